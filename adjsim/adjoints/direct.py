"""Backpropagation through the solver."""

from __future__ import annotations

from typing import cast

from adjsim.adjoints.base import Adjoint, Result
from adjsim.adjoints.durable.run_end import run_end
from adjsim.adjoints.durable.saves import forward_saves
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.all_states import AllStates
from adjsim.adjoints.sweep.backward import run_swept
from adjsim.adjoints.sweep.eager import EagerDriver
from adjsim.adjoints.sweep.recorder import Recorder, Recording
from adjsim.adjoints.sweep.stepper import prepare
from adjsim.core.run_report import RunReport
from adjsim.core.state import State
from adjsim.solvers.continuous.base import ContinuousSolver
from adjsim.solvers.run import Run


class DirectAdjoint(Adjoint):
    """Backpropagation through every operation of the solver (BPTT, discretise then optimise).

    The gradient is exact for the discrete steps, to rounding, and may itself be differentiated. The
    intermediate tensors of every step stay in memory until backward, so memory grows in proportion
    to the number of steps. It is the reference for the other adjoints. For more than a few hundred
    steps use :class:`ReversibleAdjoint` or :class:`CheckpointAdjoint`, which give the same numbers.

    With ``compile=True`` the state before each step stays in memory, and the compiled backward pass
    evaluates each step again. In runs of up to 100 steps of an :class:`~adjsim.ODE` or an
    :class:`~adjsim.SDE` the activations stay in memory too, up to a megabyte of float64 a step, and
    nothing is evaluated again. A compiled gradient has no graph, so it cannot be differentiated
    again.
    """

    def check(self, run: Run[State]) -> None:
        if isinstance(run.solver, ContinuousSolver):
            run.solver.check(run, None)

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        if run.compile and run.needs_gradient:
            return run_swept(run, report, AllStates)
        run = run.connected()
        if isinstance(run.solver, ContinuousSolver):
            found = run.solver.solve(run, report, None)
            run.refuse_written()
            return (*found, None)
        stepper, inputs = prepare(run, report)
        recording = Recording(Recorder(run.bound_record, stepper.clock), stepper)
        if run.compile:
            runner = LoopRunner(stepper, inputs, run, report)
            driver: EagerDriver | ForwardLoops = ForwardLoops(runner, recording)
        else:
            forces = stepper.plan.forces(run.dynamics.potential, report=report)
            driver = EagerDriver(stepper, inputs, forces)
        start = stepper.to_lattice(inputs.state)
        record, last = {"record": recording}, stepper.clock.last
        with forward_saves(run, report, last, record, driver) as saves:
            final = stepper.run(start, inputs, driver, [recording], run, report, saves)
        run.refuse_written()
        end = run_end(run, stepper, final, driver.force)
        result = (*recording.result(), stepper.from_lattice(final), end)
        return cast("Result[State]", result)
