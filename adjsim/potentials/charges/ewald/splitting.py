"""The numbers of an Ewald sum that follow from a tolerance, by OpenMM's formulas.

See the theory section of OpenMM's user guide, "Coulomb interaction with Ewald summation" and
"with particle mesh Ewald".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adjsim.core.arguments import as_whole
from adjsim.core.declared import POSITIVE

# OpenMM searches the number of waves from here, upwards or downwards.
FIRST_GUESS = 10
SMALLEST_MESH = 6


def splitting(alpha: float | None, cutoff: float, tolerance: float) -> float:
    """Return the given alpha, or ``sqrt(-log(2 tolerance)) / cutoff``."""
    if alpha is None:
        return math.sqrt(-math.log(2 * tolerance)) / cutoff
    return POSITIVE("alpha", alpha)


def wave_numbers(alpha: float, lengths: Sequence[float], tolerance: float) -> tuple[int, ...]:
    """Choose the largest wave number along each row of the cell.

    With d the length of the row, n is the smallest number whose error
    ``0.05 sqrt(alpha d) n exp(-(pi n / (alpha d))^2)`` is within the tolerance. The largest wave
    number is n if n is even, and else n - 1: OpenMM counts waves from zero, an odd number of them.
    """
    return tuple(_wave_number(alpha * length, tolerance) for length in lengths)


def _wave_number(width: float, tolerance: float) -> int:
    def within(n: int) -> bool:
        error = 0.05 * math.sqrt(width) * n * math.exp(-((math.pi * n / width) ** 2))
        return error <= tolerance

    n = FIRST_GUESS
    if within(n):
        while n > 1 and within(n - 1):
            n -= 1
    else:
        while not within(n):
            n += 1
    return n - n % 2


def mesh_size(
    alpha: float, lengths: Sequence[float], tolerance: float, order: int
) -> tuple[int, ...]:
    """Choose the number of mesh points along each row of the cell.

    It is ``2 alpha d / (3 tolerance^(1/5))``, rounded up, with d the length of the row. There are
    at least six points, and as many as the order.
    """
    least = max(SMALLEST_MESH, order)
    factor = 2 * alpha / (3 * tolerance**0.2)
    return tuple(max(math.ceil(factor * length), least) for length in lengths)


def three_numbers(name: str, value: int | Sequence[int], least: int) -> tuple[int, ...]:
    """Convert a count, or one for each row of the cell, to three ints."""
    given = list(value) if isinstance(value, Sequence) else [value] * 3
    counts = tuple(as_whole(name, x) for x in given)
    if len(counts) != 3 or min(counts) < least:
        raise ValueError(f"{name} must be an integer, or three, of at least {least}; got {value}.")
    return counts
