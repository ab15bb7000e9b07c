"""The forward run that all adjoints of steps share."""

from __future__ import annotations

from typing import cast

from adjsim.adjoints.base import Result
from adjsim.adjoints.durable.run_end import run_end
from adjsim.adjoints.durable.saves import forward_saves
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.eager import EagerDriver
from adjsim.adjoints.sweep.history import History
from adjsim.adjoints.sweep.recorder import Recorder, Recording
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.run_report import RunReport
from adjsim.core.state import State
from adjsim.solvers.run import Run


def run_forward(
    run: Run[State],
    report: RunReport,
    stepper: Stepper,
    inputs: Inputs,
    runner: LoopRunner | None,
    history: History | None = None,
) -> Result[State]:
    """Run all steps, by compiled loops if there is a runner of them.

    A history, if there is one, stores what a sweep needs.
    """
    recording = Recording(Recorder(run.bound_record, stepper.clock), stepper)
    budget, rows = (None, None) if history is None else (history.error_budget, history.state_rows)
    if runner is None:
        forces = stepper.plan.forces(run.dynamics.potential, report=report)
        driver: EagerDriver | ForwardLoops = EagerDriver(stepper, inputs, forces)
    else:
        driver = ForwardLoops(runner, recording, budget, rows)
    # The history reads the growth of the same step.
    given = {"record": recording, "error_budget": budget, "history": history}
    observers = {name: x for name, x in given.items() if x is not None}
    start, visited = stepper.to_lattice(inputs.state), list(observers.values())
    with forward_saves(run, report, stepper.clock.last, observers, driver) as saves:
        last = stepper.run(start, inputs, driver, visited, run, report, saves)
    run.refuse_written()
    end = run_end(run, stepper, last, driver.force)
    return cast("Result[State]", (*recording.result(), stepper.from_lattice(last), end))
