"""Runs of a liquid that is fitted to measurements, and the estimators of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adjsim.adjoints import ReversibleAdjoint
from adjsim.cli.curve import Curve
from adjsim.cli.density import Density
from adjsim.cli.job import Job
from adjsim.cli.melting import Order
from adjsim.core.trajectory import TimeAverage, Trajectory
from adjsim.dynamics.pressure.base import PistonDynamics
from adjsim.estimators import Estimator, Pathwise, Reweighting, Simulation
from adjsim.estimators.replicas import Initial, Observable
from adjsim.observables import smooth_radial_distribution

ESTIMATORS = ("reweighting", "pathwise")
# Steps of the run along which a pathwise gradient is taken, which grows exponentially with its
# length.
PATH = 250
# Steps between frames, and the default steps of a run and of its burn-in, at constant volume and at
# constant pressure, where the volume fluctuates slowly.
EVERY, STEPS, BURN_IN = (50, 100), (2500, 20000), (500, 2500)
# The largest relative change of a number in a step of the fit, and the share of samples below which
# reweighting samples again. Few densities determine epsilon and sigma by a small difference of
# large derivatives, so a step is as uncertain as its noise. At constant pressure steps are
# therefore shorter, and samples are used for longer, so that the steps end.
LARGEST_CHANGE, THRESHOLD = (0.2, 0.05), (0.5, 0.25)


class RunSettings(NamedTuple):
    """The estimator, the steps of a run and of its burn-in, and whether runs are compiled.

    ``at_pressure`` says whether they are at constant pressure.
    """

    estimator: str
    steps: int
    skip: int
    compiled: bool
    at_pressure: bool

    @classmethod
    def of(
        cls,
        estimator: str,
        steps: int | None,
        skip: int | None,
        compiled: bool,
        at_pressure: bool,
    ) -> RunSettings:
        """Check the estimator, and replace None by the default."""
        if estimator not in ESTIMATORS:
            raise ValueError(
                f"unknown estimator '{estimator}'; choose one of {', '.join(ESTIMATORS)}."
            )
        if at_pressure and estimator == "pathwise":
            raise ValueError(
                "--estimator pathwise is for --target alone: the volume answers more slowly than "
                "paths diverge. Leave it out, for reweighting."
            )
        skip = BURN_IN[at_pressure] if skip is None else skip
        if steps is None:
            steps = STEPS[at_pressure] if estimator == "reweighting" else skip + PATH
        return cls(estimator, steps, skip, compiled, at_pressure)

    @property
    def largest_change(self) -> float:
        """The largest relative change of a number in a step of the fit."""
        return LARGEST_CHANGE[self.at_pressure]


@dataclass(frozen=True)
class Condition:
    """Runs at one temperature, and what was measured at it, in this order."""

    job: Job
    density: Density | None
    curve: Curve | None

    @property
    def values(self) -> list[float]:
        """The measured numbers."""
        values = [] if self.density is None else [self.density.value]
        return values if self.curve is None else values + self.curve.g.tolist()

    @property
    def errors(self) -> list[float] | None:
        """Their standard errors, None if that of g(r) is not known."""
        errors = [] if self.density is None else [self.density.stderr]
        if self.curve is None:
            return errors
        return None if self.curve.stderr is None else errors + self.curve.stderr.tolist()


@dataclass(frozen=True)
class Fitting:
    """The conditions of a fit, and doubts of its result.

    Attributes:
        liquid: runs at constant volume, which melt the structure and cool the liquid.
        curve: the measured g(r), None without.
        width: that of the kernel of g(r).
        density, target_density: those of the structure and of the measured liquid, per cubic
            angstrom, None if that is not known.
    """

    liquid: Job
    conditions: list[Condition]
    curve: Curve | None
    width: float
    density: float
    target_density: float | None
    order: Order
    doubts: list[str]

    @property
    def at_pressure(self) -> bool:
        """Whether the runs are at constant pressure."""
        return isinstance(self.conditions[0].job.model, PistonDynamics)

    @property
    def is_density(self) -> list[bool]:
        """Whether each of the measured numbers is a density."""
        return [
            condition.density is not None and i == 0
            for condition in self.conditions
            for i in range(len(condition.values))
        ]

    @property
    def target(self) -> list[float]:
        """All measured numbers."""
        return [x for condition in self.conditions for x in condition.values]

    @property
    def stderr(self) -> list[float] | None:
        """Their standard errors, None if that of g(r) is not known."""
        found = list[float]()
        for condition in self.conditions:
            if (errors := condition.errors) is None:
                return None
            found += errors
        return found


class _Observed:
    """The densities and g(r) of replicas.

    These are kept with the positions, since reweighting evaluates states again.
    """

    def __init__(self, condition: Condition, width: float) -> None:
        self.model: Any = condition.job.model
        self.box = condition.job.system.potential.box
        self.density, self.curve, self.width = condition.density, condition.curve, width
        self.known = WeakTensorKeyDictionary()

    def __call__(self, state: Any) -> Tensor:
        parts = list[Tensor]()
        if self.density is not None:
            parts.append(self.model.density(state).unsqueeze(-1) / self.density.scale)
        if self.curve is not None:
            parts.append(self._radial(state))
        return torch.cat(parts, -1)

    def _radial(self, state: Any) -> Tensor:
        assert self.curve is not None
        assert self.box is not None
        q, strain, r = state.position, getattr(state, "strain", None), self.curve.r
        known = self.known.get(q)
        # Tests of whether an observable depends on the strain change it alone.
        if known is None or known[0] is not strain:
            boxes = [self.box] * len(q) if strain is None else self.model.box(state)
            # One system at a time, since the kernels of all pairs of one fill the cache.
            rows = [
                smooth_radial_distribution(x, r, box, width=self.width)
                for x, box in zip(q, boxes, strict=True)
            ]
            known = self.known[q] = (strain, torch.stack(rows))
        return known[1]


def problems(
    fitting: Fitting, settings: RunSettings, starts: Tensor | None = None
) -> tuple[Callable[[], Estimator], list[Observable[Any]], list[Simulation[Any]]]:
    """Return a function that makes the estimator, and the means and the runs of the conditions.

    Runs start from the structure, or at places drawn from ``starts``, ``(count, atoms, 3)``.
    """
    found = list[tuple[Callable[[], Estimator], Observable[Any], Simulation[Any]]]()
    for condition in fitting.conditions:
        job = condition.job
        initial = job.initial if starts is None else partial(job.drawn, starts)
        found.append(_problem(condition, fitting.width, settings, initial))
    makes, observables, simulations = zip(*found, strict=True)
    return makes[0], list(observables), list(simulations)


def _problem(
    condition: Condition, width: float, settings: RunSettings, initial: Initial[Any]
) -> tuple[Callable[[], Estimator], Observable[Any], Simulation[Any]]:
    """Return a function that makes the estimator, the means that it estimates, and its runs.

    In a pathwise gradient the parameters act after the burn-in alone, so it is smaller than that at
    equilibrium. The mean is that at equilibrium.
    """
    estimator, steps, skip, compiled, at_pressure = settings
    job, dt = condition.job, condition.job.solver.dt
    every = min(EVERY[at_pressure], (steps - skip) // 2)
    if every < 1:
        raise ValueError(
            f"--steps {steps} leaves {steps - skip} after the burn-in of {skip}, and two frames "
            "are needed; give more steps, or a shorter --burn-in."
        )

    def simulation(starts: Initial[Any], times: Iterable[int]) -> Simulation[Any]:
        ts = torch.tensor([n * dt for n in times], dtype=torch.float64)
        return Simulation(job.model, starts, ts, job.solver, compile=compiled)

    if estimator == "reweighting":
        average = TimeAverage(_Observed(condition, width), burn_in=skip * dt)
        make = partial(Reweighting, every=every * dt, threshold=THRESHOLD[at_pressure])
        return make, average, simulation(initial, (0, steps))
    box, curve = job.system.potential.box, condition.curve
    assert box is not None
    assert curve is not None

    def along(run: Trajectory[Any]) -> Tensor:
        r, frames = curve.r, run.position[1:]
        found = [smooth_radial_distribution(q, r, box, width=width) for q in frames]
        return torch.stack(found).mean(0)

    def equilibrated(replicas: int, generator: torch.Generator | None) -> Any:
        start = initial(replicas, generator)
        return job.run(start, skip, generator, compiled) if skip else start

    make = partial(Pathwise, ReversibleAdjoint())
    return make, along, simulation(equilibrated, range(0, steps - skip + 1, every))
