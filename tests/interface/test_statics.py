"""Derivatives of minima: flat directions, and systems that cannot be solved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import _curvature as curvature
from adjsim import minimize, statics
from adjsim.systems import cluster
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
