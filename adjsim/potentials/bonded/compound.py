"""Terms whose energy is an expression of several coordinates of a few points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_positive
from adjsim.core.coordinates import Angle, Coordinate, Dihedral, Distance, Vector, subtracted
from adjsim.core.layout import is_tracing
from adjsim.core.rounding import Rounding
from adjsim.core.typing import Array
from adjsim.potentials.bonded.custom import CustomTerm
from adjsim.potentials.expressions import Expression
from adjsim.potentials.products import derivative, with_fewer_axes

KINDS: dict[str, type[Coordinate]] = {"distance": Distance, "angle": Angle, "dihedral": Dihedral}
# Functions of the Cartesian coordinates of points, to nearest images.
OF_POINTS: dict[str, tuple[int, type[Coordinate]]] = {
    "pointdistance": (6, Distance),
    "pointangle": (9, Angle),
    "pointdihedral": (12, Dihedral),
    "periodicdistance": (6, Distance),
}


class Displacements(Coordinate):
    """The entries of all displacements, ``(*batch, displacements * dim, terms)``."""

    def __init__(self, *b: Vector) -> None:
        self.value = torch.cat(list(chain(*b)), -2)

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        return torch.cat(list(chain(*v)), -2), []


class CompoundTerm(CustomTerm):
    """The base class of terms with an expression of coordinates of several points.

    The energy of a term is a function of the displacements b that its coordinates read. The force
    is ``-dU/db``, and its product along changes w is ``-d(dU/db . w)/db``.

    Attributes:
        letter: the letter of the names of points.
        width: the number of points of a term; None: any.
        points: the names of the points of a term.
    """

    coordinate = Displacements
    # Atoms of two sides of a term may be the same.
    distinct = ((0,),)
    functions: ClassVar[Mapping[str, int]] = {name: count for name, (count, _) in OF_POINTS.items()}
    letter: ClassVar[str] = "p"
    width: ClassVar[int | None] = None
    fixed_reason = "its expression reads Cartesian coordinates, which do not move with the box"

    def __init__(
        self, index: Array, *arguments: Any, length_unit: float = 1.0, **options: Any
    ) -> None:
        given = as_indices("index", index)
        self.members = self.width or (given.shape[1] if given.ndim == 2 else 1)
        self.points = self.point_names()
        super().__init__(given, *arguments, **options)
        self.length_unit = as_positive("length_unit", length_unit)

    def point_names(self) -> tuple[str, ...]:
        """Return the names of the points of a term."""
        return tuple(f"{self.letter}{k + 1}" for k in range(self.members))

    def cartesian(self) -> dict[str, tuple[int, int]]:
        """Return the point and the axis of each name of a Cartesian coordinate."""
        return {
            f"{axis}{k + 1}": (k, number)
            for k in range(self.members)
            for number, axis in enumerate("xyz")
        }

    def arrange(self, expression: Expression) -> None:
        self.coordinates = self._read(expression)
        used = chain(*(pairs for _, pairs in self.coordinates.values()), self.further_steps())
        self.steps = tuple(dict.fromkeys(used))
        if not self.steps:
            raise ValueError(
                f"the expression {expression.text!r} reads no coordinate of atoms, so its force is "
                "zero: leave the term out."
            )
        # Cartesian coordinates do not move with the box.
        self.stretches = all(i >= 0 for i, _ in self.steps)
        solid = "dihedral" in {kind for kind, _ in self.coordinates.values()}
        self.dim = 3 if solid or not self.stretches else None

    def further_steps(self) -> Sequence[tuple[int, int]]:
        """Return displacements that are read beside those of the expression."""
        return ()

    def validate(self) -> None:
        """Refuse an expression that reads other coordinates than when the terms were made."""
        if self._read(self.expression) != self.coordinates:
            raise ValueError(
                f"the expression {self.expression.text!r} reads other coordinates than when "
                f"{type(self).__name__} was made: make it again."
            )
        super().validate()

    def _read(self, expression: Expression) -> dict[str, tuple[str, list[tuple[int, int]]]]:
        """Return the kind and the displacements of each coordinate of an expression."""
        found: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        cartesian = self.cartesian()
        for name in sorted(expression.names):
            kind, bracket, points = name.rstrip(")").partition("(")
            if bracket:
                places = [self.points.index(point) for point in points.split(",")]
                found[name] = kind, list(pairwise(places))
            elif name in cartesian:
                found[name] = name, [(-1, cartesian[name][0])]
        return found

    def differences(self, x: Tensor) -> list[Vector]:
        places = self.members_of(x)
        return [places[j] if i < 0 else subtracted(places[j], places[i]) for i, j in self.steps]

    def _to_nearest(self, vectors: list[Vector], box: Tensor | None) -> list[Vector]:
        near = super()._to_nearest(vectors, box)
        rows = zip(self.steps, vectors, near, strict=True)
        return [b if i < 0 else moved for (i, _), b, moved in rows]

    def coordinate_names(self) -> Collection[str]:
        return {*self.cartesian(), *self.coordinates}

    def coordinates_of(self, x: Tensor) -> dict[str, Tensor]:
        vectors = dict(zip(self.steps, self._vectors(x), strict=True))
        cartesian, found = self.cartesian(), dict[str, Tensor]()
        for name, (kind, steps) in self.coordinates.items():
            b = [vectors[step] for step in steps]
            if kind in KINDS:
                value = KINDS[kind](*b).value
                found[name] = value / self.length_unit if kind == "distance" else value
            else:
                found[name] = _entry(b[0], cartesian[name][1]) / self.length_unit
        return found

    def functions_of(self, x: Tensor) -> dict[str, Callable[..., Tensor]]:
        return {name: self._of_points(kind, x) for name, (_, kind) in OF_POINTS.items()} | (
            super().functions_of(x)
        )

    def _of_points(self, kind: type[Coordinate], x: Tensor) -> Callable[..., Tensor]:
        """Return a function of the Cartesian coordinates of points."""
        box = None if self.image_box is None else self.image_box / self.length_unit

        def value(*entries: Tensor) -> Tensor:
            places = torch.broadcast_tensors(*entries, x[..., :1, :])[:-1]
            rows = [places[k : k + 3] for k in range(0, len(places), 3)]
            b: list[Vector] = [subtracted(end, start) for start, end in pairwise(rows)]
            return kind(*super(CompoundTerm, self)._to_nearest(b, box)).value

        return value

    def _vectors(self, joined: Tensor) -> list[Vector]:
        """Split the entries of all displacements."""
        dim = joined.shape[-2] // len(self.steps)
        if not is_tracing():
            return [[x] for x in joined.split(dim, -2)]
        rows = joined.split(1, -2)
        return [rows[k : k + dim] for k in range(0, len(rows), dim)]

    def _pulls(self, x: Coordinate, slope: Tensor, rounding: Rounding) -> list[Vector]:
        rounding = with_fewer_axes(rounding, 1)
        return [[rounding.round(part) for part in pull] for pull in self._vectors(-slope)]

    def _changes(
        self, x: Coordinate, slope: Tensor, moves: Sequence[Vector]
    ) -> tuple[Tensor, list[Vector]]:
        w, _ = x.along(*moves)
        turned = derivative(lambda y: self.slope(y) * w, x.value)
        return w, self._vectors(-turned)


class CustomCompound(CompoundTerm):
    """Groups of atoms with an expression of several of their coordinates.

    ``U = sum over terms of unit f(coordinates, numbers)``, as OpenMM's CustomCompoundBondForce. The
    atoms of a term are the points p1, p2, ... of the expression:

    ================================= ============================================================
    ``distance(p1,p2)``               a distance, in the ``length_unit``
    ``angle(p1,p2,p3)``               the angle at p2, from 0 to pi
    ``dihedral(p1,p2,p3,p4)``         a dihedral angle, from -pi to pi
    ``x1, y1, z1, x2, ...``           Cartesian coordinates, in the ``length_unit``
    ``pointdistance(x1,y1,z1,x2,..)`` the distance of two points by their coordinates; likewise
                                      ``pointangle`` of three and ``pointdihedral`` of four
    ================================= ============================================================

    With a box distances, angles and dihedral angles are of displacements to nearest images.
    Cartesian coordinates are those of the position. Terms with them do not follow a box that moves.
    Angles and lengths whose derivative is undefined, as of three atoms on a line, have none.

    Force, product and gradients are derivatives of the expression. Use a term of the library where
    there is one; it is faster.

    Args:
        index: ``(terms, atoms)``, the atoms of each term.
        expression, numbers, tables, unit, types, box: see
            :class:`~adjsim.potentials.CustomTerm`.
        length_unit: the unit of length of the expression.

    Raises:
        ValueError: see :class:`~adjsim.potentials.CustomTerm`; an expression without coordinates.
    """


class CustomExternal(CompoundTerm):
    """Atoms with an expression of their Cartesian coordinates ``x``, ``y`` and ``z``.

    ``U = sum over atoms of unit f(x, y, z, numbers)``, as OpenMM's CustomExternalForce.
    ``periodicdistance(x,y,z,x0,y0,z0)`` is the distance from a point, to the nearest image if there
    is a box. The terms do not follow a box that moves. For harmonic restraints use
    :class:`~adjsim.PositionRestraint`.

    Args:
        index: ``(atoms,)``, the atoms.
        expression, numbers, tables, unit, types, box: see
            :class:`~adjsim.potentials.CustomTerm`.
        length_unit: the unit of length of the expression.
    """

    width = 1

    def point_names(self) -> tuple[str, ...]:
        return ()

    def cartesian(self) -> dict[str, tuple[int, int]]:
        return {axis: (0, number) for number, axis in enumerate("xyz")}


def _entry(b: Vector, axis: int) -> Tensor:
    """Return one coordinate of a vector."""
    return b[axis] if len(b) > 1 else b[0].narrow(-2, axis, 1)
