"""An integral along a solution, with an error of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

# Lobatto's four points and the three that extend them: nodes, weights, and how these differ from
# Lobatto's. With the ends among them, a jump near an end is seen.
NODES = np.array([-1.0, -((2 / 3) ** 0.5), -(0.2**0.5), 0.0, 0.2**0.5, (2 / 3) ** 0.5, 1.0])
WEIGHTS = np.array([77, 432, 625, 672, 625, 432, 77]) / 1470
DIFFERENCES = WEIGHTS - np.array([1, 0, 5, 0, 5, 0, 1]) / 6

# Relative to what is integrated, before anything cancels.
ROUNDING = 1e-13
# How often a part of the way may be divided: a jump takes fifty.
DIVISIONS = 2_000

# Steps of the way forward that make one interval at the most: about a point in each.
STRIDE = 8

# What is integrated, at times, summed with each of several rows of weights.
Integrand = Callable[..., list[list[Tensor]]]


class Integral:
    """A sum of parts, each known by two formulas.

    Args:
        like: tensors that are integrated.
        allowed: how far two formulas may differ, relative to the sum of what all parts so far have
            given in absolute value.
    """

    def __init__(self, like: Sequence[Tensor], allowed: float) -> None:
        self.sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float64)) for x in like
        ]
        self.sizes, self.allowed = [0.0 for _ in like], allowed

    def error(
        self, found: list[Tensor], off: list[Tensor], near: float, scale: Callable[[], list[Tensor]]
    ) -> float:
        """How far the two formulas differ for a part near a time, in units of what is allowed.
        ``scale`` is the size of this part if nothing cancels in it."""
        errors, sizes = _largest(off), zip(self.sizes, _largest(found), strict=True)
        if not np.isfinite(errors).all():
            raise FloatingPointError(
                "the derivative of fun with respect to a parameter is not finite near t = "
                f"{near:g}."
            )
        allowed = [self.allowed * (known + more) for known, more in sizes]
        if any(error > most for error, most in zip(errors, allowed, strict=True)):
            allowed = [
                max(most, ROUNDING * size)
                for most, size in zip(allowed, _largest(scale()), strict=True)
            ]
        tiny = float(np.finfo(float).tiny)
        return max(
            (error / max(most, tiny) for error, most in zip(errors, allowed, strict=True)),
            default=0.0,
        )

    def add(self, found: list[Tensor]) -> None:
        self.sizes = [a + b for a, b in zip(self.sizes, _largest(found), strict=True)]
        for total, x in zip(self.sums, found, strict=True):
            total += x


class SevenPoints(Integral):
    """By seven points, four of them Lobatto's, over intervals that are halved where the two
    formulas disagree (W. Gander and W. Gautschi, BIT 40, 84, 2000): what is integrated may change
    faster than the adjoint, whose steps are chosen for itself.

    Args:
        like: tensors that are integrated.
        rtol: tolerance.
    """

    def __init__(self, like: Sequence[Tensor], rtol: float) -> None:
        # The error of seven points is so much smaller than their difference from four (as in
        # QUADPACK).
        super().__init__(like, max(rtol, rtol ** (2 / 3) / 200))
        self.stride = 1

    def integrate(
        self, times: Sequence[float], integrand: Integrand, scale: Callable[[float], list[Tensor]]
    ) -> None:
        """Add the integral from the first of some times to the last. What is integrated changes
        little from one to the next, so several make an interval as long as none has to be divided.
        ``scale`` is the size of what is integrated at a time if nothing cancels in it."""
        k, last = 0, len(times) - 1
        while k < last:
            end = min(k + self.stride, last)
            whole = self._add(times[k], times[end], integrand, scale)
            self.stride = min(2 * self.stride, STRIDE) if whole else max(1, self.stride // 2)
            k = end

    def _add(
        self, begin: float, end: float, integrand: Integrand, scale: Callable[[float], list[Tensor]]
    ) -> bool:
        """Add the integral over an interval, and say whether it has not been divided."""
        waiting, divisions = [(begin, end)], 0
        generic = cache(lambda: [abs(end - begin) * x for x in scale((begin + end) / 2)])
        while waiting:
            a, b = waiting.pop()
            half, middle = (b - a) / 2, (a + b) / 2
            found, off = integrand(middle + half * NODES, half * WEIGHTS, half * DIFFERENCES)
            if self.error(found, off, middle, generic) <= 1:
                self.add(found)
                continue
            divisions += 1
            if divisions > DIVISIONS:
                raise unsettled(middle)
            waiting += [(middle, b), (a, middle)]
        return not divisions


def unsettled(t: float) -> RuntimeError:
    return RuntimeError(
        f"the integral of the derivative by a parameter does not settle near t = {t:g}: does fun "
        "draw random numbers there, or "
        "is it infinite?"
    )


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    return [float(x.abs().max()) if x.numel() else 0.0 for x in tensors]
