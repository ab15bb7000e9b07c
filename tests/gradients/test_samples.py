"""One module of a time and of states (batch, n) for simulate and for solve_ivp."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import adjsim
from adjsim import CheckpointAdjoint, Coupled, ReversibleAdjoint, RungeKutta
from tests.gradients.test_table import agree

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


class Field(nn.Module):
    """A network of the time and of states (batch, 2), and a rate for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(3, 2).double()

    def forward(self, t, y, rate, shape):
        time = t * torch.ones_like(y[:, :1])
        return torch.tanh(self.net(torch.cat([y, time], -1))) * shape["size"] - rate * y


def inputs() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(4)
    y = torch.randn(3, 2, generator=drawn, dtype=torch.float64)
    rate = torch.rand(3, 1, generator=drawn, dtype=torch.float64)
    return {"y": y.requires_grad_(), "rate": rate.requires_grad_()}


def gradients(states, field, given):
    named = given | dict(field.named_parameters())
    weights = torch.arange(1.0, 1 + states.numel()).reshape(states.shape).sin()
    found = torch.autograd.grad((weights * states.square()).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize(
    ("method", "rtol", "close"),
    [("RK45", 1e-8, 1e-6), pytest.param("Rodas4", 1e-6, 1e-4, marks=pytest.mark.slow)],
)
def test_one_module_serves_both(method, rtol, close):
    field, given, shape = Field(), inputs(), {"size": 1.5}
    found = adjsim.solve_ivp(
        field, (0.0, 1.0), given["y"], method, t_eval=[0.5, 1.0], batch_first=True,
        args=(given["rate"], shape), dense_output=True, rtol=rtol, atol=rtol / 100,
    )  # fmt: skip
    assert found.y.shape == (3, 2, 2)
    equation = adjsim.ODE(field, args=(given["rate"], shape))
    run = adjsim.simulate(
        equation,
        equation.init(given["y"]),
        [0.0, 0.5, 1.0],
        solver=RungeKutta("dormand-prince", 0.1),
    )
    # The error of the fixed steps is 1e-9.
    torch.testing.assert_close(found.y, run.y[1:].transpose(0, 1), rtol=0, atol=close)
    known = gradients(run.y[1:].transpose(0, 1), field, given)
    agree(gradients(found.y, field, given), known, close)
    torch.testing.assert_close(found.sol([0.5, 1.0]), found.y, rtol=1e-12, atol=1e-15)
    assert found.sol(0.2).shape == (3, 2)
    own = torch.tensor([[0.1, 1.0], [0.7, 0.2], [0.3, 0.5]])
    assert torch.equal(found.sol(own)[1, 1], found.sol(0.2)[1])
    assert torch.equal(pickle.loads(pickle.dumps(found)).sol(0.2), found.sol(0.2))


@pytest.mark.slow
def test_central_differences_and_the_adjoints():
    field, given = Field(), inputs()

    def solve(y, rate, adjoint="interpolate"):
        return adjsim.solve_ivp(
            field, (0.0, torch.tensor([0.5, 0.8, 1.0])), y, t_eval=None, batch_first=True,
            args=(rate, {"size": 1.0}), adjoint=adjoint, **TIGHT,
        ).y  # fmt: skip

    found = gradients(solve(**given), field, given)
    agree(gradients(solve(**given, adjoint="checkpoint"), field, given), found, 1e-12)
    h, along = 1e-5, {name: torch.cos(1 + 2 * x.detach()) for name, x in given.items()}
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            y = solve(**{name: x + sign * h * along[name] for name, x in given.items()})
            weights = torch.arange(1.0, 1 + y.numel()).reshape(y.shape).sin()
            ends.append(float((weights * y.square()).sum()))
    slope = sum(float((found[name] * x).sum()) for name, x in along.items())
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-6)


def test_events_of_samples():
    """y' = -k y falls to half of its start at t = log(2) / k."""
    start = torch.tensor([[1.0, 3.0], [2.0, 5.0], [4.0, 1.0]], dtype=torch.float64)
    k = torch.tensor([[1.0], [2.0], [0.1]], dtype=torch.float64, requires_grad=True)

    def half(t, y, k, start):
        return y[:, 0] - start[:, 0] / 2

    half.terminal = True
    found = adjsim.solve_ivp(
        lambda t, y, k, start: -k * y, (0.0, 1.0), start, events=half, args=(k, start),
        batch_first=True, **TIGHT,
    )  # fmt: skip
    known = torch.log(torch.tensor(2.0)) / k[:2, 0].detach()
    torch.testing.assert_close(found.t[:2, 1].detach(), known.double(), rtol=1e-8, atol=0)
    assert [len(x) for x in found.t_events[0]] == [1, 1, 0]
    (by_k,) = torch.autograd.grad(torch.cat(found.t_events[0]).sum(), k)
    torch.testing.assert_close(by_k[:2, 0], -known / k[:2, 0].detach(), rtol=1e-7, atol=0)
    assert found.y_events[0][1].shape == (1, 2)


@pytest.mark.parametrize(
    ("solver", "adjoint", "compile"),
    [
        (RungeKutta("rk4", 0.1), CheckpointAdjoint(), False),
        pytest.param(Coupled("rk4", 0.1), ReversibleAdjoint(), True, marks=pytest.mark.marathon),
    ],
)
def test_arguments_of_an_equation(solver, adjoint, compile):
    """The same numbers and gradients as of a module that holds them."""
    given = inputs()
    raw = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def fun(t, y, rate, scale):
        return torch.sin(y + t) * scale - rate * y

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(given["rate"].detach().clone())
            self.raw = nn.Parameter(raw.detach().clone())

        def forward(self, t, y):
            return fun(t, y, self.rate, self.raw.exp())

    equation, other = adjsim.ODE(fun, args=(given["rate"], raw.exp())), adjsim.ODE(Whole())
    runs = [
        adjsim.simulate(
            x, x.init(given["y"]), times, solver=solver, adjoint=adjoint, compile=compile
        )
        for x in (equation, other)
        for times in ([0.0, 0.5], [0.5, 0.0])
    ]
    torch.testing.assert_close(runs[0].y, runs[2].y, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(runs[1].y, runs[3].y, rtol=1e-13, atol=1e-14)
    found = torch.autograd.grad(runs[0].final.y.square().sum(), [given["y"], given["rate"], raw])
    inside = [given["y"], other.fun.rate, other.fun.raw]
    known = torch.autograd.grad(runs[2].final.y.square().sum(), inside)
    for x, y in zip(found, known, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    again = copy.deepcopy(adjsim.ODE(fun, args=(nn.Parameter(torch.ones(3, 1)), 2.0)))
    assert [name for name, _ in again.named_parameters()] == ["fun.args_0"]


def test_what_is_refused():
    y, rate = inputs().values()
    with pytest.raises(ValueError, match=r"batch_first=True takes y0 of shape \(batch, n\)"):
        adjsim.solve_ivp(lambda t, y: -y, (0, 1), y[0], batch_first=True)
    with pytest.raises(ValueError, match=r"it returned \(3, 2\). Tensors with one row a sample"):
        adjsim.solve_ivp(lambda t, y: -rate * y, (0, 1), y, batch_first=True, params=[rate])
    with pytest.raises(ValueError, match="fun gives sample 0 another rate alone than in the batch"):
        adjsim.solve_ivp(lambda t, y: y - y.mean(0), (0, 1), y, batch_first=True)
    square = torch.arange(4.0, dtype=torch.float64).reshape(2, 2)
    with pytest.raises(ValueError, match=r"a shared tensor.*declare it by params"):
        adjsim.solve_ivp(
            lambda t, y, w: y @ w.sum(0)[:, None] + 0 * y, (0, 1), y[:2], batch_first=True,
            args=(square,),
        )  # fmt: skip
    # One number for each entry looks like one for each sample, and equal rates do not tell.
    shared, three = torch.ones(3, dtype=torch.float64), torch.arange(9.0).double().reshape(3, 3)
    for fun, start in ((lambda t, y, w: -w * y, three), (lambda t, y, w: w * t + 0 * y, 0 * three)):
        with pytest.raises(ValueError, match="another rate alone than in the batch"):
            adjsim.solve_ivp(fun, (0, 1), start, batch_first=True, args=(shared,))

    def level(t, y, w):
        return (w * y).sum(-1)

    with pytest.raises(ValueError, match="event 0 gives sample 0 another value alone"):
        adjsim.solve_ivp(
            lambda t, y, w: -y, (0, 1), three, events=level, batch_first=True, args=(shared,)
        )
    with pytest.raises(TypeError, match="args must be a tuple; got"):
        adjsim.ODE(lambda t, y, k: -y, args=rate)
    with pytest.raises(TypeError, match="the state and 2 args"):
        adjsim.ODE(lambda t, y, k: -y, args=(1.0, 2.0))
