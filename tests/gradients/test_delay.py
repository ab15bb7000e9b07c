"""Delay equations by the method of steps: each interval reads the solution of the one before."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import adjsim

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


class Kept:
    """A class with a solution, which a run does not look into, as it does not at globals."""


class Delayed(nn.Module):
    """dy/dt = rates(y, y(t - delay)); ``past`` is the solution as a function of time."""

    def __init__(self, past, delay, rates):
        super().__init__()
        self.past, self.delay, self.rates = past, delay, rates

    def forward(self, t, y, *args):
        return self.rates(y, self.past(t - self.delay), *args)


def by_steps(rates, first, delay, intervals, args, nodes=5, **options):
    """The states at the end of each interval, from a constant past."""
    ends, past = [], adjsim.CubicSpline([-delay, 0.0], torch.stack([first, first]))
    y, before = first, first
    for k in range(intervals):
        times = torch.linspace(k * delay, (k + 1) * delay, nodes, dtype=torch.float64)
        sol = adjsim.solve_ivp(
            Delayed(past, delay, rates), (times[0], times[-1]), y, t_eval=times, args=args,
            **{**TIGHT, **options},
        )  # fmt: skip
        slopes = torch.stack([rates(y, before, *args), rates(sol.y[:, -1], y, *args)])
        past = adjsim.CubicSpline(times, sol.y.T, slopes=slopes)
        y, before = sol.y[:, -1], y
        ends.append(y)
    return torch.stack(ends)


def test_a_linear_equation_with_a_delay():
    """y' = -k y(t - 1) from 1 is a polynomial on each interval, which the spline represents."""
    k = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64, requires_grad=True)
    found = by_steps(lambda y, before, k: -k * before, one, 1.0, 2, (k,), method="Rodas4")
    known = one * torch.stack([1 - k, 1 - 2 * k + k**2 / 2])[:, None]
    torch.testing.assert_close(found, known, rtol=0, atol=1e-9)
    grads = torch.autograd.grad(found.square().sum(), [k, one])
    others = torch.autograd.grad(known.square().sum(), [k, one])
    for x, y in zip(grads, others, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_the_gradient_of_differences():
    """The equation of Mackey and Glass, over two delays."""
    given = torch.tensor([2.0, 1.1, 6.0], dtype=torch.float64, requires_grad=True)

    def solve(given):
        return by_steps(
            lambda y, before, b, p: b * before / (1 + before**p) - y,
            given[1:2], 1.5, 2, (given[0], given[2]), method="Rodas4", rtol=1e-8, atol=1e-10,
        )[-1, 0]  # fmt: skip

    (found,) = torch.autograd.grad(solve(given), given)
    along, h = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64), 1e-5
    with torch.no_grad():
        ends = [float(solve(given + s * h * along)) for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float((found * along).sum()), rel=1e-6)


def test_a_solution_is_read_without_a_gradient():
    with torch.no_grad():
        first = adjsim.solve_ivp(
            lambda t, y: -1 + 0 * y, (0, 1), torch.ones(1).double(), dense_output=True, **TIGHT
        )
        second = adjsim.solve_ivp(lambda t, y: -first.sol(t - 1), (1, 2), first.y[:, -1], **TIGHT)
    assert float(second.y[0, -1]) == pytest.approx(-0.5, abs=1e-9)


@pytest.mark.parametrize(
    "method", ["RK45", pytest.param("Radau", marks=pytest.mark.slow), "Rodas4"]
)
def test_a_later_function_reads_the_solution_with_its_gradient(method):
    """y' = -k y(t - 1) from c is c sum_j (-k)^j (t - j + 1)^j / j!."""
    k, c = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, 1.3))
    options = {"method": method, "dense_output": True, "args": (k, c), **TIGHT}
    found = adjsim.solve_ivp(lambda t, y, k, c: -k * c + 0 * y, (0, 1), c[None], **options)
    for n in (1, 2):
        found = adjsim.solve_ivp(
            lambda t, y, k, c, past=found.sol: -k * past(t - 1),
            (n, n + 1),
            found.y[:, -1],
            **options,
        )
    t = 2.6
    terms = [(-k) ** j * (t - j + 1) ** j / math.factorial(j) for j in range(4)]
    found, known = found.sol(t)[0], c * sum(terms)
    torch.testing.assert_close(found, known, rtol=1e-7, atol=0)
    grads = torch.autograd.grad(found, (k, c)), torch.autograd.grad(known, (k, c))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def swings(w, start, **options):
    return adjsim.solve_ivp(
        lambda t, y, w: torch.stack([w * y[1], -w * y[0] - 0.1 * y[1] ** 3]), (0, 1), start,
        args=(w,), dense_output=True, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_delay_that_is_a_parameter():
    """Two reads of another equation's solution, at times of their own, in three ways."""

    def rate(t, y, w, delay, past):
        return w * past(t - delay)[1] - y * past((t - delay) / 2)[0]

    def solve(p, way="argument"):
        past = swings(p[0], p[1:3], rtol=1e-7, atol=1e-9).sol

        def captured(t, y, w, delay):
            return rate(t, y, w, delay, past)

        fun, args, params = {
            "argument": (rate, (p[0], p[3], past), ()),
            "captured": (captured, (p[0], p[3]), ()),
            "declared": (captured, (p[0], p[3]), [past]),
        }[way]
        return adjsim.solve_ivp(
            fun, (0.5, 1), p[4:], args=args, params=params, rtol=1e-7, atol=1e-9
        ).y[0, -1]

    p = torch.tensor([1.7, 1.0, 0.3, 0.4, 0.5], dtype=torch.float64, requires_grad=True)
    along, h = torch.cos(torch.arange(5.0).double()), 1e-4
    found, *others = (
        torch.autograd.grad(solve(p, way), p)[0] for way in ("argument", "captured", "declared")
    )
    for x in others:
        torch.testing.assert_close(x, found, rtol=1e-12, atol=0)
    with torch.no_grad():
        ends = [float(solve(p + s * h * along)) for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float((found * along).sum()), rel=1e-6)


def test_a_solution_that_cannot_be_read_with_a_gradient():
    w = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)

    def low(t, y, w):
        return y[0] - 0.2

    low.direction, low.reset = -1, lambda t, y, w: y + 1
    past = swings(w, [1.0, 0.3], rtol=1e-4).sol
    jumps = swings(w, [1.0, 0.3], rtol=1e-4, events=low).sol
    for end, fun, message in (
        (1, lambda t, y: past(t)[:1] if t > 0.5 else -y, r"declare it by params=\[solution.sol\]"),
        (2, lambda t, y: past(t)[:1], r"outside of its time span \[0, 1\]"),
        (1, lambda t, y: jumps(t)[:1], "whose state jumps at t = "),
        (1, lambda t, y: Kept.past(t)[:1], "a global variable or an attribute of a class"),
    ):
        Kept.past = past
        with pytest.raises(ValueError, match=message):
            adjsim.solve_ivp(fun, (0, end), [1.0], rtol=1e-4)


def driven(t, y, a, delay, earlier, half):
    """The rates of y, which the states at a delay and at half the time before drive."""
    return torch.stack([a * earlier[1], -y[0] * half[0]])


def swing(t, y, a):
    return torch.stack([a * y[1], -y[0] - 0.1 * y[1] ** 3])


def after_events(p, method):
    """The states a while after events of the columns of p, ``(3, batch)``: start, rate, delay."""

    def low(t, y, a):
        return y[0] - 0.2

    def later(t, y, a, delay, past):
        at = (t - delay)[None]
        return driven(t, y, a, delay, past(at)[:, 0], past(at / 2)[:, 0])

    low.terminal, low.direction = True, -1
    options = {"method": method, "rtol": 1e-7, "atol": 1e-9}
    found = adjsim.solve_ivp(
        swing, (0, 9), torch.stack([p[0], 0 * p[0] + 0.3]), args=(p[1],), events=low,
        dense_output=True, **options,
    )  # fmt: skip
    begin, states = torch.cat(found.t_events[0]), torch.cat(found.y_events[0]).T
    args = p[1], p[2], found.sol
    return adjsim.solve_ivp(later, (begin, begin + 0.2), states, args=args, **options).y[:, -1]


def after_events_of_samples(p, method):
    def low(t, y, a):
        return y[:, 0] - 0.2

    def later(t, y, a, delay):
        at = t - delay
        return driven(t, y.T, a[:, 0], delay, past(at)[:, 0].T, past(at / 2)[:, 0].T).T

    low.terminal, low.direction = True, -1
    options = {"method": method, "rtol": 1e-7, "atol": 1e-9, "batch_first": True}
    start, a, delay = p[..., None]
    found = adjsim.solve_ivp(
        lambda t, y, a: swing(t, y.T, a[:, 0]).T, (0, 9), torch.cat([start, 0 * start + 0.3], 1),
        args=(a,), events=low, dense_output=True, **options,
    )  # fmt: skip
    past, begin, states = found.sol, torch.cat(found.t_events[0]), torch.cat(found.y_events[0])
    found = adjsim.solve_ivp(later, (begin, begin + 0.2), states, args=(a, delay), **options)
    return found.y[:, -1].T


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("RK45", marks=pytest.mark.slow),
        pytest.param("Rodas4", marks=pytest.mark.marathon),
    ],
)
def test_columns_and_samples_read_their_own_pasts(method):
    """Each from its own event on, as single columns do, with the gradient of differences."""
    p = torch.tensor([[0.5, 0.8], [1.7, 1.9], [0.25, 0.3]], requires_grad=True)
    weights, h = torch.cos(torch.arange(4.0)).view(2, 2), 1e-5
    alone = torch.cat([after_events(p[:, k : k + 1], method) for k in range(2)], 1)
    (expected,) = torch.autograd.grad((weights * alone).sum(), p)
    for solve in (after_events, after_events_of_samples):
        found = solve(p, method)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)
        (grad,) = torch.autograd.grad((weights * found).sum(), p)
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-10)
    along = torch.cos(torch.arange(6.0) ** 2).view(3, 2)
    with torch.no_grad():
        more, less = ((weights * after_events(p + s * h * along, method)).sum() for s in (1, -1))
        without = after_events_of_samples(p, method)
    assert float(more - less) / (2 * h) == pytest.approx(float((expected * along).sum()), rel=1e-6)
    torch.testing.assert_close(without, alone.detach(), rtol=0, atol=1e-10)


def test_a_past_of_samples_that_cannot_be_read():
    options = {"rtol": 1e-6, "batch_first": True}
    past = adjsim.solve_ivp(
        lambda t, y: -y, (0, 1), torch.ones(2, 1, requires_grad=True), dense_output=True, **options
    ).sol
    for fun, events, message in (
        (lambda t, y: past(t + 1.5), None, "not finite"),
        (lambda t, y: -y, lambda t, y: Kept.past(t)[:, 0] - 0.5, "pass it in args"),
    ):
        Kept.past = past
        with pytest.raises((ValueError, RuntimeError), match=message):
            adjsim.solve_ivp(fun, (0, 1), torch.ones(2, 1), events=events, **options)
    Kept.past = adjsim.solve_ivp(lambda t, y: -y, (0, 1), [1.0], dense_output=True).sol
    with pytest.raises(ValueError, match=r"pass it in args=\(\.\.\., solution\.sol\)"):
        adjsim.solve_ivp(lambda t, y: y * Kept.past(t[None]).T, (0, 1), torch.ones(2, 1), **options)


@pytest.mark.parametrize("samples", [True, False])
def test_a_run_without_a_gradient_leaves_the_past_its_gradient(samples):
    k = torch.tensor([[0.5], [0.7]] if samples else [0.5], requires_grad=True)
    options = {"rtol": 1e-6, "batch_first": samples}

    def solved(fun, start, *args, **more):
        return adjsim.solve_ivp(fun, (0, 1), start, args=args, **options, **more)

    grads = []
    for first in (False, True):
        past = solved(lambda t, y, k: -k * y**2, 0 * k.detach() + 1, k, dense_output=True).sol
        if first:
            with torch.no_grad():
                solved(lambda t, y, past: past(t) * y, torch.ones_like(k), past)
        end = solved(lambda t, y, past: past(t) * y, torch.ones_like(k), past).y.sum()
        grads += torch.autograd.grad(end, k)
    assert torch.equal(*grads)


def after_resets(p, form):
    """The states ``(batch,)`` at 2, thrown back where they meet a past of their own.

    The rows of p ``(3, batch)`` are the rate of the past, the delay and the start.
    """
    if form == "single":
        return torch.cat([after_resets(x, "one") for x in p.T])
    first = (lambda y: y[:, 0]) if form == "samples" else (lambda y: y[0])

    def before(past, t):
        return first(past(t)) if form != "columns" else past(t[None])[0, 0]

    def met(t, y, delay, past):
        return first(y) - 0.6 * before(past, (t - delay).reshape(t.shape))

    def thrown(t, y, delay, past):
        return y - 0.5 * before(past, t / 2).reshape(y.shape)

    met.direction, met.reset = 1, thrown
    options = {"rtol": 1e-8, "atol": 1e-10, "batch_first": form == "samples"}
    start = p[2, :, None] if form == "samples" else p[2:]
    past = adjsim.solve_ivp(
        lambda t, y, rate: -rate * y, (0, 2), 1 + 0 * start, args=(p[0].reshape(start.shape),),
        dense_output=True, **options,
    ).sol  # fmt: skip
    found = adjsim.solve_ivp(
        lambda t, y, delay, past: 0.9 * y, (1, 2), start, args=(p[1], past), events=met, **options
    )
    assert sum(times.numel() for times in found.t_events[0]) == p[0].numel()
    return found.y.flatten()[-1:] if form == "one" else first(found.y[..., -1, :])


@pytest.mark.slow
def test_events_and_resets_read_a_past():
    p = torch.tensor([[0.5, 0.8], [0.25, 0.3], [0.2, 0.25]], requires_grad=True)
    weights, along, h = torch.tensor([1.0, -0.7]), torch.cos(torch.arange(6.0)).view(3, 2), 1e-4
    states, grads = [], []
    for form in ("samples", "columns", "single"):
        states.append(after_resets(p, form))
        grads += torch.autograd.grad((weights * states[-1]).sum(), p)
    for state, grad in zip(states[:2], grads[:2], strict=True):
        torch.testing.assert_close(state, states[1], rtol=0, atol=1e-10)
        torch.testing.assert_close(grad, grads[1], rtol=0, atol=1e-10)
    # The gradient of a single state is that of the exact solution.
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=1e-6)
    with torch.no_grad():
        more, less = ((weights * after_resets(p + s * h * along, "columns")).sum() for s in (1, -1))
    assert float(more - less) / (2 * h) == pytest.approx(float((grads[0] * along).sum()), rel=1e-6)


def test_samples_read_the_past_of_one_state():
    """With or without a gradient of the past, and of the run, as columns do."""
    k = torch.tensor([0.5, 0.7, 1.2], requires_grad=True)

    def past():
        options = {"dense_output": True, "rtol": 1e-8, "atol": 1e-10}
        return adjsim.solve_ivp(
            lambda t, y, k: -k * y**2, (0, 1), [1.0], args=(k[0],), **options
        ).sol  # fmt: skip

    def of_columns(t, y, k, past):
        return -k * past(t - 0.8) * y

    def of_samples(t, y, k, past):
        return -k * past((t - 0.8)[None]).T * y

    def ends(past, k):
        options, start = {"rtol": 1e-8, "atol": 1e-10}, torch.ones(1, 3)
        columns = adjsim.solve_ivp(of_columns, (1, 1.5), start, args=(k, past), **options)
        samples = adjsim.solve_ivp(
            of_samples, (1, 1.5), start.T, args=(k[:, None], past), batch_first=True, **options
        )
        return columns.y[0, -1], samples.y[:, -1, 0]

    with_gradient = past()
    with torch.no_grad():
        without = past()
        runs = [ends(with_gradient, k), ends(without, k), ends(copy.copy(without), k)]
    runs += [ends(with_gradient, k), ends(without, k)]
    for columns, samples in runs:
        torch.testing.assert_close(samples, columns, rtol=0, atol=1e-7)
        torch.testing.assert_close(samples, runs[0][0], rtol=0, atol=1e-7)
    for columns, samples in runs[-2:]:
        expected, found = (
            torch.autograd.grad(x.sum(), k, retain_graph=True)[0] for x in (columns, samples)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
