"""Sums with named parts, the truncations of force fields, and the dispersion beyond a cutoff."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim.potentials import tail_corrections
from adjsim.potentials.force_field import ForceFieldPotential
from adjsim.potentials.pairs.tail import DispersionCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Unshifted
from adjsim.potentials.signals.controls import OpenLoop
from adjsim.potentials.signals.signals import Harmonics
from tests.problems import parameter


def argon(truncation, epsilon=1.3, sigma=0.9):
    """One species of 30 atoms in a box."""
    return adjsim.LennardJonesMixture(
        torch.zeros(30),
        nn.Parameter(torch.tensor([epsilon])),
        nn.Parameter(torch.tensor([sigma])),
        cutoff=1.9,
        box=torch.tensor([4.0, 4.5, 5.0]),
        truncation=truncation,
    )


@pytest.mark.parametrize("truncation", [Unshifted(), SwitchedDistance(1.4)])
def test_derivatives_of_truncations(truncation):
    pair = adjsim.LennardJones(1.3, 0.9, cutoff=1.9, truncation=truncation)
    s = torch.linspace(0.7, 1.89**2, 40).requires_grad_()
    energy, slope = pair.truncated_energy(s), pair.truncated_slope(s)
    (first,) = torch.autograd.grad(energy.sum(), s, retain_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), s)
    torch.testing.assert_close(slope, first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pair.truncated_curvature(s), second, rtol=1e-12, atol=1e-12)


def test_switch():
    """1 below the start, 0 at the cutoff, 1/2 in the middle of the two distances."""
    pair = adjsim.LennardJones(1.3, 0.9, cutoff=1.9, truncation=SwitchedDistance(1.4))
    s = torch.tensor([1.3, 1.65, 1.9]) ** 2
    share = pair.truncated_energy(s) / pair.pair_energy(s)
    torch.testing.assert_close(share, torch.tensor([1.0, 0.5, 0.0]), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match=r"start from 0 to below the cutoff 1.9; got 2"):
        adjsim.LennardJones(cutoff=1.9, truncation=SwitchedDistance(2.0))


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, 1.4])
def test_dispersion_of_one_species(start):
    """For one species the mean over pairs is that of tail_corrections, found by quadrature."""
    truncation = Unshifted() if start is None else SwitchedDistance(start)
    pair = argon(truncation)
    correction = DispersionCorrection(pair, start)
    position = torch.rand(2, 30, 3)
    energy = correction(position)
    expected, _ = tail_corrections(pair, 30, 90.0)
    # The quadrature of the tail is good to twelve digits.
    torch.testing.assert_close(energy, expected.expand(2), rtol=1e-11, atol=0)
    for x, y in zip(
        torch.autograd.grad(energy[0], list(pair.parameters())),
        torch.autograd.grad(expected, list(pair.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=0)
    assert not adjsim.force(correction, position).any()
    force, product = adjsim.potentials.base.force_vjp(correction, position, [pair.epsilon])
    assert not force.any()
    along, rest = product(torch.ones_like(position))
    assert not along.any()
    assert rest == [None]
    # The energy is inverse to the volume.
    assert torch.equal(correction.virial(position)[0], energy[0] * torch.eye(3))


def test_dispersion_needs_a_box():
    with pytest.raises(ValueError, match="needs a box and a cutoff"):
        DispersionCorrection(adjsim.LennardJonesMixture([0, 0], [1.0], [1.0]))


def test_epsilon_zero_has_finite_gradients():
    epsilon = nn.Parameter(torch.tensor([1.0, 0.0]))
    pair = adjsim.LennardJonesMixture([0, 1, 0], epsilon, [1.0, 1.0])
    position = torch.tensor([[0.0, 0, 0], [1.1, 0, 0], [0, 1.2, 0]])
    (gradient,) = torch.autograd.grad(pair(position), epsilon)
    only = adjsim.LennardJones(1.0, 1.0)(position[[0, 2]])
    torch.testing.assert_close(gradient, torch.stack([only, torch.zeros(())]))


def test_named_parts():
    one, two = adjsim.Harmonic(parameter(2.0)), adjsim.DoubleWell(parameter(0.5))
    potential = ForceFieldPotential({"springs": ["A-B"]}, springs=one, wells=two)
    assert [name for name, _ in potential.named_parameters()] == ["springs.k", "wells.barrier"]
    assert potential.parts == (one, two)
    assert potential.labels == {"springs": ("A-B",)}
    assert potential.box is None
    position = torch.rand(3, 4, 2)
    plain = one + two
    assert torch.equal(potential(position), plain(position))
    assert torch.equal(adjsim.force(potential, position), adjsim.force(plain, position))
    potential.springs = adjsim.Harmonic(3.0)
    assert torch.equal(potential(position), (potential.springs + two)(position))
    assert torch.equal((potential + one)(position), potential(position) + one(position))
    with pytest.raises(ValueError, match="at least one part"):
        ForceFieldPotential()


def test_wrong_units_are_found_beside_a_force_field():
    """A force, such as a control, has no energy, and the force field in eV beside it has one."""
    springs = ForceFieldPotential(springs=adjsim.HarmonicBond([[0, 1]], 1e9, 1.0))
    dynamics = adjsim.Hamiltonian(springs + OpenLoop(Harmonics(0.1, 1.0)))
    start = dynamics.init(torch.tensor([[0.0, 0, 0], [5.0, 0, 0]]), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"the energy at the start is .* eV"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.1))
