"""The text of sums in loops, and of the heads of loops over vectors."""

from __future__ import annotations

from typing import NamedTuple

from adjsim.compiler.values import Buffer, Index


class Sum(NamedTuple):
    """A sum: its variable, type, number of partial sums, term, and the place of its value."""

    name: str
    kind: str
    lanes: int
    term: str
    target: str


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


def element(buffer: Buffer, at: Index) -> str:
    """Print an element of a buffer, or its variable."""
    return buffer.name if buffer.variable else f"{buffer.name}[{at}]"


def tree(terms: list[str]) -> str:
    """Print the sum of partial sums by a binary tree."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [f"({a} + {b})" for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]
