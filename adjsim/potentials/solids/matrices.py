"""Small matrices in components, one for each element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import add, sub
from typing import Any

from torch import Tensor

from adjsim.core.coordinates import added, cross, dot


class Matrix:
    """A matrix by its rows, whose components are tensors ``(*batch, elements)``.

    Apart, the components of an element are computed together by a compiled loop.
    """

    def __init__(self, rows: Iterable[Iterable[Tensor]]) -> None:
        self.rows = [list(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.rows)

    def __getitem__(self, row: int) -> list[Tensor]:
        return self.rows[row]

    def each(self, function: Callable[..., Any], *others: Matrix) -> Matrix:
        """Apply a function to the components of this matrix and of others."""
        return Matrix(map(function, *rows) for rows in zip(self, *others, strict=True))

    def __add__(self, other: Matrix) -> Matrix:
        return self.each(add, other)

    def __sub__(self, other: Matrix) -> Matrix:
        return self.each(sub, other)

    def __mul__(self, x: Tensor | float) -> Matrix:
        return self.each(lambda component: x * component)

    def __matmul__(self, other: Matrix) -> Matrix:
        return Matrix([dot(row, column) for column in other.T] for row in self)

    def combined(self, x: Tensor, y: Tensor, other: Matrix) -> Matrix:
        """Compute ``x A + y B``."""
        return self.each(lambda p, q: x * p + y * q, other)

    @property
    def T(self) -> Matrix:
        """The transpose."""
        return Matrix(zip(*self, strict=True))

    def inner(self, other: Matrix) -> Tensor:
        """Compute ``A : B``, the sum of products of components."""
        return dot(*([x for row in matrix for x in row] for matrix in (self, other)))

    def trace(self) -> Tensor:
        """Compute the sum of the diagonal."""
        return reduce(add, [row[i] for i, row in enumerate(self)])

    def plus(self, x: Tensor | float) -> Matrix:
        """Compute ``A + x 1``."""
        return Matrix(
            [p + x if i == j else p for j, p in enumerate(row)] for i, row in enumerate(self)
        )

    def cofactors(self) -> Matrix:
        """Compute the derivative of the determinant, polynomials that are always finite."""
        if len(self) == 2:
            (a, b), (c, d) = self
            return Matrix([[d, -c], [-b, a]])
        a, b, c = self
        return Matrix([cross(b, c), cross(c, a), cross(a, b)])

    def cofactors_along(self, change: Matrix) -> Matrix:
        """Compute the derivative of :meth:`cofactors` along a change of the matrix."""
        if len(self) == 2:
            return change.cofactors()
        pairs = ((1, 2), (2, 0), (0, 1))
        return Matrix(added(cross(change[i], self[j]), cross(self[i], change[j])) for i, j in pairs)

    def determinant(self, cofactors: Matrix) -> Tensor:
        """Compute the determinant from the first row and the cofactors."""
        return dot(self[0], cofactors[0])
