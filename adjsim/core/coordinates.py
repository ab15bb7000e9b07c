"""Internal coordinates of displacement vectors, with closed-form derivatives.

A coordinate x, such as a distance or an angle, is a function of the displacements b_1, b_2, ...
between the atoms of a chain, ``b_k = q_k - q_(k-1)``. With respect to a point its gradient is
``dx/dq_k = dx/db_k - dx/db_(k+1)``. The derivatives of x and of its gradient along displacements
follow from the chain rule applied forward, operation by operation.

A vector is a list of tensors: one ``(*batch, dim, terms)``, or one ``(*batch, 1, terms)`` for each
coordinate, so that a compiled loop computes all together. Scalars are ``(*batch, 1, terms)``.

Where a coordinate is not differentiable, its gradient is zero instead of NaN: a distance of
coincident points, an angle with a side without length, the angle of three points on a line (0 or
pi), and a dihedral angle with three consecutive points on a line. Points are on a line if the sine
of the angle is below eight rounding errors. Autograd through ``value`` and ``gradient`` is finite
there too. NaN and infinite points give NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import add, mul, sub
from typing import TypeAlias

import torch
from torch import Tensor

Vector: TypeAlias = Sequence[Tensor]


def dot(a: Vector, b: Vector) -> Tensor:
    """Compute the scalar product, ``(*batch, 1, terms)``."""
    if len(a) == 1:
        return (a[0] * b[0]).sum(-2, keepdim=True)
    return reduce(add, map(mul, a, b))


def cross(a: Vector, b: Vector) -> Vector:
    """Compute the vector product in three dimensions."""
    if len(a) == 1:
        return [torch.linalg.cross(a[0], b[0], dim=-2)]
    return [a[k - 2] * b[k - 1] - a[k - 1] * b[k - 2] for k in range(3)]


def scaled(factor: Tensor, a: Vector) -> Vector:
    """Compute the multiple of a vector."""
    return [factor * x for x in a]


def added(a: Vector, b: Vector) -> Vector:
    """Compute the sum of two vectors."""
    return list(map(add, a, b))


def subtracted(a: Vector, b: Vector) -> Vector:
    """Compute the difference of two vectors."""
    return list(map(sub, a, b))


def combined(a: Vector, factor: Tensor, b: Vector) -> Vector:
    """Compute ``a + factor b``."""
    return [x + factor * y for x, y in zip(a, b, strict=True)]


class Coordinate(ABC):
    """An internal coordinate of displacements, which are the arguments of the constructor.

    Attributes:
        value: x, ``(*batch, 1, terms)``.
        gradient: dx/db_k for each k.
    """

    value: Tensor
    gradient: list[Vector]

    @abstractmethod
    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        """Compute the derivatives of value and gradient along changes of the displacements."""


class SquaredDistance(Coordinate):
    """The squared length of a displacement."""

    def __init__(self, b: Vector) -> None:
        self.value = dot(b, b)
        self.gradient = [[2 * x for x in b]]

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        return dot(self.gradient[0], v[0]), [[2 * x for x in v[0]]]


class Distance(Coordinate):
    """The length of a displacement, whose direction is zero where the length is."""

    def __init__(self, b: Vector) -> None:
        square = dot(b, b)
        # The comparison is false for NaN, which is kept.
        missing = square == 0
        root = torch.where(missing, 1.0, square).sqrt()
        self.value = torch.where(missing, 0.0, root)
        self.inverse = torch.where(missing, 0.0, 1 / root)
        self.direction = scaled(self.inverse, b)
        self.gradient = [self.direction]

    def turn(self, v: Vector) -> tuple[Tensor, Vector]:
        """Compute the derivatives of length and direction along a change of the displacement."""
        rate = dot(self.direction, v)
        return rate, scaled(self.inverse, combined(v, -rate, self.direction))

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        rate, turn = self.turn(v[0])
        return rate, [turn]


class _Bend(Coordinate):
    """A coordinate of three points, from the directions u and w of b_1 and b_2.

    It reads ``c = u . w``, the part ``w - c u`` of w that is orthogonal to u, and likewise of u.
    """

    def __init__(self, b1: Vector, b2: Vector) -> None:
        self._sides = Distance(b1), Distance(b2)
        self._directions = u, w = [side.direction for side in self._sides]
        self._product = c = dot(u, w)
        self._across = combined(w, -c, u), combined(u, -c, w)

    def _along_across(self, du: Vector, dw: Vector, dc: Tensor) -> tuple[Vector, Vector]:
        (u, w), c = self._directions, self._product
        return (
            subtracted(combined(dw, -dc, u), scaled(c, du)),
            subtracted(combined(du, -dc, w), scaled(c, dw)),
        )


class Cosine(_Bend):
    """The cosine ``-c`` of the angle at the middle one of three points, smooth at 0 and pi."""

    def __init__(self, b1: Vector, b2: Vector) -> None:
        super().__init__(b1, b2)
        self.value = -self._product
        # The gradient is -across / length.
        self._factors = [-side.inverse for side in self._sides]
        self.gradient = list(map(scaled, self._factors, self._across))

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        u, w = self._directions
        (r1, du), (r2, dw) = map(Distance.turn, self._sides, v)
        dc = dot(du, w) + dot(u, dw)
        changes = self._along_across(du, dw, dc)
        rates = [-rate * side.inverse for rate, side in zip((r1, r2), self._sides, strict=True)]
        return -dc, list(map(scaled, self._factors, map(combined, changes, rates, self._across)))


class Angle(_Bend):
    """The angle at the middle one of three points, ``atan2(|w - c u|, -c)``, from 0 to pi."""

    def __init__(self, b1: Vector, b2: Vector) -> None:
        super().__init__(b1, b2)
        c, (across, _) = self._product, self._across
        square = dot(across, across)
        straight = square <= _smallest(square)
        sine = torch.where(straight, 1.0, square).sqrt()
        # The angle of points on a line is a constant.
        constant = torch.pi * (c.detach() > 0).to(c)
        value = torch.atan2(sine, torch.where(straight, 0.0, -c))
        self.value = torch.where(straight, constant, value)
        self._sine = torch.where(straight, 0.0, sine)
        self._cosecant = torch.where(straight, 0.0, 1 / sine)
        #: Unit vectors orthogonal to b_1 and b_2, in the plane of both.
        self._normals = [scaled(self._cosecant, x) for x in self._across]
        self._inverses = [side.inverse for side in self._sides]
        self.gradient = list(map(scaled, self._inverses, self._normals))

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        (r1, du), (r2, dw) = map(Distance.turn, self._sides, v)
        rate = dot(self.gradient[0], v[0]) + dot(self.gradient[1], v[1])
        # Since c = -cos, and the length of w - c u is the sine.
        dc, ds = self._sine * rate, -self._product * rate
        changes = self._along_across(du, dw, dc)
        parts = zip(self._inverses, changes, (r1, r2), self._normals, strict=True)
        turned: list[Vector] = []
        for inverse, change, r, normal in parts:
            turn = scaled(self._cosecant, combined(change, -ds, normal))
            turned.append(scaled(inverse, combined(turn, -r * inverse, normal)))
        return rate, turned


class Dihedral(Coordinate):
    """The dihedral angle of four points, from -pi to pi, with the sign of IUPAC (trans is pi).

    It is the angle by which the first bond is turned clockwise to cover the last one, seen along
    the middle bond. With u_k the direction of b_k, ``m = u_1 x u_2`` and ``n = u_2 x u_3`` it is
    ``atan2(u_1 . n, m . n)``. The gradient is that of Blondel and Karplus, J. Comput. Chem. 17,
    1132 (1996): with M = m / m^2 and N = n / n^2, ``M / r_1``, ``-(u_1 . u_2 M + u_2 . u_3 N) /
    r_2`` and ``N / r_3``.
    """

    def __init__(self, b1: Vector, b2: Vector, b3: Vector) -> None:
        self._sides = sides = [Distance(b) for b in (b1, b2, b3)]
        u1, u2, u3 = (side.direction for side in sides)
        m, n = cross(u1, u2), cross(u2, u3)
        mm, nn = dot(m, m), dot(n, n)
        straight = torch.minimum(mm, nn) <= _smallest(mm)
        y, x = dot(u1, n), dot(m, n)
        self.value = self._angle(torch.where(straight, 0.0, y), torch.where(straight, 1.0, x))
        self._inverses = [
            torch.where(straight, 0.0, 1 / torch.where(straight, 1.0, square))
            for square in (mm, nn)
        ]
        self._crosses = m, n
        self._normals = list(map(scaled, self._inverses, self._crosses))
        self._products = dot(u1, u2), dot(u2, u3)
        ends = map(scaled, self._products, self._normals)
        self.gradient = [
            scaled(sides[0].inverse, self._normals[0]),
            scaled(-sides[1].inverse, added(*ends)),
            scaled(sides[2].inverse, self._normals[1]),
        ]

    def _angle(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute the angle whose sine and cosine are in proportion to y and x."""
        return torch.atan2(y, x)

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        sides, (first, middle, last) = self._sides, self.gradient
        u = [side.direction for side in sides]
        rates, du = zip(*map(Distance.turn, sides, v), strict=True)
        normals: list[Vector] = []
        ends: list[Vector] = []
        for k in range(2):
            change = added(cross(du[k], u[k + 1]), cross(u[k], du[k + 1]))
            double, normal = 2 * dot(self._crosses[k], change), self._normals[k]
            normals.append(scaled(self._inverses[k], combined(change, -double, normal)))
            dc = dot(du[k], u[k + 1]) + dot(u[k], du[k + 1])
            ends.append(combined(scaled(dc, normal), self._products[k], normals[k]))
        changes = normals[0], [-x for x in added(*ends)], normals[1]
        turned: list[Vector] = [
            scaled(side.inverse, combined(change, -rate, old))
            for side, change, rate, old in zip(sides, changes, rates, self.gradient, strict=True)
        ]
        return dot(first, v[0]) + dot(middle, v[1]) + dot(last, v[2]), turned


class Fold(Dihedral):
    """The angle by which two triangles with a common edge are folded, from -pi to pi.

    It is the dihedral angle less pi, so it is zero, and smooth, where the four points are in a
    plane with the triangles beside each other. It jumps where they lie on each other.
    """

    def _angle(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.atan2(-y, -x)


def _smallest(square: Tensor) -> float:
    """Return the squared sine of an angle below which it is rounding errors."""
    return (8 * torch.finfo(square.dtype).eps) ** 2
