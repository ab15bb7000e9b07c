"""The partial sums of loops, and the text of their heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adjsim.compiler.values import LANES, LONG, Buffer, Index, Value

# The number of rows from which on their sum has partial sums, which threads share.
MANY_ROWS = 96


class Sum(NamedTuple):
    """A sum: its variable, type, runs of terms (see runs_of), term, and the place of its value."""

    name: str
    kind: str
    run: int
    length: int
    term: str
    target: str

    @property
    def lanes(self) -> int:
        """The number of partial sums."""
        return 1 if self.run == self.length else LANES

    @property
    def variable(self) -> str:
        """The type of the partial sums, in a loop along a row."""
        return f"partial_sums<{self.kind}>" if self.lanes > 1 else self.kind

    @property
    def total(self) -> str:
        """Print the sum of the partial sums, in a loop along a row."""
        return tree([self.name] if self.lanes == 1 else [f"{self.name}[{n}]" for n in range(LANES)])

    def lane(self, term: str) -> str:
        """Print the number of the partial sum that takes a term."""
        if self.lanes == 1:
            return "0"
        return f"({term}) % {LANES}" if self.run == 1 else f"({term}) / {self.run}"

    def at(self, term: str) -> str:
        """Print the partial sum that takes a term, in a loop along a row."""
        return self.name if self.lanes == 1 else f"{self.name}[{self.lane(term)}]"

    def head(self, name: str) -> str:
        """Print the head of the loop over the terms of the partial sum ``lane``."""
        if self.run == 1:
            return f"for (int64_t {name} = lane; {name} < {self.length}; {name} += {LANES}) {{"
        end = f"(lane < {LANES - 1} ? (lane + 1) * {self.run} : {self.length})"
        return f"for (int64_t {name} = lane * {self.run}; {name} < {end}; ++{name}) {{"


def runs_of(x: Value, axes: Sequence[int], exact: bool) -> int | None:
    """Return how many terms in a row the partial sums of a sum over axes take, or None for any.

    Of LANES partial sums, number l adds the runs l, l + LANES, ... of terms. Runs of one term are
    those of the lanes of a vector, and a run of all terms is one sum in order. A sum of many long
    rows has LANES runs, so that a thread reads rows that it wrote. The runs of a sum of an exact
    run do not depend on other values of the loop.
    """
    length = math.prod(x.shape[axis] for axis in axes)
    row = max((n for a, n in enumerate(x.shape) if a not in axes and x.strides[a] == 1), default=1)
    if row >= LONG and length >= MANY_ROWS:
        return -(-length // LANES)
    along = any(x.strides[axis] == 1 and x.shape[axis] > LANES for axis in axes)
    return (1 if along else length) if exact else None


def steps(limit: int, width: int) -> list[str]:
    """Print the head of a loop whose steps are of one width.

    The last step begins early, and its first numbers, ``again``, are computed twice.
    """
    if limit % width == 0:
        return [f"for (int64_t b = 0; b < {limit}; b += {width}) {{", "const int64_t again = 0;"]
    last = limit - width
    return [
        f"for (int64_t step = 0; step < {limit}; step += {width}) {{",
        f"const int64_t b = step < {last} ? step : {last}, again = step - b;",
    ]


def parts(limit: int, width: int) -> list[str]:
    """Print the head of a loop over parts of so many elements, of which the last one is short."""
    return [
        f"for (int64_t b = 0; b < {limit}; b += {width}) {{",
        f"const int64_t width = b < {limit - width} ? {width} : {limit} - b;",
    ]


def element(buffer: Buffer, at: Index) -> str:
    """Print an element of a buffer, or its variable."""
    return buffer.name if buffer.variable else f"{buffer.name}[{at}]"


def tree(terms: list[str]) -> str:
    """Print the sum of partial sums by a binary tree."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [f"({a} + {b})" for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]
