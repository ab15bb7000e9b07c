"""Small matrices in components, one for each element.

A matrix is a list of rows. Each component is a tensor ``(*batch, elements)``, so that a compiled
loop computes all components of an element together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, mul, sub
from typing import Any, TypeAlias

from torch import Tensor

from adjsim.core.coordinates import added as vector_added
from adjsim.core.coordinates import cross, dot

Matrix: TypeAlias = Sequence[Sequence[Tensor]]


def each(function: Callable[..., Any], *matrices: Matrix) -> Matrix:
    """Apply a function to the components of matrices."""
    return [list(map(function, *rows)) for rows in zip(*matrices, strict=True)]


def inner(a: Matrix, b: Matrix) -> Tensor:
    """Compute ``A : B``, the sum of products of components."""
    return reduce(add, [x for row in each(mul, a, b) for x in row])


def product(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A B``."""
    return [[dot(row, column) for column in zip(*b, strict=True)] for row in a]


def transposed(a: Matrix) -> Matrix:
    """Return the transpose."""
    return list(zip(*a, strict=True))


def combined(x: Tensor, a: Matrix, y: Tensor, b: Matrix) -> Matrix:
    """Compute ``x A + y B``."""
    return each(lambda p, q: x * p + y * q, a, b)


def added(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A + B``."""
    return each(add, a, b)


def subtracted(a: Matrix, b: Matrix) -> Matrix:
    """Compute ``A - B``."""
    return each(sub, a, b)


def diagonal_added(a: Matrix, x: Tensor | float) -> Matrix:
    """Compute ``A + x 1``."""
    return [[p + x if i == j else p for j, p in enumerate(row)] for i, row in enumerate(a)]


def trace(a: Matrix) -> Tensor:
    """Compute the sum of the diagonal."""
    return reduce(add, [row[i] for i, row in enumerate(a)])


def scaled(x: Tensor | float, a: Matrix) -> Matrix:
    """Compute ``x A``."""
    return each(lambda p: x * p, a)


def cofactors(f: Matrix) -> Matrix:
    """Compute the derivative of det F, in two or three dimensions.

    Its components are polynomials, so that it is finite for every F. In three dimensions its rows
    are the vector products of the other two rows of F.
    """
    if len(f) == 2:
        (a, b), (c, d) = f
        return [[d, -c], [-b, a]]
    return [cross(f[1], f[2]), cross(f[2], f[0]), cross(f[0], f[1])]


def cofactors_along(f: Matrix, df: Matrix) -> Matrix:
    """Compute the derivative of :func:`cofactors` along dF."""
    if len(f) == 2:
        return cofactors(df)
    pairs = ((1, 2), (2, 0), (0, 1))
    return [vector_added(cross(df[i], f[j]), cross(f[i], df[j])) for i, j in pairs]


def determinant(f: Matrix, cofactor: Matrix) -> Tensor:
    """Compute det F from its first row and its cofactors."""
    return dot(f[0], cofactor[0])
