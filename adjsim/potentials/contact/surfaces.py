"""Surfaces, as the gap between a point and the surface.

The gap g is the distance of a point from the surface, negative behind it. It is a
:class:`~adjsim.core.coordinates.Coordinate` with value g, gradient n, the unit normal, and the
derivative of n along a displacement v, which is H v with the curvature H of the surface. With w the
vector from the centre of a sphere, from the axis of a cylinder, or from a box to a point outside::

    n = w / abs(w)        H = (P - n n^T) / abs(w)

P is the unit matrix for a sphere, the projector orthogonal to the axis for a cylinder, and selects
the axes along which the point is beyond the box. Elsewhere, at a plane and inside a box, H is zero.

A gap is not differentiable at the centre of a sphere, on the axis of a cylinder, and inside a box
where two faces are equally near. Normal and curvature are finite there: zero at the centre and on
the axis, and those of the first of the faces inside a box.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import describe_type, wrong_shape
from adjsim.core.coordinates import Coordinate, Distance, Vector, combined, dot, scaled, subtracted
from adjsim.core.declared import declared
from adjsim.core.typing import Number
from adjsim.potentials.evaluated import DeclaredModule

# The rules of a vector with an entry for each dimension, and of a length.
POINT: dict[str, Any] = {
    "finite": True,
    "shapes": (("dim",),),
    "each": "one number for each dimension",
}
LENGTH: dict[str, Any] = {"positive": True, "finite": True, "single": True}


class Surface(DeclaredModule):
    """A surface that does not move. Subclasses write ``coordinate(x)``.

    Attributes:
        dim: the number of coordinates of a point.
    """

    dim: int

    def coordinate(self, x: Vector) -> Coordinate:
        """Compute the gap, with two derivatives, of points: dim tensors ``(*batch, 1, points)``."""
        raise TypeError(f"{type(self).__name__} has no coordinate(x).")


class Plane(Surface):
    """The plane ``n^T x = offset``, with matter on the side to which n points.

    The gap is ``n . x - offset`` with ``n = normal / abs(normal)``.

    Args:
        {parameters}

    Raises:
        ValueError: a normal of length zero or not ``(dim,)``, more than one offset, infinite
            numbers.
    """

    normal: Tensor = declared("``(dim,)``, of any length but zero", **POINT)
    offset: Tensor = declared(
        "distance of the plane from the origin along n", 0.0, finite=True, single=True
    )

    def __init__(self, *values: Number, **named: Number) -> None:
        super().__init__(*values, **named)
        self.dim = len(self.normal)

    def validate(self) -> None:
        """Refuse a normal without a direction."""
        _refuse_no_direction("normal", self.normal)

    def coordinate(self, x: Vector) -> Coordinate:
        normal = _column(self.normal, x)
        return _PlaneGap(x, scaled(dot(normal, normal).rsqrt(), normal), _number(self.offset, x))


class Centred(Surface):
    """The base class of surfaces around a point."""

    center: Tensor = declared("a point", **POINT)

    def __init__(self, *values: Number, **named: Number) -> None:
        super().__init__(*values, **named)
        self.dim = len(self.center)


class Sphere(Centred):
    """A solid ball (a disc), with matter outside and the gap ``abs(x - center) - radius``.

    Args:
        center: ``(dim,)``.
        {parameters}

    Raises:
        ValueError: a radius that is not one positive number, infinite numbers.
    """

    radius: Tensor = declared("length", **LENGTH)

    def coordinate(self, x: Vector) -> Coordinate:
        return _Rounded(subtracted(x, _column(self.center, x)), _number(self.radius, x))


class Cylinder(Centred):
    """A solid cylinder without ends, with matter outside of it.

    The gap is ``abs(w) - radius`` with the part w of ``x - center`` that is orthogonal to the axis.

    Args:
        center: ``(3,)``, a point of the axis.
        {parameters}

    Raises:
        ValueError: not three dimensions, an axis of length zero, a radius that is not one positive
            number, infinite numbers.
    """

    axis: Tensor = declared("``(3,)``, of any length but zero", **POINT)
    radius: Tensor = declared("length", **LENGTH)

    def validate(self) -> None:
        """Refuse other dimensions than three, and an axis without a direction."""
        if len(self.center) != 3 or len(self.axis) != 3:
            raise ValueError(
                f"center and axis must be (3,); got {tuple(self.center.shape)} and "
                f"{tuple(self.axis.shape)}. In two dimensions use Sphere, a disc."
            )
        _refuse_no_direction("axis", self.axis)

    def coordinate(self, x: Vector) -> Coordinate:
        axis = _column(self.axis, x)
        axis = scaled(dot(axis, axis).rsqrt(), axis)
        b = subtracted(x, _column(self.center, x))
        return _Rounded(b, _number(self.radius, x), axis)


class Box(Centred):
    """A solid box along the axes, with matter outside of it.

    The gap is the distance from the box, and inside minus the distance from the nearest face.
    Inside, the force turns abruptly where another face becomes the nearest one, so keep
    penetrations small beside the half lengths.

    Args:
        center: ``(dim,)``.
        {parameters}

    Raises:
        ValueError: half lengths that are not positive or not as many as the coordinates of the
            center, infinite numbers.
    """

    half_lengths: Tensor = declared("``(dim,)``", positive=True, finite=True)

    def validate(self) -> None:
        """Refuse half lengths that are not as many as the coordinates of the center."""
        if self.half_lengths.shape != self.center.shape:
            raise wrong_shape(
                "half_lengths", f"({len(self.center)},), as center", self.half_lengths
            )

    def coordinate(self, x: Vector) -> Coordinate:
        return _BoxGap(subtracted(x, _column(self.center, x)), _column(self.half_lengths, x))


class Inside(Surface):
    """The same surface with matter inside: a ball becomes a bowl, a box a container.

    The gap is that of the surface with the other sign. Where two walls of a container are equally
    near, the force of a penalty that reaches there turns abruptly. :class:`Quadratic` acts behind
    the walls alone; for other penalties add a contact with a plane for each wall.

    Args:
        surface: :class:`Sphere`, :class:`Box`, :class:`Cylinder` or another surface.

    Raises:
        TypeError: no surface, or a :class:`Moving` one: write ``Moving(Inside(surface), path)``.
    """

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        if not isinstance(surface, Surface):
            raise TypeError(
                f"surface must be a Surface; got {describe_type(surface)}. A moving one is "
                "Moving(Inside(surface), path)."
            )
        self.surface, self.dim = surface, surface.dim

    def coordinate(self, x: Vector) -> Coordinate:
        return _Opposite(self.surface.coordinate(x))


class Moving(nn.Module):
    """A surface that moves without turning: at time t it is shifted by ``path(t)``.

    Args:
        surface: the surface where the path is zero.
        path: a module or function from the time, a float or a tensor, to the shift ``(dim,)``,
            differentiable. Tensors that it reads and that require grad must be parameters or
            buffers of a module. Friction needs the velocity, ``path.rate(t)``, which the signals of
            ``adjsim.potentials`` have.

    Raises:
        TypeError: no :class:`Surface`, or a path that cannot be called.
    """

    def __init__(self, surface: Surface, path: Callable[[Any], Tensor]) -> None:
        super().__init__()
        if not isinstance(surface, Surface):
            raise TypeError(f"surface must be a Surface; got {describe_type(surface)}.")
        if not callable(path):
            raise TypeError(f"path must be a function of time; got {describe_type(path)}.")
        self.surface, self.path, self.dim = surface, path, surface.dim


class _PlaneGap(Coordinate):
    def __init__(self, x: Vector, normal: Vector, offset: Tensor) -> None:
        self.value = dot(normal, x) - offset
        self.gradient = [normal]

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        return dot(self.gradient[0], v[0]), [[torch.zeros_like(part) for part in v[0]]]


class _Rounded(Coordinate):
    """The distance of b from a centre or, with a unit vector along an axis, from the axis."""

    def __init__(self, b: Vector, radius: Tensor, axis: Vector | None = None) -> None:
        self._axis = axis
        self._distance = Distance(self._across(b))
        self.value = self._distance.value - radius
        self.gradient = self._distance.gradient

    def _across(self, b: Vector) -> Vector:
        return b if self._axis is None else combined(b, -dot(self._axis, b), self._axis)

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        return self._distance.along(self._across(v[0]))


class _BoxGap(Coordinate):
    def __init__(self, b: Vector, half_lengths: Vector) -> None:
        d = [x.abs() - h for x, h in zip(b, half_lengths, strict=True)]
        signs = [torch.where(x < 0, -torch.ones_like(x), torch.ones_like(x)) for x in b]
        self._out = [x > 0 for x in d]
        self._outside = Distance([s * x.clamp(min=0) for s, x in zip(signs, d, strict=True)])
        # One face after the other is compared, so that the first of equally near ones remains.
        depth, face = d[0], [signs[0], *(torch.zeros_like(x) for x in d[1:])]
        for k, x in enumerate(d[1:], 1):
            nearer = x > depth
            depth = torch.where(nearer, x, depth)
            face = [
                torch.where(nearer, signs[k] if j == k else 0.0, old) for j, old in enumerate(face)
            ]
        outside, (normal,) = depth > 0, self._outside.gradient
        self.value = torch.where(outside, self._outside.value, depth)
        self.gradient = [[torch.where(outside, x, y) for x, y in zip(normal, face, strict=True)]]

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        moved = [torch.where(out, x, 0.0) for out, x in zip(self._out, v[0], strict=True)]
        _, (turn,) = self._outside.along(moved)
        return dot(self.gradient[0], v[0]), [turn]


class _Opposite(Coordinate):
    def __init__(self, gap: Coordinate) -> None:
        self._gap = gap
        self.value = -gap.value
        self.gradient = [[-x for x in gap.gradient[0]]]

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        rate, (turn,) = self._gap.along(*v)
        return -rate, [[-x for x in turn]]


def _column(vector: Tensor, like: Vector) -> Vector:
    """Return the entries of a vector, each to broadcast against coordinates of points."""
    return list(vector.to(like[0]).reshape(-1, 1, 1).unbind(0))


def _number(value: Tensor, like: Vector) -> Tensor:
    return value.to(like[0]).reshape(())


def _refuse_no_direction(name: str, value: Tensor) -> None:
    if not bool(value.detach().abs().max() > 0):
        raise ValueError(f"{name} must not be zero.")
