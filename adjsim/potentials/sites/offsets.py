"""Offsets of virtual sites from their first atoms, with closed-form derivatives.

An offset s is a function of the displacements d_1, d_2, ... of the other atoms from the first one.
Vectors are those of :mod:`adjsim.core.coordinates`. With the forces F on the sites held fixed,
``F . s`` has the derivatives ``pull(F)`` by the displacements. The derivative of these along
changes v is ``turn(F, v)``, which by the symmetry of second derivatives is also that of
``F . push(v)`` by the displacements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce

from torch import Tensor

from adjsim.core.coordinates import (
    Distance,
    Vector,
    added,
    combined,
    cross,
    dot,
    scaled,
    subtracted,
)


class Offset(ABC):
    """Offsets of sites at given displacements.

    Attributes:
        value: s, ``(*batch, dim, sites)`` or its coordinates.
    """

    value: Vector

    @abstractmethod
    def push(self, v: Sequence[Vector]) -> Vector:
        """Compute the derivative of s along changes of the displacements."""

    @abstractmethod
    def pull(self, force: Vector) -> list[Vector]:
        """Compute the derivatives of ``force . s`` by the displacements."""

    @abstractmethod
    def turn(self, force: Vector, v: Sequence[Vector]) -> list[Vector]:
        """Compute the derivative of :meth:`pull` along changes of the displacements."""


class Weighted(Offset):
    """Sums of displacements with weights, ``s = sum_k w_k d_k``."""

    def __init__(self, weights: Sequence[Tensor], d: Sequence[Vector]) -> None:
        self.weights = weights
        self.value = weighted(weights, d)

    def push(self, v: Sequence[Vector]) -> Vector:
        return weighted(self.weights, v)

    def pull(self, force: Vector) -> list[Vector]:
        return [scaled(weight, force) for weight in self.weights]

    def turn(self, force: Vector, v: Sequence[Vector]) -> list[Vector]:
        return [scaled(0 * weight, force) for weight in self.weights]


class Crossed(Offset):
    """Displacements and their vector product, ``s = w_1 d_1 + w_2 d_2 + c d_1 x d_2``."""

    def __init__(self, weights: Sequence[Tensor], factor: Tensor, d: Sequence[Vector]) -> None:
        self.weights, self.factor, self.d = weights, factor, d
        self.value = combined(weighted(weights, d), factor, cross(*d))

    def push(self, v: Sequence[Vector]) -> Vector:
        (a, b), (da, db) = self.d, v
        turned = added(cross(da, b), cross(a, db))
        return combined(weighted(self.weights, v), self.factor, turned)

    def pull(self, force: Vector) -> list[Vector]:
        crosses = self._crosses(force, self.d)
        return [
            combined(scaled(w, force), self.factor, x)
            for w, x in zip(self.weights, crosses, strict=True)
        ]

    def turn(self, force: Vector, v: Sequence[Vector]) -> list[Vector]:
        return [scaled(self.factor, x) for x in self._crosses(force, v)]

    def _crosses(self, force: Vector, d: Sequence[Vector]) -> tuple[Vector, Vector]:
        """Compute the derivatives of ``force . d_1 x d_2``."""
        return cross(d[1], force), cross(force, d[0])


class Frame:
    """Points ``p = x e + y m + z n`` that are fixed in the axes e, m, n of two vectors a and b.

    e is along a, n along ``a x b``, and ``m = n x e``. Changes of a and b turn the axes by

    ``w = e (n . db - k n . da)/s - m (n . da)/r + n (m . da)/r``,

    with ``r = |a|``, ``s = |e x b| = m . b`` and ``k = (e . b)/r``. Where a has no length, or b is
    along a, the axes that have no direction are zero.
    """

    def __init__(self, point: Sequence[Tensor], a: Vector, b: Vector) -> None:
        x = Distance(a)
        z = Distance(cross(x.direction, b))
        e, n = x.direction, z.direction
        self.axes = e, cross(n, e), n
        self.inverses = x.inverse, z.inverse
        self.across, self.slope = z.value, dot(e, b) * x.inverse
        self.value = weighted(point, self.axes)

    def turned(self, da: Vector, db: Vector) -> Vector:
        """Compute the turn of the axes along changes of a and b."""
        (e, m, n), (over_r, over_s) = self.axes, self.inverses
        up = dot(n, da)
        about = (dot(n, db) - self.slope * up) * over_s, -up * over_r, dot(m, da) * over_r
        return weighted(about, (e, m, n))

    def pull(self, force: Vector) -> tuple[Vector, Vector]:
        """Compute the derivatives of ``force . p`` by a and b."""
        (_, m, n), (first, second, third) = self.axes, self._factors(cross(self.value, force))
        return subtracted(scaled(third, m), scaled(second, n)), scaled(first, n)

    def turn(self, force: Vector, da: Vector, db: Vector) -> tuple[Vector, Vector]:
        """Compute the derivative of :meth:`pull` along changes of a and b."""
        (e, m, n), (over_r, over_s), k = self.axes, self.inverses, self.slope
        w, torque = self.turned(da, db), cross(self.value, force)
        de, dm, dn = (cross(w, axis) for axis in self.axes)
        changed = cross(cross(w, self.value), force)
        along, aside, up = (
            dot(changed, axis) + dot(torque, change)
            for axis, change in zip(self.axes, (de, dm, dn), strict=True)
        )
        first, second, third = self._factors(torque)
        # The relative rates of r and s, and the rate of k.
        dr = dot(e, da) * over_r
        in_plane = dot(m, de)
        ds = (dot(m, db) - k * dot(m, da)) * over_s
        dk = (dot(e, db) + self.across * in_plane) * over_r - k * dr
        dfirst = along * over_s - first * ds
        dthird = up * over_r - third * dr
        dsecond = aside * over_r - (second - k * first) * dr + dk * first + k * dfirst
        by_a = subtracted(
            combined(scaled(dthird, m), third, dm), combined(scaled(dsecond, n), second, dn)
        )
        return by_a, combined(scaled(dfirst, n), first, dn)

    def _factors(self, torque: Vector) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``t.e/s``, ``t.m/r + k t.e/s`` and ``t.n/r`` of a torque t."""
        (e, m, n), (over_r, over_s) = self.axes, self.inverses
        first = dot(torque, e) * over_s
        return first, dot(torque, m) * over_r + self.slope * first, dot(torque, n) * over_r


class Framed(Offset):
    """Points fixed in the axes of two weighted sums, ``s = sum_k o_k d_k + p(a, b)``.

    Here ``a = sum_k x_k d_k`` and ``b = sum_k y_k d_k``, and p is that of :class:`Frame`.
    """

    def __init__(
        self,
        origin: Sequence[Tensor],
        sides: tuple[Sequence[Tensor], Sequence[Tensor]],
        point: Sequence[Tensor],
        d: Sequence[Vector],
    ) -> None:
        self.origin, self.sides = origin, sides
        self.frame = Frame(point, *(weighted(side, d) for side in sides))
        self.value = added(weighted(origin, d), self.frame.value)

    def push(self, v: Sequence[Vector]) -> Vector:
        turned = self.frame.turned(*(weighted(side, v) for side in self.sides))
        return added(weighted(self.origin, v), cross(turned, self.frame.value))

    def pull(self, force: Vector) -> list[Vector]:
        pulls = self._spread(*self.frame.pull(force))
        return [combined(x, o, force) for o, x in zip(self.origin, pulls, strict=True)]

    def turn(self, force: Vector, v: Sequence[Vector]) -> list[Vector]:
        da, db = (weighted(side, v) for side in self.sides)
        return self._spread(*self.frame.turn(force, da, db))

    def _spread(self, by_a: Vector, by_b: Vector) -> list[Vector]:
        """Compute derivatives by the displacements from those by a and b."""
        return [weighted(pair, (by_a, by_b)) for pair in zip(*self.sides, strict=True)]


def weighted(weights: Sequence[Tensor], vectors: Sequence[Vector]) -> Vector:
    """Sum vectors with weights."""
    return reduce(added, map(scaled, weights, vectors))
