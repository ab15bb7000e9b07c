"""Right-hand sides that jump: with an event on the switching surface the gradient is right, without
one it is refused.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy.integrate
import torch

import adjsim

METHODS = ["RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA"]
ADJOINTS = ["interpolate", "checkpoint", "backsolve"]
# RK23 takes many steps.
RTOL = {"RK23": 1e-6}


def leaf(x):
    return torch.tensor(x, requires_grad=True)


def surface(level):
    def event(t, y, *args):
        return y[0] - level

    event.reset = lambda t, y, *args: y
    return event


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("method", METHODS)
def test_twice_as_fast_above(method, adjoint):
    """y' = 1 below c and 2 above, from y0 = 0.1 with c = 1: y(2) = c + 2 (2 - (c - y0))."""
    start, c = leaf([0.1]), leaf(1.0)
    fun = lambda t, y, c: torch.where(y < c, 1.0, 2.0)  # noqa: E731
    found = adjsim.solve_ivp(
        fun,
        (0, 2),
        start,
        method,
        events=surface(c),
        args=(c,),
        rtol=1e-6,
        atol=1e-9,
        adjoint=adjoint,
    )
    found.y[0, -1].backward()
    assert float(found.y[0, -1].detach()) == pytest.approx(3.2, abs=1e-4)
    assert float(start.grad) == pytest.approx(2.0, abs=1e-9)
    assert float(c.grad) == pytest.approx(-1.0, abs=1e-9)


def pushed(t, y, a, b, c):
    """Pushed by a below c and by b above, with a second entry that sees the push as well."""
    push = torch.where(y[0] < c, a, b)
    return torch.stack([push + 0.2 * y[1] * torch.cos(t), torch.sin(t) * push - y[1]])


SPANS = {"forward": (0.3, 2.0, [0.1, 0.4]), "backward": (2.0, 0.3, [1.9, 0.2])}


def by_phases(span, values):
    """y(t1) of the same problem, each phase with its own constant push."""
    begin, end, _ = SPANS[span]
    *start, a, b, c = values
    crossing = lambda t, y: y[0] - c  # noqa: E731
    crossing.terminal = True
    options = {"method": "DOP853", "rtol": 1e-13, "atol": 1e-14}
    for push in (a, b) if span == "forward" else (b, a):

        def fun(t, y, push=push):
            return [push + 0.2 * y[1] * np.cos(t), np.sin(t) * push - y[1]]

        events = crossing if begin == SPANS[span][0] else None
        found = scipy.integrate.solve_ivp(fun, (begin, end), start, events=events, **options)
        begin, start = found.t[-1], found.y[:, -1]
    assert begin == end
    return start @ np.array([1.0, -0.6])


@functools.cache
def differences(span):
    at, h = np.array([*SPANS[span][2], 0.8, 1.7, 1.0]), 1e-4
    return [
        (by_phases(span, at + h * e) - by_phases(span, at - h * e)) / (2 * h) for e in np.eye(5)
    ]


PAIRS = [
    pytest.param(
        method,
        adjoint,
        marks=[]
        if method == "RK45" or (method, adjoint) == ("Radau", ADJOINTS[0])
        else [pytest.mark.slow if adjoint == ADJOINTS[0] else pytest.mark.marathon],
    )
    for method in METHODS
    for adjoint in ADJOINTS
]


@pytest.mark.parametrize("span", list(SPANS))
@pytest.mark.parametrize(("method", "adjoint"), PAIRS)
def test_rates_and_surface_as_parameters(method, adjoint, span):
    """Start, both rates and the level of the surface, forward and backward in time; a step over the
    jump has errors of its own, a few times those of others (implicit methods miss their tolerance
    by more there: a thousand)."""
    begin, end, start = SPANS[span]
    inputs = [leaf(start), leaf(0.8), leaf(1.7), leaf(1.0)]
    rtol = RTOL.get(method, 1e-8)
    found = adjsim.solve_ivp(
        pushed, (begin, end), inputs[0], method, events=surface(inputs[3]), args=tuple(inputs[1:]),
        adjoint=adjoint, rtol=rtol,
        atol=rtol / 10,
    )  # fmt: skip
    (found.y[:, -1] @ torch.tensor([1.0, -0.6])).backward()
    grads = torch.cat([x.grad.reshape(-1) for x in inputs]).numpy()
    allowed = rtol * (1000 if method in ("Radau", "BDF", "LSODA") else 100)
    np.testing.assert_allclose(grads, differences(span), rtol=allowed, atol=allowed + 1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_that_sets_a_time(method):
    """A drive that is switched off at t = c: y(2) = 3 c."""
    c = leaf(0.7)
    event = lambda t, y: t - c  # noqa: E731
    event.reset = lambda t, y: y
    found = adjsim.solve_ivp(
        lambda t, y: torch.where(t < c, 3.0, 0.0) + 0 * y,
        (0, 2),
        [0.0],
        method,
        events=event,
        rtol=1e-6,
    )
    found.y[0, -1].backward()
    assert float(found.y[0, -1].detach()) == pytest.approx(2.1, abs=1e-4)
    assert float(c.grad) == pytest.approx(3.0, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_at_the_surface_has_the_rate_from_before(dtype):
    """Its time derivative, through t_events and y_events, and at the end that a terminal event
    makes.
    """
    c = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    fun = lambda t, y: torch.where(y[0] < 1.0, 1.0, 2.0) * torch.tensor([1.0, 3.0], dtype=dtype)  # noqa: E731
    for terminal in (True, False):
        event = surface(c)
        event.terminal = terminal
        if terminal:
            del event.reset
        start = torch.tensor([0.1, 0.0], dtype=dtype)
        found = adjsim.solve_ivp(fun, (0, 2), start, events=event, rtol=1e-6, atol=1e-8)
        for of, answer in ((found.t_events[0][0], 1.0), (found.y_events[0][0, 1], 3.0)):
            (grad,) = torch.autograd.grad(of, c, retain_graph=True)
            assert float(grad) == pytest.approx(answer, rel=1e-5)
        if terminal:
            (grad,) = torch.autograd.grad(found.y[1, -1], c)
            assert float(grad) == pytest.approx(3.0, rel=1e-5)


def test_a_reset_with_a_jump_on_its_surface():
    """A ball that bounces from a floor with y -> e v, in air that is thicker below: f^+ and f^- are
    those above.
    """
    e = leaf(0.8)

    def fun(t, y, e):
        return torch.stack([y[1], torch.where(y[0] <= 0, -50.0, -9.81) + 0 * y[1]])

    def floor(t, y, e):
        return y[0]

    floor.reset, floor.direction = lambda t, y, e: torch.stack([y[0], -e * y[1]]), -1
    found = adjsim.solve_ivp(
        fun, (0, 0.8), [1.0, 0.0], events=floor, args=(e,), rtol=1e-9, atol=1e-11
    )
    found.y[0, -1].backward()
    te = (2 / 9.81) ** 0.5
    assert float(e.grad) == pytest.approx(9.81 * te * (0.8 - te), rel=1e-6)


def test_sliding_is_refused():
    """Dry friction pushes back from both sides."""
    fun = lambda t, y: torch.where(y > 1.0, -1.0, 1.0)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"slides along event 0 from t = 0\.(9|89)"):
        adjsim.solve_ivp(fun, (0, 2), leaf([0.1]), events=surface(1.0), rtol=1e-6)
    event = surface(1.0)
    event.direction = 1
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"slides along event 0 from t = 0\.(9|89)"),
    ):
        adjsim.solve_ivp(fun, (0, 2), [0.1], events=event, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "rtol"),
    [
        *((method, 1e-4) for method in METHODS),
        *(
            pytest.param(method, 1e-8, marks=pytest.mark.slow)
            for method in METHODS
            if method != "RK23"
        ),
    ],
)
def test_a_jump_that_no_event_marks_is_refused(method, rtol):
    p = leaf(1.0)

    def fun(t, y, p):
        return p * torch.where(y[0] < 1.0, 1.0, 2.0) * torch.stack([1 + 0 * y[1], torch.cos(t)])

    options = {"method": method, "args": (p,), "rtol": rtol, "atol": rtol / 10}
    with pytest.raises(ValueError, match=r"fun jumps at t = 0\.(9|89).*event\.reset = lambda"):
        adjsim.solve_ivp(fun, (0, 2), [0.1, 0.0], **options)
    counted = surface(1.0)
    del counted.reset
    with pytest.raises(ValueError, match="fun jumps"):
        adjsim.solve_ivp(fun, (0, 2), [0.1, 0.0], events=counted, **options)
    with torch.no_grad():
        adjsim.solve_ivp(fun, (0, 2), [0.1, 0.0], **options)


@pytest.mark.parametrize("method", METHODS)
def test_sliding_without_an_event_is_refused(method):
    """Steps pile up without end where nobody stops them."""
    p = leaf(1.0)
    with pytest.raises(ValueError, match=r"fun jumps at t = 0\.(9|89)"):
        adjsim.solve_ivp(
            lambda t, y, p: -p * torch.sign(y - 1.0), (0, 2), [0.1], method, args=(p,), rtol=1e-6
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_jump_at_a_fixed_time_needs_no_event(method):
    """A control that is constant in each of four intervals has the right gradient; a declared
    tensor that may set the time of a jump, and that fun has no derivative by, has not."""
    u = leaf([1.0, -2.0, 0.5, 1.5])
    fun = lambda t, y, u: u[min(int(2 * t), 3)] - y  # noqa: E731
    found = adjsim.solve_ivp(fun, (0, 2), [0.0], method, args=(u,), rtol=1e-6, atol=1e-8)
    found.y[0, -1].backward()
    ends = np.exp(-(2 - np.arange(5) / 2))
    np.testing.assert_allclose(u.grad.numpy(), np.diff(ends), rtol=1e-3)
    switch = leaf(0.7)
    with pytest.raises(ValueError, match=r"fun jumps at t = 0\.7"):
        adjsim.solve_ivp(
            lambda t, y, c: torch.where(t < c, 3.0, 0.0) - y,
            (0, 2),
            [0.0],
            method,
            args=(switch,),
            rtol=1e-6,
        )


KINKS = {
    "kink": lambda t, y, p: p * torch.abs(y - 0.3) - 1.0,
    "relu": lambda t, y, p: p * torch.relu(0.5 - y) - 0.5,
    "narrow": lambda t, y, p: 1.0 + p * torch.sigmoid((y - 0.5) / 1e-4),
    "stiff": lambda t, y, p: -1e5 * (y - p * torch.cos(t)),
    "front": lambda t, y, p: p * y**2 * (1 - y),
    "still": lambda t, y, p: 0 * p * y,
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, marks=() if method in ("RK45", "BDF") else (pytest.mark.slow,))
        for method in METHODS
        for name in KINKS
        if name != "stiff" or method not in ("RK23", "RK45", "DOP853")
    ],
)
def test_no_false_alarm(method, name):
    """Continuous functions, however rapid: a kink has no jump, a narrow transition is wider than
    the steps that resolve it.
    """
    p = leaf(1.0)
    y0 = [1e-2] if name == "front" else [1.0 if name in ("kink", "relu", "still") else 0.0]
    end = 200 if name == "front" else 2
    for rtol in (1e-4, 1e-7):
        assert adjsim.solve_ivp(
            KINKS[name], (0, end), y0, method, args=(p,), rtol=rtol, atol=rtol / 10
        ).y.requires_grad
