"""Multipliers of rigid triangles in closed form."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim.dynamics.constraints import systems
from adjsim.dynamics.constraints.multipliers import LengthMultipliers, TriangleMultipliers
from adjsim.dynamics.constraints.triangles import triangle_multipliers
from tests.constraints import tensor
from tests.contracts.test_cpp import printed

COUNT = 40
# Each order and each direction of pairs.
PAIRS = ([[0, 1], [0, 2], [1, 2]], [[2, 1], [0, 1], [2, 0]], [[1, 0], [1, 2], [2, 0]])


class Triangles:
    """Triangles of random shapes and masses, in a batch of two, which a step of a size moves."""

    def __init__(self, size: float, dim: int = 3, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        q = tensor([[0.0, 0, 0], [1, 0, 0], [0.3, 0.8, 0]])[:, :dim]
        q = q + 0.1 * torch.randn(2, COUNT, 3, dim, generator=generator).double()
        moved = q + size * torch.randn(2, COUNT, 3, dim, generator=generator).double()
        mass = 0.5 + 20 * torch.rand(3 * COUNT, generator=generator).double() ** 2
        # Triangles that hang at an atom.
        mass[: 3 * COUNT // 4 : 3] = math.inf
        index = torch.cat([tensor(PAIRS[k % 3]).long() + 3 * k for k in range(COUNT)])
        self.q, self.moved = (x.flatten(1, 2).to(dtype) for x in (q[:1].expand_as(q), moved))
        i, j = index.unbind(-1)
        length = (self.q[0, i] - self.q[0, j]).norm(dim=-1)
        self.held = adjsim.DistanceConstraints(index, length)
        masses = adjsim.Hamiltonian(adjsim.Harmonic(0.0), mass.to(dtype)).masses
        self.c = self.held.coefficients(masses, self.q)
        self.u, self.d = self.held.differences(self.moved), self.held.differences(self.q)

    def group(self, h: float = 1.0) -> tuple[torch.Tensor, ...]:
        u, d, length = self.held._group(0, self.u, self.d, self.c["length"])
        return u, d, h * self.c["S0"], length


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.03])
@pytest.mark.parametrize("h", [0.02, -0.02])
def test_the_closed_form_is_the_solution_of_newtons_method(dim, size, h):
    system = Triangles(size, dim)
    assert [tuple(group) for group in system.held.groups] == [(0, 3 * COUNT, 3, 3, 1)]
    u, d, S, length = system.group(h)
    assert float((d.sum(-1)).abs().max()) < 1e-15
    scale = S.diagonal(dim1=-2, dim2=-1)
    expected = LengthMultipliers.apply(u, d, S, length)
    # The closed form by itself has the error of the squares of slender triangles.
    for found, atol in (
        (triangle_multipliers(u, d, S, length), 1e-12),
        (TriangleMultipliers.apply(u, d, S, length), 1e-13),
    ):
        torch.testing.assert_close(scale * found, scale * expected, rtol=0, atol=atol)
    at = system.held.at_lengths(system.c, system.moved, system.q)
    assert float(system.held.excess(at).abs().max()) < 1e-15


def test_single_precision_has_its_digits():
    system = Triangles(0.03, dtype=torch.float32)
    at = system.held.at_lengths(system.c, system.moved, system.q)
    assert at.dtype == torch.float32
    assert float(system.held.excess(at).abs().max()) < 5e-7


@pytest.mark.parametrize("angle", [0.3, 1e-2, 3e-4])
def test_flat_triangles_need_one_iteration(angle):
    x = tensor([[0.0, 0, 0], [1, 0, 0], [0.4, angle, 0]])
    d = torch.stack([x[0] - x[1], x[1] - x[2], x[2] - x[0]], -1).unsqueeze(1)
    S = tensor([[2.0, -1, -1], [-1, 3, -2], [-1, -2, 3]]).unsqueeze(0)
    length = d.norm(dim=0)
    turned = torch.linalg.matrix_exp(
        tensor([[0.0, -0.03, 0.02], [0.03, 0, -0.05], [-0.02, 0.05, 0]])
    )
    u = (turned.T @ d.squeeze(1)).unsqueeze(1) * 1.0001
    closed = triangle_multipliers(u, d, S, length)
    e = u + (S * (closed.unsqueeze(0) * d).unsqueeze(-2)).sum(-1)
    # Newton's method squares an error of a length of less than the root of rounding.
    assert float((e.norm(dim=0) / length - 1).abs().max()) < 1e-10
    x = TriangleMultipliers.apply(u, d, S, length)
    e = u + (S * (x.unsqueeze(0) * d).unsqueeze(-2)).sum(-1)
    assert float((e.norm(dim=0) / length - 1).abs().max()) < 1e-15


def test_the_derivatives_are_those_of_the_implicit_function_theorem():
    system = Triangles(0.05)
    arguments = [x[..., 10:11, :] for x in system.group()[:2]] + [
        x[10:11] for x in system.group()[2:]
    ]
    arguments = [x.clone().requires_grad_() for x in arguments]
    # S of three masses has the rank two, and the form needs it: differences keep it.
    w = torch.rand(1, 3, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    B = tensor([[1.0, -1, 0], [0, 1, -1], [-1, 0, 1]])

    def multipliers(u, d, w, length):
        # Around the triangle, as differences are.
        u, d = (torch.cat([x[..., :2], -x[..., :2].sum(-1, keepdim=True)], -1) for x in (u, d))
        return TriangleMultipliers.apply(u, d, torch.einsum("ka,na,la->nkl", B, w, B), length)

    arguments[2] = w
    assert torch.autograd.gradcheck(
        multipliers, arguments, check_forward_ad=True, check_batched_grad=True
    )


@pytest.fixture
def once(monkeypatch):
    """A single iteration in C++, which mends no wrong closed form."""
    monkeypatch.setattr(systems, "ITERATIONS", 1)
    systems._declarations.cache_clear()
    yield
    systems._declarations.cache_clear()


@pytest.mark.usefixtures("once")
def test_the_printed_closed_form_is_that_of_torch():
    system = Triangles(0.03)
    found = printed(
        TriangleMultipliers.apply, *system.group(-0.02), operators=[systems.CONSTRAINT_OPERATORS]
    )
    expected = TriangleMultipliers.apply(*system.group(-0.02))
    scale = 0.02 * system.c["S0"].diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(scale * found, scale * expected, rtol=0, atol=1e-13)


def test_a_triangle_without_a_solution_is_named():
    system = Triangles(2.0)
    with pytest.raises(FloatingPointError, match="no multipliers were found"):
        system.held.at_lengths(system.c, system.moved, system.q)
