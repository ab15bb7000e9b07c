"""Test problems with exact answers, on which the command line compares estimators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.adjoints import CheckpointAdjoint
from adjsim.core.trajectory import Final, TimeAverage, Trajectory
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
from adjsim.observables import first_passage_time
from adjsim.potentials import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.potentials.base import force
from adjsim.solvers import EulerMaruyama

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "pathwise": partial(Pathwise, CheckpointAdjoint()),
    "forward-sensitivity": ForwardSensitivity,
    "finite-difference": FiniteDifference,
    "girsanov": Girsanov,
    "score-function": ScoreFunction,
    "reweighting": Reweighting,
}

# A mean, and its derivatives by parameter name.
Answer = tuple[float, dict[str, float]]


@dataclass(frozen=True)
class Exact:
    """An answer known without sampling.

    It has the method, the answer as a function of the horizon, and the estimand, "path" or
    "stationary".
    """

    how: str
    answer: Callable[[float], Answer]
    estimand: str


@dataclass(frozen=True)
class Question:
    """A simulation and an observable, as functions of the horizon."""

    title: str
    simulation: Callable[[float], Simulation[Any]]
    observable: Callable[[float], Observable[Any]]
    exact: Exact | None = None


@dataclass(frozen=True)
class Preset:
    """A problem, and its observables by the names of ``--observable``, the default first."""

    title: str
    horizon: float
    replicas: int
    questions: dict[str, Question]


def presets() -> dict[str, Preset]:
    """Make the presets, by their names on the command line."""
    return {
        "harmonic": _harmonic(),
        "asymmetric-double-well": _asymmetric(),
        "muller-brown": _muller_brown(),
        "first-passage": _first_passage(),
    }


def _parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _harmonic() -> Preset:
    dynamics = OverdampedLangevin(Harmonic(_parameter(1.0)), kT=1.0)
    observables = {"square": ("<x^2>", _square), "energy": ("<U>", dynamics.potential)}
    return Preset(
        "harmonic well, k = kT = friction = 1",
        10.0,
        4096,
        _at_equilibrium(dynamics, _line(4000, 8.0), 0.01, observables),
    )


def _asymmetric() -> Preset:
    dynamics = OverdampedLangevin(AsymmetricDoubleWell(1.0, _parameter(-0.67)), kT=0.5)
    observables = {
        "position": ("<x>", lambda q: q[:, 0, 0]),
        "square": ("<x^2>", _square),
        "energy": ("<U>", dynamics.potential),
    }
    return Preset(
        "asymmetric double well, barrier 1, asymmetry -0.67, kT = 0.5, friction 1",
        10.0,
        4096,
        _at_equilibrium(dynamics, _line(4000, 3.0), 0.01, observables),
    )


def _muller_brown() -> Preset:
    dynamics = OverdampedLangevin(MullerBrown(), kT=_parameter(15.0))
    x, y = (
        torch.linspace(a, b, n, dtype=torch.float64)
        for a, b, n in ((-1.8, 1.3, 621), (-0.6, 2.2, 561))
    )
    grid = torch.cartesian_prod(x, y).unsqueeze(1)
    observables = {
        "deep": (
            "share in the deep basin (a step smoothed over 1/8)",
            lambda q: torch.sigmoid(8 * (q[:, 0, 1] - 0.8)),
        ),
        "energy": ("<U>", dynamics.potential),
    }
    return Preset(
        "Muller-Brown surface, kT = 15, friction 1",
        0.02,
        4096,
        _at_equilibrium(dynamics, grid, 5e-5, observables),
    )


def _square(position: Tensor) -> Tensor:
    return position[:, 0, 0] ** 2


def _at_equilibrium(
    dynamics: OverdampedLangevin,
    grid: Tensor,
    dt: float,
    observables: dict[str, tuple[str, Callable[[Tensor], Tensor]]],
) -> dict[str, Question]:
    """Make time averages without a burn-in, from starts drawn at equilibrium on a fine grid."""

    def weights() -> Tensor:
        return torch.softmax(-dynamics.potential(grid) / dynamics.kT, 0)

    def initial(replicas: int, generator: torch.Generator | None) -> PositionState:
        return dynamics.init(
            grid[torch.multinomial(weights(), replicas, replacement=True, generator=generator)]
        )

    def simulation(horizon: float) -> Simulation[PositionState]:
        return Simulation(dynamics, initial, [0.0, horizon], EulerMaruyama(dt))

    def question(title: str, function: Callable[[Tensor], Tensor]) -> Question:
        return Question(
            f"{title} from equilibrium",
            simulation,
            lambda horizon: TimeAverage(lambda state: function(state.position)),
            Exact(
                "equilibrium, by quadrature",
                lambda horizon: _answer(dynamics, (weights() * function(grid)).sum()),
                "stationary",
            ),
        )

    return {name: question(*function) for name, function in observables.items()}


def _first_passage() -> Preset:
    dynamics, dt, width = OverdampedLangevin(DoubleWell(_parameter(1.0)), kT=0.5), 0.01, 0.1
    start = torch.full((1, 1), -1.0, dtype=torch.float64)

    def simulation(times: Tensor) -> Simulation[PositionState]:
        return Simulation(
            dynamics,
            lambda replicas, _: dynamics.init(start.repeat(replicas, 1, 1)),
            times,
            EulerMaruyama(dt),
        )

    def beyond(position: Tensor) -> Tensor:
        return torch.sigmoid(position[..., 0, 0] / width)

    def passage(run: Trajectory[PositionState]) -> Tensor:
        return first_passage_time(beyond(run.position) / width, run.times)

    def crossed(horizon: float) -> Answer:
        x, densities = _densities(dynamics, start, dt, round(horizon / dt), None)
        return _answer(dynamics, (densities[-1] * beyond(x)).sum())

    def time(horizon: float) -> Answer:
        steps = round(horizon / dt)
        _, densities = _densities(
            dynamics, start, dt, steps - 1, lambda x: torch.exp(-beyond(x) / width * dt)
        )
        return _answer(dynamics, dt * torch.stack([density.sum() for density in densities]).sum())

    how = "at the horizon, by propagating the density of the walker"
    return Preset(
        "double well, barrier 1, kT = 0.5, friction 1, from the left well",
        4.0,
        4096,
        {
            "crossed": Question(
                f"share beyond the barrier at the horizon (a step smoothed over {width:g}, which "
                "gives it a pathwise gradient)",
                lambda horizon: simulation(torch.tensor([0.0, horizon], dtype=torch.float64)),
                lambda horizon: Final(lambda state: beyond(state.position)),
                Exact(how, crossed, "path"),
            ),
            "time": Question(
                "mean time until absorption (at most the horizon), at the rate "
                f"sigmoid(x / {width:g}) / {width:g}",
                lambda horizon: simulation(
                    torch.arange(round(horizon / dt) + 1, dtype=torch.float64) * dt
                ),
                lambda horizon: passage,
                Exact(how, time, "path"),
            ),
        },
    )


def _line(points: int, half: float) -> Tensor:
    return torch.linspace(-half, half, points, dtype=torch.float64).reshape(-1, 1, 1)


def _densities(
    dynamics: OverdampedLangevin,
    start: Tensor,
    dt: float,
    steps: int,
    survival: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, list[Tensor]]:
    """Compute the density of a walker after each step, by quadrature.

    A step ``x' = x + F(x) dt/friction + s xi`` with ``s = sqrt(2 kT dt/friction)`` takes a density
    p to ``p'(x') = integral N(x'; x + F(x) dt/friction, s^2) a(x) p(x) dx``, where a is the share
    that survives a frame. On nodes s/5 apart the trapezoidal rule has an error of 1e-16, since the
    integrand is as smooth as a Gaussian of width s. The start, a point, has no density and is
    represented by its mass.

    Returns:
        The nodes, and ``a(x) p(x)`` after 0, 1, ... steps, times the spacing of the nodes.
    """
    s = float((2 * dynamics.kT * dt / dynamics.friction).sqrt())
    x = _line(2 * math.ceil(15 / s) + 1, 3.0)
    spacing = float(x[1] - x[0])

    def step_from(position: Tensor) -> Tensor:
        mean = position + force(dynamics.potential, position) * dt / dynamics.friction
        return (
            spacing
            / (s * math.sqrt(2 * math.pi))
            * torch.exp(-((x[:, 0] - mean[:, 0, 0]) ** 2) / (2 * s * s))
        )

    def alive(position: Tensor) -> Tensor:
        return torch.ones_like(position[:, 0, 0]) if survival is None else survival(position)

    point, kernel, share = start.unsqueeze(0), step_from(x), alive(x)
    densities = [alive(point)]
    if steps > 0:
        densities.append(step_from(point)[:, 0] * densities[0] * share)
    for _ in range(steps - 1):
        densities.append((kernel @ densities[-1]) * share)
    return x, densities


def _answer(dynamics: OverdampedLangevin, mean: Tensor) -> Answer:
    parameters = dynamics.trainable()
    grads = torch.autograd.grad(mean, list(parameters.values()))
    return float(mean.detach()), {
        name: float(grad) for name, grad in zip(parameters, grads, strict=True)
    }
