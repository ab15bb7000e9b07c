"""The coefficients of explicit Runge-Kutta methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from operator import mul
from typing import Any

from adjsim.core.arguments import as_number, describe_type

HIGHEST_ORDER = 6
# The rounding of sums of coefficients, far below any condition that a method misses.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Tableau:
    """The coefficients of an explicit Runge-Kutta method (Butcher 1963)::

        k_i = f(t + c_i h, y + h sum_{j<i} a_ij k_j)        y' = y + h sum_i b_i k_i

    ``order`` is the order of accuracy, found from the order conditions of rooted trees up to order
    six.

    Args:
        a: the rows of the matrix, the first with no entries or with zeros. Entries beyond the
            diagonal must be zero.
        b: the weights, one for each stage, whose sum is one.
        c: the nodes, the sums of the rows of a; None: these sums.
        error: the weights of an error estimate ``h sum_i error_i k_i``, which are b less the
            weights of an embedded method of another order. They are one for each stage, or one
            more for ``f(t + h, y')``, and their sum is zero. None: no estimate.

    Raises:
        ValueError: rows of a wrong length, an implicit method, weights whose sum is not one, nodes
            that are not the sums of the rows, error weights whose sum is not zero.
    """

    a: Sequence[Sequence[float | int]]
    b: Sequence[float | int]
    c: Sequence[float | int] | None = None
    error: Sequence[float | int] | None = None

    def __post_init__(self) -> None:
        b = _numbers("b", self.b)
        stages = len(b)
        if len(self.a) != stages:
            raise ValueError(
                f"a has {len(self.a)} rows and b {stages} weights; a method has one of each for a "
                "stage."
            )
        rows = [_numbers(f"a[{i}]", row) for i, row in enumerate(self.a)]
        for i, row in enumerate(rows):
            if any(row[i:]):
                raise ValueError(
                    f"a[{i}] has an entry on or beyond the diagonal, so the method is implicit; "
                    "only explicit methods are steps of RungeKutta."
                )
            if len(row) < i:
                raise ValueError(f"a[{i}] has {len(row)} entries; it must have {i}.")
        sums = tuple(math.fsum(row) for row in rows)
        c = sums if self.c is None else _numbers("c", self.c)
        if len(c) != stages or any(abs(x - y) > TOLERANCE for x, y in zip(c, sums, strict=True)):
            raise ValueError(f"c must be the sums of the rows of a, {sums}; got {c}.")
        if abs(math.fsum(b) - 1) > TOLERANCE:
            raise ValueError(f"the sum of b must be 1; got {math.fsum(b):g}.")
        error = None if self.error is None else _numbers("error", self.error)
        if error is not None and len(error) not in (stages, stages + 1):
            raise ValueError(
                f"error has {len(error)} weights; it must have one for each of the {stages} "
                "stages, and may have one more for the rate at the end of the step."
            )
        if error is not None and (abs(math.fsum(error)) > TOLERANCE or not any(error)):
            raise ValueError(
                "error must be the differences of two sets of weights, not all zero, and their sum "
                f"zero; got the sum {math.fsum(error):g}."
            )
        a = tuple(row[:i] for i, row in enumerate(rows))
        for name, value in (("a", a), ("b", b), ("c", c), ("error", error)):
            object.__setattr__(self, name, value)

    @cached_property
    def nodes(self) -> tuple[float, ...]:
        """The nodes c."""
        assert self.c is not None
        return tuple(self.c)

    @cached_property
    def order(self) -> int:
        """The order of accuracy, at most six."""
        # The size, the density and the elementary weights at the stages of each rooted tree.
        trees: list[tuple[int, int, list[float]]] = []
        for order in range(HIGHEST_ORDER):
            known = [x for n in range(order + 1) for x in combinations_with_replacement(trees, n)]
            for branches in known:
                if sum(size for size, _, _ in branches) != order:
                    continue
                density = (order + 1) * math.prod(x for _, x, _ in branches)
                weights = [math.prod(_dot(row, x) for _, _, x in branches) for row in self.a]
                if abs(_dot(self.b, weights) - 1 / density) > TOLERANCE:
                    return order
                trees.append((order + 1, density, weights))
        return HIGHEST_ORDER

    @cached_property
    def error_order(self) -> int:
        """The power of the step below that of the error estimate."""
        assert self.error is not None
        extra = len(self.error) - len(self.b)
        b = [*self.b, *[0.0] * extra]
        embedded = [x - e for x, e in zip(b, self.error, strict=True)]
        return min(self.order, Tableau([*self.a, *[self.b] * extra], embedded).order)


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(map(mul, x, y))


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise TypeError(f"{name} must be a list of numbers; got {describe_type(values)}.")
    return tuple(as_number(f"{name}[{i}]", x) for i, x in enumerate(values))


TABLEAUS = {
    "euler": Tableau([[]], [1]),
    "midpoint": Tableau([[], [1 / 2]], [0, 1]),
    "heun": Tableau([[], [1]], [1 / 2, 1 / 2]),
    # The second-order method with the smallest bound of the error (Ralston 1962).
    "ralston": Tableau([[], [2 / 3]], [1 / 4, 3 / 4]),
    # Strong stability preserving, of Shu and Osher (1988).
    "ssp3": Tableau([[], [1], [1 / 4, 1 / 4]], [1 / 6, 1 / 6, 2 / 3]),
    # The third-order method of the pair of Bogacki and Shampine (1989), and its error.
    "bogacki-shampine": Tableau(
        [[], [1 / 2], [0, 3 / 4]], [2 / 9, 1 / 3, 4 / 9], error=[-5 / 72, 1 / 12, 1 / 9, -1 / 8]
    ),
    "rk4": Tableau([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
    # The fifth-order method of the pair of Dormand and Prince (1980), and its error.
    "dormand-prince": Tableau(
        [
            [],
            [1 / 5],
            [3 / 40, 9 / 40],
            [44 / 45, -56 / 15, 32 / 9],
            [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
            [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
        ],
        [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
        error=[71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40],
    ),
}
