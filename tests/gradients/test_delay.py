"""Delay equations by the method of steps: each interval reads the solution of the one before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


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
