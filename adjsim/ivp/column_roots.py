"""Roots of a function of one variable in many columns at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjsim.ivp.events import MOST_ITERATIONS

# Iterations of the search for a minimum, to 1e-5 of the interval as in SciPy.
GOLDEN_ITERATIONS = 25


def find_roots(
    function: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
    accuracy: Callable[[Tensor], Tensor],
    wanted: Tensor,
) -> Tensor:
    """Return the roots between x = 0 and 1 by Chandrupatla's method; zero where not ``wanted``.

    ``low`` and ``high`` are the values at 0 and 1, of different signs. Each iteration interpolates
    by an inverse parabola, or halves the bracket (T. R. Chandrupatla, Adv. Eng. Software 28, 145,
    1997). ``accuracy`` is the allowed width of a bracket around x.
    """
    b, a = torch.zeros_like(low), torch.ones_like(low)
    c, fa, fb, fc = a, high, low, high
    share = torch.full_like(low, 0.5)
    best = torch.where(high.abs() < low.abs(), a, b)
    open_ = wanted & (low != 0) & (high != 0)
    for _ in range(MOST_ITERATIONS):
        if not open_.any():
            break
        x = torch.where(open_, a + share * (b - a), best)
        value = function(x)
        same = value.sign() == fa.sign()
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, value
        best = torch.where(open_, torch.where(fa.abs() < fb.abs(), a, b), best)
        width = (b - a).abs()
        least = accuracy(best) / width
        open_ = open_ & (value != 0) & (width > 2 * accuracy(best))
        ratio, part = (a - b) / (c - b), (fa - fb) / (fc - fb)
        inverse = (1 - (1 - ratio).sqrt() < part) & (part < ratio.sqrt())
        parabola = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (
            fc - fb
        )
        share = torch.where(inverse & parabola.isfinite(), parabola, 0.5)
        share = share.maximum(least).minimum(1 - least)
    return torch.where(wanted, best, 0.0)


def find_minima(function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return the points between 0 and 1 of a minimum in each column, by the golden section."""
    ratio = (5**0.5 - 1) / 2
    low, high = torch.zeros_like(like), torch.ones_like(like)
    for _ in range(GOLDEN_ITERATIONS):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        left = function(first) < function(second)
        low, high = torch.where(left, low, first), torch.where(left, second, high)
    return (low + high) / 2
