"""An integral along a solution, with an error of its own.

The steps of an adjoint are chosen for the adjoint, and what is integrated may change faster. So each interval is taken
by Kronrod's seven points, three of them Gauss', and halved where the two disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

# Kronrod's extension of Gauss' three points: nodes, weights, and how they differ from Gauss' weights.
NODES = np.array([0.960491268708020283, 0.774596669241483377, 0.434243749346802558, 0.0])
NODES = np.concatenate([-NODES, NODES[-2::-1]])
WEIGHTS = np.array([0.104656226026467265, 0.268488089868333441, 0.401397414775962223, 0.450916538658474142])
WEIGHTS = np.concatenate([WEIGHTS, WEIGHTS[-2::-1]])
DIFFERENCES = WEIGHTS - np.array([0, 5 / 9, 0, 8 / 9, 0, 5 / 9, 0])

# Relative to what is integrated, before anything cancels.
ROUNDING = 1e-13
# In how many intervals one may be divided: a jump takes fifty.
DIVISIONS = 2_000

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
        self.sizes = [0.0 for _ in like]
        # Kronrod's error is so much smaller than its difference from Gauss' (as in QUADPACK).
        self.allowed = max(rtol, rtol ** (2 / 3) / 200)

    def add(self, begin: float, end: float, integrand: Integrand, scale: Callable[[float], list[Tensor]]) -> None:
        """Add the integral over an interval. ``scale`` is the size of what is integrated at a time if nothing cancels in it."""
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


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    return [float(x.abs().max()) if x.numel() else 0.0 for x in tensors]


def _add(sizes: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(sizes, more, strict=True)]
