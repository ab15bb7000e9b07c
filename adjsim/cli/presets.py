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
    """An answer without sampling, by the horizon, for the estimand "path" or "stationary"."""

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
    harmonic = OverdampedLangevin(Harmonic(_parameter(1.0)), kT=1.0)
    asymmetric = OverdampedLangevin(AsymmetricDoubleWell(1.0, _parameter(-0.67)), kT=0.5)
    square = ("<x^2>", lambda q: q[:, 0, 0] ** 2)
    return {
        "harmonic": _at_equilibrium(
            "harmonic well, k = kT = friction = 1", harmonic, _line(4000, 8.0), {"square": square}
        ),
        "asymmetric-double-well": _at_equilibrium(
            "asymmetric double well, barrier 1, asymmetry -0.67, kT = 0.5, friction 1",
            asymmetric,
            _line(4000, 3.0),
            {"position": ("<x>", lambda q: q[:, 0, 0]), "square": square},
        ),
        "muller-brown": _at_equilibrium(
            "Muller-Brown surface, kT = 15, friction 1",
            OverdampedLangevin(MullerBrown(), kT=_parameter(15.0)),
            torch.cartesian_prod(_points(-1.8, 1.3, 621), _points(-0.6, 2.2, 561)).unsqueeze(1),
            {"deep": ("share in the deep basin (a step smoothed over 1/8)", _in_deep_basin)},
            horizon=0.02,
            dt=5e-5,
        ),
        "first-passage": _first_passage(),
    }


def _in_deep_basin(position: Tensor) -> Tensor:
    return torch.sigmoid(8 * (position[:, 0, 1] - 0.8))


def _parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _points(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


def _line(points: int, half: float) -> Tensor:
    return _points(-half, half, points).reshape(-1, 1, 1)


def _at_equilibrium(
    title: str,
    dynamics: OverdampedLangevin,
    grid: Tensor,
    observables: dict[str, tuple[str, Callable[[Tensor], Tensor]]],
    horizon: float = 10.0,
    dt: float = 0.01,
) -> Preset:
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

    measured = {**observables, "energy": ("<U>", dynamics.potential)}
    questions = {name: question(*observable) for name, observable in measured.items()}
    return Preset(title, horizon, 4096, questions)


def _first_passage() -> Preset:
    dynamics, dt, width = OverdampedLangevin(DoubleWell(_parameter(1.0)), kT=0.5), 0.01, 0.1
    start = torch.full((1, 1), -1.0, dtype=torch.float64)

    def initial(replicas: int, generator: torch.Generator | None) -> PositionState:
        return dynamics.init(start.repeat(replicas, 1, 1))

    def simulation(times: Tensor) -> Simulation[PositionState]:
        return Simulation(dynamics, initial, times, EulerMaruyama(dt))

    def beyond(position: Tensor) -> Tensor:
        return torch.sigmoid(position[..., 0, 0] / width)

    def passage(run: Trajectory[PositionState]) -> Tensor:
        return first_passage_time(beyond(run.position) / width, run.times)

    def crossed(horizon: float) -> Answer:
        steps = round(horizon / dt)
        x, densities = _densities(dynamics, start, dt, steps, lambda x: torch.ones_like(x[:, 0, 0]))
        return _answer(dynamics, (densities[-1] * beyond(x)).sum())

    def time(horizon: float) -> Answer:
        steps = round(horizon / dt)
        _, densities = _densities(
            dynamics, start, dt, steps - 1, lambda x: torch.exp(-beyond(x) / width * dt)
        )
        return _answer(dynamics, dt * torch.stack([density.sum() for density in densities]).sum())

    how = "at the horizon, by propagating the density of the walker"
    questions = {
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
    }
    title = "double well, barrier 1, kT = 0.5, friction 1, from the left well"
    return Preset(title, 4.0, 4096, questions)


def _densities(
    dynamics: OverdampedLangevin,
    start: Tensor,
    dt: float,
    steps: int,
    survival: Callable[[Tensor], Tensor],
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
        gaussian = torch.exp(-((x[:, 0] - mean[:, 0, 0]) ** 2) / (2 * s * s))
        return spacing / (s * math.sqrt(2 * math.pi)) * gaussian

    point, kernel, share = start.unsqueeze(0), step_from(x), survival(x)
    densities = [survival(point)]
    if steps > 0:
        densities.append(step_from(point)[:, 0] * densities[0] * share)
    for _ in range(steps - 1):
        densities.append((kernel @ densities[-1]) * share)
    return x, densities


def _answer(dynamics: OverdampedLangevin, mean: Tensor) -> Answer:
    parameters = dynamics.trainable()
    grads = torch.autograd.grad(mean, list(parameters.values()))
    return float(mean.detach()), dict(zip(parameters, map(float, grads), strict=True))
