"""Factors that precondition the linear systems of implicit steps."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import meshes
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.potentials import NeoHookean
from adjsim.solvers.implicit import newton
from adjsim.solvers.implicit.newton import step_factors

# 540 coordinates, above the size for which the matrix is made; moduli over two decades.
MESH = meshes.box([2.0, 0.5, 0.5], [14, 2, 3])
BODY = NeoHookean(MESH, 1e4 * 100 ** torch.linspace(0, 1, len(MESH.tetrahedra)).double(), 0.3)
INVERSE_MASS = torch.where(MESH.vertices[:, :1] == 0, 0.0, 1 / MESH.lumped_mass(1e3)[:, None])


def matrix_at(x, a, near=None, potential=BODY):
    return newton.StepMatrix(ForceEvaluator(potential), x, 0.0, a, INVERSE_MASS.to(x), near)


def bent(scale, lead=(), dtype=torch.float64):
    draw = torch.randn(*lead, *MESH.vertices.shape, generator=torch.Generator().manual_seed(3))
    return (MESH.vertices + scale * draw.double()).to(dtype)


def right_hand_side(x):
    draw = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(x)
    return torch.where(INVERSE_MASS > 0, draw, 0.0)


def counting(monkeypatch):
    """Count the products of conjugate gradients."""
    product, found = newton.StepMatrix._transposed, []

    def counted(self, w):
        found.append(w)
        return product(self, w)

    monkeypatch.setattr(newton.StepMatrix, "_transposed", counted)
    return found


@pytest.mark.marathon
@pytest.mark.parametrize("lead", [(), (2,)], ids=["single", "batch"])
def test_factors_spare_products_and_change_no_solution(lead, monkeypatch):
    x = bent(1e-3, lead)
    b = right_hand_side(x)
    products = counting(monkeypatch)
    mine, refused = matrix_at(x, 0.1).solve(b, 1e-14)
    assert not bool(refused.any())
    # Those before the factors, and a few after them.
    assert newton.PATIENCE < len(products) <= newton.PATIENCE + 6
    products.clear()
    with monkeypatch.context() as without:
        without.setattr(newton, "step_factors", lambda *_: None)
        plain, _ = matrix_at(x, 0.1).solve(b, 1e-14)
    assert len(products) > 5 * newton.PATIENCE
    monkeypatch.setattr(newton, "DENSE", b.numel())
    dense, _ = matrix_at(x, 0.1).solve(b, 1e-14)
    # The condition number is about (a omega)^2 = 1e5, with residuals of 1e-14.
    for found in (mine, plain):
        assert float((found - dense).norm() / dense.norm()) < 1e-9


def test_factors_of_a_position_nearby_are_used_again(monkeypatch):
    first = matrix_at(bent(1e-3), 0.1)
    b = right_hand_side(first.x)
    first.solve(b, 1e-8)
    products = counting(monkeypatch)
    second = matrix_at(bent(1.1e-3), 0.1, first)
    w, _ = second.solve(b, 1e-8)
    assert second.factors is first.factors
    assert len(products) < 20
    assert second.residual(w, b) < 2e-8


def test_the_factors_are_those_of_the_matrix_in_float32_too():
    for dtype, error in ((torch.float64, 1e-10), (torch.float32, 2e-2)):
        # float32: the Hessian is right to 1e-7, times the condition number of 1e5.
        x = bent(1e-3, dtype=dtype)
        matrix = matrix_at(x, 0.1)
        factors = step_factors(matrix.forces, x, 0.1, matrix.root)
        b = right_hand_side(x)
        found = factors(b)
        assert found.dtype == dtype
        assert float((factors(matrix._transposed(b)) - b).norm() / b.norm()) < error
        pinned = (INVERSE_MASS == 0).expand_as(b)
        assert torch.equal(factors(torch.ones_like(b))[pinned], torch.ones_like(b)[pinned])


def test_products_of_factors_are_counted():
    matrix = matrix_at(bent(1e-3), 0.1)
    step_factors(matrix.forces, matrix.x, 0.1, matrix.root)
    # Three products for each of some tens of colours.
    assert matrix.forces.report.energy_evaluations > 2 * 3 * 10


class AllPairs(torch.nn.Module):
    """Springs without length between all atoms, so that the Hessian is full."""

    def forward(self, position):
        apart = position.unsqueeze(-2) - position.unsqueeze(-3)
        return 25.0 * apart.square().sum((-1, -2, -3))


def test_a_full_hessian_has_no_factors():
    forces, x = ForceEvaluator(AllPairs()), bent(1e-3)[:60]
    assert step_factors(forces, x, 1.0, torch.ones(())) is None


def test_a_matrix_that_is_not_positive_is_refused(monkeypatch):
    """A body that is compressed to a third of its length buckles: its Hessian is not positive."""
    monkeypatch.setattr(newton, "PATIENCE", 2)
    x = MESH.vertices * torch.tensor([0.33, 1.0, 1.0])
    matrix = matrix_at(x, 1.0)
    assert step_factors(matrix.forces, x, 1.0, matrix.root) is None
    _, refused = matrix.solve(right_hand_side(x), 1e-10)
    assert bool(refused.all())


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(adjsim.BackwardEuler, marks=pytest.mark.marathon),
        pytest.param(adjsim.ImplicitMidpoint, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_steps_with_factors(solver, monkeypatch):
    """The end and the derivative of a run are those of runs without factors."""
    products = counting(monkeypatch)

    def run():
        scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        body = NeoHookean(MESH, scale * BODY.youngs_modulus.detach(), 0.3)
        mass = torch.where(INVERSE_MASS > 0, 1 / INVERSE_MASS, torch.inf)
        dynamics = adjsim.Hamiltonian(body, mass)
        start = dynamics.init(bent(1e-3), torch.zeros_like(MESH.vertices))
        end = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=solver(0.1)).final.position
        ((end - MESH.vertices) ** 2).sum().backward()
        found = len(products)
        products.clear()
        return end.detach(), scale.grad, found

    end, slope, few = run()
    monkeypatch.setattr(newton, "step_factors", lambda *_: None)
    plain_end, plain_slope, many = run()
    assert few < 0.5 * many
    torch.testing.assert_close(end, plain_end, rtol=0, atol=1e-11)
    # A residual of 1e-15 times a condition number of 1e5.
    torch.testing.assert_close(slope, plain_slope, rtol=1e-9, atol=0)
