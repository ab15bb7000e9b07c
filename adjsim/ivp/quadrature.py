"""An integral along a solution, with an error of its own.

The steps of an adjoint are chosen for the adjoint, and what is integrated may change faster. So each interval is taken
by seven points, four of them Lobatto's, and halved where the two formulas disagree (W. Gander and W. Gautschi, BIT 40, 84,
2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

# Lobatto's four points and the three that extend them: nodes, weights, and how these differ from Lobatto's. With the ends among
# them, a jump near an end is seen.
NODES = np.array([-1.0, -((2 / 3) ** 0.5), -(0.2**0.5), 0.0, 0.2**0.5, (2 / 3) ** 0.5, 1.0])
WEIGHTS = np.array([77, 432, 625, 672, 625, 432, 77]) / 1470
DIFFERENCES = WEIGHTS - np.array([1, 0, 5, 0, 5, 0, 1]) / 6

# Relative to what is integrated, before anything cancels.
ROUNDING = 1e-13
# In how many intervals one may be divided: a jump takes fifty.
DIVISIONS = 2_000

# Steps of the way forward that make one interval at the most: about a point in each.
STRIDE = 8

# What is integrated, at times, summed with each of several rows of weights.
Integrand = Callable[..., list[list[Tensor]]]


class Integral:
    """The sum of integrals over intervals, to a relative tolerance.

    Args:
        like: tensors that are integrated.
        rtol: tolerance, relative to the sum of what all intervals so far have given in absolute value.
    """

    def __init__(self, like: Sequence[Tensor], rtol: float) -> None:
        self.sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float64)) for x in like]
        self.sizes, self.stride = [0.0 for _ in like], 1
        # The error of seven points is so much smaller than their difference from four (as in QUADPACK).
        self.allowed = max(rtol, rtol ** (2 / 3) / 200)

    def integrate(self, times: Sequence[float], integrand: Integrand, scale: Callable[[float], list[Tensor]]) -> None:
        """Add the integral from the first of some times to the last. What is integrated changes little from one to the next, so
        several make an interval as long as none has to be divided. ``scale`` is the size of what is integrated at a time if
        nothing cancels in it."""
        k, last = 0, len(times) - 1
        while k < last:
            end = min(k + self.stride, last)
            whole = self._add(times[k], times[end], integrand, scale)
            self.stride = min(2 * self.stride, STRIDE) if whole else max(1, self.stride // 2)
            k = end

    def _add(self, begin: float, end: float, integrand: Integrand, scale: Callable[[float], list[Tensor]]) -> bool:
        """Add the integral over an interval, and say whether it has not been divided."""
        waiting, divisions, floors = [(begin, end)], 0, [0.0 for _ in self.sizes]
        while waiting:
            a, b = waiting.pop()
            half, middle = (b - a) / 2, (a + b) / 2
            found, off = integrand(middle + half * NODES, half * WEIGHTS, half * DIFFERENCES)
            sizes, errors = _add(self.sizes, _largest(found)), _largest(off)
            if not np.isfinite(errors).all():
                raise FloatingPointError(f"the derivative of fun by a parameter is not finite near t = {middle:g}.")
            allowed = [max(self.allowed * size, floor) for size, floor in zip(sizes, floors, strict=True)]
            if all(error <= most for error, most in zip(errors, allowed, strict=True)):
                self.sizes = sizes
                for total, x in zip(self.sums, found, strict=True):
                    total += x
                continue
            if not divisions:
                floors = [ROUNDING * abs(b - a) * size for size in _largest(scale(middle))]
            divisions += 1
            if divisions > DIVISIONS:
                raise RuntimeError(
                    f"the integral of the derivative by a parameter does not settle near t = {middle:g}: does fun draw random "
                    "numbers there, or is it infinite?"
                )
            waiting += [(middle, b), (a, middle)]
        return not divisions


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    return [float(x.abs().max()) if x.numel() else 0.0 for x in tensors]


def _add(sizes: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(sizes, more, strict=True)]
