"""Solvers, adjoints and solutions survive copies, pickle and files."""

from __future__ import annotations

import copy

import pytest
import torch

import adjsim
from adjsim import adjoints, solvers
from adjsim.ivp.solve import METHODS
from tests.copies import WAYS

TABLEAU = solvers.Tableau([[], [0.5]], [0.0, 1.0])
OBJECTS = [
    solvers.BAOAB(0.1),
    solvers.VelocityVerlet(0.1),
    solvers.Splitting("BAOAB", 0.1, exact=True),
    solvers.LeimkuhlerMatthews(0.1),
    solvers.EulerMaruyama(0.1),
    solvers.Milstein(0.1),
    solvers.StochasticHeun(0.1),
    solvers.ReversibleHeun(0.1, exact=True),
    solvers.RungeKutta("rk4", 0.1),
    solvers.RungeKutta(TABLEAU, 0.1),
    solvers.Coupled(TABLEAU, 0.1, exact=True),
    solvers.Coupled("dormand-prince", solvers.Adaptive(1e-5, 1e-6)),
    solvers.Coupled("dormand-prince", solvers.StepTimes([0.0, 0.1, 0.3]), rate=1.0),
    solvers.BackwardEuler(0.1),
    solvers.ImplicitMidpoint(0.1),
    solvers.ODESolver(rtol=1e-5),
    solvers.ODESolver("rk4", dt=0.1),
    solvers.SDESolver("heun", dt=0.1),
    solvers.InstabilityError("a reason"),
    TABLEAU,
    solvers.Adaptive(1e-5, 1e-6),
    solvers.StepTimes([0.0, 0.1, 0.3]),
    adjoints.DirectAdjoint(),
    adjoints.CheckpointAdjoint(3),
    adjoints.ReversibleAdjoint(checkpoint_every=5),
    adjoints.BacksolveAdjoint(rtol=1e-3),
    adjoints.CompileError("a reason"),
    adjoints.ReconstructionError("a reason"),
    adjsim.GrazingError("a reason"),
]


def test_every_solver_and_adjoint_is_tested():
    made = {type(x).__name__ for x in OBJECTS} | {"BAOAB", "VelocityVerlet", "Adjoint"}
    assert made >= {*solvers.__all__, *adjoints.__all__}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("x", OBJECTS, ids=repr)
def test_objects(x, way):
    found = WAYS[way](x)
    assert type(found) is type(x)
    assert repr(found) == repr(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_solver_and_adjoint_run_the_same(way):
    dynamics = adjsim.Langevin(adjsim.Harmonic(torch.tensor(1.0, requires_grad=True)), 1.0, 0.5)
    start = dynamics.init(torch.ones(2, 1), torch.zeros(2, 1))
    for solver, adjoint in (
        (solvers.Splitting("BAOAB", 0.1, exact=True), adjoints.ReversibleAdjoint()),
        (solvers.SDESolver(dt=0.1), adjoints.BacksolveAdjoint()),
    ):
        first, second = (
            adjsim.simulate(dynamics, start, [0.0, 0.5], solver=s, adjoint=a, generator=1).position
            for s, a in ((solver, adjoint), (WAYS[way](solver), WAYS[way](adjoint)))
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adjoint", ["interpolate", "checkpoint", "backsolve"])
@pytest.mark.parametrize("method", [*METHODS, "columns"])
def test_solutions(method, adjoint, way):
    """A copy has the values of the solution, and no gradient, whether or not the solution has."""
    if method == "columns" and adjoint == "backsolve":
        return
    p = torch.tensor(2.0, requires_grad=True)
    start = torch.ones(2, 3) if method == "columns" else torch.ones(2)
    method, events = ("RK45", None) if method == "columns" else (method, lambda t, y, p: y[0] - 0.5)
    found = adjsim.solve_ivp(
        lambda t, y, p: -p * y, (0, 1), start * p, method, dense_output=True, events=events,
        args=(p,), adjoint=adjoint, rtol=1e-5,
    )  # fmt: skip
    again = WAYS[way](found)
    assert type(again) is adjsim.OdeResult
    assert again.keys() == found.keys()
    assert torch.equal(again.y, found.y)
    times = torch.tensor([0.1, 0.77])
    assert torch.equal(again.sol(times), found.sol(times))
    assert torch.equal(WAYS[way](again).sol(times), found.sol(times))
    assert not again.y.requires_grad
    assert not again.sol(times).requires_grad
    assert copy.copy(found).y.requires_grad
    assert copy.copy(found.sol)(times).requires_grad
