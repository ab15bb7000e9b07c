"""The choice of step sizes by an estimate of the error, for every method with adaptive steps.

With the error e of a step of size h, relative to its tolerance, and an estimate of order p in the
step size, the next size is ``h min(g, max(0.2, 0.9 e^(-1/p)))``. This is the controller of SciPy's
solvers, with g = 10, and g = 1 after a rejected attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

N = TypeVar("N", float, Tensor)
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0
# A smaller error is replaced by this one, of which every power is finite.
SMALLEST_ERROR = 1e-30


def relative(error: Tensor, states: Sequence[Tensor], rtol: Any, atol: Any) -> Tensor:
    """Return an error, entry by entry, relative to the tolerance ``atol + rtol max abs(y)``."""
    size = reduce(torch.maximum, map(torch.abs, states))
    return error / (atol + rtol * size)


def next_factor(error: N, order: int, most: N | float = GROW) -> N:
    """Return the ratio, of at most ``most``, of the next step size to the present one.

    An error of infinity or NaN stands for a step that left the finite numbers.
    """
    if isinstance(error, Tensor):
        found = SAFETY * error.clamp(min=SMALLEST_ERROR) ** (-1 / order)
        return found.nan_to_num(SHRINK).clamp(min=SHRINK).clamp(max=most)
    if not error < math.inf:
        return SHRINK
    return min(most, max(SHRINK, SAFETY * max(error, SMALLEST_ERROR) ** (-1 / order)))


def first_size(
    size: Tensor, slope: Tensor, length: Tensor, order: int, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Choose the first step size (Hairer, Norsett and Wanner, section II.4), as SciPy does.

    The norms are relative to the tolerance; ``change`` is of the rate, over a trial step along it.
    """
    large = (size >= 1e-5) & (slope >= 1e-5)
    trial = torch.where(large, 0.01 * size / slope, 1e-6).minimum(length)
    steepest = slope.maximum(change(trial) / trial)
    found = torch.where(
        steepest <= 1e-15, (1e-3 * trial).clamp(min=1e-6), (0.01 / steepest) ** (1 / order)
    )
    found = found.minimum(100 * trial).minimum(length)
    # The trial step may leave the domain of the rates: then the first attempt decides.
    return torch.where(found > 0, found, trial)
