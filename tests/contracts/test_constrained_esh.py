"""Energy-sampling Hamiltonian dynamics along constraints."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim.dynamics.esh import ESHState
from tests.constraints import WATER_LENGTHS, tensor, waters, weighted

ADJOINTS = (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint())


class Trap(adjsim.potentials.Potential):
    """A quartic well that couples and turns all bodies, of strength k."""

    def __init__(self, k):
        super().__init__()
        self.k = k if isinstance(k, torch.nn.Parameter) else torch.nn.Parameter(tensor(k))

    def forward(self, position):
        x, y = position[..., 0], position[..., 1]
        rest = position[..., 2:].square().sum(-1)
        each = 0.2 * (x + 0.5 * y) ** 4 + 0.3 * y**4 + 0.2 * x**2 + 0.3 * x + 0.4 * rest
        return self.k * each.sum(-1)


class EnergySampling:
    """Two rigid waters in the well, whose numbers are leaves."""

    def __init__(self) -> None:
        position, self.index = waters(2)
        position = position - position.mean(0)
        self.leaves = {"k": tensor(0.7), "length": tensor(WATER_LENGTHS * 2), "position": position}

    def constrained(self, numbers):
        constraints = adjsim.DistanceConstraints(self.index, numbers["length"])
        return adjsim.Constrained(adjsim.ESH(Trap(numbers["k"]), dof=12), constraints)

    def run(self, numbers, dt, ts, **options):
        dynamics = self.constrained(numbers)
        start = dynamics.init(numbers["position"].expand(2, 6, 3), generator=1)
        solver = adjsim.Splitting("EAE", dt)
        return dynamics, adjsim.simulate(dynamics, start, ts, solver=solver, **options)

    def end(self, numbers, **options):
        return weighted(self.run(numbers, 0.05, [0.0, 0.15], **options)[1].final)

    def parameters(self):
        return {name: torch.nn.Parameter(x.clone()) for name, x in self.leaves.items()}


def test_energy_is_of_second_order_and_the_direction_a_tangent():
    system, errors = EnergySampling(), []
    for dt in (0.1, 0.05):
        with torch.no_grad():
            dynamics, path = system.run(system.leaves, dt, [0.1 * k for k in range(9)])
        states = ESHState(path.position, path.direction, path.log_speed)
        energy, held = dynamics.invariant(states), dynamics.constraints
        errors.append(float((energy - energy[0]).abs().max()))
        assert float(held.excess(path.position).abs().max()) < 1e-12
        bonds, turns = (held.differences(x) for x in (path.position, path.direction))
        assert float((bonds * turns).sum(-2).abs().max()) < 1e-12
        sizes = path.direction.square().sum((-1, -2))
        torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0, atol=1e-14)
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_reversed_directions_return_to_the_start():
    system = EnergySampling()
    with torch.no_grad():
        dynamics, path = system.run(system.leaves, 0.1, [0.0, 1.5])
        turned = path.final._replace(direction=-path.final.direction)
        solver = adjsim.Splitting("EAE", 0.1)
        back = adjsim.simulate(dynamics, turned, [0.0, 1.5], solver=solver).final
    assert float((path.final.position - path.position[0]).abs().max()) > 0.2
    for mine, sign, name in zip(back, (1, -1, 1), back._fields, strict=True):
        start = getattr(path, name)[0]
        # Rounding grows over 15 steps by less than a factor of a thousand.
        torch.testing.assert_close(mine, sign * start, rtol=0, atol=1e-12)


def test_the_rates_are_those_of_short_steps():
    system, h = EnergySampling(), 1e-4
    with torch.no_grad():
        dynamics, path = system.run(system.leaves, h, [0.0, h, 2 * h])
        rates = dynamics.drift(0.0, ESHState(*(getattr(path, x)[1] for x in ESHState._fields)))
    for name in ESHState._fields:
        values = getattr(path, name)
        slope = (values[2] - values[0]) / (2 * h)
        # The error of a central difference is h^2 / 6 times a third derivative of about 10.
        torch.testing.assert_close(getattr(rates, name), slope, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_differences():
    system = EnergySampling()
    numbers = system.parameters()
    found = [
        torch.autograd.grad(system.end(numbers, adjoint=a), list(numbers.values()))
        for a in ADJOINTS
    ]
    generator, h = torch.Generator().manual_seed(5), 1e-5
    for k, (name, number) in enumerate(numbers.items()):
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [
                system.end(numbers | {name: torch.nn.Parameter(number + s * along)})
                for s in (h, -h)
            ]
        expected = (ends[0] - ends[1]) / (2 * h)
        for grads in found:
            torch.testing.assert_close(grads[k], found[0][k], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close((grads[k] * along).sum(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.marathon
def test_compiled_runs_have_the_same_gradients():
    system = EnergySampling()
    numbers = system.parameters()
    plain, compiled = (
        torch.autograd.grad(system.end(numbers, adjoint=ADJOINTS[2], **x), list(numbers.values()))
        for x in ({}, {"compile": True})
    )
    for mine, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


def test_a_glide_keeps_volumes_of_positions_and_momenta():
    """Of two joined rods in a plane, by X, Y and two angles, and their conjugate momenta."""
    constraints, h = adjsim.DistanceConstraints([[0, 1], [1, 2]], [1.0, 0.7]), 0.4
    dynamics = adjsim.Constrained(adjsim.ESH(Trap(1.0), dof=4), constraints)
    (move,) = dynamics.terms["A"].moves(h, None)

    def places(x):
        arms = torch.stack([torch.cos(x[2:]), torch.sin(x[2:])], -1) * tensor([[1.0], [0.7]])
        return torch.stack([x[:2], x[:2] + arms[0], x[:2] + arms.sum(0)])

    def glide(z):
        x, conjugate = z.split(4)
        B = torch.func.jacrev(places)(x).reshape(6, 4)
        p = (B @ torch.linalg.solve(B.T @ B, conjugate)).reshape(3, 2)
        size = p.square().sum().sqrt()
        c = constraints.coefficients(dynamics.masses, p)
        q, u, r = move.function(c, places(x), p / size, torch.log(size))
        bonds = q[1:] - q[:-1]
        end = torch.cat([q[0], torch.atan2(bonds[:, 1], bonds[:, 0])])
        p = torch.exp(r) * u
        B = torch.func.jacrev(places)(end).reshape(6, 4)
        return torch.cat([end, B.T @ p.flatten()]), size, r

    z, step = tensor([0.2, -0.1, 0.5, 1.3, 0.3, -0.6, 0.7, -0.9]), 1e-5
    columns = [
        (glide(z + s)[0] - glide(z - s)[0]) / (2 * step)
        for s in step * torch.eye(8, dtype=torch.float64)
    ]
    # Differences have errors of 1e-9.
    assert abs(float(torch.linalg.det(torch.stack(columns, 1))) - 1) < 1e-7
    # The size of the momentum changes.
    _, size, r = glide(z)
    assert abs(float(r - torch.log(size))) > 1e-3


@pytest.mark.marathon
def test_the_density_of_frames_is_stationary():
    """Frames have ``exp(-U (1 - 1/d))`` on the surface measure, and with the weights exp(-U)."""
    count, h, steps = 20_000, 0.2, 25
    constraints = adjsim.DistanceConstraints([[0, 1]], 1.0)
    dynamics = adjsim.Constrained(adjsim.ESH(Trap(1.0), dof=3), constraints)

    def places(X, Y, angle):
        arm, centre = torch.stack([torch.cos(angle), torch.sin(angle)], -1) / 2, (X, Y)
        return torch.stack([torch.stack(centre, -1) + arm, torch.stack(centre, -1) - arm], -2)

    def observed(position):
        bond, centre = position[..., 0, :] - position[..., 1, :], position.mean(-2)
        return torch.stack([bond[..., 0] ** 2, centre[..., 0] ** 2, centre[..., 0]], -1)

    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    grid = places(
        *torch.meshgrid(x, x, 2 * math.pi * torch.arange(64, dtype=x.dtype) / 64, indexing="ij")
    )
    generator = torch.Generator().manual_seed(2)
    drawn = torch.rand(20 * count, 4, generator=generator, dtype=torch.float64)
    tried = places(*(8 * drawn[:, :2] - 4).unbind(-1), 2 * math.pi * drawn[:, 2])
    with torch.no_grad():
        energy = dynamics.potential(grid)
        weight, least = torch.exp(-energy * 2 / 3), float(energy.min()) - 0.01
        # By rejection; beyond the square of 8 the density is below 1e-10.
        accepted = drawn[:, 3] < torch.exp((least - dynamics.potential(tried)) * 2 / 3)
        start = dynamics.init(tried[accepted][:count], generator=0)
        solver = adjsim.Splitting("EAE", h)
        final = adjsim.simulate(dynamics, start, [0.0, h * steps], solver=solver).final
    assert len(start.position) == count
    # Trapezoidal sums of smooth functions that vanish at the ends.
    exact = (weight[..., None] * observed(grid)).sum((0, 1, 2)) / weight.sum()
    found = observed(final.position)
    value, error = found.mean(0), found.std(0) / count**0.5
    assert bool((error < tensor([0.003, 0.01, 0.006])).all()), error
    # The bias of the step is below a few thousandths.
    assert bool(((value - exact).abs() < 4 * error + 0.003).all()), (value, exact, error)


def test_bad_degrees_of_freedom_and_exact_runs_are_refused():
    rods = adjsim.DistanceConstraints([[0, 1]], 1.0)
    with pytest.raises(ValueError, match="dof = atoms x dim - constraints"):
        adjsim.Constrained(adjsim.ESH(Trap(1.0)), rods)
    with pytest.raises(ValueError, match="dof must be positive; got 0"):
        adjsim.ESH(Trap(1.0), dof=0)
    position = tensor([[0.0, 0], [1, 0]])
    with pytest.raises(ValueError, match=r"dof is 5, more than atoms x dim = 4"):
        adjsim.ESH(Trap(1.0), dof=5).init(position, generator=0)
    with pytest.raises(ValueError, match=r"dof is 4, and constraints .* leave 3 degrees"):
        adjsim.Constrained(adjsim.ESH(Trap(1.0), dof=4), rods).init(position, generator=0)
    dynamics = adjsim.Constrained(adjsim.ESH(Trap(1.0), dof=3), rods)
    with pytest.raises(ValueError, match="a momentum of zero has no direction"):
        dynamics.init(position, tensor([[1.0, 0], [-1, 0]]))
    start = dynamics.init(position, generator=0)
    turned = start._replace(direction=tensor([[1.0, 0], [0, 0]]))
    for state, dt, options, kind, message in (
        (turned, 0.1, {}, ValueError, "momenta at the start change the constrained distances"),
        (start, 0.1, {"exact": True}, TypeError, "term 'E' of Constrained is neither"),
        (start, 3.0, {}, FloatingPointError, "no multipliers were found"),
    ):
        with pytest.raises(kind, match=message):
            adjsim.simulate(
                dynamics, state, [0.0, 9.0], solver=adjsim.Splitting("EAE", dt, **options)
            )
