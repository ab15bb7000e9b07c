"""Small matrices in components, one for each element, and their rotations.

The rotation R next to F = R S, with S symmetric, maximises ``tr(R^T F)`` among rotations, so that
det R = 1 where det F is negative too. With R of the unit quaternion q, ``tr(R^T F) = q^T N q`` for
a symmetric N linear in F (Horn, J. Opt. Soc. Am. A 4, 629 (1987)). So q is the eigenvector of the
largest eigenvalue t of N, the largest root of

    t^4 - 2 |F|^2 t^2 - 8 det(F) t + |F|^4 - 4 |cof F|^2

Newton's iteration finds t from above; a column of the adjugate of ``N - t`` is q. Where t is a
multiple root (rank one, and reflections such as diag(1, 1, -1)), R is not unique. The adjugate then
gives one of the rotations with the largest trace, and the derivative of R is set to zero. Singular
vectors, whose derivatives are infinite where singular values are equal, are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import add, sub
from typing import Any

import torch
from torch import Tensor

from adjsim.core.coordinates import added, cross, dot

# Newton steps for t, which converge quadratically where R is unique; and for R.
ROOT_STEPS, ROTATION_STEPS = 16, 3


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


def rotation(f: Matrix) -> Matrix:
    """Compute R, differentiable any number of times."""
    if not torch.is_grad_enabled():
        return _rotation(f)
    return _apart(_Rotation.apply(_joined(f)))


def rotation_along(f: Matrix, r: Matrix, df: Matrix) -> Matrix:
    """Compute the derivative of R along dF, a symmetric linear map of dF.

    It is ``R [w]`` with ``(tr(S) - S) w`` the axial vector of ``R^T dF - dF^T R``.
    """
    return r @ _skew(_turn(r.T @ f, r.T @ df))


def _smallest(x: Tensor) -> float:
    """Return the determinant of ``tr(S) - S`` relative to |F|^dim below which R is not unique."""
    return torch.finfo(x.dtype).eps ** (2 / 3)


def _turn(s: Matrix, a: Matrix) -> list[Tensor]:
    """Solve ``(tr(S) - S) w = axial(A - A^T)``; w is zero where it is not unique."""
    if len(s) == 2:
        total = s.trace()
        unique = total * total > _smallest(total) ** 2 * s.inner(s)
        return [(a[1][0] - a[0][1]) * torch.where(unique, 1 / torch.where(unique, total, 1), 0)]
    axial = [a[2][1] - a[1][2], a[0][2] - a[2][0], a[1][0] - a[0][1]]
    whole = ((s + s.T) * -0.5).plus(s.trace())
    adjugate = whole.cofactors()
    size, square = whole.determinant(adjugate), s.inner(s)
    unique = size * size > _smallest(size) ** 2 * square * square * square
    inverse = torch.where(unique, 1 / torch.where(unique, size, 1), 0)
    return [inverse * (x * axial[0] + y * axial[1] + z * axial[2]) for x, y, z in adjugate]


def _skew(w: list[Tensor]) -> Matrix:
    if len(w) == 1:
        none = torch.zeros_like(w[0])
        return Matrix([[none, -w[0]], [w[0], none]])
    x, y, z = w
    none = torch.zeros_like(x)
    return Matrix([[none, -z, y], [z, none, -x], [-y, x, none]])


def _rotation(f: Matrix) -> Matrix:
    if len(f) == 2:
        x, y = f[0][0] + f[1][1], f[1][0] - f[0][1]
        square = x * x + y * y
        unique = square > _smallest(square) ** 2 * f.inner(f)
        inverse = torch.where(unique, torch.rsqrt(torch.where(unique, square, 1)), 0)
        c, s = torch.where(unique, x * inverse, 1), y * inverse
        return Matrix([[c, -s], [s, c]])
    square = f.inner(f)
    none = square == 0
    factor = torch.where(none, 0, torch.rsqrt(torch.where(none, 1, square)))
    unit = (f * factor).plus(torch.where(none, 1.0, 0.0).to(square))
    r = _of_quaternion(_eigenvector(unit))
    for _ in range(ROTATION_STEPS):
        # Newton's step for S - S^T = 0, as a rotation by the formula of Cayley.
        s = r.T @ unit
        w = _turn(s, s)
        turn = _skew(w)
        half = 0.5 / (1 + 0.25 * (w[0] * w[0] + w[1] * w[1] + w[2] * w[2]))
        r = r + r @ turn.combined(2 * half, half, turn @ turn)
    return r


def _eigenvector(f: Matrix) -> list[Tensor]:
    """Compute a quaternion of the largest trace for a matrix of norm one."""
    square, cofactors = f.inner(f), f.cofactors()
    linear = -8 * f.determinant(cofactors)
    last = square * square - 4 * cofactors.inner(cofactors)
    t = torch.sqrt(3 * square)
    for _ in range(ROOT_STEPS):
        value = ((t * t - 2 * square) * t + linear) * t + last
        slope = (4 * t * t - 4 * square) * t + linear
        rising = slope > 0
        t = t - torch.where(rising, value / torch.where(rising, slope, 1), 0)
    (a, b, c), (d, e, g), (h, i, j) = f
    n = [
        [a + e + j - t, i - g, c - h, d - b],
        [i - g, a - e - j - t, b + d, c + h],
        [c - h, b + d, e - a - j - t, g + i],
        [d - b, c + h, g + i, j - a - e - t],
    ]
    rows = _adjugate(n)
    best, size = rows[0], rows[0][0].abs()
    for k in (1, 2, 3):
        larger = rows[k][k].abs() > size
        best = [torch.where(larger, x, y) for x, y in zip(rows[k], best, strict=True)]
        size = torch.where(larger, rows[k][k].abs(), size)
    return best


def _adjugate(n: list[list[Tensor]]) -> list[list[Tensor]]:
    """Compute the adjugate of a symmetric matrix of four rows."""
    found: list[list[Tensor]] = []
    for i in range(4):
        row = [found[j][i] for j in range(i)]
        for j in range(i, 4):
            p, q = ([k for k in range(4) if k != gone] for gone in (i, j))
            minor = Matrix([n[k][m] for m in q] for k in p)
            size = minor.determinant(minor.cofactors())
            row.append(size if (i + j) % 2 == 0 else -size)
        found.append(row)
    return found


def _of_quaternion(q: list[Tensor]) -> Matrix:
    """Compute the rotation of a quaternion of any length."""
    w, x, y, z = q
    f = 2 / (w * w + x * x + y * y + z * z)
    return Matrix(
        [
            [1 - f * (y * y + z * z), f * (x * y - w * z), f * (x * z + w * y)],
            [f * (x * y + w * z), 1 - f * (x * x + z * z), f * (y * z - w * x)],
            [f * (x * z - w * y), f * (y * z + w * x), 1 - f * (x * x + y * y)],
        ]
    )


class _Rotation(torch.autograd.Function):
    """R of ``(dim, dim, ...)`` matrices, whose derivative is written with R itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor) -> Tensor:
        return _joined(_rotation(_apart(f)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        f, r = ctx.saved_tensors
        return _joined(rotation_along(_apart(f), _apart(r), _apart(tangents[0])))

    # The derivative is a symmetric map.
    backward = jvp


def _apart(x: Tensor) -> Matrix:
    return Matrix(row.unbind(0) for row in x.unbind(0))


def _joined(x: Matrix) -> Tensor:
    return torch.stack([torch.stack(row) for row in x])
