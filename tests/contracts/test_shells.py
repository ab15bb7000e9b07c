"""Bending of shells, and gravity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import adjsim
from adjsim import Splitting, meshes
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.products import derivative
from adjsim.potentials.solids.bending import HingeBending
from tests.problems import parameter, vector
from tests.suites import PotentialContract

SHEET = meshes.sheet([1.0, 0.8], [2, 2])
HINGES = len(SHEET.hinges())
# Two triangles with the edge from 1 to 2.
PAIR = meshes.Mesh(
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]],
    triangles=[[0, 1, 2], [3, 2, 1]],
)


def bumpy() -> torch.Tensor:
    noise = torch.randn(9, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return SHEET.vertices + 0.06 * noise


def folded(angle: float) -> torch.Tensor:
    """The pair of triangles, the second one turned about the edge by an angle from flat."""
    q = PAIR.vertices.clone()
    middle, out = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    q[3] = middle + math.cos(angle) * out / 2
    q[3, 2] = -math.sin(angle) / math.sqrt(2)
    return q


def turn() -> torch.Tensor:
    """A rotation."""
    found = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)).double())
    return found.Q * torch.linalg.det(found.Q)


CASES = {
    "flat rest": (lambda: HingeBending(SHEET, parameter(1.3)), bumpy()),
    "every hinge": (
        lambda: HingeBending(
            SHEET,
            nn.Parameter(torch.linspace(0.5, 1.5, HINGES, dtype=torch.float64)),
            nn.Parameter(torch.linspace(-0.4, 0.9, HINGES, dtype=torch.float64)),
        ),
        bumpy(),
    ),
    "near a fold": (lambda: HingeBending(PAIR, parameter(1.3), parameter(0.3)), folded(3.0)),
    # With wells, since a constant force has no derivative along the position to compare.
    "gravity": (
        lambda: Gravity(parameter(1.3), parameter(9.81)) + adjsim.Harmonic(0.7),
        bumpy(),
    ),
    "masses": (
        lambda: (
            Gravity(
                vector(*(0.5 + 0.1 * k for k in range(9))),
                parameter(9.81),
                direction=vector(0.2, 1.0, -2.0),
            )
            + adjsim.Harmonic(0.7)
        ),
        bumpy(),
    ),
}


@pytest.mark.parametrize("name", CASES)
class TestShells(PotentialContract):
    @pytest.fixture
    def potential(self, name):
        return CASES[name][0]()

    @pytest.fixture
    def position(self, name):
        return CASES[name][1]


def test_the_angle_of_a_fold():
    bending = HingeBending(PAIR, 1.0)
    for angle in (-3.1, -0.4, 0.0, 1e-9, 0.4, 1.57, 3.1):
        found = float(bending.geometry(folded(angle)).value)
        # Near pi an error of a coordinate counts by one; at 1e-9 the angle is relatively exact.
        assert found == pytest.approx(angle, rel=1e-14, abs=1e-15)


def test_the_energy_of_one_hinge():
    # The edge has length sqrt(2), and the triangles have an area of 1/2 each.
    bending = HingeBending(PAIR, 1.7, rest_angle=0.1)
    assert float(bending(folded(0.5))) == pytest.approx(1.7 * 3 * 2 / 1 * 0.4**2, rel=1e-13)


@pytest.mark.parametrize("vertices", [SHEET.vertices, bumpy()], ids=["flat", "bent"])
def test_there_is_no_force_at_rest(vertices):
    mesh = meshes.Mesh(vertices, triangles=SHEET.triangles)
    bending = HingeBending(mesh, 1.3)
    assert float(bending(mesh.vertices)) == 0.0
    assert not force(bending, mesh.vertices).any()
    # The product is minus that of the Hessian: only rigid motions are free.
    _, pullback = force_vjp(bending, mesh.vertices, [])
    axis = torch.tensor([0.3, -0.2, 0.9]).expand(9, 3)
    other = torch.randn(9, 3)
    scale = float(pullback(other)[0].abs().max())
    assert scale > 1.0
    for motion in (axis, torch.linalg.cross(axis, mesh.vertices)):
        assert (
            float(force_vjp(bending, mesh.vertices, [])[1](motion)[0].abs().max()) < 1e-13 * scale
        )


@pytest.mark.parametrize("angle", [0.0, math.pi, -math.pi, math.pi - 1e-9, 1e-300])
def test_flat_and_folded_states_are_finite(angle):
    q = folded(angle).requires_grad_()
    bending = HingeBending(PAIR, 1.3, rest_angle=0.2)
    value, pullback = force_vjp(bending, q.detach(), [])
    along, _ = pullback(torch.ones_like(q))
    found = -derivative(bending, q)
    second = torch.autograd.grad(found.sum(), q)[0]
    for x in (value, along, found, second):
        assert bool(torch.isfinite(x).all())
    # The slope 2 k 3 |e|^2 / A (theta - rest), on tips at a distance sqrt(1/2) from the edge.
    theta = float(bending.geometry(q.detach()).value)
    assert abs(theta) == pytest.approx(abs(angle), abs=1e-15)
    expected = 2 * 1.3 * 6 * abs(theta - 0.2) * math.sqrt(2)
    assert float(value[3].norm()) == pytest.approx(expected, rel=1e-12)


def test_a_triangle_without_area_has_no_force():
    q = PAIR.vertices.clone()
    q[3] = 0.5 * (q[1] + q[2])
    bending = HingeBending(PAIR, 1.3)
    assert not force(bending, q).any()


def test_energy_and_force_turn_with_the_shell():
    bending, q, rotation = HingeBending(SHEET, 1.3), bumpy(), turn()
    assert float(torch.linalg.det(rotation)) == pytest.approx(1.0, rel=1e-12)
    moved = q @ rotation.T + torch.tensor([3.0, -1.0, 2.0])
    assert float(bending(moved)) == pytest.approx(float(bending(q)), rel=1e-12)
    f = force(bending, q)
    torch.testing.assert_close(force(bending, moved), f @ rotation.T, rtol=1e-11, atol=1e-11)
    # No net force and no net torque, to rounding of forces of some tens.
    assert float(f.sum(0).abs().max()) < 1e-12
    assert float(torch.linalg.cross(q, f).sum(0).abs().max()) < 1e-12


def test_flexural_rigidity_of_a_grid_bent_along_an_axis():
    """A cylinder of radius R has the energy D / (2 R^2) for each area, with D = 6 k; the cells at
    the two free edges have half of it.
    """
    mesh, radius = meshes.sheet([2.0, 1.0], [8, 4]), 50.0
    x, y, _ = mesh.vertices.unbind(-1)
    bent = [radius * torch.sin(x / radius), y, radius * (1 - torch.cos(x / radius))]
    energy = float(HingeBending(mesh, 1.5)(torch.stack(bent, -1)))
    # Second order in the angle of a cell, 1/200.
    assert energy == pytest.approx(7 / 8 * 6 * 1.5 / (2 * radius**2) * 2.0, rel=1e-5)


@pytest.mark.parametrize(("scheme", "early"), [("BAB", 0.0), ("BA", 1.0)])
def test_free_fall(scheme, early):
    """Verlet is exact, and semi-implicit Euler falls too far by g h T / 2."""
    h, total, g, mass = 0.02, 0.6, parameter(9.81), vector(1.0, 2.0, 0.3)
    dynamics = adjsim.Hamiltonian(Gravity(mass, g), mass)
    q = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 2.0], [0.0, 1.0, 3.0]])
    v = torch.tensor([[0.2, 0.1, 1.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 2.0]])
    start = dynamics.init(q, mass.detach()[:, None] * v)
    run = adjsim.simulate(dynamics, start, [0.0, total], solver=Splitting(scheme, h))
    expected = q + v * total
    expected[:, 2] -= 9.81 * total**2 / 2 + early * 9.81 * h * total / 2
    torch.testing.assert_close(run.final.position.detach(), expected, rtol=1e-13, atol=1e-13)
    heights = run.final.position[:, 2]
    by_g, by_mass = torch.autograd.grad(heights.sum(), [g, mass])
    assert float(by_g) == pytest.approx(-3 * (total**2 + early * h * total) / 2, rel=1e-12)
    # The momentum is a constant, so that v = p/m; the fall does not depend on the mass.
    by_momentum = -v[:, 2] * total / mass.detach()
    torch.testing.assert_close(by_mass, by_momentum, rtol=1e-12, atol=1e-12)


def test_pinned_atoms_have_no_weight():
    gravity = Gravity([1.0, math.inf], 9.81)
    q = torch.tensor([[0.0, 2.0], [0.0, 5.0]])
    assert float(gravity(q)) == pytest.approx(19.62)
    assert torch.equal(force(gravity, q), torch.tensor([[0.0, -9.81], [0.0, 0.0]]))


def test_what_makes_no_shell_and_no_gravity_is_refused(unchecked):
    one = meshes.Mesh([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], triangles=[[0, 1, 2]])
    with pytest.raises(ValueError, match="the mesh has no hinge"):
        HingeBending(one, 1.0)
    with pytest.raises(ValueError, match=f"{HINGES} terms"):
        HingeBending(SHEET, [1.0, 2.0])
    with pytest.raises(ValueError, match="needs 3 dimensions"):
        HingeBending(SHEET, 1.0)(torch.zeros(9, 2))
    with pytest.raises(ValueError, match="mass must be positive"):
        Gravity(-1.0, 9.81)
    with pytest.raises(ValueError, match=r"mass must be one number, \(atoms,\) or \(atoms, 1\)"):
        Gravity([[1.0, 2.0]], 9.81)
    with pytest.raises(ValueError, match="g must be one number"):
        Gravity(1.0, [9.81, 1.0])
    with pytest.raises(ValueError, match=r"direction must not be zero"):
        Gravity(1.0, 9.81, direction=[0.0, 0.0])
    with pytest.raises(ValueError, match="mass has 2 entries and position 9 atoms"):
        Gravity([1.0, 2.0], 9.81)(SHEET.vertices)
    with pytest.raises(ValueError, match="direction has 2 entries and position has dim 3"):
        Gravity(1.0, 9.81, direction=[0.0, 1.0])(SHEET.vertices)
