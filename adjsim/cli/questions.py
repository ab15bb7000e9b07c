"""Estimators of the command line, their observables, and a problem with an exact answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.adjoints import CheckpointAdjoint
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics import OverdampedLangevin, PositionState
from adjsim.estimators import (
    Estimator,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    Pathwise,
    Reweighting,
    ScoreFunction,
    Simulation,
)
from adjsim.estimators.replicas import Observable
from adjsim.potentials import Harmonic
from adjsim.solvers import EulerMaruyama

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "pathwise": partial(Pathwise, CheckpointAdjoint()),
    "forward-sensitivity": ForwardSensitivity,
    "finite-difference": FiniteDifference,
    "girsanov": Girsanov,
    "score-function": ScoreFunction,
    "reweighting": Reweighting,
}

# The titles of the observables of the harmonic well, the default first; its own, and its step.
HARMONIC = {"square": "<x^2>", "energy": "<U>"}
HARMONIC_TITLE = "harmonic well, k = kT = friction = 1"
HARMONIC_DT = 0.01

# A mean, and its derivatives by parameter name.
Answer = tuple[float, dict[str, float]]


@dataclass(frozen=True)
class Question:
    """A simulation and an observable, as functions of the horizon.

    ``unit`` is that of the observable, where it is not one of the system's own units, and ``exact``
    computes its mean at equilibrium, where that is known.
    """

    title: str
    simulation: Callable[[float], Simulation[Any]]
    observable: Callable[[float], Observable[Any]]
    unit: str = ""
    exact: Callable[[], Answer] | None = None


def harmonic_well(name: str) -> Question:
    """Ask for a time average in a well, from starts drawn at equilibrium on a fine grid."""
    k = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    dynamics = OverdampedLangevin(Harmonic(k), kT=1.0)
    grid = torch.linspace(-8.0, 8.0, 4000, dtype=torch.float64).reshape(-1, 1, 1)

    def measured(position: Tensor) -> Tensor:
        return dynamics.potential(position) if name == "energy" else position[:, 0, 0] ** 2

    def weights() -> Tensor:
        return torch.softmax(-dynamics.potential(grid) / dynamics.kT, 0)

    def initial(replicas: int, generator: torch.Generator | None) -> PositionState:
        return dynamics.init(
            grid[torch.multinomial(weights(), replicas, replacement=True, generator=generator)]
        )

    def exact() -> Answer:
        mean = (weights() * measured(grid)).sum()
        (slope,) = torch.autograd.grad(mean, k)
        return float(mean.detach()), {"potential.k": float(slope)}

    return Question(
        f"{HARMONIC[name]} from equilibrium",
        lambda horizon: Simulation(dynamics, initial, [0.0, horizon], EulerMaruyama(HARMONIC_DT)),
        lambda horizon: TimeAverage(lambda state: measured(state.position)),
        exact=exact,
    )
