"""An integral along a solution, with an error of its own.

The steps of an adjoint are chosen for the adjoint, and what is integrated may change faster. So each interval is taken
by Kronrod's seven points, three of them Gauss', and halved where the two disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from adjsim.ivp.field import Array

# Kronrod's extension of Gauss' three points: nodes, weights, and how they differ from Gauss' weights.
NODES = np.array([0.960491268708020283, 0.774596669241483377, 0.434243749346802558, 0.0])
NODES = np.concatenate([-NODES, NODES[-2::-1]])
WEIGHTS = np.array([0.104656226026467265, 0.268488089868333441, 0.401397414775962223, 0.450916538658474142])
WEIGHTS = np.concatenate([WEIGHTS, WEIGHTS[-2::-1]])
DIFFERENCES = WEIGHTS - np.array([0, 5 / 9, 0, 8 / 9, 0, 5 / 9, 0])

# What Kronrod's points and Gauss' give, for times and two rows of weights.
Integrand = Callable[[Array, Array, Array], list[list[Tensor]]]


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

    def add(self, begin: float, end: float, integrand: Integrand) -> None:
        """Add the integral over an interval."""
        waiting = [(begin, end)]
        while waiting:
            a, b = waiting.pop()
            half, middle = (b - a) / 2, (a + b) / 2
            found, off = integrand(middle + half * NODES, half * WEIGHTS, half * DIFFERENCES)
            sizes = [size + float(x.abs().max()) for size, x in zip(self.sizes, found, strict=True) if x.numel()]
            errors = [float(x.abs().max()) for x in off if x.numel()]
            fine = all(error <= self.allowed * size for error, size in zip(errors, sizes, strict=True))
            if fine or abs(half) <= 16 * np.finfo(float).eps * max(abs(a), abs(b)):
                self.sizes = sizes
                for total, x in zip(self.sums, found, strict=True):
                    total += x
            else:
                waiting += [(middle, b), (a, middle)]
