"""Minima and their derivatives: fixed atoms, sparse Hessians, flat directions, and errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import adjsim
from adjsim import meshes, minimize
from adjsim.io.systems import cluster
from adjsim.potentials import NeoHookean
from adjsim.potentials.statics import curvature, minimum as statics
from tests.problems import parameter


@pytest.fixture(params=["dense", "products"])
def _way(request, monkeypatch):
    """The Hessian diagonalised, and by its products alone."""
    if request.param == "products":
        monkeypatch.setattr(statics, "DENSE", 3)


def displaced(potential):
    """The cluster near its minimum, and off the origin."""
    q = cluster().position * 1.1
    return minimize(potential, q + 0.01 * torch.randn(q.shape) + 0.3)


@pytest.mark.usefixtures("_way")
def test_losses_that_read_where_a_free_cluster_is_and_how_it_is_turned():
    """All lengths scale with sigma about the centre, which moves no centre and turns nothing: dq =
    (q - centre)/sigma.
    """
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.1))
    q = displaced(potential)
    arms = (q - q.mean(0)).detach() / 1.1
    for weight in (torch.randn(13, 3), torch.ones(13, 3)):
        epsilon, sigma = torch.autograd.grad(
            (q * weight).sum(), list(potential.parameters()), retain_graph=True
        )
        # A condition number of 30 and a force left of 1e-14.
        assert float(sigma) == pytest.approx(float((arms * weight).sum()), abs=1e-11)
        assert abs(float(epsilon)) < 1e-11


def test_the_derivative_is_that_of_a_minimiser_that_follows_forces():
    """Minima found anew from the old one, at sigma a little larger and smaller."""
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.1))
    q, weight, h = displaced(potential), torch.randn(13, 3), 1e-4
    slope = torch.autograd.grad((q * weight).sum(), potential.sigma)[0]
    moved = [minimize(adjsim.LennardJones(1.0, 1.1 + s * h), q.detach()) for s in (1, -1)]
    difference = float(((moved[0] - moved[1]) * weight).sum()) / (2 * h)
    # Of order h^2.
    assert float(slope) == pytest.approx(difference, rel=1e-6)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("stiffness", "fails"), [(1e-6, False), (1e-10, True), (0.0, False)])
def test_soft_directions_are_errors_and_flat_ones_are_left_out(stiffness, fails):
    center = nn.Parameter(torch.tensor([0.3, 0.2]))
    bowl, start = adjsim.Harmonic(torch.tensor([1.0, stiffness]), center), torch.ones(4, 2)
    if fails:
        with pytest.raises(
            RuntimeError,
            match=r"ill-conditioned: its curvatures are between 1e-10 and 1, a condition number",
        ):
            minimize(bowl, start)
        return
    (slope,) = torch.autograd.grad(minimize(bowl, start).sum(), center)
    torch.testing.assert_close(
        slope, torch.tensor([4.0, 4.0 if stiffness else 0.0]), rtol=1e-7, atol=1e-12
    )


class InField(nn.Module):
    """A pair in a field that does not depend on the place."""

    def __init__(self):
        super().__init__()
        self.pair, self.field = adjsim.LennardJones(), parameter(0.0)

    def forward(self, position):
        return self.pair(position) + self.field * position[..., 0].sum(-1)


def test_a_parameter_that_pushes_along_a_flat_direction_is_an_error():
    q = minimize(InField(), torch.tensor([[0.0, 0.0, 0.0], [1.2, 0.0, 0.0]]))
    with pytest.raises(
        RuntimeError, match="'field' pushes along a direction in which the energy has no curvature"
    ):
        (q[1] - q[0]).norm().backward()


def test_what_the_iterations_leave_is_an_error_of_our_own(monkeypatch):
    """MINRES that stopped short; and softest directions that Lanczos iterations do not find."""
    monkeypatch.setattr(statics, "DENSE", 3)
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.1))
    q = displaced(potential)
    with monkeypatch.context() as patch:
        patch.setattr(curvature, "minres", lambda A, b, **_: (0.9 * b, 0))
        with pytest.raises(
            RuntimeError, match=r"was not solved: .* of its right-hand side is left"
        ):
            q[0, 0].backward()
    monkeypatch.setattr(curvature, "RESTARTS", 3)
    bowl = adjsim.Harmonic(torch.logspace(-9, 0, 300).reshape(-1, 3), parameter(0.1))
    with pytest.raises(RuntimeError, match="could not be distinguished from the others"):
        minimize(bowl, torch.full((100, 3), 0.1))


@pytest.mark.usefixtures("_way")
def test_a_saddle_of_a_large_system_is_an_error():
    with pytest.raises(RuntimeError, match="saddle"):
        minimize(adjsim.DoubleWell(parameter(1.0)), torch.zeros(3, 2))


# Fixed atoms.


@pytest.mark.parametrize("fixed", [[True, False, False, True], [0, 3], torch.tensor([0, 3])])
def test_a_chain_between_two_fixed_atoms(fixed):
    """Springs in a row: each takes a share of the whole elongation in proportion to 1/k."""
    k = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
    chain = adjsim.HarmonicBond(torch.tensor([[0, 1], [1, 2], [2, 3]]), k, torch.ones(3))
    ends = torch.tensor([0.5, 5.0], requires_grad=True)
    start = torch.stack([ends[0], torch.tensor(1.7), torch.tensor(3.0), ends[1]]).reshape(4, 1)
    q = minimize(chain, start, fixed=fixed)[:, 0]
    shares = (1 / k) / (1 / k).sum()
    expected = ends[0] + 1 + shares[0] * (ends[1] - ends[0] - 3)
    assert float(q[1].detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert torch.equal(q[[0, 3]], ends)
    found = torch.autograd.grad(q[1], [k, ends])
    for x, y in zip(found, torch.autograd.grad(expected, [k, ends]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_fixed_atoms_of_a_cluster_against_differences():
    """Boundary values of a batch of two, in a random direction."""
    potential, q = adjsim.LennardJones(parameter(1.0), parameter(1.1)), cluster().position * 1.1
    start = torch.stack([q, 1.001 * q])
    along, weight = torch.zeros_like(start), torch.randn_like(start)
    along[:, :4] = torch.randn(2, 4, 3)
    start.requires_grad_()

    def value(position):
        return (minimize(potential, position, fixed=range(4)) * weight).sum()

    slope, h = torch.autograd.grad(value(start), start)[0], 2e-5
    assert not slope[:, 4:].any()
    ends = [float(value(start.detach() + s * h * along).detach()) for s in (1, -1)]
    # Of order h^2.
    assert float((slope * along).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


# Sparse Hessians.


def network(shape, stiffness=100.0, misfit=0.0):
    """A cubic lattice of springs with diagonals, at rest where it is placed, up to a misfit."""
    q = torch.tensor(list(itertools.product(*map(range, shape)))).double()
    distance = torch.cdist(q, q)
    i, j = torch.nonzero(torch.triu(distance < 1.75, 1), as_tuple=True)
    length = nn.Parameter(distance[i, j] * (1 + misfit * torch.randn(len(i))))
    return q, adjsim.HarmonicBond(torch.stack([i, j], 1), stiffness, length)


class Hung(nn.Module):
    """A body under its weight."""

    def __init__(self, body, weight):
        super().__init__()
        self.body, self.weight = body, parameter(weight)

    def forward(self, position):
        return self.body(position) + self.weight * position[..., -1].sum(-1)


@pytest.mark.parametrize("clamped", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_factorised_network_equals_the_diagonalised_one(clamped, monkeypatch):
    """Under a weight, or free, and then with springs that are under stress at the minimum."""
    q, body = network((14, 2), parameter(100.0), misfit=0.0 if clamped else 0.01)
    potential = Hung(body, 1e-3) if clamped else body
    fixed = q[:, 0] == 0 if clamped else None
    start, weight = q + 0.05 * torch.randn_like(q), torch.randn_like(q)
    found = []
    for limit in (600, 3):
        monkeypatch.setattr(statics, "DENSE", limit)
        here = start.clone().requires_grad_()
        x = minimize(potential, here, fixed=fixed)
        lengths = (x[1:] - x[:-1]).norm(dim=-1)
        wanted = [here, *potential.parameters()] if clamped else [*potential.parameters()]
        grads = torch.autograd.grad((lengths * weight[1:, 0]).sum(), wanted)
        # A free body may have been placed and turned in another way.
        found.append([x.detach() if clamped else lengths.detach(), *grads])
    search = statics._Search(potential, torch.ones(len(q), dtype=torch.bool), 1e-10, 10)
    assert isinstance(search.pseudo_inverse(q), statics.LocalInverse)
    for x, y in zip(*found, strict=True):
        # Both solve systems of condition numbers near 1e4 to rounding.
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_body_without_load_is_found_in_few_steps(monkeypatch):
    """Its energy goes to zero, where rounding relative to the energy never ends the steps."""
    q, body = network((14, 2), 100.0)
    monkeypatch.setattr(statics, "DENSE", 3)
    factors, make = [], statics.positive_factor
    monkeypatch.setattr(statics, "positive_factor", lambda *a: factors.append(1) or make(*a))
    for seed in range(12):
        moved = 0.05 * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed))
        minimize(body, q + moved)
    # Newton's method takes 8 to 16 steps each time, and never stopped in one of eight before.
    assert len(factors) < 12 * 20


def test_errors_of_factorised_networks(monkeypatch):
    """A strut that is compressed along itself is a saddle; a weak spring is a soft direction."""
    monkeypatch.setattr(statics, "DENSE", 3)
    q, body = network((24, 2), 100.0)
    ends = (q[:, 0] == 0) | (q[:, 0] == 23)
    with pytest.raises(RuntimeError, match="saddle"):
        minimize(body, q * torch.tensor([0.9, 1.0]), fixed=ends)
    lengths = torch.ones(1)
    tip, ends = torch.cat([q, torch.tensor([[24.0, 0.5]])]), [0, 1]
    ties = torch.tensor([[46, 48], [47, 48]])
    for stiffness, message in ((1e-8, "ill-conditioned"), (100.0, None)):
        whole = body + adjsim.HarmonicBond(ties, parameter(stiffness), 1.25**0.5 * lengths)
        if message is None:
            found = minimize(whole, tip, fixed=ends)
            assert float((found.detach() - tip).norm()) < 1e-10
            continue
        with pytest.raises(RuntimeError, match=message):
            minimize(whole, tip, fixed=ends)


def beam(cells, modulus=1e5):
    """An elastic beam, clamped at one end, under gravity."""
    mesh = meshes.box([4.0, 1.0, 1.0], cells)
    weight = mesh.lumped_mass(100.0) * 9.81
    solid = NeoHookean(mesh, parameter(modulus), parameter(0.3))
    return mesh.vertices, solid + Load(weight), mesh.vertices[:, 0] == 0


class Load(nn.Module):
    """Weights on vertices."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, position):
        return (self.weight * position[..., -1]).sum(-1)


@pytest.mark.parametrize(
    "cells", [(8, 2, 2), pytest.param((20, 4, 4), marks=pytest.mark.marathon)], ids=str
)
def test_an_elastic_beam_under_gravity(cells, monkeypatch):
    """The sag of the tip by E against differences; and the clamp: where it is moved, the beam moves
    with it, and where it is turned, the beam turns, but for gravity.
    """
    monkeypatch.setattr(statics, "DENSE", 3)
    q, potential, fixed = beam(cells)
    start = q.clone().requires_grad_()
    tip = minimize(potential, start, fixed=fixed)[-1]
    assert float(tip[2].detach() - q[-1, 2]) < -1.0
    modulus = next(potential.parameters())
    slope, held = torch.autograd.grad(tip[2], [modulus, start])
    torch.testing.assert_close(held.sum(0), torch.tensor([0.0, 0.0, 1.0]), rtol=0, atol=1e-8)
    assert not held[~fixed].any()
    sags, h = [], 10.0
    for sign in (1, -1):
        moved = beam(cells, 1e5 + sign * h)[1]
        sags.append(float(minimize(moved, q, fixed=fixed)[-1, 2].detach()))
    # Of order (h/E)^2.
    assert float(slope) == pytest.approx((sags[0] - sags[1]) / (2 * h), rel=1e-6)


@pytest.mark.slow
def test_a_body_that_nothing_holds_falls_and_is_refused():
    """Held by a weak spring, it has a minimum, however far below."""
    mesh = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
    body = NeoHookean(mesh, 1e4, 0.3) + adjsim.Gravity(mesh.lumped_mass(100.0), 9.81)
    with pytest.raises(RuntimeError, match=r"no minimum: a force of .* moves all atoms together"):
        minimize(body, mesh.vertices, max_iterations=100)
    rest = minimize(body + adjsim.Harmonic(10.0), mesh.vertices)
    assert float(rest[:, 2].mean()) == pytest.approx(-100 * 9.81 / (8 * 10.0), rel=1e-8)


# Arguments.


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ([4], r"fixed\[0\] names atom 4, and atoms are counted from 0 to 3"),
        ([-1], r"fixed\[0\] names atom -1"),
        ([True], r"a mask of shape \(1,\); it must be \(4,\)"),
        ([0, 1, 2, 3], "all atoms are fixed"),
        ([0.5], "fixed must be integers"),
    ],
)
def test_fixed_atoms_that_do_not_exist_are_refused(fixed, message):
    with pytest.raises(ValueError, match=message):
        minimize(adjsim.Harmonic(), torch.ones(4, 2), fixed=fixed)


def test_what_cannot_be_minimised_or_differentiated_again_is_refused():
    with pytest.raises(TypeError, match="potential must be a module with an energy"):
        minimize(adjsim.ForceField(), torch.ones(4, 2))
    k = parameter(1.0)
    q = minimize(adjsim.DoubleWell(k), torch.full((1, 1), 1.1))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(q.sum(), k, create_graph=True)


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [*((x, torch.float64) for x in (0.0, 1e3, 1e10)), *((x, torch.float32) for x in (0.0, 1e3))],
)
def test_a_pair_far_from_the_origin(offset, dtype):
    """The minimum is at 2^(1/6) sigma to the resolution of the coordinates, from 1.3 sigma, where
    the curvature is negative.
    """
    resolution = torch.finfo(dtype).eps * max(1.3, offset)
    potential = adjsim.LennardJones(1.0, parameter(1.0))
    start = torch.tensor([[0.0, 0.0, 0.0], [1.3, 0.0, 0.0]], dtype=torch.float64) + offset
    q = minimize(potential, start.to(dtype))
    length = (q[1] - q[0]).norm()
    # Rounding of two coordinates, and that of the force over the curvature.
    assert float(length.detach()) == pytest.approx(2 ** (1 / 6), abs=2 * resolution)
    (slope,) = torch.autograd.grad(length, potential.sigma)
    # The length is proportional to sigma. The relative change of the curvature is 21 times that
    # of the length.
    assert float(slope) == pytest.approx(2 ** (1 / 6), abs=64 * resolution)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize(("energy", "length"), [(1.65e-21, 3.4e-10), (1e20, 1e10)])
def test_minima_do_not_depend_on_the_units(energy, length, offset):
    start = cluster().position * 1.15 + offset
    expected = minimize(adjsim.LennardJones(), start)
    found = minimize(adjsim.LennardJones(energy, length), start * length)
    # The condition number is 30.
    close = 100 * torch.finfo(torch.float64).eps * max(1.0, offset)
    torch.testing.assert_close(found / length, expected, rtol=0, atol=close)


def test_second_derivatives_that_float32_does_not_hold_are_refused():
    start = torch.tensor([[0.0, 0.0], [1.2e-10, 0.0]], dtype=torch.float32)
    with pytest.raises(RuntimeError, match="in float64, or units"):
        minimize(adjsim.LennardJones(1e-21, 1e-10), start)
