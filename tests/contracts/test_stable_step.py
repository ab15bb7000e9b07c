"""The largest stable step against dense eigenvalues, and against runs."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim import meshes
from adjsim.dynamics.stable_step import largest_stable_step
from adjsim.potentials import Barrier, Contact, MovingContact, NeoHookean, Plane, Quadratic
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.products import derivative
from tests.bonded import CHAIN
from tests.contact import Moving, Swing

CELLS = [(1, 1, 1), (2, 2, 2)]


def dense(potential, mass, q, added=0.0) -> float:
    """2 / omega_max from all eigenvalues."""
    hessian = torch.func.jacrev(lambda x: derivative(potential, x.reshape(q.shape)).flatten())(
        q.flatten()
    )
    root = (1 / mass).sqrt().expand(q.shape).flatten()
    hessian = hessian + added * torch.eye(len(root), dtype=q.dtype)
    return 2 / math.sqrt(float(torch.linalg.eigvalsh(root[:, None] * hessian * root)[-1]))


@pytest.mark.parametrize("added", [0.0, 1e4])
@pytest.mark.parametrize("cells", CELLS)
def test_it_is_that_of_dense_eigenvalues(cells, added):
    """24 coordinates, of which all eigenvalues are computed, and 81, with Lanczos iterations."""
    mesh = meshes.box((1.0, 0.8, 0.6), cells)
    body, mass = NeoHookean(mesh, 1e5, 0.3), mesh.lumped_mass(1000.0).unsqueeze(-1)
    q = mesh.vertices
    contact = Contact(Plane([0.0, 0, 1]), Quadratic(added)) if added else None
    found = largest_stable_step(body, mass, q, contact=contact)
    assert found == pytest.approx(dense(body, mass, q, added), rel=1e-7)
    assert largest_stable_step(body, mass, torch.stack([q, q]), contact=contact) == pytest.approx(
        found, rel=1e-7
    )


def test_pinned_vertices_and_vertices_without_contact_do_not_count():
    bond = adjsim.HarmonicBond([[0, 1]], 30.0, 1.4)
    q = CHAIN[:3]
    assert largest_stable_step(bond, [math.inf, 2.0, 1.0], q) == pytest.approx(
        2 / math.sqrt((30 + 0.0) / 2), rel=1e-3
    )
    moving = MovingContact(Moving(Plane([0.0, 0, 1]), Swing()), Quadratic(500.0), index=[2])
    assert largest_stable_step(bond, [1.0, 1.0, 2.0], q, contact=moving) == pytest.approx(
        2 / math.sqrt(250), rel=1e-12
    )
    assert largest_stable_step(Gravity(1.0, 9.81), 1.0, q) == math.inf
    assert largest_stable_step(Gravity(1.0, 9.81), 1.0, CHAIN.repeat(9, 1)) == math.inf


@pytest.mark.parametrize(
    ("penalty", "load", "start", "small"),
    [
        (Quadratic(1e4), 500.0, -0.05, 1e-2),
        # Below its floor, where a load holds the ball.
        (Barrier(1e4, 0.02), 6000.0, 0.0007, 1e-4),
    ],
)
@pytest.mark.parametrize(("share", "stable"), [(0.999, True), (1.001, False)])
def test_runs_beyond_it_diverge_and_below_it_do_not(penalty, load, start, small, share, stable):
    """A ball that stays in contact, where the stiffness is one number: 2 / sqrt(k/m)."""
    contact = Contact(Plane([1.0]), penalty)
    q = torch.tensor([[start]], dtype=torch.float64)
    limit = largest_stable_step(Gravity(1.0, load), 1.0, q, contact=contact)
    curvature = contact.penalty.curvature(q)
    assert limit == pytest.approx(2 / math.sqrt(float(curvature)), rel=1e-12)
    rest = q + (load - contact.normal_force(q).unsqueeze(-1)) / -curvature
    dynamics = adjsim.Hamiltonian(Gravity(1.0, load) + contact, 1.0)
    path = adjsim.simulate(
        dynamics,
        dynamics.init(rest + 1e-7, torch.zeros_like(q)),
        [k * share * limit for k in range(201)],
        solver=adjsim.VelocityVerlet(share * limit),
    ).position
    # At 1.001 of the bound an oscillation grows by exp(2 sqrt(2 x 0.001)) = 1.09 a step.
    assert bool((path - rest).abs().max() < small) == stable


def test_an_elastic_body_diverges_beyond_it():
    mesh = meshes.box((1.0, 0.8, 0.6), (2, 2, 2))
    mass = mesh.lumped_mass(1000.0)
    body = NeoHookean(mesh, 1e5, 0.3)
    limit = largest_stable_step(body, mass, mesh.vertices)
    dynamics = adjsim.Hamiltonian(body, mass)
    kick = torch.randn(27, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes: list[float] = []
    for share in (0.99, 1.01):
        dt = share * limit
        path = adjsim.simulate(
            dynamics,
            # So small that the body is linear.
            dynamics.init(mesh.vertices, 1e-9 * kick),
            [0.0, 60 * dt],
            solver=adjsim.VelocityVerlet(dt),
        )
        sizes.append(float(path.final.momentum.abs().max()))
    # Momenta stay of their size, or grow by exp(2 sqrt(2 x 0.01)) = 1.3 a step.
    assert sizes[0] < 1e-7
    assert sizes[1] > 1e-5


def test_errors():
    q = CHAIN[:2]
    bond = adjsim.HarmonicBond([[0, 1]], 30.0, 1.4)
    with pytest.raises(ValueError, match="mass has 3 entries and the state 2 atoms"):
        largest_stable_step(bond, [1.0, 2.0, 3.0], q)
    contact = Contact(Plane([0.0, 0, 1]), Quadratic(1.0))
    with pytest.raises(ValueError, match="energy must be positive"):
        largest_stable_step(bond, 1.0, q, contact=contact, energy=-1.0)
    with pytest.raises(ValueError, match="Hessian of the potential is not finite"):
        largest_stable_step(adjsim.LennardJones(), 1.0, torch.zeros(2, 3, dtype=torch.float64))


def test_the_way_to_the_floor_is_energy():
    """Weight times height stiffens a barrier as the same kinetic energy does."""
    mesh, g = meshes.box((1.0, 0.8, 0.6), (1, 1, 1)), 1e-3
    mass = mesh.lumped_mass(1000.0)
    body = NeoHookean(mesh, 1e5, 0.3) + Gravity(mass, g)
    steps = []
    for height, moves in ((5.0, 0.0), (2.0, 3.0), (2.0, 0.0)):
        floor = Contact(Plane([0.0, 0, 1], -height), Barrier(1e3, 0.1))
        dynamics = adjsim.Mechanics(body, mass, contact=floor)
        momentum = torch.zeros_like(mesh.vertices)
        momentum[:, 0] = mass * (2 * g * moves) ** 0.5
        steps.append(dynamics.largest_step(dynamics.init(mesh.vertices, momentum)))
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert steps[2] > 1.005 * steps[1]


def test_the_way_to_the_floor_is_no_energy_without_a_force():
    """More energy on a barrier makes it stiffer; a body without forces gains none on its way."""
    mesh = meshes.box((1.0, 0.8, 0.6), (1, 1, 1))
    body, mass = NeoHookean(mesh, 1e5, 0.3), mesh.lumped_mass(1000.0)
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(mesh.vertices.shape, generator=generator, dtype=torch.float64)
    steps = []
    for height in (1.0, 100.0):
        floor = Contact(Plane([0.0, 0, 1], -height), Barrier(1e3, 0.1))
        dynamics = adjsim.Mechanics(body, mass, contact=floor)
        steps.append(dynamics.largest_step(dynamics.init(mesh.vertices, momentum)))
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)
