"""Estimates and minima after a change between two calls, or between a result and its gradient."""

from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import adjsim
from adjsim.core.durable.store import StoreError
from adjsim.estimators import Reweighting, ScoreFunction, Shadowing, Simulation
from adjsim.observables import pair_distances
from tests.problems import parameter


def well(kT=None):
    return adjsim.Langevin(
        adjsim.Harmonic(parameter(2.0)), kT=parameter(1.0) if kT is None else kT, friction=1.0
    )


def simulation_of(dynamics, until=10.0, atoms=1):
    def initial(replicas, generator):
        position = torch.randn(replicas, atoms, 1, generator=generator, dtype=torch.float64)
        return dynamics.init(position, torch.zeros_like(position))

    return Simulation(dynamics, initial, [0.0, until], solver=adjsim.BAOAB(0.1))


@dataclass
class Scaled:
    """Equal to every other one, by its fields."""

    w: torch.Tensor = field(compare=False)

    def __call__(self, state):
        return self.w * (state.position**2).flatten(1).sum(1)


@pytest.mark.slow
def test_an_observable_that_equals_another_one_is_still_its_own():
    simulation, estimator = simulation_of(well()), ScoreFunction()
    found = {}
    for w in (1.0, 10.0):
        observable = adjsim.TimeAverage(Scaled(torch.tensor(w, dtype=torch.float64)), burn_in=2.0)
        found[w] = estimator(simulation, observable, replicas=32, chunks=4, generator=1)
    torch.testing.assert_close(found[10.0].value, 10 * found[1.0].value, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_samples_of_another_box_are_not_weighted():
    """The mean squared distance of two atoms that hardly interact is L^2/4 in the box."""
    box = torch.full((3,), 6.0, dtype=torch.float64)
    potential = adjsim.GaussianCore(parameter(0.1), 1.0, cutoff=2.5, box=box)
    dynamics = adjsim.Langevin(potential, friction=1.0)

    def initial(replicas, generator):
        position = torch.rand(replicas, 2, 3, generator=generator, dtype=torch.float64)
        return dynamics.init(position * potential.box, torch.zeros_like(position))

    def squares(state):
        return (pair_distances(state.position, potential.box) ** 2).flatten(1).sum(1)

    simulation = Simulation(dynamics, initial, [0.0, 10.0], solver=adjsim.BAOAB(0.05))
    estimator = Reweighting()
    options = {"replicas": 64, "chunks": 4, "generator": 1}
    estimator(simulation, adjsim.TimeAverage(squares), **options)
    with torch.no_grad():
        potential.box.fill_(8.0)
    found = estimator(simulation, adjsim.TimeAverage(squares), **options)
    fresh = Reweighting()(simulation, adjsim.TimeAverage(squares), **options)
    assert found.diagnostics["sampled"]
    assert torch.equal(found.value, fresh.value)


def test_a_surrogate_has_read_kT_and_masses():
    dynamics = well()
    estimator, simulation = Reweighting(burn_in=2.0), simulation_of(dynamics)
    observable = adjsim.TimeAverage(lambda s: (s.position**2).flatten(1).sum(1))
    estimator(simulation, observable, replicas=32, chunks=4, generator=1)
    (expected,) = torch.autograd.grad(estimator.surrogate(observable), dynamics.kT)
    surrogate = estimator.surrogate(observable)
    with torch.no_grad():
        dynamics.kT.mul_(3.0)
    (found,) = torch.autograd.grad(surrogate, dynamics.kT)
    assert torch.equal(found, expected)


class Lorenz(nn.Module):
    def __init__(self, keeps=False):
        super().__init__()
        self.rho, self.keeps, self.calls = parameter(28.0), keeps, 0

    def forward(self, t, y):
        self.calls += 1
        rho = self.rho
        if self.keeps:
            if not hasattr(self, "kept"):
                self.kept = self.rho * 1.0
            rho = self.kept
        a, b, c = y.unbind(-1)
        return torch.stack([10 * (b - a), a * (rho - c) - b, a * b - 8 / 3 * c], -1)


def chaotic(field):
    dynamics = adjsim.ODE(field)

    def initial(replicas, generator):
        return dynamics.init(torch.randn(replicas, 3, generator=generator, dtype=torch.float64) + 1)

    solver = adjsim.RungeKutta("rk4", 0.01)
    return dynamics, Simulation(dynamics, initial, [0.0, 2.5], solver=solver)


HEIGHT = adjsim.TimeAverage(lambda s: s.y[:, 2], burn_in=1.0)


def test_shadowing_works_on_a_copy():
    field = Lorenz()
    dynamics, simulation = chaotic(field)
    Shadowing(1, 0.5, burn_in=1.0)(simulation, HEIGHT, replicas=4, chunks=2, generator=1)
    assert field.calls == 0
    assert dynamics.fun is field


@pytest.mark.slow
def test_shadowing_counts_its_evaluations():
    """A chunk more is a segment more, of 50 steps of four evaluations, forth and back."""
    _, simulation = chaotic(Lorenz())
    one, two = (
        Shadowing(1, 0.5, burn_in=1.0)(simulation, HEIGHT, replicas=4, chunks=chunks, generator=1)
        for chunks in (1, 2)
    )
    more = two.diagnostics["energy_evaluations"] - one.diagnostics["energy_evaluations"]
    assert more == 2 * 50 * 4


def test_shadowing_refuses_a_tensor_that_is_kept():
    _, simulation = chaotic(Lorenz(keeps=True))
    with pytest.raises(ValueError, match=r"keeps 'fun\.kept'"):
        Shadowing(1, 0.5, burn_in=1.0)(simulation, HEIGHT, replicas=4, chunks=2, generator=1)


def test_shadowing_refuses_a_change_by_its_observable():
    field = Lorenz()
    _, simulation = chaotic(field)

    def height(state):
        with torch.no_grad():
            field.rho.add_(1e-3)
        return state.y[:, 2]

    with pytest.raises(ValueError, match="writes to its own parameter"):
        Shadowing(1, 0.5, burn_in=1.0)(
            simulation, adjsim.TimeAverage(height, burn_in=1.0), replicas=4, chunks=2, generator=1
        )


HIDDEN = parameter(28.0)


def test_shadowing_refuses_a_captured_parameter():
    def lorenz(t, y):
        a, b, c = y.unbind(-1)
        return torch.stack([10 * (b - a), a * (HIDDEN - c) - b, a * b - 8 / 3 * c], -1)

    class Captures(Lorenz):
        def forward(self, t, y):
            return lorenz(t, y) + 0 * self.rho

    _, simulation = chaotic(Captures())
    with pytest.raises(ValueError, match="requires grad but is not registered"):
        Shadowing(1, 0.5, burn_in=1.0)(simulation, HEIGHT, replicas=4, chunks=2, generator=1)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.c = parameter(2.0), [1.0, 0.3]

    def forward(self, q):
        return (self.c[0] * q**4 / 4 + self.k * (q - self.c[1]) ** 2).sum((-1, -2))


def test_a_minimum_whose_potential_has_changed_is_refused():
    potential = Listed()
    found = adjsim.minimize(potential, torch.full((1, 1), 0.5, dtype=torch.float64))
    potential.c[0] = 5.0
    with pytest.raises(RuntimeError, match="has changed since the minimum was found"):
        found.sum().backward()


class SlottedWall:
    """A wall beyond 2, which the start does not touch."""

    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __call__(self, q):
        return self.k * torch.clamp(q - 2.0, min=0) ** 2


class Walled(adjsim.potentials.Potential):
    def __init__(self, wall):
        super().__init__()
        self.pull, self.wall = parameter(1.0), wall

    def forward(self, position):
        strength = self.wall if callable(self.wall) else SlottedWall(self.wall[0])
        return (strength(position) - self.pull * position).sum((-1, -2))


@pytest.mark.parametrize("wall", [SlottedWall, lambda k: deque([k])])
def test_what_a_slotted_callable_and_a_deque_hold_is_seen(tmp_path, wall):
    def run(k):
        dynamics = adjsim.Hamiltonian(Walled(wall(k)))
        start = dynamics.init(torch.zeros(1, 1).double(), torch.full((1, 1), 0.5).double())
        solver = adjsim.VelocityVerlet(0.05)
        return adjsim.simulate(
            dynamics, start, [0.0, 5.0], solver=solver, adjoint=adjsim.CheckpointAdjoint(),
            store=tmp_path / "run",
        )  # fmt: skip

    run(1.0)
    with pytest.raises(StoreError, match="of another computation"):
        run(50.0)
