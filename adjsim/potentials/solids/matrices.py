"""Small matrices in components, one for each element.

A matrix is a list of rows. Each component is a tensor ``(*batch, elements)``, so that a compiled
loop computes all components of an element together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Matrix: TypeAlias = Sequence[Sequence[Tensor]]


def inner(a: Matrix, b: Matrix) -> Tensor:
    """Compute ``A : B``, the sum of products of components."""
    first, *rest = [x * y for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    for product in rest:
        first = first + product
    return first


def product(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A B``."""
    return [[_dot(row, column) for column in zip(*b, strict=True)] for row in a]


def transposed(a: Matrix) -> Matrix:
    """Return the transpose."""
    return list(zip(*a, strict=True))


def combined(x: Tensor, a: Matrix, y: Tensor, b: Matrix) -> Matrix:
    """Compute ``x A + y B``."""
    return [[x * p + y * q for p, q in zip(u, v, strict=True)] for u, v in zip(a, b, strict=True)]


def added(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A + B``."""
    return [[p + q for p, q in zip(u, v, strict=True)] for u, v in zip(a, b, strict=True)]


def subtracted(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A - B``."""
    return [[p - q for p, q in zip(u, v, strict=True)] for u, v in zip(a, b, strict=True)]


def diagonal_added(a: Matrix, x: Tensor | float) -> Matrix:
    """Compute ``A + x 1``."""
    return [[p + x if i == j else p for j, p in enumerate(row)] for i, row in enumerate(a)]


def trace(a: Matrix) -> Tensor:
    """Compute the sum of the diagonal."""
    first, *rest = [row[i] for i, row in enumerate(a)]
    for x in rest:
        first = first + x
    return first


def scaled(x: Tensor | float, a: Matrix) -> Matrix:
    """Compute ``x A``."""
    return [[x * p for p in row] for row in a]


def cofactors(f: Matrix) -> Matrix:
    """Compute the derivative of det F, in two or three dimensions.

    Its components are polynomials, so that it is finite for every F. In three dimensions its rows
    are the vector products of the other two rows of F.
    """
    if len(f) == 2:
        (a, b), (c, d) = f
        return [[d, -c], [-b, a]]
    return [_cross(f[1], f[2]), _cross(f[2], f[0]), _cross(f[0], f[1])]


def cofactors_along(f: Matrix, df: Matrix) -> Matrix:
    """Compute the derivative of :func:`cofactors` along dF."""
    if len(f) == 2:
        return cofactors(df)
    pairs = ((1, 2), (2, 0), (0, 1))
    return [
        [x + y for x, y in zip(_cross(df[i], f[j]), _cross(f[i], df[j]), strict=True)]
        for i, j in pairs
    ]


def determinant(f: Matrix, cofactor: Matrix) -> Tensor:
    """Compute det F from its first row and its cofactors."""
    return _dot(f[0], cofactor[0])


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    first, *rest = [x * y for x, y in zip(a, b, strict=True)]
    for term in rest:
        first = first + term
    return first


def _cross(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [
        a[1] * b[2] - a[2] * b[1],
        a[2] * b[0] - a[0] * b[2],
        a[0] * b[1] - a[1] * b[0],
    ]
