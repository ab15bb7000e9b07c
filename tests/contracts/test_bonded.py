"""Bonded terms against plain formulas, automatic differentiation and differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from torch import nn

import adjsim
from adjsim.core.rounding import Rounding
from adjsim.potentials.base import force_vjp
from adjsim.potentials.bonded.selection import WIDTH, Selection
from adjsim.potentials.products import derivative
from tests.bonded import (
    ANGLES,
    BONDED,
    BONDS,
    CHAIN,
    CHARGES,
    EVERY,
    MAPS,
    PAIRS,
    POINTS,
    RESTRAINTS,
    SERIES,
    TORSIONS,
    close,
    grid,
    mixture,
)
from tests.problems import slow_but
from tests.suites import PotentialContract

# One row of each coordinate, and restraints.
SHORT = (
    "bonds, types",
    "angles",
    "cosines",
    "torsions, types",
    "maps, types",
    "scaled, species",
    "balls",
)


@pytest.mark.parametrize("name", slow_but(lambda name: name in SHORT, EVERY))
class TestBonded(PotentialContract):
    @pytest.fixture
    def potential(self, name):
        return EVERY[name]()

    @pytest.fixture
    def position(self):
        return CHAIN


# Energies by plain formulas, one term after the other.


def distance(a, b):
    return float(np.linalg.norm(a - b))


def angle(a, b, c):
    u, w = a - b, c - b
    return math.acos(float(u @ w) / (float(np.linalg.norm(u)) * float(np.linalg.norm(w))))


def dihedral(a, b, c, d):
    """The angle between the parts of the outer bonds that are orthogonal to the middle one."""
    axis = (c - b) / np.linalg.norm(c - b)
    u, w = (x - (x @ axis) * axis for x in (a - b, d - c))
    return math.atan2(float(np.cross(axis, u) @ w), float(u @ w))


def wrapped(x):
    return (x + math.pi) % (2 * math.pi) - math.pi


def lj(epsilon, sigma, r):
    return 4 * epsilon * ((sigma / r) ** 12 - (sigma / r) ** 6)


def mixed(i, j):
    species = [0, 1, 0, 2, 1, 2]
    e, s = (0.3, 0.5, 0.4), (2.0, 2.4, 2.2)
    a, b = species[i], species[j]
    return math.sqrt(e[a] * e[b]), (s[a] + s[b]) / 2


def total(q, index, x, u):
    return sum(u(n, x(*(q[i] for i in term))) for n, term in enumerate(index))


def series(c):
    return lambda x: sum(a * math.cos(x - math.pi) ** n for n, a in enumerate(c))


def splined(values, phi, psi):
    """The spline along psi of the splines along phi."""
    at = np.linspace(0.0, 2 * math.pi, len(values) + 1)

    def along(rows, x):
        closed = np.concatenate([rows, rows[:1]])
        return CubicSpline(at, closed, bc_type="periodic")(x % (2 * math.pi))

    return float(along(along(values.detach().numpy(), phi), psi))


PLAIN = {
    "bonds": lambda q: total(q, BONDS, distance, lambda n, r: 15 * (r - 1.4) ** 2),
    "bonds, types": lambda q: total(
        q,
        BONDS,
        distance,
        lambda n, r: (15, 12.5)[n in (1, 4)] * (r - (1.4, 1.5)[n in (1, 4)]) ** 2,
    ),
    "morse": lambda q: total(
        q,
        BONDS,
        distance,
        lambda n, r: (
            (4, 5)[n in (1, 4)] * (1 - math.exp(-1.8 * (r - (1.4, 1.5)[n in (1, 4)]))) ** 2
        ),
    ),
    "angles": lambda q: total(
        q, ANGLES, angle, lambda n, x: (3 + n) / 2 * (x - (1.9, 2.0, 2.1, 1.7)[n]) ** 2
    ),
    "cosines": lambda q: total(
        q,
        ANGLES,
        angle,
        lambda n, x: (3, 4)[n in (1, 2)] / 2 * (math.cos(x) - math.cos(1.9)) ** 2,
    ),
    "urey-bradley": lambda q: total(
        q, ANGLES, lambda a, b, c: distance(a, c), lambda n, r: 1.5 * (r - 2.4) ** 2
    ),
    "torsions": lambda q: total(
        q,
        TORSIONS,
        dihedral,
        lambda n, x: (0.7, 1.1, 0.5)[n] * (1 + math.cos((n + 1) * x - (0.0, 0.3, math.pi)[n])),
    ),
    "series": lambda q: total(q, TORSIONS, dihedral, lambda n, x: series(SERIES)(x)),
    "series, types": lambda q: total(
        q, TORSIONS, dihedral, lambda n, x: series(SERIES if n == 1 else SERIES[::-1])(x)
    ),
    "maps": lambda q: total(
        q, MAPS, lambda *a: (dihedral(*a[:4]), dihedral(*a[4:])), lambda n, x: splined(grid(8), *x)
    ),
    "maps, types": lambda q: total(
        q,
        MAPS,
        lambda *a: (dihedral(*a[:4]), dihedral(*a[4:])),
        lambda n, x: splined(grid(6, 3)[(2, 0)[n]], *x),
    ),
    "impropers": lambda q: total(
        q, TORSIONS, dihedral, lambda n, x: 1.5 * wrapped(x - (2.9, -3.1, 0.4)[n]) ** 2
    ),
    "explicit": lambda q: total(
        q,
        PAIRS,
        distance,
        lambda n, r: lj((0.3, 0.4, 0.2)[n], (2.9, 2.8, 2.4)[n], r) + 1.7 * (0.2, -0.3, 0.1)[n] / r,
    ),
    "scaled, species": lambda q: total(
        q, PAIRS, distance, lambda n, r: 0.5 * lj(*mixed(*PAIRS[n]), r)
    ),
    "scaled, charges": lambda q: total(
        q,
        PAIRS,
        distance,
        lambda n, r: (0.5, 0.8, 0.6)[n] * 1.7 * math.prod(CHARGES[i] for i in PAIRS[n]) / r,
    ),
    "scaled, truncated": lambda q: total(
        q,
        PAIRS,
        distance,
        lambda n, r: (
            0.5 * (lj(*mixed(*PAIRS[n]), r) - lj(*mixed(*PAIRS[n]), 3.0)) if r < 3 else 0.0
        ),
    ),
    "points": lambda q: sum(
        k / 2 * distance(q[i], p) ** 2
        for i, k, p in zip((1, 4), (3, 2), POINTS.numpy(), strict=True)
    ),
    "balls": lambda q: sum(
        1.5 * max(0.0, distance(q[i], p) - 0.2) ** 2
        for i, p in zip((1, 4), POINTS.numpy(), strict=True)
    ),
}


@pytest.mark.parametrize(
    ("custom", "written"),
    [("bonds", "morse"), ("angles", "cosines"), ("torsions", "impropers")],
)
def test_expressions_have_the_forces_of_written_terms(custom, written):
    mine, theirs = EVERY[f"custom {custom}"](), EVERY[written]()
    assert float(mine(CHAIN)) == pytest.approx(float(theirs(CHAIN)), rel=1e-13)
    v = torch.randn_like(CHAIN)
    for found, expected in zip(
        (mine.force(CHAIN), force_vjp(mine, CHAIN, [])[1](v)[0]),
        (theirs.force(CHAIN), force_vjp(theirs, CHAIN, [])[1](v)[0]),
        strict=True,
    ):
        close(found, expected, 1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_energies_are_those_of_plain_formulas(name):
    # The acos of the plain angle loses about a digit.
    found = EVERY[name]()(CHAIN).detach()
    assert float(found) == pytest.approx(PLAIN[name](CHAIN.numpy()), rel=1e-12)


@pytest.mark.parametrize(("phi", "sense"), list(itertools.product((0.0, 1.0, math.pi), (1, -1))))
def test_dihedral_angles_have_the_sign_of_iupac(phi, sense):
    """Seen along the middle bond, which leads away from the observer, a clockwise turn from the
    first bond to the last one is positive; trans is pi.
    """
    # The middle bond leads along z. Seen from below, clockwise is from x to y.
    q = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]], dtype=torch.float64)
    q[3, :2] = torch.tensor([math.cos(sense * phi), math.sin(sense * phi)])
    found = adjsim.HarmonicImproper([[0, 1, 2, 3]], 2.0, 0.0).geometry(q).value
    assert abs(float(found)) == pytest.approx(phi, abs=1e-15)
    if phi == 1.0:
        assert float(found) * sense > 0


BOXES = {
    "no box": None,
    "box": torch.tensor([3.9, 4.2, 4.6], dtype=torch.float64),
    "tilted": torch.tensor([[4.4, 0, 0], [1.1, 4.2, 0], [0.4, -0.9, 4.6]], dtype=torch.float64),
}


@pytest.mark.parametrize(
    ("name", "box"),
    slow_but(
        lambda name, box: box == ("tilted" if name in SHORT else "no box"),
        list(itertools.product(EVERY, BOXES)),
    ),
)
def test_closed_forms_equal_automatic_differentiation(name, box):
    potential = EVERY[name](box=BOXES[box])
    parameters = list(potential.parameters())
    q = torch.stack([CHAIN, CHAIN.flip(0) + 0.1 * CHAIN.cos()]).requires_grad_()
    v = torch.randn_like(q)
    through = -derivative(potential, q)
    expected = torch.autograd.grad(through, (q, *parameters), v)
    value, pullback = force_vjp(potential, q.detach(), parameters)
    along, rest = pullback(v)
    # Closed forms and autograd round differently, by a few parts in 1e16 for each operation.
    close(value, through, 1e-12)
    close(along, expected[0], 1e-11)
    for mine, theirs in zip(rest.gradient(parameters), expected[1:], strict=True):
        close(mine, theirs, 1e-11)
    differentiable = adjsim.force(potential, q)
    assert torch.equal(differentiable, value)
    for mine, theirs in zip(
        torch.autograd.grad(differentiable, (q, *parameters), v), expected, strict=True
    ):
        close(mine, theirs, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_forward_mode_and_vmap(name):
    potential, v = EVERY[name](), torch.randn_like(CHAIN)
    _, rate = torch.func.jvp(lambda q: adjsim.force(potential, q), (CHAIN,), (v,))
    along, _ = force_vjp(potential, CHAIN, [])[1](v)
    close(rate, along, 1e-11)
    batch = torch.stack([CHAIN, CHAIN + 0.1])
    found = torch.func.vmap(torch.func.grad(lambda q: potential(q)))(batch)
    close(-found, adjsim.force(potential, batch), 1e-12)


@pytest.mark.parametrize("name", slow_but(lambda name: name in SHORT, EVERY))
def test_parameters_against_central_differences(name):
    potential, v = EVERY[name](), torch.randn_like(CHAIN)
    parameters = list(potential.parameters())
    value, pullback = force_vjp(potential, CHAIN, parameters)
    h = 1e-5
    for p, grad in zip(parameters, pullback(v)[1].gradient(parameters), strict=True):
        direction = torch.randn_like(p)
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                p += sign * h * direction
                ends.append(float((adjsim.force(potential, CHAIN) * v).sum()))
                p -= sign * h * direction
        # Truncation h^2 and rounding 1e-16 |F| / h are below 1e-9 of the forces here.
        slope, scale = (ends[0] - ends[1]) / (2 * h), float(value.norm() * v.norm())
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9 * scale)


def test_the_gradient_of_a_type_is_the_sum_over_its_terms():
    types = torch.tensor([0, 1, 0, 0, 1])
    of_types = BONDED["bonds, types"]()
    each = adjsim.HarmonicBond(
        BONDS,
        nn.Parameter(of_types.k.detach()[types]),
        nn.Parameter(of_types.length.detach()[types]),
    )
    assert float(of_types(CHAIN)) == float(each(CHAIN))
    of_types(CHAIN).backward()
    each(CHAIN).backward()
    expected = torch.zeros(2).index_add(0, types, each.k.grad)
    torch.testing.assert_close(of_types.k.grad, expected, rtol=1e-14, atol=0)
    # No term is of the last type.
    assert of_types.length.grad[2] == 0


@pytest.mark.parametrize(
    ("name", "box"),
    slow_but(
        lambda name, box: box == "tilted" and name in SHORT,
        # The atoms of a group are read where they are.
        list(itertools.product(sorted({*EVERY} - {"custom centroids"}), ("box", "tilted"))),
    ),
)
def test_images_do_not_matter(name, box):
    """An atom may be moved by any vector of the lattice."""
    cell = BOXES[box]
    potential, rows = EVERY[name](box=cell), torch.diag(cell) if cell.ndim == 1 else cell
    shift = torch.tensor([[0, 0, 0], [1, 0, -1], [0, 0, 0], [-2, 1, 0], [0, 3, 0], [0, 0, 1]])
    moved = CHAIN + shift.to(rows) @ rows
    # Rounding of positions ten times as far from the origin.
    torch.testing.assert_close(potential(moved), potential(CHAIN), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        adjsim.force(potential, moved), adjsim.force(potential, CHAIN), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize(
    ("name", "box"),
    slow_but(
        lambda name, box: box == "tilted" and name in SHORT,
        list(itertools.product(BONDED, BOXES)),
        # A rectangular box is a tilted one with zeros.
        marathon=lambda name, box: box == "box",
    ),
)
def test_virials_against_strain(name, box):
    cell, h, found = BOXES[box], 1e-5, torch.zeros(3, 3)

    def energy(strain):
        change = torch.eye(3) + strain
        if cell is None:
            return float(BONDED[name]()(CHAIN @ change.T).detach())
        rows = torch.diag(cell) if cell.ndim == 1 else cell
        return float(BONDED[name](box=rows @ change.T)(CHAIN @ change.T).detach())

    for a, b in itertools.product(range(3), repeat=2):
        strain = torch.zeros(3, 3)
        strain[a, b] = h
        found[a, b] = -(energy(strain) - energy(-strain)) / (2 * h)
    expected = BONDED[name](box=cell).virial(torch.stack([CHAIN, CHAIN]))
    # As for parameters: truncation h^2, rounding 1e-16 U / h.
    scale = 1e-8 * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(found.expand(2, 3, 3), expected.detach(), rtol=1e-6, atol=scale)


LINE = torch.tensor([[float(i), 0, 0] for i in range(6)], dtype=torch.float64)
DEGENERATE = {
    "line": LINE,
    "folded": LINE[[0, 1, 0, 1, 2, 1]] + torch.tensor([[0, 0, 0.0]] * 5 + [[0, 1.0, 0]]),
    "point": torch.zeros(6, 3, dtype=torch.float64),
    "bond without length": torch.cat([CHAIN[:2], CHAIN[1:2], CHAIN[3:]]),
}
ANGULAR = [name for name in BONDED if not name.startswith(("explicit", "scaled"))]


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    slow_but(
        lambda geometry, dtype: dtype == torch.float64 or geometry == "folded",
        itertools.product(DEGENERATE, (torch.float64, torch.float32)),
    ),
    ids=str,
)
def test_degenerate_geometry_is_finite(geometry, dtype):
    for name in (*ANGULAR, *RESTRAINTS):
        potential, q = EVERY[name](), DEGENERATE[geometry].to(dtype)
        parameters = list(potential.parameters())
        value, pullback = force_vjp(potential, q, parameters)
        along, rest = pullback(torch.randn_like(q))
        here = q.clone().requires_grad_()
        energy = potential(here)
        (slope,) = torch.autograd.grad(energy, here, create_graph=True)
        second = torch.autograd.grad(slope.sum(), (here, *parameters), allow_unused=True)
        known = [x for x in (*rest.gradient(parameters), *second) if x is not None]
        for x in (energy, value, along, slope, *known):
            assert bool(torch.isfinite(x).all()), name
        # Rounding of the largest force.
        close(-slope, value, 64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_positions_that_are_not_finite_are_not_hidden(wrong):
    q = CHAIN.clone()
    q[[1, 3, 4]] = wrong
    for name, make in EVERY.items():
        assert not bool(adjsim.force(make(), q).isfinite().all()), name
        if math.isnan(wrong):
            assert bool(make()(q).isnan()), name


def test_undefined_angles_have_no_force():
    assert bool((adjsim.force(BONDED["angles"](), LINE) == 0).all())
    assert bool((adjsim.force(BONDED["torsions"](), LINE) == 0).all())
    # A cosine is smooth on a line: the force vanishes and the product does not.
    value, pullback = force_vjp(BONDED["cosines"](), LINE, [])
    assert float(value.abs().max()) < 1e-15
    bent = torch.zeros_like(LINE)
    bent[1::2, 1] = 1.0
    along, _ = pullback(bent)
    q = LINE.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-derivative(BONDED["cosines"](), q), q, bent)
    close(along, expected, 1e-12)
    assert float(along.abs().max()) > 1


def test_nearly_straight_angles_are_accurate():
    """An acos of the cosine would lose half of the digits."""
    bend = 1e-6
    q = torch.tensor([[-1.0, 0, 0], [0, 0, 0], [math.cos(bend), math.sin(bend), 0]])
    found = BONDED["angles"]().coordinate([(q[1:2] - q[:1]).T], [(q[2:] - q[1:2]).T]).value
    assert float(math.pi - found) == pytest.approx(bend, rel=1e-9)


@pytest.mark.parametrize("count", [1, WIDTH, WIDTH + 1, 2 * WIDTH**2 + 5])
def test_selections_and_their_transposes(count):
    index = torch.cat([torch.full((count,), 2), torch.tensor([0, 4, 0])])[torch.randperm(count + 3)]
    selection, x = Selection(index, 6), torch.randn(2, 6, requires_grad=True)
    y = torch.randn(2, count + 3, requires_grad=True)
    assert torch.equal(selection(x), x[:, index])
    expected = torch.zeros(2, 6).index_add(1, index, y.detach())
    # Sums in another order.
    torch.testing.assert_close(selection.transpose(y), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(selection(x), x, y.detach())[0], expected, rtol=1e-12, atol=1e-12
    )
    assert torch.equal(
        torch.autograd.grad(selection.transpose(y), y, x.detach())[0], x.detach()[:, index]
    )


def test_rounded_forces_sum_to_zero():
    rounding = Rounding(torch.full((2, 1, 1, 1), 2.0**-30))
    batch = torch.stack([CHAIN, 1.1 * CHAIN])
    for name, make in BONDED.items():
        force = adjsim.force(make(), batch, rounding=rounding)
        assert bool((force.sum(-2) == 0).all()), name
        assert torch.equal(force, (force * 2.0**30).round() * 2.0**-30)
        # Each of at most a dozen contributions to an atom is rounded.
        torch.testing.assert_close(force, adjsim.force(make(), batch), rtol=0, atol=12 * 2.0**-31)


def test_atoms_that_no_term_names_have_no_force():
    more = torch.cat([CHAIN, torch.randn(3, 3)])
    potential = BONDED["angles"]()
    force = adjsim.force(potential, more)
    assert torch.equal(force[:6], adjsim.force(potential, CHAIN))
    assert bool((force[6:] == 0).all())


@pytest.mark.slow
def test_scaled_pairs_share_the_parameters_of_their_potential():
    pair = mixture()
    both = pair + adjsim.ScaledPairs(pair, PAIRS, -0.5)
    assert [name for name, _ in both.named_parameters()] == ["parts.0.epsilon", "parts.0.sigma"]
    grads = torch.autograd.grad(both(CHAIN), list(both.parameters()))
    apart = torch.autograd.grad(pair(CHAIN), list(pair.parameters()))
    listed = adjsim.ScaledPairs(pair, PAIRS, -0.5)
    rest = torch.autograd.grad(listed(CHAIN), list(pair.parameters()))
    for g, a, b in zip(grads, apart, rest, strict=True):
        torch.testing.assert_close(g, a + b, rtol=1e-13, atol=0)
    # All pairs, listed, are the pair potential itself.
    everyone = [list(pair) for pair in itertools.combinations(range(6), 2)]
    whole = adjsim.ScaledPairs(pair, everyone)
    torch.testing.assert_close(whole(CHAIN), pair(CHAIN), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        adjsim.force(whole, CHAIN), adjsim.force(pair, CHAIN), rtol=1e-12, atol=1e-14
    )


def test_potentials_may_be_made_under_inference_mode():
    types = [0, 1, 0, 0, 1]
    with torch.inference_mode():
        made = adjsim.HarmonicBond(BONDS, [30.0, 25.0], [1.4, 1.5], types=types)
        energy = made(CHAIN)
    made.k.requires_grad_()
    found = made(CHAIN)
    assert float(found.detach()) == float(energy)
    assert bool(torch.autograd.grad(found, made.k)[0].isfinite().all())


def test_the_saved_state_holds_the_numbers():
    assert set(BONDED["torsions, types"]().state_dict()) == {"k", "periodicity", "phase"}


# Errors.


def bonds(*arguments, **options):
    return lambda: adjsim.HarmonicBond(*arguments, **options)


WRONG = [
    (bonds([[0, 1, 2]], 1.0, 1.0), r"\(n, 2\).*got shape \(1, 3\)"),
    (bonds([], 1.0, 1.0), "with n at least 1; got shape"),
    (bonds([[0, 1], [2, 2]], 1.0, 1.0), r"index\[1\] names an atom twice: \[2, 2\]"),
    (bonds([[0, -1]], 1.0, 1.0), r"index\[0\] names atom -1"),
    (bonds([[0, 2**40]], 1.0, 1.0), "names atom 1099511627776"),
    (bonds([[0, 1.5]], 1.0, 1.0), "index must be integers"),
    (bonds([[0, 6]], 1.0, 1.0), "term 0 of HarmonicBond names atom 6 and position has 6 atoms"),
    (
        bonds(BONDS, [1.0, 2.0], 1.0),
        r"k must be a number, or \(terms,\) with 5 terms; got shape \(2,\)",
    ),
    (
        bonds(BONDS, 1.0, [1.0, 2.0], types=[0, 1, 2, 0, 0]),
        r"length must be a number, or \(types,\) with types up to 2",
    ),
    (bonds(BONDS, 1.0, 1.0, types=[0, 1]), r"types must be \(5,\)"),
    (bonds(BONDS, 1.0, 1.0, types=[0, 1, 0, 0, -1]), "numbered from 0; got -1"),
    (bonds(BONDS, math.nan, 1.0), "k is NaN"),
    (bonds(BONDS, 1.0, 1.0, box=[4.0, 4.0]), "box has 2 dimensions and position 3"),
    (lambda: adjsim.HarmonicAngle([[0, 1, 0]], 1.0, 1.0), r"index\[0\] names an atom twice"),
    (lambda: adjsim.MorseBond(BONDS, 1.0, -1.0, 1.0), "width must be positive"),
    (
        lambda: adjsim.PeriodicTorsion(TORSIONS, 1.0, 0, 0.0),
        "periodicity must be positive integers; got 0",
    ),
    (
        lambda: adjsim.PeriodicTorsion(TORSIONS, 1.0, [1, 2], 0.0),
        r"periodicity must be a number, or \(terms,\)",
    ),
    (
        lambda: adjsim.PeriodicTorsion(TORSIONS, 1.0, [1.5], 0.0),
        "periodicity must be integers",
    ),
    (
        lambda: adjsim.RyckaertBellemans(TORSIONS, [1.0] * 5),
        r"must be \(6,\), or \(terms, 6\) with 3 terms; got shape \(5,\)",
    ),
    (
        lambda: adjsim.PositionRestraint([0, 1], 1.0, torch.zeros(3, 3)),
        r"position must be \(2, dim\)",
    ),
    (
        lambda: adjsim.PositionRestraint([7], 1.0, torch.zeros(1, 3)),
        "names atom 7 and position has 6 atoms",
    ),
    (
        lambda: adjsim.PositionRestraint([0], 1.0, torch.zeros(1, 2)),
        "points of dim 2 and position has dim 3",
    ),
    (
        lambda: adjsim.ExplicitPairs(PAIRS, 1.0, 1.0, 1.0, math.inf),
        "constant must be finite",
    ),
    (
        lambda: adjsim.ScaledPairs(adjsim.Coulomb([1.0, 2.0]), [[0, 2]]),
        "index names atom 2 and charge of the potential is for 2 atoms",
    ),
    (
        lambda: adjsim.ScaledPairs(mixture(), [[0, 9]]),
        "index names atom 9 and the potential has species of 6",
    ),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_input_is_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()(CHAIN)


def test_torsions_need_three_dimensions():
    with pytest.raises(ValueError, match="needs 3 dimensions; position has dim 2"):
        BONDED["torsions"]()(CHAIN[:, :2])


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="potential"):
        adjsim.ScaledPairs(adjsim.Harmonic(), PAIRS)
    with pytest.raises(TypeError, match="points do not move with the box"):
        RESTRAINTS["points"]().virial(CHAIN)
