"""Runs of a liquid whose g(r) is fitted, and the estimators of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adjsim.adjoints import ReversibleAdjoint
from adjsim.cli.job import Job
from adjsim.core.trajectory import TimeAverage, Trajectory
from adjsim.estimators import Estimator, Pathwise, Reweighting, Simulation
from adjsim.estimators.replicas import Initial, Observable
from adjsim.observables import smooth_radial_distribution

ESTIMATORS = ("reweighting", "pathwise")
# Steps between frames, and of the run along which a pathwise gradient is taken, which grows
# exponentially with its length.
EVERY, PATH = 50, 250


class _Radial:
    """The g(r) of replicas, kept with their positions: reweighting evaluates states again."""

    def __init__(self, r: Tensor, box: Tensor, width: float) -> None:
        self.r, self.box, self.width = r, box, width
        self.known = WeakTensorKeyDictionary()

    def __call__(self, state: Any) -> Tensor:
        q: Tensor = state.position
        if q not in self.known:
            # One system at a time, since the kernels of all pairs of one fill the cache.
            rows = [smooth_radial_distribution(x, self.r, self.box, width=self.width) for x in q]
            self.known[q] = torch.stack(rows)
        return self.known[q]


def radial_problem(
    job: Job,
    r: Tensor,
    width: float,
    estimator: str,
    steps: int | None,
    skip: int,
    compile_runs: bool,
    initial: Initial[Any],
) -> tuple[Callable[[], Estimator], Observable[Any], Simulation[Any]]:
    """Return a function that makes the estimator, the mean that it estimates, and its runs.

    In a pathwise gradient the parameters act after the burn-in alone, so it is smaller than that at
    equilibrium. The mean is that at equilibrium.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator '{estimator}'; choose one of {', '.join(ESTIMATORS)}.")
    box, dt = job.system.potential.box, job.solver.dt
    assert box is not None
    if steps is None:
        steps = 2500 if estimator == "reweighting" else skip + PATH
    every = min(EVERY, (steps - skip) // 2)
    if every < 1:
        raise ValueError(
            f"--steps {steps} leaves {steps - skip} after the burn-in of {skip}, and two frames "
            "are needed; give more steps, or a shorter --burn-in."
        )
    radial = _Radial(r, box, width)

    def along(run: Trajectory[Any]) -> Tensor:
        frames = [smooth_radial_distribution(q, r, box, width=width) for q in run.position[1:]]
        return torch.stack(frames).mean(0)

    def simulation(starts: Initial[Any], times: Iterable[int]) -> Simulation[Any]:
        ts = torch.tensor([n * dt for n in times], dtype=torch.float64)
        return Simulation(job.model, starts, ts, job.solver, compile=compile_runs)

    if estimator == "reweighting":
        average = TimeAverage(radial, burn_in=skip * dt)
        make = partial(Reweighting, every=every * dt)
        return make, average, simulation(initial, (0, steps))

    def equilibrated(replicas: int, generator: torch.Generator | None) -> Any:
        start = initial(replicas, generator)
        return job.run(start, skip, generator, compile_runs) if skip else start

    make = partial(Pathwise, ReversibleAdjoint())
    return make, along, simulation(equilibrated, range(0, steps - skip + 1, every))
