"""Contact with surfaces and of particles, against plain formulas, differentiation and numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import adjsim
from adjsim.potentials import (
    Barrier,
    Box,
    Contact,
    Cylinder,
    Inside,
    Moving,
    MovingContact,
    ParticleContact,
    Plane,
    PlaneContact,
    Quadratic,
    Softplus,
    Sphere,
)
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.products import derivative
from tests.bonded import close
from tests.contact import CENTER, EVERY, PENALTIES, POINTS, SHORT, SURFACES, Swing, contact, moving
from tests.problems import parameter, slow_but, vector
from tests.suites import PotentialContract

ORIGIN, AXES = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)


@pytest.mark.parametrize(("surface", "penalty"), slow_but(lambda *row: row in SHORT, EVERY))
class TestContact(PotentialContract):
    @pytest.fixture
    def potential(self, surface, penalty):
        return contact(surface, penalty)

    @pytest.fixture
    def position(self):
        return POINTS


# Gaps by plain formulas.


def box_gap(x):
    d = np.abs(x - np.array(CENTER)) - np.array([0.6, 0.8, 0.7])
    if (d > 0).any():
        nearest = np.clip(x - np.array(CENTER), [-0.6, -0.8, -0.7], [0.6, 0.8, 0.7])
        return float(np.linalg.norm(x - np.array(CENTER) - nearest))
    return max(d)


def cylinder_gap(x):
    axis = np.array([0.3, 0.5, 1.0]) / math.sqrt(1.34)
    return float(np.linalg.norm(np.cross(x - np.array(CENTER), axis))) - 0.7


GAPS = {
    "plane": lambda x: float(x @ np.array([0.2, -0.3, 1.0])) / math.sqrt(1.13) + 0.4,
    "sphere": lambda x: math.dist(x, CENTER) - 0.8,
    "cylinder": cylinder_gap,
    "box": box_gap,
    "bowl": lambda x: 1.2 - math.dist(x, CENTER),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_gaps_are_those_of_plain_formulas(surface):
    found = contact(surface, "quadratic")
    gap = found.gap(POINTS)
    expected = torch.tensor([GAPS[surface](x) for x in POINTS.numpy()])
    # Sums of squares of order one, rounded.
    torch.testing.assert_close(gap.detach(), expected, rtol=0, atol=1e-14)
    assert gap.shape == (12,)
    assert bool((gap < 0).any())
    assert bool((gap > 0).any())
    normal = found.normal(POINTS).detach()
    torch.testing.assert_close(normal.norm(dim=-1), torch.ones(12, dtype=torch.float64))
    slope = derivative(lambda q: found.gap(q), POINTS).detach()
    torch.testing.assert_close(normal, slope, rtol=0, atol=1e-14)
    # A step along the normal changes the gap by its length, in the same piece of the surface.
    torch.testing.assert_close(found.gap(POINTS + 1e-3 * normal), gap + 1e-3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_forces_and_normal_forces_are_those_of_gap_and_penalty(lead):
    found = contact("sphere", "softplus", index=range(5))
    q = POINTS.expand(*lead, 12, 3)
    size = found.normal_force(q)
    assert size.shape == (*lead, 12)
    assert bool((size[..., :5] > 0).all())
    assert bool((size[..., 5:] == 0).all())
    torch.testing.assert_close(force(found, q), size.unsqueeze(-1) * found.normal(q))
    torch.testing.assert_close(size[..., :5], -found.penalty.slope(found.gap(q))[..., :5])
    assert torch.equal(found.surface_velocity(q), torch.zeros_like(q))
    energy = found.penalty.element(found.gap(q))[..., :5].sum(-1)
    torch.testing.assert_close(found(q), energy)


# Where a gap has no derivative.
KINKS = {
    "centre of a ball": (lambda: Sphere(ORIGIN, 1.0), ORIGIN, 0.0),
    "axis of a cylinder": (lambda: Cylinder(ORIGIN, AXES[2], 1.0), 0.3 * AXES[2], 0.0),
    "middle of a box": (lambda: Box(ORIGIN, [1.0, 1.0, 1.0]), ORIGIN, 1.0),
    "medial plane of a box": (lambda: Box(ORIGIN, [1.0, 1.0, 1.0]), AXES[0] / 2 + AXES[1] / 2, 1.0),
    "edge of a box": (lambda: Box(ORIGIN, [1.0, 1.0, 1.0]), AXES[0] + AXES[1], 1.0),
}


@pytest.mark.parametrize("name", KINKS)
def test_numbers_are_finite_where_a_gap_has_no_derivative(name):
    make, point, length = KINKS[name]
    surface = make()
    found = Contact(surface, Softplus(parameter(3.0), 0.1))
    q = point.unsqueeze(0).clone().requires_grad_()
    assert float(found.normal(q).detach().norm()) == length
    value, pullback = force_vjp(found, q.detach(), [found.penalty.stiffness])
    along, rest = pullback(torch.ones_like(value))
    (through,) = torch.autograd.grad(force(found, q).sum(), q)
    for x in (value, along, through, *rest.gradient([found.penalty.stiffness])):
        assert bool(torch.isfinite(x).all())


@pytest.mark.parametrize("surface", SURFACES)
def test_surfaces_are_differentiable_twice(surface):
    """Autograd through the closed force is the closed product, and its derivative is finite."""
    found = contact(surface, "softplus")
    q, v = POINTS.clone().requires_grad_(), torch.randn_like(POINTS)
    (along,) = torch.autograd.grad(force(found, q), q, v, create_graph=True)
    expected, _ = force_vjp(found, POINTS, [])[1](v)
    close(along, expected, 1e-12)
    assert bool(torch.isfinite(torch.autograd.grad(along.sum(), q)[0]).all())


# Penalties.


@pytest.mark.parametrize("penalty", PENALTIES)
def test_slopes_and_curvatures_of_penalties(penalty):
    found = PENALTIES[penalty]()
    gap = torch.linspace(-1.01, 1.0, 401, dtype=torch.float64)
    h = 1e-6
    with torch.no_grad():
        close(found.slope(gap), derivative(found.element, gap), 1e-13)
        close(found.curvature(gap), derivative(found.slope, gap), 1e-13)
        slope = (found.element(gap + h) - found.element(gap - h)) / (2 * h)
        # Truncation h^2 u''' and rounding u eps / h are below 1e-8 of the largest entries.
        close(found.slope(gap), slope, 1e-8)
        assert bool((found.slope(gap) <= 0).all())
        most = float(found.largest_curvature())
        assert most >= float(found.curvature(gap).max()) * (1 - 1e-12)


def test_derivatives_of_softplus_are_right_at_a_gap_of_zero():
    """A vertex that starts on the surface: u'' = k (1/4 + ln(2)/4), by autograd too."""
    gap = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    penalty = Softplus(100.0, 0.05)
    expected = torch.full((1,), 25 * (1 + math.log(2)), dtype=torch.float64)
    (second,) = torch.autograd.grad(penalty.slope(gap).sum(), gap)
    torch.testing.assert_close(second, expected, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(penalty.element(gap).sum(), gap, create_graph=True)
    torch.testing.assert_close(slope, penalty.slope(gap), rtol=1e-12, atol=0)
    (second,) = torch.autograd.grad(slope.sum(), gap)
    torch.testing.assert_close(second, expected, rtol=1e-12, atol=0)


def test_softplus_tends_to_the_quadratic_penalty():
    gap = torch.tensor([-1.0, -0.3, -0.01, 0.02, 0.5], dtype=torch.float64)
    soft, sharp = Softplus(30.0, 1e-5), Quadratic(30.0)
    for method in ("element", "slope", "curvature"):
        # exp(-0.01/1e-5) is zero, and multiples of the width are rounded.
        torch.testing.assert_close(
            getattr(soft, method)(gap), getattr(sharp, method)(gap), rtol=1e-15, atol=0
        )
    wide = Softplus(30.0, 0.1)
    # exp(-1000) is zero, so no number overflows.
    far = torch.tensor([-100.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(wide.slope(far), sharp.slope(far), rtol=1e-15, atol=0)
    # The largest curvature is reached at g = -3.0977 w, and is rounded up.
    peak = float(wide.curvature(torch.tensor(-0.30977, dtype=torch.float64)))
    assert peak == pytest.approx(1.04533339 * 30, rel=1e-8)
    assert peak < float(wide.largest_curvature()) < 1.0001 * peak


@pytest.mark.parametrize("floor", [None, 0.05])
def test_the_barrier_is_continuous_at_its_ends(floor):
    barrier = Barrier(30.0, 0.4, floor)
    low = 0.02 if floor is None else floor
    h = 1e-9
    for end in (low, 0.4):
        below, above = (torch.tensor(end + x, dtype=torch.float64) for x in (-h, h))
        for method, rate in (("element", "slope"), ("slope", "curvature")):
            jump = getattr(barrier, method)(above) - getattr(barrier, method)(below)
            middle = float(getattr(barrier, rate)(torch.tensor(end, dtype=torch.float64)))
            # A change by the derivative times 2h, to the next order and rounding.
            assert float(jump) == pytest.approx(2 * h * middle, rel=1e-4, abs=1e-12)
        jump = barrier.curvature(above) - barrier.curvature(below)
        # The third derivative is at most 2 kappa / d at x = g/d by (1/x + 1/x^2 + 1/x^3).
        x = end / 0.4
        assert abs(float(jump)) <= 2 * h * 2 * 30 / 0.4 * (1 / x + 1 / x**2 + 1 / x**3) * 1.01
    gap = torch.tensor([0.4, 0.41, 7.0], dtype=torch.float64)
    for method in ("element", "slope", "curvature"):
        assert torch.equal(getattr(barrier, method)(gap), torch.zeros_like(gap))
    # Quadratic below the floor: one curvature, however deep.
    deep = torch.tensor([low, 0.0, -0.3, -1e6], dtype=torch.float64)
    assert torch.equal(barrier.curvature(deep), barrier.curvature(deep[:1]).expand(4))
    expected = -30.0 * (0.1 - 0.4) ** 2 * math.log(0.1 / 0.4)
    assert float(barrier.element(torch.tensor(0.1, dtype=torch.float64))) == pytest.approx(
        expected, rel=1e-14
    )


def test_the_largest_curvature_is_that_at_the_gap_of_the_energy():
    barrier = Barrier(vector(30.0, 60.0), 0.4)
    energy = 3.0
    for k, kappa in enumerate((30.0, 60.0)):
        one = Barrier(kappa, 0.4)
        gap = brentq(lambda g, p=one: float(p.element(torch.tensor(g))) - energy, 0.02, 0.4)
        expected = float(one.curvature(torch.tensor(gap)))
        assert float(barrier.largest_curvature(energy)[k]) == pytest.approx(expected, rel=1e-6)
    # More energy than the barrier has at the floor.
    assert torch.equal(barrier.largest_curvature(1e9), barrier.largest_curvature())
    ratio = barrier.largest_curvature() / barrier.stiffness
    assert float(ratio[0].detach()) == pytest.approx(443, abs=0.5)


def test_nan_stays_nan():
    nan = torch.tensor([math.nan], dtype=torch.float64)
    for make in PENALTIES.values():
        assert bool(torch.isnan(make().element(nan)).all())
        assert bool(torch.isnan(make().slope(nan)).all())


# Moving surfaces.


@pytest.mark.parametrize(("surface", "penalty"), SHORT)
def test_a_moving_surface_is_one_at_rest_seen_from_it(surface, penalty):
    found, still, t = moving(surface, penalty), contact(surface, penalty), 0.7
    shift = found.surface.path(t)
    for method in ("gap", "normal", "normal_force"):
        assert torch.equal(
            getattr(found, method)(POINTS, t), getattr(still, method)(POINTS - shift)
        )
    assert torch.equal(force(found, POINTS, t), force(still, POINTS - shift))
    h = 1e-6
    rate = (found.surface.path(t + h) - found.surface.path(t - h)) / (2 * h)
    # Truncation h^2 and rounding eps / h.
    torch.testing.assert_close(
        found.surface_velocity(POINTS, t), rate.expand(12, 3), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("surface", "penalty"), SHORT)
def test_products_of_moving_contact_equal_automatic_differentiation(surface, penalty):
    found, t = moving(surface, penalty, index=range(9)), 0.7
    parameters = list(found.parameters())
    q = torch.stack([POINTS, POINTS.flip(0) + 0.1]).requires_grad_()
    v = torch.randn_like(q)
    through = force(found, q, t)
    expected = torch.autograd.grad(through, (q, *parameters), v)
    value, pullback = force_vjp(found, q.detach(), parameters, t)
    along, rest = pullback(v)
    assert torch.equal(value, through)
    for mine, theirs in zip((along, *rest.gradient(parameters)), expected, strict=True):
        close(mine, theirs, 1e-12)


# Particles.


def particles(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, generator=generator, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(20, marks=pytest.mark.slow), 600])
def test_contact_of_particles_is_that_of_a_double_loop(count):
    radius = 0.03 + 0.02 * torch.rand(
        count, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    size = 1.0 if count == 600 else 0.25
    q = size * particles(count)
    found = ParticleContact(radius, 50.0)
    # The list is that of the pair operator; a small system is evaluated without.
    assert found.path(q) == ("neighbour list" if count == 600 else "all pairs")
    energy, expected, touching = 0.0, np.zeros((count, 3)), 0
    points, sizes = q.numpy(), radius.numpy()
    for i in range(count):
        d = points[i] - points[i + 1 :]
        r = np.sqrt((d * d).sum(-1))
        overlap = np.maximum(0.0, sizes[i] + sizes[i + 1 :] - r)
        energy += 25.0 * (overlap**2).sum()
        pull = (50.0 * overlap / r)[:, None] * d
        expected[i] += pull.sum(0)
        expected[i + 1 :] -= pull
        touching += int((overlap > 0).sum())
    assert touching > count / 2
    close(found(q), torch.tensor(energy), 1e-13)
    close(force(found, q), torch.from_numpy(expected), 1e-12)


class TestParticles(PotentialContract):
    @pytest.fixture(params=["number", pytest.param("each", marks=pytest.mark.slow)])
    def potential(self, request):
        radius = parameter(0.12) if request.param == "number" else vector(*[0.1, 0.12, 0.14] * 4)
        return ParticleContact(radius, parameter(50.0))

    @pytest.fixture
    def position(self):
        return 0.4 * particles(12)


def test_particles_with_one_centre_have_finite_forces():
    found = ParticleContact(0.2, 50.0)
    q = torch.tensor([[0.0, 0], [0, 0], [0.3, 0]], dtype=torch.float64)
    value, pullback = force_vjp(found, q, [])
    along, _ = pullback(torch.ones_like(q))
    assert float(found(q[:2])) == pytest.approx(25 * 0.16, rel=1e-14)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(along).all())
    assert torch.equal(value[0], value[1])
    assert float(value[2, 0]) == pytest.approx(2 * 50 * 0.1, rel=1e-12)


# Errors.

ERRORS = {
    "moving": (
        lambda: Contact(Moving(Plane([0.0, 1.0]), Swing()), Quadratic(1.0)),
        "MovingContact",
    ),
    "at rest": (lambda: MovingContact(Plane([0.0, 1.0]), Quadratic(1.0)), "use Contact"),
    "no surface": (lambda: Contact(1.0, Quadratic(1.0)), "must be a Surface"),
    "no penalty": (lambda: Contact(Plane([0.0, 1.0]), 3.0), "penalty must be"),
    "inside": (lambda: Inside(Moving(Plane([0.0, 1.0]), Swing())), "Moving"),
    "normal": (lambda: Plane([0.0, 0.0]), "normal must not be zero"),
    "shape of normal": (lambda: Plane(1.0), r"normal must be \(dim,\)"),
    "offset": (lambda: Plane([0.0, 1.0], [1.0, 2.0]), "offset must be one number"),
    "infinite": (lambda: Sphere([0.0, math.inf], 1.0), "center must be finite"),
    "radius": (lambda: Sphere([0.0, 0.0], -1.0), "radius must be positive"),
    "radii": (lambda: Sphere([0.0, 0.0], [1.0, 2.0]), "radius must be one number"),
    "axis": (lambda: Cylinder(ORIGIN, ORIGIN, 1.0), "axis must not be zero"),
    "flat cylinder": (lambda: Cylinder([0.0, 0], [0.0, 1], 1.0), "Sphere, a disc"),
    "half lengths": (lambda: Box(ORIGIN, [1.0, 1.0]), "half_lengths must be"),
    "path": (lambda: Moving(Plane([0.0, 1.0]), 3.0), "path must be a function"),
    "stiffness": (lambda: Quadratic(0.0), "stiffness must be positive"),
    "stiffnesses": (lambda: Quadratic([[1.0, 2.0]]), "one number for each vertex"),
    "infinite stiffness": (lambda: Quadratic(math.inf), "stiffness must be finite"),
    "depth": (lambda: Quadratic(1.0, depth=0.0), "depth must be positive"),
    "floor": (lambda: Barrier(1.0, 0.1, 0.1), "floor must be below distance"),
    "index": (lambda: Contact(Plane([0.0, 1.0]), Quadratic(1.0), index=[-1]), "index must be"),
    "dim": (lambda: contact("sphere", "softplus")(POINTS[:, :2]), "in 3 dimensions; position has"),
    "vertex": (lambda: contact("sphere", "softplus", index=[12])(POINTS), "names vertex 12"),
    "shift": (lambda: moving("box", "softplus", lambda t: ORIGIN[:2]).gap(POINTS), "path of a Box"),
    "rate": (
        lambda: moving("box", "softplus", lambda t: ORIGIN).surface_velocity(POINTS),
        r"no rate\(t\)",
    ),
    "particles": (lambda: ParticleContact(0.0, 1.0), "radius must be positive"),
    "cutoff": (
        lambda: ParticleContact([0.1, 0.2], 1.0, cutoff=0.25),
        "the largest sum of two radii, 0.3",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_value_and_the_way_out(name):
    call, match = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def test_penetration_is_refused_with_the_vertex():
    q = torch.tensor([[[0.0, 0.1], [0.0, -0.02]], [[0.0, 0.1], [0.0, -0.3]]], dtype=torch.float64)
    plane = Plane([0.0, 1.0])
    with pytest.raises(ValueError, match=r"vertex 1 is at the gap -0.3 from the surface, below 0"):
        Contact(plane, Barrier(1.0, 0.1)).refuse_penetration(q)
    with pytest.raises(ValueError, match=r"that Quadratic allows: .* stiffness or the depth"):
        Contact(plane, Quadratic(1.0, depth=0.1)).refuse_penetration(q)
    Contact(plane, Quadratic(1.0)).refuse_penetration(q)
    Contact(plane, Softplus(1.0, 0.1, depth=0.4)).refuse_penetration(q)
    Contact(plane, Barrier(1.0, 0.1), index=[0]).refuse_penetration(q)


def test_plane_contact_is_a_plane_with_the_smooth_penalty():
    found = PlaneContact(vector(0.0, 2.0), parameter(0.1), parameter(30.0), parameter(0.05))
    assert set(dict(found.named_parameters())) == {
        "surface.normal", "surface.offset", "penalty.stiffness", "penalty.width",
    }  # fmt: skip
    q = POINTS[:, :2]
    expected = Contact(Plane([0.0, 1.0], 0.1), Softplus(30.0, 0.05))
    torch.testing.assert_close(force(found, q).detach(), force(expected, q), rtol=1e-14, atol=0)
    assert isinstance(
        adjsim.HarmonicBond([[0, 1]], 1.0, 1.0) + found, adjsim.potentials.SumPotential
    )


def test_radii_that_outgrow_the_neighbour_list_are_refused():
    touching = ParticleContact(0.5, 2.0)
    q = torch.tensor([[0.0, 0.0], [1.5, 0.0]])
    assert float(touching(q)) == 0
    touching.radius.mul_(2)
    with pytest.raises(ValueError, match="at least the largest sum of two radii, 2; it is 1"):
        touching(q)
    grown = ParticleContact(torch.nn.Parameter(torch.tensor(0.5)), 2.0)
    grown.radius.data.mul_(2)
    assert float(grown(q)) == pytest.approx(0.25, rel=1e-14)
