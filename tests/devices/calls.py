"""Calls other than runs of fixed steps: estimators, adaptive steps, solve_ivp, minima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjsim
from tests import constraints, fields
from tests.contracts import test_elastic
from tests.problems import parameter, square

Results = list[Tensor]


def gradient(loss: Tensor, *wanted: Tensor) -> Results:
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def simulation(device: Any) -> adjsim.Simulation:
    """Replicas in a harmonic well by BAOAB."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.3)), 1.0, 1.0, 1.0).to(device)

    def initial(replicas: int, generator: Any) -> Any:
        zero = torch.zeros(replicas, 2, 3, dtype=torch.float64, device=device)
        return dynamics.init(zero, generator=generator)

    return adjsim.Simulation(dynamics, initial, [0.0, 2.0], adjsim.BAOAB(0.1))


def estimated(estimator: Callable[[], Any]) -> Callable[[Any], Results]:
    def call(device: Any) -> Results:
        def size(state: Any) -> Tensor:
            return state.position.square().sum((-1, -2))

        average = adjsim.TimeAverage(size)
        found = estimator()(simulation(device), average, replicas=8, generator=3)
        return [found.value, *found.grad.values()]

    return call


def adaptive(solver: Callable[[], Any], adjoint: Any) -> Callable[[Any], Results]:
    def call(device: Any) -> Results:
        dynamics, y = fields.equation(None).to(device), fields.start().to(device)
        ts = torch.tensor([0.0, 0.7], dtype=torch.float64, device=device)
        run = adjsim.simulate(dynamics, dynamics.init(y), ts, solver=solver(), adjoint=adjoint)
        return gradient(run.final.y.square().sum(), *dynamics.parameters())

    return call


def noisy(
    solver: Callable[[], Any], seed: Any, adjoint: type[Any] = adjsim.CheckpointAdjoint
) -> Callable[[Any], Results]:
    def call(device: Any) -> Results:
        dynamics, y = fields.equation("diagonal").to(device), fields.start().to(device)
        run = adjsim.simulate(
            dynamics, dynamics.init(y), [0.0, 0.25], solver=solver(),
            adjoint=adjoint(), generator=seed,
        )  # fmt: skip
        return gradient(run.final.y.square().sum(), *dynamics.parameters())

    return call


def solved(method: str, adjoint: str) -> Callable[[Any], Results]:
    def call(device: Any) -> Results:
        k = torch.tensor(1.7, dtype=torch.float64, device=device, requires_grad=True)
        y = torch.tensor([1.0, 0.2], dtype=torch.float64, device=device)

        def spiral(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
            return torch.stack([y[1] + 0.1 * torch.sin(3 * t), -k * y[0] - 0.2 * y[1] * y[0] ** 2])

        found = adjsim.solve_ivp(
            spiral, (0.0, 2.0), y, method, t_eval=[0.5, 2.0], args=(k,), adjoint=adjoint
        )
        return gradient(found.y.square().sum(), k)

    return call


def bounces(device: Any) -> Results:
    """Balls that fall, each with bounces of its own."""
    height = torch.tensor([0.7, 1.0, 1.3], dtype=torch.float64, device=device, requires_grad=True)

    def fall(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -9.81 - 0.1 * y[1]])

    def floor(t: Tensor, y: Tensor) -> Tensor:
        return y[0]

    floor.direction = -1
    floor.reset = lambda t, y: torch.stack([y[0], -0.8 * y[1]])
    start = torch.stack([height, torch.zeros_like(height)])
    found = adjsim.solve_ivp(fall, (0.0, 0.9), start, t_eval=[0.9], events=floor)
    return gradient(found.y.square().sum(), height)


def minimum(device: Any) -> Results:
    position, sigma = square()[0].to(device), parameter(1.0)
    potential = adjsim.LennardJones(1.0, sigma).to(device)
    found = adjsim.minimize(potential, position)
    length = torch.pdist(found)
    return gradient(length.sum(), *potential.parameters())


def solid(device: Any) -> Results:
    """A body whose Hessian is factorised."""
    potential = test_elastic.body("neo-hookean").to(device)
    position = test_elastic.moved(test_elastic.SOLID, 0.02).to(device)
    found = adjsim.minimize(potential, position, fixed=torch.arange(4))
    return gradient(found.square().sum(), *potential.parameters())


def steady(device: Any) -> Results:
    class Still(fields.Net):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return super().forward(torch.zeros_like(t), y) - y

    dynamics = adjsim.ODE(Still()).to(device)
    found = adjsim.steady_state(dynamics, fields.start().to(device))
    return gradient(found.y.square().sum(), *dynamics.parameters())


def observed(device: Any) -> Results:
    """Sums over the near pairs of a large system in a box that the caller gives as numbers."""
    drawn = torch.Generator().manual_seed(0)
    position = 6 * torch.rand(600, 3, generator=drawn, dtype=torch.float64)
    q, box, at = position.to(device), [6.0] * 3, torch.linspace(0.5, 2.5, 5)
    return [
        adjsim.coordination_number(q, 1.2, width=0.1, box=box),
        adjsim.bond_order(q, 1.2, width=0.1, box=box),
        adjsim.angular_distribution(q, at, box, cutoff=1.5, width=0.1),
        adjsim.radial_distribution(q, at, box),
        adjsim.smooth_radial_distribution(q, at, box, width=0.1),
    ]


def held(exact: bool) -> Callable[[Any], Results]:
    def call(device: Any) -> Results:
        position, index = constraints.waters(2)
        length = torch.tensor(2 * constraints.WATER_LENGTHS, dtype=torch.float64)
        inner = adjsim.Langevin(adjsim.Harmonic(parameter(0.3)), 1.2, 0.5, 0.4)
        dynamics: Any = adjsim.Constrained(
            inner, adjsim.DistanceConstraints(index, torch.nn.Parameter(length))
        ).to(device)
        start = dynamics.init(position.to(device), generator=1)
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.08], solver=adjsim.Splitting("BAOAB", 0.02, exact=exact),
            adjoint=adjsim.ReversibleAdjoint(), generator=2,
        )  # fmt: skip
        return gradient(run.final.position.square().sum(), *dynamics.parameters())

    return call


CALLS: dict[str, Callable[[Any], Results]] = {
    "Pathwise": estimated(adjsim.Pathwise),
    "ScoreFunction": estimated(adjsim.ScoreFunction),
    "Reweighting": estimated(lambda: adjsim.Reweighting(every=0.5)),
    "Girsanov": estimated(adjsim.Girsanov),
    "ForwardSensitivity": estimated(adjsim.ForwardSensitivity),
    "FiniteDifference": estimated(adjsim.FiniteDifference),
    "adaptive": adaptive(
        lambda: adjsim.Coupled("dormand-prince", adjsim.Adaptive()), adjsim.ReversibleAdjoint()
    ),
    "backsolve": adaptive(lambda: adjsim.ODESolver("dopri5"), adjsim.BacksolveAdjoint()),
    "path": noisy(lambda: adjsim.EulerMaruyama(2.0**-4), adjsim.BrownianPath(3, 2.0**-12)),
    "path, adaptive": noisy(
        lambda: adjsim.StochasticHeun(adjsim.Adaptive(1e-2, 1e-3, 2.0**-4)),
        adjsim.BrownianPath(3, 2.0**-12),
    ),
    "torchsde": noisy(lambda: adjsim.SDESolver("euler", dt=2.0**-4), 3, adjsim.DirectAdjoint),
    **{
        f"{method}, {adjoint}": solved(method, adjoint)
        for method in ("RK45", "DOP853", "Radau", "BDF", "LSODA", "Rodas4")
        for adjoint in ("interpolate", "checkpoint")
    },
    "bounces": bounces,
    "minimum": minimum,
    "solid": solid,
    "steady state": steady,
    "observables": observed,
    "constraints": held(False),
    "constraints, exact": held(True),
}
