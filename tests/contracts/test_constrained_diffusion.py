"""Diffusion along constraints: exact steps, gradients, starts and refusals."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from tests.constraints import MixedClusters, tensor, weighted

DT = 0.005


class DiffusingClusters(MixedClusters):
    """Two rigid waters, a dimer and a free atom, of unlike frictions; one atom is pinned."""

    def __init__(self) -> None:
        super().__init__()
        del self.leaves["mass"]
        self.leaves["friction"] = tensor([3.0, 1, 1, 2, 1, 1.5, math.inf, 1, 1])

    def constrained(self, numbers):
        potential = adjsim.SoftSphere(numbers["epsilon"], 1.5, exclusions=self.index)
        inner = adjsim.OverdampedLangevin(potential, numbers["kT"], numbers["friction"])
        return adjsim.Constrained(inner, adjsim.DistanceConstraints(self.index, numbers["length"]))

    def start(self, dynamics, numbers):
        position = numbers["position"]
        return dynamics.init(torch.stack([position, position + 0.2]))

    def end(self, numbers, steps=2, **options):
        dynamics = self.constrained(numbers)
        start, solver = self.start(dynamics, numbers), adjsim.EulerMaruyama(DT)
        return adjsim.simulate(
            dynamics, start, [0.0, steps * DT], solver=solver, generator=2, **options
        ).final


def test_a_rod_turns_by_the_angle_of_its_noise():
    """Across the bond a step adds the change of the difference; a projection keeps it."""
    friction, kT, length = tensor([2.0, 0.5]), 0.7, 1.3
    inner = adjsim.OverdampedLangevin(adjsim.Gravity([0.1, 0.4], 1.0), kT, friction)
    dynamics = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 1]], length))
    start = dynamics.init(tensor([[0.0, 0], [length, 0]]).expand(50, 2, 2))
    final = adjsim.simulate(
        dynamics, start, [0.0, DT], solver=adjsim.EulerMaruyama(DT), generator=3
    ).final.position
    free = adjsim.simulate(
        inner, start, [0.0, DT], solver=adjsim.EulerMaruyama(DT), generator=3
    ).final.position
    bond = final[:, 1] - final[:, 0]
    angle = torch.asin((free[:, 1, 1] - free[:, 0, 1]) / length)
    turned = length * torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    torch.testing.assert_close(bond, turned, rtol=0, atol=1e-14)
    # Pulls are opposite, so the centre of friction moves as without the constraint.
    centre = (friction[:, None] * (final - free)).sum(1)
    torch.testing.assert_close(centre, torch.zeros_like(centre), rtol=0, atol=1e-14)


@pytest.mark.slow
def test_gradients_are_those_of_differences():
    system = DiffusingClusters()
    numbers = system.parameters()
    direct, checkpointed = (
        torch.autograd.grad(weighted(system.end(numbers, adjoint=a)), list(numbers.values()))
        for a in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint())
    )
    generator, h = torch.Generator().manual_seed(5), 1e-5
    for (name, number), mine, other in zip(numbers.items(), direct, checkpointed, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [weighted(system.end(numbers | {name: number + s * along})) for s in (h, -h)]
        expected = (ends[0] - ends[1]) / (2 * h)
        torch.testing.assert_close((mine * along).sum(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_compiled_runs_have_the_same_ends_and_gradients():
    system, found = DiffusingClusters(), []
    numbers = system.parameters()
    for options in ({}, {"compile": True}):
        final = system.end(numbers, 6, adjoint=adjsim.CheckpointAdjoint(), **options)
        grads = torch.autograd.grad(weighted(final), list(numbers.values()))
        found.append((final.position.detach(), *grads))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_steps_hold_constraints_in_each_system_as_alone():
    system = DiffusingClusters()
    dynamics = system.constrained(system.leaves)
    start = system.start(dynamics, system.leaves)
    final = system.end(system.leaves, 20).position
    assert float(dynamics.constraints.excess(final).abs().max()) < 1e-12
    assert torch.equal(final[:, 6], start.position[:, 6])
    one = type(start)(start.position[0])
    solver = adjsim.EulerMaruyama(DT)
    alone = adjsim.simulate(dynamics, one, [0.0, 20 * DT], solver=solver, generator=2).final
    assert torch.equal(alone.position, final[0])
    # The drift without noise is along the constraints.
    rate = dynamics.drift(0.0, start).position
    bonds, rates = (dynamics.constraints.differences(x) for x in (start.position, rate))
    across = (bonds * rates).sum(-2)
    torch.testing.assert_close(across, torch.zeros_like(across), rtol=0, atol=1e-12)


def test_a_pinned_atom_leaves_the_gradient_by_temperature_finite():
    kT = torch.nn.Parameter(tensor(1.0))
    inner = adjsim.OverdampedLangevin(adjsim.Harmonic(1.0), kT, [1.0, math.inf])
    start = inner.init(torch.zeros(2, 3, dtype=torch.float64))
    solver = adjsim.EulerMaruyama(0.1)
    final = adjsim.simulate(inner, start, [0.0, 0.2], solver=solver, generator=0).final
    (slope,) = torch.autograd.grad(final.position.square().sum(), kT)
    # All displacements are in proportion to the root of kT.
    torch.testing.assert_close(slope, final.position.square().sum().detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": adjsim.LeimkuhlerMatthews(DT)}, r"project the noise .* Constrained\(Langevin"),
        ({"solver": adjsim.Splitting("D", DT)}, "no flow to split: use EulerMaruyama"),
        ({"solver": adjsim.SDESolver(dt=DT)}, r"at the ends of steps. Use EulerMaruyama\(dt\)"),
        ({"adjoint": adjsim.ReversibleAdjoint()}, "has no inverse, .* use CheckpointAdjoint"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(next(iter(x.values()))).__name__,
)
def test_other_steps_and_adjoints_are_refused(options, message):
    system = DiffusingClusters()
    dynamics = system.constrained(system.parameters())
    start = system.start(dynamics, system.leaves)
    given = {"solver": adjsim.EulerMaruyama(DT), "generator": 0} | options
    with pytest.raises(TypeError, match=message):
        adjsim.simulate(dynamics, start, [0.0, DT], **given)


def test_each_atom_has_a_friction():
    system = DiffusingClusters()
    dynamics = system.constrained(system.leaves | {"friction": tensor([1.0] * 8)})
    with pytest.raises(ValueError, match="friction has 8 entries and the state 9 atoms"):
        dynamics.init(system.leaves["position"])


def test_the_density_is_declared_without_frictions_that_vary():
    rods, well = adjsim.DistanceConstraints([[0, 1]], 1.0), adjsim.Harmonic(1.0)

    def density(friction, constraints=rods):
        inner = adjsim.OverdampedLangevin(well, 0.5, friction)
        return adjsim.Constrained(inner, constraints).stationary_density()

    state = adjsim.OverdampedLangevin(well).init(tensor([[0.0, 0], [1, 0]]))
    for friction in ([1.0, 2.0], torch.nn.Parameter(tensor(1.5))):
        torch.testing.assert_close(density(friction).reduced_energy(state), tensor(1.0))
    with pytest.raises(TypeError, match="the friction of Constrained requires grad"):
        density(torch.nn.Parameter(tensor([1.0, 2.0])))
    with pytest.raises(TypeError, match="the length of Constrained requires grad"):
        density(1.0, adjsim.DistanceConstraints([[0, 1]], torch.nn.Parameter(tensor(1.0))))
