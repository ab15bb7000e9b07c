"""Small problems with exact answers on which estimators are set beside each other from the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adjsim._state import State
from adjsim._trajectory import Final, TimeAverage
from adjsim.adjoints import CheckpointAdjoint
from adjsim.dynamics import OverdampedLangevin
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
from adjsim.potentials import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.solvers import EulerMaruyama

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "pathwise": lambda: Pathwise(CheckpointAdjoint()),
    "forward-sensitivity": ForwardSensitivity,
    "finite-difference": FiniteDifference,
    "girsanov": Girsanov,
    "score-function": ScoreFunction,
    "reweighting": Reweighting,
}


@dataclass(frozen=True)
class Preset:
    """A problem: what is run for how long, what is observed, and its equilibrium answer where there is one.

    ``exact`` gives the mean and, by parameter, its derivative, by quadrature.
    """

    title: str
    horizon: float
    simulation: Callable[[float], Simulation]
    observable: TimeAverage | Final
    exact: Callable[[], tuple[float, dict[str, float]]] | None


def presets() -> dict[str, Preset]:
    """By the names of the command line."""
    return {
        "harmonic": _harmonic(),
        "asymmetric-double-well": _asymmetric(),
        "muller-brown": _muller_brown(),
        "first-passage": _first_passage(),
    }


def _parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _harmonic() -> Preset:
    kT = 1.0
    dynamics = OverdampedLangevin(Harmonic(_parameter(1.0)), kT=kT)
    grid = _line(4000, 8.0)
    return Preset(
        "harmonic well, k = kT = friction = 1: <x^2> from equilibrium",
        10.0,
        _from_equilibrium(dynamics, grid, 0.01),
        TimeAverage(lambda state: state.position[:, 0, 0] ** 2),
        lambda: _quadrature(dynamics, grid, lambda x: x[:, 0, 0] ** 2),
    )


def _asymmetric() -> Preset:
    dynamics = OverdampedLangevin(AsymmetricDoubleWell(1.0, _parameter(-0.67)), kT=0.5)
    grid = _line(4000, 3.0)
    return Preset(
        "asymmetric double well, barrier 1, asymmetry -0.67, kT = 0.5, friction 1: <x> from equilibrium",
        10.0,
        _from_equilibrium(dynamics, grid, 0.01),
        TimeAverage(lambda state: state.position[:, 0, 0]),
        lambda: _quadrature(dynamics, grid, lambda x: x[:, 0, 0]),
    )


def _muller_brown() -> Preset:
    dynamics = OverdampedLangevin(MullerBrown(), kT=_parameter(15.0))
    x, y = (torch.linspace(a, b, n, dtype=torch.float64) for a, b, n in ((-1.8, 1.3, 621), (-0.6, 2.2, 561)))
    grid = torch.cartesian_prod(x, y).unsqueeze(1)

    def deep(position: Tensor) -> Tensor:
        return torch.sigmoid(8 * (position[:, 0, 1] - 0.8))

    return Preset(
        "Muller-Brown surface, kT = 15, friction 1: share in the deep basin, its edge smoothed over 1/8, from equilibrium",
        0.02,
        _from_equilibrium(dynamics, grid, 5e-5),
        TimeAverage(lambda state: deep(state.position)),
        lambda: _quadrature(dynamics, grid, deep),
    )


def _first_passage() -> Preset:
    dynamics = OverdampedLangevin(DoubleWell(_parameter(1.0)), kT=0.5)

    def simulation(horizon: float) -> Simulation:
        def initial(replicas: int, generator: torch.Generator | None) -> State:
            return dynamics.init(-torch.ones(replicas, 1, 1, dtype=torch.float64))

        return Simulation(dynamics, initial, [0.0, horizon], EulerMaruyama(0.01))

    return Preset(
        "double well, barrier 1, kT = 0.5, friction 1: share beyond the barrier after the horizon, from the left well; the "
        "step at the barrier is smoothed over 0.1, as pathwise gradients need it to be",
        4.0,
        simulation,
        Final(lambda state: torch.sigmoid(state.position[:, 0, 0] / 0.1)),
        None,
    )


def _line(points: int, half: float) -> Tensor:
    return torch.linspace(-half, half, points, dtype=torch.float64).reshape(-1, 1, 1)


def _weights(dynamics: OverdampedLangevin, grid: Tensor) -> Tensor:
    return torch.softmax(-dynamics.potential(grid) / dynamics.kT, 0)


def _from_equilibrium(dynamics: OverdampedLangevin, grid: Tensor, dt: float) -> Callable[[float], Simulation]:
    """Runs whose starts are drawn from the distribution on a fine grid, so that there is nothing to equilibrate."""

    def initial(replicas: int, generator: torch.Generator | None) -> State:
        pick = torch.multinomial(_weights(dynamics, grid), replicas, replacement=True, generator=generator)
        return dynamics.init(grid[pick])

    return lambda horizon: Simulation(dynamics, initial, [0.0, horizon], EulerMaruyama(dt))


def _quadrature(
    dynamics: OverdampedLangevin, grid: Tensor, function: Callable[[Tensor], Tensor]
) -> tuple[float, dict[str, float]]:
    """The equilibrium mean and its derivatives, by sums on the grid."""
    parameters = dynamics.trainable()
    mean = (_weights(dynamics, grid) * function(grid)).sum()
    grads = torch.autograd.grad(mean, list(parameters.values()))
    return float(mean.detach()), {name: float(grad) for name, grad in zip(parameters, grads, strict=True)}
