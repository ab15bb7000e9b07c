"""Runs of an equation whose save times decrease."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    Coupled,
    DirectAdjoint,
    ODESolver,
    ReversibleAdjoint,
    RungeKutta,
)
from tests.fields import Net, Pair, PairNet
from tests.gradients.test_table import agree
from tests.problems import slow_but

TIMES = [1.0, 0.8, 0.1]
ROWS = [
    (RungeKutta("rk4", 0.05), DirectAdjoint(), False),
    (RungeKutta("midpoint", 0.05), CheckpointAdjoint(3), True),
    (Coupled("rk4", 0.05), ReversibleAdjoint(), False),
    (Coupled("rk4", 0.05, exact=True), ReversibleAdjoint(), True),
    (Coupled("dormand-prince", adjsim.Adaptive()), ReversibleAdjoint(), False),
    (adjsim.ImplicitMidpoint(0.05), CheckpointAdjoint(), False),
    (ODESolver("dopri5", rtol=1e-9, atol=1e-10), BacksolveAdjoint(), False),
]


def start(width=3):
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(2, width, generator=drawn, dtype=torch.float64)


class Mirrored(torch.nn.Module):
    """The equation of z(s) = y(-s), written out."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, s, z):
        return -self.net(-s, z)


def gradients(fun, times, solver, adjoint, compile):
    equation, y = adjsim.ODE(fun), start().requires_grad_()
    run = adjsim.simulate(
        equation, equation.init(y), times, solver=solver, adjoint=adjoint, compile=compile
    )
    loss = run.y[1].square().sum() + run.final.y.sum()
    named = dict(zip("abcdefg", equation.parameters(), strict=False)) | {"y": y}
    found = torch.autograd.grad(loss, list(named.values()))
    return run, dict(zip(named, found, strict=True))


@pytest.mark.parametrize(
    ("solver", "adjoint", "compile"),
    slow_but(
        lambda solver, adjoint, compile: not compile and not isinstance(solver, Coupled),
        ROWS,
        marathon=lambda solver, adjoint, compile: compile and isinstance(solver, Coupled),
    ),
    ids=lambda x: repr(x) if isinstance(x, bool) else type(x).__name__,
)
def test_a_run_is_that_of_the_mirrored_equation(solver, adjoint, compile):
    run, found = gradients(Net(), TIMES, solver, adjoint, compile)
    other, expected = gradients(
        Mirrored(Net()), [-t for t in TIMES], solver, DirectAdjoint(), False
    )
    assert run.times.tolist() == TIMES
    close = {"rtol": 0, "atol": 1e-13 if not compile else 1e-9}
    torch.testing.assert_close(run.y, other.y, **close)
    agree(found, expected, 1e-6 if isinstance(adjoint, BacksolveAdjoint) else 1e-9)
    if "step_times" in run.stats:
        assert float(run.stats["step_times"][0]) == 1.0
        assert float(run.stats["step_times"][-1]) == pytest.approx(0.1)


def test_there_and_back():
    """By steps of fourth order over a time of one."""
    net, solver = Net(), RungeKutta("rk4", 0.01)
    equation, y = adjsim.ODE(net), start()
    there = adjsim.simulate(equation, equation.init(y), [0.0, 1.0], solver=solver)
    back = adjsim.simulate(equation, there.final, [1.0, 0.5, 0.0], solver=solver)
    torch.testing.assert_close(back.final.y, y, rtol=0, atol=1e-9)
    middle = adjsim.simulate(equation, equation.init(y), [0.0, 0.5], solver=solver).final.y
    torch.testing.assert_close(back.y[1], middle, rtol=0, atol=1e-9)


def test_two_halves_of_a_run_backwards():
    equation, solver = adjsim.ODE(Net()), RungeKutta("rk4", 0.05)
    begin = equation.init(start())
    whole = adjsim.simulate(equation, begin, [1.0, 0.5, 0.0], solver=solver)
    first = adjsim.simulate(equation, begin, [1.0, 0.5], solver=solver)
    second = adjsim.simulate(equation, None, [0.5, 0.0], solver=solver, continues=first)
    assert torch.equal(second.final.y, whole.final.y)
    with pytest.raises(ValueError, match=r"continues= ends at"):
        adjsim.simulate(equation, None, [0.4, 0.0], solver=solver, continues=first)


def test_named_tuples():
    equation = adjsim.ODE(PairNet())
    y = Pair(*start().split([1, 2], -1))
    run = adjsim.simulate(equation, y, [0.5, 0.0], solver=RungeKutta("rk4", 0.05))
    whole = adjsim.ODE(PairNet().net)
    expected = adjsim.simulate(
        whole, whole.init(start()), [0.5, 0.0], solver=RungeKutta("rk4", 0.05)
    )
    torch.testing.assert_close(torch.cat(tuple(run.final), -1), expected.final.y)


def test_what_runs_one_way():
    langevin = adjsim.Langevin(adjsim.Harmonic())
    with pytest.raises(ValueError, match=r"ts decrease, and time runs one way for Langevin"):
        adjsim.simulate(
            langevin, langevin.init(torch.ones(1, 2), generator=0), [1.0, 0.0],
            solver=adjsim.BAOAB(0.1), generator=1,
        )  # fmt: skip
    equation = adjsim.ODE(Net())
    with pytest.raises(ValueError, match=r"decrease; got ts\[2\] = 0.7 after ts\[1\] = 0.5"):
        adjsim.simulate(
            equation, equation.init(start()), [1.0, 0.5, 0.7], solver=RungeKutta("rk4", 0.1)
        )


@pytest.mark.parametrize(
    ("solver", "where"),
    [
        (
            Coupled("dormand-prince", adjsim.Adaptive(1e-3, 1e-3)),
            r"the error of step .* \(t = 1.9608\)",
        ),
        (Coupled("rk4", 0.125), r"in step 8 \(t = 2\)"),
        (RungeKutta("rk4", 0.125), r"in step 11 \(t = 1.625\)"),
        (adjsim.BackwardEuler(0.25), r"the implicit step at t = 2.5 did"),
        (ODESolver("rk4", dt=0.125), r"not finite at t = 0;"),
    ],
    ids=lambda x: "" if isinstance(x, str) else repr(x),
)
def test_errors_name_the_time_of_the_user(solver, where):
    """The solution 1/(t - 2) from t = 3 blows up at t = 2."""
    equation = adjsim.ODE(lambda t, y: -(y**2))
    y = torch.ones(1, dtype=torch.float64)
    with pytest.raises((FloatingPointError, RuntimeError), match=where):
        adjsim.simulate(equation, equation.init(y), [3.0, 0.0], solver=solver)
