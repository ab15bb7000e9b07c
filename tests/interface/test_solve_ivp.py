"""solve_ivp is SciPy's: its values to the last bit, its meaning, its errors; and what it refuses of
its own.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings

import numpy as np
import pytest
import scipy.integrate
import torch
from torch import nn

import adjsim
import adjsim.ivp.piecewise
from adjsim.ivp import forward_states
from adjsim.ivp.piecewise import Piece
from adjsim.ivp.solve import METHODS as METHODS_OF_SCIPY
from tests.problems import slow_but

METHODS = ["RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA"]
IMPLICIT = METHODS[3:]


def spiral(t, y, k):
    return torch.stack([y[1] + 0.1 * torch.sin(3 * t), -k * y[0] - 0.2 * y[1] * y[0] ** 2])


def as_numpy(function, *args):
    """The same function of NumPy arrays."""

    def called(t, y):
        with torch.no_grad():
            return function(torch.tensor(t), torch.tensor(y), *args).numpy()

    for name in ("terminal", "direction"):
        if hasattr(function, name):
            setattr(called, name, getattr(function, name))
    return called


KINDS = ["steps", "t_eval", "dense", "dense-t_eval", "events", "terminal", "counted"]


@pytest.mark.parametrize(
    ("method", "adjoint", "kind", "span"),
    slow_but(
        lambda method, adjoint, kind, span: (
            span[0] == 0
            and (
                adjoint is None
                or (adjoint == "checkpoint" and method in ("RK45", "Radau", "LSODA"))
            )
        ),
        itertools.product(
            METHODS,
            [None, "interpolate", "checkpoint", "backsolve"],
            KINDS,
            [(0.0, 4.0), (4.0, 0.0)],
        ),
        # The steps that an adjoint keeps do not depend on the direction; backsolve keeps none.
        marathon=lambda method, adjoint, kind, span: (
            adjoint == "backsolve" or (adjoint is not None and span[0] != 0)
        ),
    ),
)
def test_values_are_scipys_to_the_last_bit(method, adjoint, kind, span):
    """Whether a gradient is asked for, by any adjoint, or not."""
    grad = adjoint is not None
    k = torch.tensor(2.0, requires_grad=grad)

    def event(t, y, k):
        return y[0] - 0.2

    def slow(t, y, k):
        return y[1] * k

    event.terminal = {"terminal": True, "counted": 2}.get(kind, False)
    slow.direction = -1
    events = [event, slow] if kind in ("events", "terminal", "counted") else None
    ours = {"t_eval": None, "dense_output": kind.startswith("dense"), "rtol": 1e-5, "atol": 1e-8}
    if "t_eval" in kind:
        ours["t_eval"] = np.linspace(*span, 7)[1:]
    found = adjsim.solve_ivp(
        spiral,
        span,
        [1.0, 0.0],
        method,
        events=events,
        args=(k,),
        adjoint=adjoint or "interpolate",
        **ours,
    )
    theirs = None if events is None else [as_numpy(e, k) for e in events]
    known = scipy.integrate.solve_ivp(
        as_numpy(spiral, k), span, [1.0, 0.0], method, events=theirs, **ours
    )
    assert np.array_equal(found.t.detach().numpy(), known.t)
    assert np.array_equal(found.y.detach().numpy(), known.y)
    assert (found.status, found.message, found.success) == (
        known.status,
        known.message,
        known.success,
    )
    if kind.startswith("dense"):
        times = np.linspace(*span, 33)
        assert np.array_equal(found.sol(times).detach().numpy(), known.sol(times))
        assert np.array_equal(found.sol(1.3).detach().numpy(), known.sol(1.3))
        assert (found.sol.t_min, found.sol.t_max) == (known.sol.t_min, known.sol.t_max)
    else:
        assert found.sol is known.sol is None
    if events is None:
        assert found.t_events is found.y_events is None
        return
    for mine, other in zip(
        (*found.t_events, *found.y_events), (*known.t_events, *known.y_events), strict=True
    ):
        assert np.array_equal(mine.detach().numpy().ravel(), other.ravel())
    if not grad:
        assert (found.nfev, found.njev, found.nlu) == (known.nfev, known.njev, known.nlu)


@pytest.mark.parametrize(
    ("method", "jac"),
    slow_but(
        lambda method, jac: method == "LSODA" and jac is None,
        [(m, jac) for m in METHODS for jac in (None, "autodiff") if not jac or m in IMPLICIT],
        marathon=lambda method, jac: jac is not None or method in ("Radau", "BDF"),
    ),
)
def test_checkpoints_repeat_the_very_steps(method, jac, monkeypatch):
    """Every interpolant of a way that is solved again, over several levels of checkpoints, is that
    of the way forward.
    """
    monkeypatch.setattr(forward_states, "SEGMENT_STEPS", 4)
    solver_of = METHODS_OF_SCIPY[method]
    dense, kept = (
        forward_states.StoredInterpolants(solver_of),
        forward_states.Checkpointed(solver_of),
    )
    fun = as_numpy(lambda t, y: spiral(t, y, torch.tensor(20.0)))
    options = (
        {"jac": lambda t, y: np.array([[0.0, 1.0], [-20 - 0.4 * y[1] * y[0], -0.2 * y[0] ** 2]])}
        if jac
        else {}
    )
    options |= {"rtol": 1e-5 if method == "RK23" else 1e-8, "atol": 1e-10}
    solver = solver_of(
        fun, 0.0, np.array([1.0, 0.0]), 4.0 if method in ("RK23", "Radau") else 8.0, **options
    )
    dense(solver), kept(solver)
    while solver.status == "running":
        solver.step()
        dense(solver), kept(solver)
    assert len(dense.interpolants) > 60
    whole, end, pieces = dense.solution(), float(dense.times[-1]) - 0.05, 0
    for _ in range(2):
        now = end
        for start, path in kept.backward([(end, whole(end))]):
            for t in np.linspace(start, now, 7)[1:-1]:
                assert np.array_equal(path(t), whole(t))
            now, pieces = start, pieces + 1
        assert now == 0.0
    assert pieces > 10
    assert len(kept.kept) <= 8


@pytest.mark.parametrize(
    ("method", "jac"),
    [
        (method, jac)
        for method in ("Radau", "BDF", "LSODA")
        for jac in ("autodiff", "function", "matrix")
        if (method, jac) != ("LSODA", "matrix")
    ],
)
def test_jacobians(method, jac):
    matrix = torch.tensor([[-1.0, 0.5], [0.2, -30.0]])
    given = {"autodiff": "autodiff", "function": lambda t, y, a: a, "matrix": matrix}[jac]
    found = adjsim.solve_ivp(
        lambda t, y, a: a @ y, (0, 2), [1.0, 2.0], method, args=(matrix,), jac=given, rtol=1e-8
    )
    their = matrix.numpy() if jac == "matrix" else lambda t, y: matrix.numpy()
    known = scipy.integrate.solve_ivp(
        as_numpy(lambda t, y: matrix @ y), (0, 2), [1.0, 2.0], method, jac=their, rtol=1e-8
    )
    assert np.array_equal(found.y.numpy(), known.y)
    assert found.njev == known.njev


def test_a_vectorized_function():
    k = torch.tensor(2.0, requires_grad=True)
    seen = []

    def fun(t, y, k):
        seen.append(y.ndim)
        return torch.stack([y[1], -k * y[0]])

    grads = []
    for vectorized in (True, False):
        found = adjsim.solve_ivp(
            fun, (0, 2), [1.0, 0.0], "Radau", vectorized=vectorized, args=(k,), rtol=1e-6, atol=1e-9
        )
        grads.append(torch.autograd.grad(found.y[0, -1], k)[0])
        if vectorized:
            assert set(seen) == {2}
    torch.testing.assert_close(*grads, rtol=1e-9, atol=0)


def test_what_fun_may_be():
    """A list of numbers and tensors, a module, a method of one, a partial: each with the gradient
    of its parameters.
    """

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(0.7))

        def forward(self, t, y):
            return -self.k * y

        def with_factor(self, factor, t, y):
            return -self.k * y * factor

    module = Decay()
    rate = lambda t, y, k: [-k * y[0], 0.0]  # noqa: E731
    grads = []
    for fun in (module, module.forward, functools.partial(module.with_factor, 1.0)):
        found = adjsim.solve_ivp(fun, (0, 1), [1.0, 2.0], rtol=1e-8)
        grads.append(torch.autograd.grad(found.y[0, -1], module.k)[0])
    found = adjsim.solve_ivp(rate, (0, 1), [1.0, 2.0], args=(module.k,), rtol=1e-8)
    grads.append(torch.autograd.grad(found.y[0, -1], module.k)[0])
    for grad in grads:
        torch.testing.assert_close(grad, -torch.exp(torch.tensor(-0.7)), rtol=1e-6, atol=0)


def test_params_may_be_modules_or_what_has_a_history():
    net, source = nn.Linear(1, 1), torch.tensor(0.3, requires_grad=True)
    k = source**2
    found = adjsim.solve_ivp(lambda t, y: net(y) - k * y, (0, 1), [1.0], params=[net, k], rtol=1e-6)
    found.y[0, -1].backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in net.parameters())
    assert source.grad is not None
    again = adjsim.solve_ivp(
        lambda t, y: net(y) - k * y,
        (0, 1),
        [1.0],
        params=(x for x in [*net.parameters(), k]),
        rtol=1e-6,
    )
    assert again.y.requires_grad


stiffness = torch.tensor(2.0, requires_grad=True)


def test_an_undeclared_tensor_is_named():
    inside = torch.tensor(1.0, requires_grad=True)

    class Spring(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = [torch.tensor(1.0)]
            self.strength = torch.tensor(2.0, requires_grad=True)

        def forward(self, t, y):
            return -self.strength * y

    rows = [
        (lambda t, y: -stiffness * y, "'stiffness'"),
        (lambda t, y: -inside * y, "'inside'"),
        (Spring(), "'strength' .a plain attribute of Spring"),
        (lambda t, y: -(inside + 1) * y, "'inside'"),
    ]
    for fun, name in rows:
        with pytest.raises(ValueError, match=f"fun reads {name}.*params="):
            adjsim.solve_ivp(fun, (0, 1), [1.0])
    with torch.no_grad():
        adjsim.solve_ivp(rows[0][0], (0, 1), [1.0])


def test_more_names():
    w = torch.tensor(1.0, requires_grad=True)

    class Callable:
        def __init__(self):
            self.rate = w

        def __call__(self, t, y):
            return -self.rate * y

    with pytest.raises(ValueError, match=r"'w' .an argument of a partial"):
        adjsim.solve_ivp(functools.partial(lambda t, y, w: -w * y, w=w), (0, 1), [1.0])
    with pytest.raises(ValueError, match=r"'rate' .a plain attribute of Callable"):
        adjsim.solve_ivp(Callable(), (0, 1), [1.0])


def test_an_undeclared_tensor_that_is_read_late_and_nothing_else_declared():
    late, y0 = torch.tensor(1.0, requires_grad=True), torch.tensor([1.0], requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y: -y * (late if t > 0.5 else 1.0), (0, 1), y0, rtol=1e-6)
    with pytest.raises(ValueError, match="fun reads 'late'"):
        found.y[0, -1].backward()


def test_what_comes_from_a_declared_tensor_is_refused_or_an_argument():
    """Its gradient would be counted twice, or its graph be gone at the second step."""
    k = torch.tensor(0.5, requires_grad=True)
    grown = k.exp()
    with pytest.raises(ValueError, match="computed from a declared one before the solution"):
        adjsim.solve_ivp(lambda t, y: -grown * y, (0, 1), [1.0], params=[k], rtol=1e-6)
    both = adjsim.solve_ivp(
        lambda t, y: -grown * k * y, (0, 1), [1.0], params=[k, grown], rtol=1e-9, atol=1e-12
    )
    (counted_once,) = torch.autograd.grad(both.y[0, -1], k, retain_graph=True)
    for fun, args in (
        (lambda t, y, a, b: -a * b * y, (k, grown)),
        (lambda t, y, pair: -pair["k"] * pair["grown"][0] * y, ({"k": k, "grown": [grown]},)),
    ):
        found = adjsim.solve_ivp(fun, (0, 1), [1.0], args=args, rtol=1e-9, atol=1e-12)
        (grad,) = torch.autograd.grad(found.y[0, -1], k, retain_graph=True)
        rate = 0.5 * np.exp(0.5)
        assert float(grad) == pytest.approx(float(counted_once), rel=1e-7)
        assert float(grad) == pytest.approx(-np.exp(-rate) * (np.exp(0.5) + rate), rel=1e-7)


def test_an_undeclared_tensor_that_is_read_late_is_named_too():
    late, k = torch.tensor(1.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    found = adjsim.solve_ivp(
        lambda t, y: -k * y * (late if t > 0.5 else 1.0), (0, 1), [1.0], params=[k], rtol=1e-6
    )
    with pytest.raises(ValueError, match="fun reads 'late'"):
        found.y[0, -1].backward()


def test_leaves_are_touched_by_backward_alone():
    k, y0 = torch.tensor(2.0, requires_grad=True), torch.tensor([1.0], requires_grad=True)
    found = adjsim.solve_ivp(
        lambda t, y: -k * y, (0, 1), y0, params=[k], rtol=1e-6, dense_output=True
    )
    grads = torch.autograd.grad(found.y[0, -1], [k, y0], retain_graph=True)
    assert k.grad is None
    assert y0.grad is None
    found.y[0, -1].backward()
    assert torch.equal(k.grad, grads[0])
    assert torch.equal(y0.grad, grads[1])


def test_a_parameter_that_is_changed_before_backward_is_one_of_the_next_solution():
    k = torch.tensor(2.0, requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], params=[k], rtol=1e-8)
    with torch.no_grad():
        k.add_(1.0)
    found.y[0, -1].backward()
    assert float(k.grad) == pytest.approx(-np.exp(-2.0), rel=1e-6)
    constant, y0 = torch.tensor(2.0), torch.tensor([1.0], requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y, c: -c * y, (0, 1), y0, args=(constant,), rtol=1e-8)
    constant.fill_(3.0)
    found.y[0, -1].backward()
    assert float(y0.grad) == pytest.approx(np.exp(-2.0), rel=1e-6)


def test_no_second_derivative_in_silence():
    k = torch.tensor(2.0, requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], params=[k], rtol=1e-6)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(found.y[0, -1], k, create_graph=True)
    when = torch.tensor([0.5], requires_grad=True)
    level = torch.tensor(0.5, requires_grad=True)
    saved = adjsim.solve_ivp(lambda t, y: -y, (0, 1), [1.0], t_eval=when, rtol=1e-6)
    crossed = adjsim.solve_ivp(
        lambda t, y: -y, (0, 1), [1.0], events=lambda t, y: y[0] - level, rtol=1e-6
    )
    for out, x in ((saved.y.sum(), when), (crossed.t_events[0].sum(), level)):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(out, x, create_graph=True)


def test_a_loose_gradient_warns_once():
    adjsim.ivp.piecewise._warn_loose.cache_clear()
    k = torch.tensor(2.0, requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch.no_grad():
            adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0])
        adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], params=[k], rtol=1e-6)
        assert not seen
        for _ in range(3):
            adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], params=[k])
    assert len(seen) == 1
    assert "rtol" in str(seen[0].message)
    assert seen[0].filename == __file__


def test_a_failure_has_scipys_words():
    with pytest.raises(
        RuntimeError, match="RK45 failed: Required step size is less than spacing between numbers"
    ):
        adjsim.solve_ivp(lambda t, y: y**2, (0, 2), [1.0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "Euler"}, ValueError, "method must be one of RK23"),
        ({"adjoint": "reverse"}, ValueError, "adjoint must be one of interpolate"),
        ({"args": 2.0}, TypeError, "args must be a tuple"),
        ({"y0": [[[1.0]]]}, ValueError, r"y0 must be of shape \(n,\) or \(n, batch\)"),
        (
            {"fun": lambda t, y: torch.ones(3)},
            ValueError,
            r"fun returned shape \(3,\) for a state of shape \(2,\)",
        ),
        ({"t_eval": [2.0]}, ValueError, "not within `t_span`"),
        ({"t_eval": [0.5, 0.2]}, ValueError, "not properly sorted"),
        ({"t_span": (0, float("nan"))}, ValueError, "two finite times"),
        (
            {"events": lambda t, y: torch.sign(y[0] - 0.5), "requires_grad": True},
            ValueError,
            "does not depend on t or y",
        ),
        ({"jac": "finite"}, ValueError, 'jac must be "autodiff"'),
        ({"rtol": float("nan")}, ValueError, "rtol must be zero or positive; got nan"),
        (
            {"events": lambda t, y: float(y[0]) - 0.9, "requires_grad": True},
            TypeError,
            "event 0 returns float",
        ),
    ],
)
def test_what_is_refused(arguments, error, message):
    arguments = dict(arguments)
    y0 = torch.tensor([1.0, 0.5], requires_grad=arguments.pop("requires_grad", False))
    full = {"fun": lambda t, y: -y, "t_span": (0, 1), "y0": y0, "rtol": 1e-6, **arguments}
    with pytest.raises(error, match=message):
        adjsim.solve_ivp(**full)


def test_a_start_at_an_event_with_a_reset_has_to_say_its_direction():
    """SciPy counts it as an event, whichever way the solution goes."""
    floor = lambda t, y: y[0]  # noqa: E731
    floor.reset = lambda t, y: torch.stack([y[0], -0.5 * y[1]])
    fall = lambda t, y: [y[1], -10.0]  # noqa: E731
    with pytest.raises(ValueError, match="starts at event 0, which has a reset: set its direction"):
        adjsim.solve_ivp(fall, (0, 1.1), [0.0, 5.0], events=floor)
    floor.direction = -1
    found = adjsim.solve_ivp(fall, (0, 1.1), [0.0, 5.0], events=floor, rtol=1e-6)
    torch.testing.assert_close(found.t_events[0], torch.tensor([1.0]))
    again = adjsim.solve_ivp(fall, (0, 0.2), [0.0, -5.0], events=floor, rtol=1e-6)
    torch.testing.assert_close(again.t_events[0], torch.tensor([0.0]), rtol=0, atol=1e-12)
    torch.testing.assert_close(again.y[:, -1], torch.tensor([0.3, 0.5]), rtol=1e-9, atol=1e-9)


def test_a_reset_to_rest_on_the_event_is_refused():
    floor = lambda t, y: y[0]  # noqa: E731
    floor.direction, floor.reset = -1, lambda t, y: 0 * y
    with pytest.raises(RuntimeError, match="at rest on the event"):
        adjsim.solve_ivp(
            lambda t, y: torch.stack([y[1], -1.0 * (y[0] > 0)]), (0, 3), [1.0, 0.0], events=floor
        )


def test_a_reset_that_writes_in_place():
    floor = lambda t, y: y[0]  # noqa: E731

    def bounce(t, y):
        y[1] *= -0.9
        return y

    floor.reset = bounce
    found = adjsim.solve_ivp(lambda t, y: [y[1], -1.0], (0, 2), [1.0, 0.0], events=floor, rtol=1e-9)
    torch.testing.assert_close(
        found.y_events[0][0], torch.tensor([0.0, -(2**0.5)]), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wall_that_rounding_does_not_put_on_both_sides(dtype):
    """Straight flights inside of a circle: each wall is hit once, whatever rounding leaves of the
    distance from it.
    """

    def rim(t, y):
        return y[0] ** 2 + y[1] ** 2 - 2.3

    def reflect(t, y):
        normal = y[:2] / y[:2].norm()
        return torch.cat([y[:2], y[2:] - 2 * (y[2:] @ normal) * normal])

    rim.reset = reflect
    for angle in np.linspace(0.1, 6.1, 13):
        start = torch.tensor([0.3, -0.2, np.cos(angle), np.sin(angle)], dtype=dtype)
        found = adjsim.solve_ivp(
            lambda t, y: torch.cat([y[2:], 0 * y[2:]]),
            (0, 6),
            start,
            events=rim,
            rtol=1e-6,
            atol=1e-6,
        )
        # A chord of a circle is as long each time.
        chords = found.t_events[0].diff()
        assert len(chords) >= 1
        torch.testing.assert_close(chords, chords[:1].expand_as(chords), rtol=1e-3, atol=1e-4)


def test_resets_at_one_time_are_taken_from_what_came_before():
    def one(t, y):
        return y[0] - 1

    def two(t, y):
        return t - 1.0

    one.reset, two.reset = lambda t, y: y * 1, lambda t, y: torch.stack([y[0] - 0.5, y[1]])
    fly = lambda t, y: torch.stack([y[1], 0 * y[1]])  # noqa: E731
    found = adjsim.solve_ivp(fly, (0, 3), [0.0, 1.0], events=(one, two), rtol=1e-9)
    torch.testing.assert_close(found.t_events[0], torch.tensor([1.0, 1.5]), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.y[0, -1], torch.tensor(2.5))


def test_a_reset_at_the_very_start_of_a_solution_back_in_time():
    event = lambda t, y: t - 2.0  # noqa: E731
    event.reset, event.direction = lambda t, y: 2 * y, -1
    found = adjsim.solve_ivp(
        lambda t, y: -y, (2, 1), [1.0], events=event, dense_output=True, rtol=1e-9
    )
    torch.testing.assert_close(
        found.sol(1.5), 2 * torch.exp(torch.tensor([0.5])), rtol=1e-6, atol=0
    )


def test_events_at_the_ends():
    """At t1 with a reset, and in a span of no length."""
    y0 = torch.tensor([1.0], requires_grad=True)
    event = lambda t, y: t - 2.0  # noqa: E731
    event.reset = lambda t, y: 3 * y
    found = adjsim.solve_ivp(lambda t, y: -y, (0, 2), y0, events=event, rtol=1e-9)
    found.y[0, -1].backward()
    assert float(y0.grad) == pytest.approx(3 * np.exp(-2), rel=1e-7)
    none = adjsim.solve_ivp(lambda t, y: -y, (2, 2), y0, events=lambda t, y: y[0] - 1, rtol=1e-9)
    assert none.y.requires_grad


def test_times_outside_have_no_gradient():
    y0 = torch.tensor([1.0], requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y: -y, (0, 1), y0, rtol=1e-6, dense_output=True)
    with pytest.raises(ValueError, match="there is no gradient"):
        found.sol([-0.1, 0.5])
    with torch.no_grad():
        assert found.sol([-0.1, 0.5]).shape == (1, 2)
    with pytest.raises(ValueError, match="a time or times"):
        found.sol(torch.zeros(2, 2))


def test_starts_of_several_kinds():
    one, half = torch.tensor(1.0 + 1j), torch.tensor(0.5, dtype=torch.float32)
    still = lambda t, y: 0 * y  # noqa: E731
    assert adjsim.solve_ivp(still, (0, 1), [one, 0.0]).y[0, 0] == 1 + 1j
    assert adjsim.solve_ivp(still, (0, 1), [torch.tensor(1.0), 1j]).y[1, 0] == 1j
    assert adjsim.solve_ivp(still, (0, 1), [half, torch.tensor(1.0)]).y.dtype == torch.float64
    assert adjsim.solve_ivp(still, (0, 1), [half, 1]).y.dtype == torch.float32
    assert adjsim.solve_ivp(still, (0, 1), torch.tensor([1, 2])).y.dtype == torch.float64


def test_a_reset_of_another_shape_is_refused():
    event = lambda t, y: y[0] - 0.5  # noqa: E731
    event.reset = lambda t, y: torch.ones(3)
    with pytest.raises(ValueError, match=r"reset returned shape \(3,\)"):
        adjsim.solve_ivp(lambda t, y: -y, (0, 1), [1.0], events=event)


@pytest.mark.slow
def test_nothing_is_kept_without_a_gradient():
    """Neither when none is asked for nor once it has been taken."""
    k = torch.tensor(2.0, requires_grad=True)
    with torch.no_grad():
        found = adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], dense_output=True)
    assert not found.y.requires_grad
    assert not found.sol(0.5).requires_grad

    def pieces():
        gc.collect()
        return sum(type(x) is Piece for x in gc.get_objects())

    before = pieces()
    kept = adjsim.solve_ivp(lambda t, y: -k * y, (0, 1), [1.0], params=[k], rtol=1e-6)
    assert kept.y.requires_grad
    assert pieces() == before + 1
    del kept
    assert pieces() == before


def test_resets_in_every_output():
    """A sawtooth: both sides of a reset without t_eval, the state before it with t_eval and in the
    dense solution.
    """
    event = lambda t, y: y[0] - 1.0  # noqa: E731
    event.reset = lambda t, y: 0 * y
    grow = lambda t, y: torch.ones(1)  # noqa: E731
    steps = adjsim.solve_ivp(grow, (0, 3.5), [0.0], events=event, dense_output=True, max_step=0.4)
    assert torch.equal(steps.t, steps.t.sort().values)
    jumps = steps.t[1:] == steps.t[:-1]
    assert int(jumps.sum()) == 3
    torch.testing.assert_close(steps.y[0, :-1][jumps], torch.ones(3))
    torch.testing.assert_close(steps.y[0, 1:][jumps], torch.zeros(3))
    torch.testing.assert_close(steps.t_events[0], torch.tensor([1.0, 2.0, 3.0]))
    times = torch.tensor([0.5, 2.25, 1.75, 3.5])
    torch.testing.assert_close(steps.sol(times)[0], times % 1)
    saved = adjsim.solve_ivp(grow, (0, 3.5), [0.0], t_eval=times.sort().values, events=event)
    torch.testing.assert_close(saved.y[0], times.sort().values % 1)
    assert torch.equal(saved.t, times.sort().values)
