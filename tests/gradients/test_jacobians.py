"""Jacobians of solutions: rows of cotangents in one backward pass, and tangents forward in time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import adjsim
from adjsim.core.rows import pulled_rows
from adjsim.ivp import collocation_sweep
from tests.problems import slow_but

TIMES, P, Y0 = torch.tensor([[0.4, 0.8], [1.1, 0.4], [1.0, 0.5]], dtype=torch.float64)
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def pendulum(t, y, p):
    return torch.stack([p[0] * y[1] * torch.cos(t), -p[1] * y[0] ** 2])


def states(p, y0=Y0, times=TIMES, span=(0, 0.8), **options):
    return adjsim.solve_ivp(pendulum, span, y0, t_eval=times, args=(p,), **TIGHT, **options).y


def one_by_one(fun, x):
    """The Jacobian, with one backward pass for each row."""
    return torch.autograd.functional.jacobian(fun, x)


def at_once(fun, x):
    return torch.autograd.functional.jacobian(fun, x, vectorize=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "adjoint"),
    slow_but(
        lambda method, adjoint: adjoint == "interpolate" and method == "RK45",
        [
            ("RK45", "interpolate"),
            ("RK45", "backsolve"),
            ("DOP853", "interpolate"),
            ("Radau", "interpolate"),
            ("BDF", "checkpoint"),
            ("BDF", "interpolate"),
        ],
    ),
)
def test_rows_and_tangents_agree_with_single_rows_and_differences(method, adjoint):
    def fun(p):
        return states(p, method=method, adjoint=adjoint)

    expected, h, step = one_by_one(fun, P), 1e-4, torch.tensor([1.0, 0.0])
    allowed = 1e-6 if method == "BDF" else 1e-7
    rows = at_once(fun, P)
    assert torch.allclose(rows, expected, atol=allowed, rtol=0)
    assert torch.equal(torch.func.jacrev(fun)(P), rows)
    difference = (fun(P + h * step) - fun(P - h * step)) / (2 * h)
    assert torch.allclose(rows[..., 0], difference, atol=max(1e-6, 10 * allowed), rtol=0)
    if adjoint == "interpolate":
        assert torch.allclose(torch.func.jacfwd(fun)(P), expected, atol=allowed, rtol=0)
    else:
        with pytest.raises(NotImplementedError, match='adjoint="interpolate"'):
            torch.func.jacfwd(fun)(P)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fun",
    [
        lambda s: states(P, Y0 * s),
        lambda s: states(P, Y0, TIMES * s),
        lambda s: states(P, Y0 * s, None, (s / 10, 0.8 * s))[:, -1],
        lambda s: states(P, Y0 * s, [0.5, 0.2], (0.8, 0)),
        lambda s: adjsim.solve_ivp(
            pendulum, (0, 0.8), Y0, args=(P * s,), dense_output=True, **TIGHT
        ).sol(TIMES * s),
    ],
    ids=["start", "times", "span", "backwards", "sol"],
)
def test_derivatives_of_starts_and_times(fun):
    x = torch.tensor(0.9)
    expected = one_by_one(fun, x)
    assert float(expected.abs().max()) > 0.1
    assert torch.allclose(torch.func.jacrev(fun)(x), expected, atol=1e-7, rtol=0)
    assert torch.allclose(torch.func.jacfwd(fun)(x), expected, atol=1e-7, rtol=0)


@pytest.mark.slow
def test_parameters_of_modules_by_functional_call():
    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self):
            return adjsim.solve_ivp(
                lambda t, y: torch.tanh(self.net(y)), (0, 1), Y0, t_eval=[1.0], params=self.net,
                **TIGHT,
            ).y  # fmt: skip

    run = Run()

    def fun(weight):
        return torch.func.functional_call(run, {"net.weight": weight}, ())

    weight = run.net.weight.detach()
    expected = one_by_one(fun, weight)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.allclose(jacobian(fun)(weight), expected, atol=1e-7, rtol=0)


@pytest.mark.slow
def test_rows_of_events_of_columns_and_of_complex_states():
    def floor(t, y, p):
        return y[1] - 0.2 * p[0]

    floor.reset = lambda t, y, p: torch.stack([y[0] * p[1], -y[1]])

    def bounced(p):
        found = adjsim.solve_ivp(pendulum, (0, 0.8), Y0, args=(p,), events=floor, **TIGHT)
        return torch.cat([found.y[:, -1], found.t_events[0][:1]])

    def columns(p):
        start = Y0[:, None].expand(2, 3)
        return adjsim.solve_ivp(
            pendulum, (0, 0.8), start, t_eval=TIMES, args=(p,), rtol=1e-6, atol=1e-8
        ).y

    def spiral(p):
        start = torch.tensor([1 + 0.5j, 2j], dtype=torch.complex128)
        found = adjsim.solve_ivp(
            lambda t, y, p: (1j * p[0] - p[1]) * y + 0.1 * y.conj(), (0, 0.8), start, t_eval=TIMES,
            args=(p,), **TIGHT,
        )  # fmt: skip
        return torch.view_as_real(found.y)

    for fun in (bounced, columns, spiral):
        assert torch.allclose(at_once(fun, P), one_by_one(fun, P), atol=1e-7, rtol=0)
    for fun, name in ((bounced, "events"), (columns, "columns")):
        with pytest.raises(ValueError, match=rf"torch\.func .* do not take {name}: use"):
            torch.func.jacrev(fun)(P)


@pytest.mark.marathon
def test_many_stiff_states_have_rows_in_blocks(monkeypatch):
    monkeypatch.setattr(collocation_sweep, "MAX_COLLOCATION_SIZE", 32)
    matrix = -torch.diag(torch.linspace(1, 50, 34))

    def fun(p):
        return adjsim.solve_ivp(
            lambda t, y, p: p[0] * (matrix @ y) - p[1] * y**2, (0, 0.1), torch.ones(34), "Radau",
            [0.1], args=(p,), rtol=1e-6, atol=1e-8,
        ).y[::12, 0]  # fmt: skip

    expected = one_by_one(fun, P)
    assert torch.allclose(at_once(fun, P), expected, atol=1e-7, rtol=0)
    assert torch.allclose(torch.func.jacfwd(fun)(P), expected, atol=1e-7, rtol=0)


def test_an_operation_that_vmap_does_not_know_takes_the_rows_one_by_one():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return torch.from_numpy(2 * x.numpy() * cotangent.numpy())

    x = torch.arange(3.0).requires_grad_()
    (found,) = pulled_rows([Square.apply(x)], [x], [torch.eye(3)])
    assert torch.equal(found, torch.diag(2 * x.detach()))


def test_forward_derivatives_without_torch_func():
    tangent = torch.tensor([1.0, 2.0])
    expected = one_by_one(states, P) @ tangent
    with forward_ad.dual_level(), torch.no_grad():
        found = states(forward_ad.make_dual(P, tangent))
        assert torch.allclose(forward_ad.unpack_dual(found).tangent, expected, atol=1e-7)
        with pytest.raises(ValueError, match="a tensor with a tangent, which was not declared"):
            adjsim.solve_ivp(
                lambda t, y: pendulum(t, y, forward_ad.make_dual(P, tangent)), (0, 0.8), Y0
            )


def test_no_derivative_is_lost_in_silence():
    def captured(p):
        return adjsim.solve_ivp(lambda t, y: pendulum(t, y, p), (0, 0.8), Y0, **TIGHT).y[:, -1]

    def total(p):
        return states(p).sum()

    def mixed(p):
        return torch.func.grad(lambda y: states(p, y).sum())(Y0).sum()

    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(ValueError, match=r"fun reads a tensor that torch\.func"):
            jacobian(captured)(P)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            jacobian(mixed)(P)
    for second in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            second(total)(P)
    p = P.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(mixed(p), p)
    with pytest.raises(ValueError, match=r"torch.vmap over the inputs of solve_ivp"):
        torch.vmap(states)(P.expand(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["RK45", "Radau"])
def test_25_rows_cost_at_most_five_backward_passes(method, monkeypatch):
    """In passes of autograd, of which a backward pass takes several a step."""
    p, grad = P.clone().requires_grad_(), torch.autograd.grad
    y = states(p, times=torch.linspace(0.1, 0.8, 13), method=method).flatten()[:25]

    def passes(cotangents, batched):
        calls = []

        def counted(*given, **settings):
            calls.append(1)
            return grad(*given, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "grad", counted)
            grad(y, p, cotangents, retain_graph=True, is_grads_batched=batched)
        return len(calls)

    one, rows = passes(torch.ones(25), False), passes(torch.eye(25), True)
    assert one > 10
    assert rows < 5 * one
