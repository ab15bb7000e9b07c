"""Observables and their gradients, against central differences and known numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import adjsim
from adjsim.potentials import ForceShifted, Switched
from tests.problems import parameter

SIDES = [4.1, 4.3, 4.6]
TILTED = [[4.2, 0.0, 0.0], [0.7, 4.3, 0.0], [-0.4, 0.6, 4.4]]


def fluid(atoms=20, replicas=(), seed=0, side=4.1):
    """Atoms near the points of a grid, of which none are close."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:atoms] * (side / 3)
    return points + 0.12 * torch.randn((*replicas, atoms, 3), generator=generator)


def crystal(basis, cells):
    """Points of a cubic crystal with unit cells of side 1."""
    corners = torch.cartesian_prod(*[torch.arange(float(cells))] * 3)
    return (corners.unsqueeze(1) + torch.tensor(basis)).reshape(-1, 3)


FCC = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]
BCC = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]

OBSERVABLES = {
    "smooth radial distribution": lambda q, box: adjsim.smooth_radial_distribution(
        q, torch.linspace(0.8, 2.0, 5), box, width=0.1
    ),
    "nearest neighbour": adjsim.nearest_neighbour_distance,
    "coordination": lambda q, box: adjsim.coordination_number(q, 1.6, width=0.1, box=box),
    "structure factor": lambda q, box: adjsim.structure_factor(
        q, 2 * math.pi * torch.eye(3) / torch.as_tensor(SIDES)
    ),
    "bond order": lambda q, box: adjsim.bond_order(q, 1.6, width=0.1, box=box),
    "angles": lambda q, box: adjsim.angular_distribution(
        q, torch.linspace(0.0, math.pi, 7), box, cutoff=1.9, width=0.2, start=1.4
    ),
    "pressure": lambda q, box: adjsim.pressure(*moving(q, box)),
    "stress": lambda q, box: adjsim.stress(*moving(q, box)),
}


def moving(q, box):
    potential = adjsim.LennardJones(cutoff=2.0, box=box, truncation=Switched(1.5))
    dynamics = adjsim.Hamiltonian(potential + adjsim.Morse(0.3, cutoff=2.0, box=box), 1.3)
    return dynamics, adjsim.PhaseState(q, 0.3 * q.flip(-1))


@pytest.mark.parametrize("box", [SIDES, TILTED], ids=["sides", "tilted"])
@pytest.mark.parametrize("name", OBSERVABLES)
def test_gradients_against_central_differences(name, box):
    q = fluid(replicas=(2,))
    observable, generator = OBSERVABLES[name], torch.Generator().manual_seed(1)
    value = observable(q, box)
    assert value.shape[0] == 2
    weight = torch.randn(value.shape, generator=generator)
    direction = torch.randn(q.shape, generator=generator)
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad((observable(leaf, box) * weight).sum(), leaf)
    h = 1e-5
    up, down = ((observable(q + s * h * direction, box) * weight).sum() for s in (1, -1))
    slope = (grad * direction).sum()
    # The truncation is h^2/6 times a third derivative of some ten thousand.
    torch.testing.assert_close(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-6)
    for i in range(2):
        torch.testing.assert_close(observable(q[i], box), value[i], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_smooth_distribution_is_a_convolution():
    """Its mean over a shell is that of the histogram, where the kernel is narrow."""
    q = fluid(27, (40,))
    edges = torch.linspace(0.9, 1.9, 6)
    exact = adjsim.radial_distribution(q, edges, SIDES)
    r = torch.linspace(0.9, 1.9, 1001)
    smooth = adjsim.smooth_radial_distribution(q, r, SIDES, width=0.004).mean(0)
    shells = (smooth * r**2)[:-1].reshape(5, 200).sum(1) / (r**2)[:-1].reshape(5, 200).sum(1)
    torch.testing.assert_close(shells, exact, rtol=0.02, atol=0)


@pytest.mark.slow
def test_an_ideal_gas_has_no_structure():
    """The relative error of a bin is one over the root of its number of pairs, 40,000 or more."""
    q = 4.0 * torch.rand(6, 500, 3, generator=torch.Generator().manual_seed(2))
    edges = torch.linspace(0.8, 2.0, 5)
    g = adjsim.radial_distribution(q, edges, [4.0] * 3)
    torch.testing.assert_close(g, torch.ones(4), rtol=0.02, atol=0)
    r = torch.linspace(0.8, 1.6, 9)
    smooth = adjsim.smooth_radial_distribution(q, r, [4.0] * 3, width=0.04).mean(0)
    torch.testing.assert_close(smooth, torch.ones(9), rtol=0.05, atol=0)
    angles = torch.linspace(0.5, math.pi - 0.5, 9)
    p = adjsim.angular_distribution(q, angles, [4.0] * 3, cutoff=0.9, width=0.1)
    # The kernel multiplies a sine by exp(-width^2/2). Five errors of a mean of six frames.
    error = p.std(0) / 6**0.5
    assert bool((error < 0.02).all())
    assert bool(((p.mean(0) - math.exp(-0.005) * angles.sin() / 2).abs() < 5 * error).all())


@pytest.mark.parametrize(
    ("dim", "basis", "cells", "distance", "bonds"),
    [
        (3, FCC, 2, 0.85, {60: 24, 90: 12, 120: 24, 180: 6}),
        (3, [[0.0, 0.0, 0.0]], 3, 1.2, {90: 12, 180: 3}),
        (2, [[0.0, 0.0]], 3, 1.2, {90: 4, 180: 2}),
    ],
    ids=["fcc", "sc", "square"],
)
def test_angles_of_crystals(dim, basis, cells, distance, bonds):
    """The share of each angle is its number among the pairs of neighbours of an atom."""
    corners = torch.cartesian_prod(*[torch.arange(float(cells))] * dim)
    q = (corners.unsqueeze(1) + torch.tensor(basis)).reshape(-1, dim)
    angles = torch.linspace(0.0, math.pi, 1201)
    p = adjsim.angular_distribution(q, angles, [float(cells)] * dim, cutoff=distance, width=0.015)
    # The kernel is even about 0 and pi, so the trapezoidal rule is exact up to rounding errors.
    assert float(torch.trapezoid(p, angles)) == pytest.approx(1.0, abs=1e-12)
    for degrees, number in bonds.items():
        near = (angles - math.radians(degrees)).abs() < 0.1
        share = float(torch.trapezoid(p[near], angles[near]))
        # The kernel has 2e-11 beyond 0.1.
        assert share == pytest.approx(number / sum(bonds.values()), abs=1e-10)
    leaf = q.clone().requires_grad_()
    coarse = adjsim.angular_distribution(
        leaf, torch.tensor([math.pi, 3.0, 1.5]), [float(cells)] * dim, cutoff=distance, width=0.1
    )
    # No first-order change of the mean angle in a crystal: every atom is a centre of inversion.
    (grad,) = torch.autograd.grad(coarse.sum(), leaf)
    torch.testing.assert_close(grad, torch.zeros_like(q), rtol=0, atol=1e-12)


def test_bond_order_of_crystals():
    """Steinhardt's numbers: 12 neighbours in fcc, 14 in bcc, 6 in the simple cubic crystal."""
    for basis, cells, distance, known in (
        (FCC, 3, 0.85, 0.574524),
        ([[0.0, 0.0, 0.0]], 3, 1.2, math.sqrt(1 / 8)),
        (BCC, 4, 1.2, 0.510688),
    ):
        q = crystal(basis, cells)
        found = adjsim.bond_order(q, distance, width=1e-3, box=[float(cells)] * 3)
        assert float(found) == pytest.approx(known, abs=1e-6)
        rotation = torch.linalg.qr(fluid(3))[0]
        turned = adjsim.bond_order(
            q @ rotation.T, distance, width=1e-3, box=cells * rotation.T.contiguous()
        )
        assert float(turned) == pytest.approx(known, abs=1e-6)


def test_no_order_has_a_gradient_of_zero():
    """Q_2 of a simple cubic crystal is zero to the last bit, and so is the radius of an atom."""
    q = crystal([[0.0, 0.0, 0.0]], 3).requires_grad_()
    order = adjsim.bond_order(q, 1.2, width=1e-4, degree=2, box=[3.0] * 3)
    radius = adjsim.radius_of_gyration(q[:1])
    for value in (order, radius):
        assert float(value.detach()) == 0
        (grad,) = torch.autograd.grad(value, q)
        assert torch.equal(grad, torch.zeros_like(q))
    # Away from it the gradient is that of the root.
    moved = q.detach().clone()
    moved[0] += 0.1
    moved.requires_grad_()
    (grad,) = torch.autograd.grad(adjsim.bond_order(moved, 1.2, width=0.1, degree=2), moved)
    assert float(grad.norm()) > 0.01


def test_fcc_has_twelve_neighbours():
    q, box = crystal(FCC, 3), [3.0] * 3
    assert float(adjsim.coordination_number(q, 0.85, width=1e-3, box=box)) == pytest.approx(12)
    nearest = adjsim.nearest_neighbour_distance(q, box)
    assert float(nearest) == pytest.approx(math.sqrt(0.5), rel=1e-14)
    k = 4 * math.pi * torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    # The second is forbidden in fcc.
    found = adjsim.structure_factor(q, k)
    torch.testing.assert_close(found, torch.tensor([float(len(q)), 0.0]), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("box", [SIDES, TILTED], ids=["sides", "tilted"])
def test_stress_is_the_derivative_with_respect_to_strain(box):
    """Positions, box and momenta strained together: p dq is invariant."""
    cell = torch.as_tensor(box)
    cell = torch.diag(cell) if cell.ndim == 1 else cell
    q, p = fluid(), 0.3 * fluid(seed=1)
    volume = float(torch.linalg.det(cell))

    def energy(strain):
        deformed = torch.eye(3) + strain
        new = cell @ deformed
        options = {"cutoff": 2.0, "box": new}
        potential = adjsim.LennardJones(truncation=ForceShifted(), **options)
        potential = potential + adjsim.Wolf([1.0, -1.0] * 10, 0.8, **options)
        dynamics = adjsim.Hamiltonian(potential, 1.3)
        momentum = p @ torch.linalg.inv(deformed).T
        return dynamics, adjsim.PhaseState(q @ deformed, momentum)

    dynamics, state = energy(torch.zeros(3, 3))
    found = adjsim.stress(dynamics, state)
    torch.testing.assert_close(
        adjsim.pressure(dynamics, state), -found.diagonal().mean(), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(found, found.T, rtol=1e-12, atol=1e-12)
    h = 1e-6
    for a, b in itertools.combinations_with_replacement(range(3), 2):
        strain = torch.zeros(3, 3)
        strain[a, b] += h / 2
        strain[b, a] += h / 2
        ends = []
        for sign in (1, -1):
            dynamics, state = energy(sign * strain)
            ends.append(float(dynamics.invariant(state)))
        slope = (ends[0] - ends[1]) / (2 * h) / volume
        assert float(found[a, b]) == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_pressure_of_an_ideal_gas():
    q, p = fluid(), fluid(seed=3)
    potential = adjsim.LennardJones(0.0, cutoff=2.0, box=SIDES)
    dynamics = adjsim.Hamiltonian(potential, parameter(2.0))
    expected = (p**2).sum() / 2.0 / 3 / math.prod(SIDES)
    torch.testing.assert_close(
        adjsim.pressure(dynamics, adjsim.PhaseState(q, p)), expected, rtol=1e-13, atol=0,
        check_dtype=False,
    )  # fmt: skip


def test_what_pressure_needs():
    q = fluid()
    state = adjsim.PhaseState(q, q)
    with pytest.raises(ValueError, match="periodic box"):
        adjsim.pressure(adjsim.Hamiltonian(adjsim.LennardJones()), state)
    with pytest.raises(ValueError, match="periodic box"):
        adjsim.pressure(adjsim.Hamiltonian(adjsim.Harmonic()), state)
    boxed = adjsim.LennardJones(cutoff=2.0, box=SIDES)
    other = adjsim.Morse(cutoff=2.0, box=[5.0] * 3)
    with pytest.raises(ValueError, match="a sum has one box"):
        adjsim.pressure(adjsim.Hamiltonian(boxed + other), state)


@pytest.mark.parametrize(
    "between",
    [
        lambda **o: adjsim.potentials.CustomCentroid([[0], [1]], [[0, 1]], "distance(g1,g2)", **o),
        lambda **o: adjsim.potentials.CustomHydrogenBond([[0]], [[1]], "distance(d1,a1)", **o),
    ],
)
def test_terms_between_molecules_need_a_box(between):
    q = fluid()
    state, pairs = adjsim.PhaseState(q, q), adjsim.LennardJones(cutoff=2.0, box=SIDES)
    assert adjsim.pressure(adjsim.Hamiltonian(pairs + between(box=SIDES)), state).isfinite()
    with pytest.raises(ValueError, match=r"Custom.* has none: make it, or its nonbonded"):
        adjsim.pressure(adjsim.Hamiltonian(pairs + between()), state)


def angles_of(q, angles=(1.0, 2.0), box=SIDES, cutoff=1.6, width=0.1, start=None):
    return adjsim.angular_distribution(
        q, list(angles), box, cutoff=cutoff, width=width, start=start
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: adjsim.smooth_radial_distribution(q, [1.0], SIDES, width=0.0), "width must be"),
        (lambda q: adjsim.smooth_radial_distribution(q, [3.0], SIDES, width=0.1), "half the small"),
        (lambda q: adjsim.coordination_number(q, 1.0, width=-1.0), "width must be positive"),
        (lambda q: adjsim.structure_factor(q, torch.ones(2, 2)), r"wavevectors must be \(n, 3\)"),
        (lambda q: adjsim.bond_order(q, 1.0, width=0.1, degree=3), "degree must be even"),
        (lambda q: adjsim.bond_order(q[:, :2], 1.0, width=0.1), "for 3 dimensions"),
        (lambda q: adjsim.bond_order(q, 1.0, width=-0.1), "width must be positive"),
        (
            lambda q: adjsim.smooth_radial_distribution(q[:, :2], [1.0], SIDES[:2], width=0.1),
            "for 3 dimensions",
        ),
        (
            lambda q: adjsim.radial_distribution(q[:, :2], [0.5, 1.0], SIDES[:2]),
            "for 3 dimensions",
        ),
        (lambda q: adjsim.nearest_neighbour_distance(q[:1]), "with atoms >= 2"),
        (
            lambda q: adjsim.radial_distribution(q[:1], [0.5, 1.0], SIDES),
            r"position of radial_distribution must be .* with atoms >= 2 .*; got shape \(1, 3\)",
        ),
        (
            lambda q: adjsim.smooth_radial_distribution(q[:1], [1.0], SIDES, width=0.1),
            r"of smooth_radial_distribution must be .* with atoms >= 2 .*; got shape \(1, 3\)",
        ),
        (
            lambda q: adjsim.radial_distribution(q.expand(0, 20, 3), [0.5, 1.0], SIDES),
            r"needs a frame; position has shape \(0, 20, 3\)",
        ),
        (
            lambda q: adjsim.radial_distribution(q[0].tolist(), [0.5, 1.0], SIDES),
            r"must be \(\*batch, atoms, dim\) with .*; got shape \(3,\)",
        ),
        (lambda q: adjsim.coordination_number(q, 2.5, width=0.1, box=SIDES), "half the smallest"),
        (lambda q: adjsim.coordination_number(q, 0.0, width=0.1), "distance must be positive"),
        (lambda q: adjsim.bond_order(q, 2.5, width=0.1, box=SIDES), "half the smallest"),
        (lambda q: adjsim.bond_order(q, 0.1, width=0.01), "no neighbours within 0.1"),
        (lambda q: adjsim.radial_distribution(q, [1.0, 2.5], SIDES), "half the smallest"),
        (lambda q: angles_of(q, cutoff=0.1), "no neighbours within 0.1"),
        (lambda q: angles_of(q, cutoff=2.5), "half the smallest"),
        (lambda q: angles_of(q, width=0.0), "width must be positive and at most pi/8"),
        (lambda q: angles_of(q, width=0.5), "width must be positive and at most pi/8"),
        (lambda q: angles_of(q, start=1.7), "start must be between 0 and the cutoff 1.6"),
        (lambda q: angles_of(q, angles=[90.0]), "radians between 0 and pi; got 90 to 90"),
        (lambda q: angles_of(q, angles=[]), "angles must be"),
        (lambda q: angles_of(q[:, :1], box=None), "dim >= 2"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call(fluid())
