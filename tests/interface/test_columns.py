"""solve_ivp with problems in columns: SciPy's values in each column, shapes, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate
import torch
from torch import nn

import adjsim
from adjsim.ivp.columns import COLUMN_METHODS

METHODS = ["RK45", "Rodas4"]
MU = [0.1, 1.0, 30.0, 4.0]


def van_der_pol(t, y, mu):
    return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0] + 0.1 * torch.sin(t)])


def start() -> torch.Tensor:
    return torch.tensor([[2.0, 1.0, -2.0, 0.3], [0.0, -0.7, 0.1, 0.0]])


def scipy_column(j: int, method: str, span, t_eval=None, start_factor=1.0, **options):
    def rate(t, y):
        return [y[1], MU[j] * (1 - y[0] ** 2) * y[1] - y[0] + 0.1 * np.sin(t)]

    return scipy.integrate.solve_ivp(
        rate, span, start_factor * start()[:, j].numpy(), method, t_eval, True, **options
    )


@pytest.mark.parametrize("span", [(0.0, 2.0), (1.0, 0.97)])
@pytest.mark.parametrize(
    "options", [{"rtol": 1e-6, "atol": [1e-7, 1e-8]}, {"max_step": 0.3}, {"first_step": 0.03}, {}]
)
def test_every_column_takes_the_steps_of_scipy(options, span):
    """The same number of steps, and the same states.

    They differ by less than what a few roundings of the start make of SciPy's own states.
    """
    times = np.linspace(*span, 7)
    found = adjsim.solve_ivp(
        van_der_pol, span, start(), "RK45", times, True, args=(torch.tensor(MU),), **options
    )
    inside = np.linspace(*span, 5)
    for j in range(4):
        known = scipy_column(j, "RK45", span, times, **options)
        assert int(found.steps[j]) == len(known.sol.ts) - 1
        moved = [
            scipy_column(j, "RK45", span, times, 1 + k * 1e-15, **options) for k in (1, -1, 3, -3)
        ]
        rounding = max(np.abs(x.y - known.y).max() for x in moved)
        close = {"rtol": 0, "atol": 2 * rounding}
        np.testing.assert_allclose(found.y[..., j].numpy(), known.y, **close)
        np.testing.assert_allclose(found.sol(inside)[..., j].numpy(), known.sol(inside), **close)


@pytest.mark.slow
@pytest.mark.parametrize("rtol", [1e-4, pytest.param(1e-6, marks=pytest.mark.slow)])
def test_stiff_values(rtol):
    """Within thirty times the tolerance, which is what local errors sum to here."""
    times = [0.1, 0.5, 1.5]
    args, options = (torch.tensor(MU),), {"rtol": rtol, "atol": rtol / 100}
    found = adjsim.solve_ivp(van_der_pol, (0, 2), start(), "Rodas4", times, args=args, **options)
    for j in range(4):
        known = scipy_column(j, "Radau", (0, 2), times, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.y[..., j].numpy(), known.y, rtol=30 * rtol, atol=30 * rtol)
    assert found.njev == found.nlu > 0


@pytest.mark.parametrize(
    ("method", "order", "inside", "steps"), [("RK45", 5, 4, 40), ("Rodas4", 4, 3, 8)]
)
@torch.no_grad()
def test_orders(method, order, inside, steps):
    """Of the result over a fixed time, and of the interpolant in one step (one more)."""

    def rate(t, y):
        return torch.stack([y[1] + torch.sin(3 * t) * y[0], -(y[0] ** 3) + torch.cos(t) - y[1] * t])

    def end(steps, method, length):
        h, y = torch.full((1,), length / steps), torch.tensor([[1.0], [0.3]])
        for k in range(steps):
            y = COLUMN_METHODS[method](rate, k * h, h, y, None).end
        return y

    exact = end(160, "RK45", 0.8)
    errors = [float((end(n, method, 0.8) - exact).abs().max()) for n in (steps, 2 * steps)]
    # An order is found to a third, since terms of higher order contribute.
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.34)
    errors = []
    for h in (0.05, 0.025):
        zero, y = torch.zeros(1), torch.tensor([[1.0], [0.3]])
        coefficients = COLUMN_METHODS[method](rate, zero, zero + h, y, None).polynomial()
        x = 0.37
        found = y + sum(c * x ** (k + 1) for k, c in enumerate(coefficients))
        errors.append(float((found - end(8, "RK45", x * h)).abs().max()))
    assert np.log2(errors[0] / errors[1]) > inside + 0.66


def test_a_stiff_component_is_damped_at_once():
    """L-stability: y' = -1e9 (y - cos t) - sin t in steps that do not see the decay."""
    found = adjsim.solve_ivp(lambda t, y: -1e9 * (y - torch.cos(t)) - torch.sin(t), (0, 2),
                             torch.tensor([[1.0, 5.0]]), "Rodas4", rtol=1e-5)  # fmt: skip
    torch.testing.assert_close(found.y[0, -1], torch.full((2,), np.cos(2.0)), rtol=1e-5, atol=0.0)
    assert int(found.steps.max()) < 50


def test_shapes():
    args, times = (torch.tensor(MU),), [0.5, 1.0, 1.5]
    found = adjsim.solve_ivp(van_der_pol, (0, 2), start(), "RK45", times, True, args=args)
    assert found.t.shape == (3,)
    assert found.y.shape == (2, 3, 4)
    assert found.success
    assert found.status == 0
    assert found.t_events is None
    torch.testing.assert_close(found.sol(0.5), found.y[:, 0], rtol=1e-13, atol=0.0)
    assert found.sol([[0.5, 1.0, 0.0, 2.0], [0.0, 0.0, 2.0, 1.0]]).shape == (2, 2, 4)
    assert found.sol(torch.zeros(0)).shape == (2, 0, 4)
    ends = adjsim.solve_ivp(van_der_pol, (0, 2), start(), args=args)
    assert torch.equal(ends.t, torch.tensor([0.0, 2.0]))
    assert torch.equal(ends.y[:, 0], start())
    assert torch.equal(ends.y[:, -1], found.sol(2.0))
    own = adjsim.solve_ivp(van_der_pol, (0, [1.0, 2.0, 3.0, 2.0]), start(), args=args)
    assert torch.equal(own.t, torch.tensor([[0.0] * 4, [1.0, 2.0, 3.0, 2.0]]))
    torch.testing.assert_close(own.y[:, -1, 1], ends.y[:, -1, 1], rtol=1e-13, atol=0.0)
    rows = torch.tensor([[0.5, 1.0, 1.5, 0.0], [1.0, 1.5, 2.0, 0.0]])
    read = adjsim.solve_ivp(van_der_pol, (0, 2), start(), t_eval=rows, args=args)
    torch.testing.assert_close(read.y[:, 0, 0], found.y[:, 0, 0], rtol=1e-13, atol=0.0)
    assert torch.equal(read.y[:, 1, 3], start()[:, 3])
    none = adjsim.solve_ivp(van_der_pol, (0, 2), start().requires_grad_(), t_eval=[], args=args)
    assert none.y.shape == (2, 0, 4)
    none.y.sum().backward()
    listed = adjsim.solve_ivp(van_der_pol, (0, 2), list(start()), args=args)
    assert torch.equal(listed.y, ends.y)
    nested = adjsim.solve_ivp(van_der_pol, (0, 2), start().tolist(), args=args)
    assert torch.equal(nested.y, ends.y)


@pytest.mark.parametrize("method", METHODS)
def test_single_precision_and_inference_mode(method):
    """The arguments of fun have the dtype of y0; steps are computed in double precision."""

    def rate(t, y):
        assert t.dtype == y.dtype == torch.float32
        assert t.shape == y.shape[1:]
        return [y[1], -y[0]]

    y0 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float32, requires_grad=True)
    found = adjsim.solve_ivp(rate, (0, 1), y0, method, rtol=1e-6)
    assert found.y.dtype == found.t.dtype == torch.float32
    turn = torch.tensor([[np.cos(1), np.sin(1)], [-np.sin(1), np.cos(1)]], dtype=torch.float32)
    torch.testing.assert_close(found.y[:, -1], turn, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.y[0, -1].sum(), y0)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad, turn[:, 0, None].expand(2, 2).abs(), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        again = adjsim.solve_ivp(rate, (0, 1), y0.detach() * 1, method, rtol=1e-6)
    assert torch.equal(again.y, found.y.detach())


@pytest.mark.parametrize("method", METHODS)
def test_a_column_that_blows_up_is_named(method):
    """y' = y^2 blows up at t = 1 / y0; the other columns end before."""
    y0 = torch.tensor([[0.1, 0.2, 2.0, 0.1]])
    with pytest.raises(RuntimeError, match=rf"{method} failed in column 2 at t = 0\.[45]"):
        adjsim.solve_ivp(lambda t, y: y**2, (0, 1), y0, method)
    ended = adjsim.solve_ivp(lambda t, y: y**2, (0, [1, 1, 0.4, 1]), y0, method, rtol=1e-7)
    torch.testing.assert_close(ended.y[0, -1, 2], torch.tensor(10.0), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_rates_that_are_not_finite_are_named(method):
    y0 = torch.tensor([[1.0, 1.0, 1.0]])
    later = torch.tensor([9.0, 0.5, 9.0])
    with pytest.raises(RuntimeError, match=r"failed in column 1 at t = 0\.[45]"):
        adjsim.solve_ivp(lambda t, y: y / (t < later), (0, 1), y0, method)
    with pytest.raises(ValueError, match="not finite in column 2 at its start, t = 0; 1 of 3"):
        adjsim.solve_ivp(lambda t, y: y * torch.tensor([1.0, 1.0, torch.inf]), (0, 1), y0, method)
    y0[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"y0 must be finite; got nan in entry 0 of column 1"):
        adjsim.solve_ivp(lambda t, y: y, (0, 1), y0, method)


def resetting(t, y):
    return y[0] - 0.5


resetting.reset = lambda t, y: y + y.mean(1, keepdim=True)

REFUSED = [
    ({"method": "Radau"}, "method must be one of RK45, Rodas4; got 'Radau'. \"Rodas4\" is for"),
    ({"adjoint": "backsolve"}, "adjoint must be one of interpolate, checkpoint; got 'backsolve'"),
    ({"adjoint_rtol": 1e-3}, "take the options rtol, atol, max_step, first_step; got 'adj"),
    ({"events": lambda t, y: y}, r"event 0 must return .* for each of the 3 columns; got \(2, 3\)"),
    (
        {"events": lambda t, y: y.sum() + 0 * t},
        "event 0 of column 0 changes when only other columns",
    ),
    ({"events": resetting}, "the reset of event 0 of column 0 changes when only other columns"),
    ({"t_span": (0, [1.0, 2.0])}, r"shape \(3\), one for each column; got shape \(2,\)"),
    ({"t_span": (0, [1.0, torch.inf, 2.0])}, "two finite times; got 0.0 and inf in column 1"),
    ({"t_eval": [0.5, 1.5]}, r"got 1.5 for column 0, whose span is \(0, 1\)"),
    ({"t_eval": [0.5, 0.2]}, "sorted"),
    ({"t_eval": torch.zeros(2, 2)}, r"\(times, 3\)"),
    ({"atol": [1e-6, 1e-6, 1e-6]}, r"atol must be a number or of shape \(2,\)"),
    ({"atol": -1.0}, "atol must be zero or positive; got -1.0"),
    ({"atol": [1e-6, torch.nan]}, "atol must be zero or positive; got "),
    ({"rtol": torch.nan}, "rtol must be zero or positive; got nan"),
    ({"max_step": 0.0}, "max_step must be positive; got 0.0"),
    ({"first_step": -1.0}, "first_step must be positive; got -1.0"),
    ({"y0": torch.ones(2, 3, dtype=torch.complex128)}, "must be real"),
    ({"y0": torch.ones(2, 0)}, r"y0 has no entries: its shape is \(2, 0\)"),
    ({"fun": lambda t, y: y[:1]}, r"shape \(1, 3\) for a state of shape \(2, 3\)"),
    ({"fun": lambda t, y: y - y.mean(1, keepdim=True)}, "column 0 of y0 changes when only other"),
    # A column of reference, and terms that are zero at the start.
    ({"fun": lambda t, y: y - y[:, :1]}, "column 1 of y0 changes when only other"),
    ({"fun": lambda t, y: t * y.sum(1, keepdim=True)}, "column 0 of y0 changes when only other"),
    ({"fun": lambda t, y: y * y[:, :1], "y0": torch.zeros(2, 3)}, "column 1 of y0 changes"),
    ({"fun": lambda t, y: y.mul_(-1)}, "fun writes into y"),
    ({"fun": lambda t, y: y * torch.rand(())}, "draw no random numbers"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refused(changed, message):
    given = {"fun": lambda t, y: -y, "t_span": (0, 1), "y0": torch.ones(2, 3), **changed}
    with pytest.raises(ValueError, match=message):
        adjsim.solve_ivp(**given)


def test_refused_types():
    with pytest.raises(TypeError, match="fun computes with NumPy"):
        adjsim.solve_ivp(lambda t, y: -np.asarray(y), (0, 1), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"y0 must be of shape \(n,\) or \(n, batch\)"):
        adjsim.solve_ivp(lambda t, y: -y, (0, 1), torch.ones(2, 2, 2))
    found = adjsim.solve_ivp(lambda t, y: -y, (0, 1), torch.ones(2, 3), dense_output=True)
    with pytest.raises(ValueError, match=r"got 1.1 for column 0, whose span is \(0, 1\)"):
        found.sol(1.1)


def test_gradients_that_would_be_lost_are_refused():
    """An undeclared tensor, a second derivative, or a function changed since."""
    a = torch.ones((), requires_grad=True)
    y0 = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(ValueError, match="'a', which requires grad and was not declared"):
        adjsim.solve_ivp(lambda t, y: -a * y, (0, 1), y0)
    late = adjsim.solve_ivp(lambda t, y: -y if t[0] < 0.5 else -a * y, (0, 1), y0, max_step=0.01)
    with pytest.raises(ValueError, match="'a', which requires grad and was not declared"):
        late.y.sum().backward()
    found = adjsim.solve_ivp(lambda t, y, a: -a * y, (0, 1), y0, args=(a,))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(found.y.sum(), y0, create_graph=True)
    with torch.no_grad():
        a += 1
    found.y[0, -1, 0].backward()
    # Ten times the default tolerance. With the changed number it would be -exp(-2).
    assert float(a.grad) == pytest.approx(-np.exp(-1.0), rel=1e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adjoint", ["interpolate", "checkpoint"])
def test_a_changed_function_is_refused(method, adjoint, monkeypatch):
    class Decay(nn.Module):
        factor = 1.0

        def forward(self, t, y):
            return -self.factor * y

    fun, y0 = Decay(), torch.ones(1, 2, requires_grad=True)
    found = adjsim.solve_ivp(fun, (0, 1), y0, method, adjoint=adjoint)
    monkeypatch.setattr(Decay, "factor", 1.5)
    with pytest.raises(RuntimeError, match="fun has changed since the forward solution"):
        found.y.sum().backward()
