"""Running an exact splitting forward and back by its inverse, as a sweep does."""

from __future__ import annotations

import torch

from adjsim.adjoints.reversible import Fingerprints
from adjsim.adjoints.sweep.history import SweepStart
from adjsim.adjoints.sweep.passes import EagerDriver
from adjsim.adjoints.sweep.recorder import CotangentGrowth, Recorder, RecordSweep
from adjsim.adjoints.sweep.stepper import prepare
from adjsim.core.noise import Noise
from adjsim.core.reading import Reading
from adjsim.core.run_report import RunReport
from adjsim.core.state import State
from adjsim.dynamics import Dynamics
from adjsim.dynamics.cotangents import Cotangents
from adjsim.solvers.run import Run
from adjsim.solvers.splitting import Splitting


@torch.no_grad()
def forth_and_back(
    dynamics: Dynamics, start: State, solver: Splitting, steps: int, seed: int = 0
) -> tuple[State, State, State]:
    """States of the lattice, buffers included: the start, the end, and the start as it was found
    again.
    """
    times = torch.tensor([0.0, steps * solver.dt], dtype=torch.float64)
    reading = Reading(dynamics)
    tensors = reading.leaves()
    dynamics = reading.bound(tensors)
    run = Run(reading, tensors, dynamics, start, times, solver, None, Noise(seed))
    report = RunReport()
    stepper, inputs = prepare(run, report)
    history = Fingerprints(stepper, None, run)
    forces = stepper.plan.forces(dynamics.potential)
    before, driver = stepper.to_lattice(start), EagerDriver(stepper, inputs, forces)
    after = stepper.run(before, inputs, driver, [history], run, report)
    nothing = {name: torch.zeros_like(x) for name, x in start._asdict().items()}
    recorder, received = Recorder(None, stepper.clock), [None] * len(start)
    unread = RecordSweep(recorder, received, Cotangents(nothing), forces, CotangentGrowth({}))
    rewind = history.rewind(SweepStart(inputs, forces, None, start))
    found = driver.sweep(unread, rewind, False)
    return before, after, found
