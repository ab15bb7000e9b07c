"""Backpropagation through the solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adjsim.adjoints.base import Adjoint, Result
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.history import History, Rewind, StateRows, SweepStart
from adjsim.adjoints.sweep.passes import run_forward, run_swept
from adjsim.adjoints.sweep.stepper import Stepper, TangentNoise, prepare
from adjsim.core.durable.stateful import Entries
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, in_transform
from adjsim.core.transforms import are_forward, with_tangent
from adjsim.dynamics.buffer import Spill
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

    keeps_graph = True

    def check(self, run: Run[State]) -> None:
        if isinstance(run.solver, ContinuousSolver):
            run.solver.check(run, None)

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        if run.compile and run.needs_gradient:
            return run_swept(run, report, AllStates)
        if run.needs_gradient or in_transform() or run.reading.has_tangents:
            run = run.connected()
        if isinstance(run.solver, ContinuousSolver):
            found = run.solver.solve(run, report, None)
            run.refuse_written()
            return (*found, None)
        stepper, inputs = prepare(run, report)
        if not run.compile and are_forward((*run.state, *run.tensors)):
            groups = inputs.coefficients.items()
            given = {a: {n: with_tangent(x) for n, x in group.items()} for a, group in groups}
            inputs = inputs._replace(coefficients=given)
            if stepper.noise is not None:
                stepper = replace(stepper, noise=TangentNoise(**vars(stepper.noise)))
        runner = LoopRunner(stepper, inputs, run, report) if run.compile else None
        return run_forward(run, report, stepper, inputs, runner)


class AllStates(History):
    """The states before all steps, which the compiled loops of the run store."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper)
        self.block_length = stepper.clock.last
        self.rows: StateRows = {}
        self.state_rows = self.rows

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return (stepper.clock.last,)

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if step == self.stepper.clock.last:
            self.store(step, state)

    def state(self) -> dict[str, Any]:
        rows = [[first, *rows] for first, rows in self.rows.items()]
        return {**super().state(), "rows": Entries(rows)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.rows.update({first: tuple(rows) for first, *rows in state["rows"]})

    def rewind(self, given: SweepStart) -> Rewind:
        return Rewind(self.checkpoints[self.stepper.clock.last], self.rows)
