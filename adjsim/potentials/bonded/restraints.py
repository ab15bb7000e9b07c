"""Restraints of atoms to fixed points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.coordinates import Coordinate, Vector, subtracted
from adjsim.core.declared import declared
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED
from adjsim.core.typing import Number, Positions
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.bonds_and_angles import HarmonicTerm
from adjsim.potentials.bonded.terms import whole
from adjsim.potentials.products import DeferredVJP


class Restraint(BondedPotential):
    """A sum over restrained atoms of ``element(r)``, with r their distances from their points."""

    members = 1
    steps = ((-1, 0),)
    stretches = False
    fixed_reason = "its points do not move with the box"
    shapes_of_declared = "a number, one for each restrained atom or one for each type"

    k: Tensor = declared("stiffness, energy / length^2")
    position: Tensor = declared(
        "``(atoms, dim)``, the point of each restrained atom, or the middle of its ball",
        shapes=(("atoms", "dim"),),
        each="a point for each restrained atom",
    )

    def register_term_parameter(self, name: str, value: Number, **rule: Any) -> None:
        if name == "position":
            register(self, name, value, **rule | {"shapes": [(len(self.index), "dim")]})
        else:
            super().register_term_parameter(name, value, **rule)

    def displacements(self, position: Positions) -> list[Vector]:
        self.check_position(position)
        if position.shape[-1] != self.position.shape[-1]:
            raise ValueError(
                f"{type(self).__name__} has points of dim {self.position.shape[-1]} and position "
                f"has dim {position.shape[-1]}."
            )
        return self._from_points(self.members_of(position)[0])

    def differences(self, x: Tensor) -> list[Vector]:
        return [self.members_of(x)[0]]

    def parameter_vjp(
        self, x: Coordinate, rate: Tensor, position: Tensor, v: Tensor
    ) -> DeferredVJP:
        # The points are parameters too, and do not enter by the slope.
        along, place = (whole(self.members_of(y)[0]) for y in (v, position))
        return DeferredVJP(self, self._pull, along, place)

    def _pull(self, place: Tensor) -> Tensor:
        """Compute the force on the restrained atoms, ``(*batch, dim, terms)``."""
        x = self.coordinate(*self._from_points([place]))
        return whole(self._pulls(x, self.slope(x.value), UNROUNDED)[0])

    def _from_points(self, places: Vector) -> list[Vector]:
        points = self.position.to(places[0]).T
        rows = points.split([part.shape[-2] for part in places])
        return self._to_nearest([subtracted(places, rows)], self.image_box)


class PositionRestraint(Restraint, HarmonicTerm):
    """Harmonic restraints, ``U = sum over atoms of k/2 |q - position|^2``.

    Args:
        index: ``(atoms,)``, the restrained atoms.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    def change(self, x: Tensor) -> Tensor:
        return x


class FlatBottomRestraint(Restraint, HarmonicTerm):
    """Restraints to balls, ``U = sum over atoms of k/2 max(0, |q - position| - radius)^2``.

    Args:
        index: ``(atoms,)``, the restrained atoms.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    radius: Tensor = declared("of the ball, length")

    def change(self, x: Tensor) -> Tensor:
        return (x - self.term_parameter("radius", x)).clamp(min=0)

    def curvature(self, x: Tensor) -> Tensor:
        return torch.where(self.change(x) > 0, self.term_parameter("k", x), 0.0)
