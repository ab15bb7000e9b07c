"""Restraints of atoms to fixed points."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim._geometry import Distance, Vector
from adjsim._typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential


class _Restraint(BondedPotential):
    """A restraint to points: the displacement of a term is that of its atom from its point."""

    members = 1
    steps = ()
    coordinate = Distance

    k: Tensor
    position: Tensor

    def __init__(
        self,
        index: Array,
        k: Number,
        position: Array,
        *,
        types: Array | None = None,
        box: Array | None = None,
    ) -> None:
        super().__init__(index, types=types, box=box)
        self.register_term_parameter("k", k)
        self.register_points("position", position)

    def displacements(self, position: Tensor) -> list[Vector]:
        self._check_position(position)
        (places,) = self.members_of(position)
        return [self._nearest(places - self.position.to(places).T)]

    def virial(self, position: Tensor) -> Tensor:
        raise TypeError(
            f"{type(self).__name__} has no virial(position): its points do not move with the box."
        )


class PositionRestraint(_Restraint):
    """Harmonic restraints, ``U = sum over atoms of k/2 |q - position|^2``.

    Args:
        index: ``(atoms,)``, the restrained atoms.
        k: stiffness, energy / length^2; a number, one for each restrained atom or one for each
            type.
        position: ``(atoms, dim)``, the point of each restrained atom.
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    def element(self, x: Tensor) -> Tensor:
        return 0.5 * self.term_parameter("k", x) * x * x

    def slope(self, x: Tensor) -> Tensor:
        return self.term_parameter("k", x) * x

    def curvature(self, x: Tensor) -> Tensor:
        return self.term_parameter("k", x).expand_as(x)


class FlatBottomRestraint(_Restraint):
    """Restraints to balls, ``U = sum over atoms of k/2 max(0, |q - position| - radius)^2``.

    Args:
        index: ``(atoms,)``, the restrained atoms.
        k: stiffness, energy / length^2; a number, one for each restrained atom or one for each
            type.
        position: ``(atoms, dim)``, the middle of the ball of each restrained atom.
        radius: of the ball, length; as k.
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    radius: Tensor

    def __init__(
        self,
        index: Array,
        k: Number,
        position: Array,
        radius: Number,
        *,
        types: Array | None = None,
        box: Array | None = None,
    ) -> None:
        super().__init__(index, k, position, types=types, box=box)
        self.register_term_parameter("radius", radius)

    def element(self, x: Tensor) -> Tensor:
        outside = self._outside(x)
        return 0.5 * self.term_parameter("k", x) * outside * outside

    def slope(self, x: Tensor) -> Tensor:
        return self.term_parameter("k", x) * self._outside(x)

    def curvature(self, x: Tensor) -> Tensor:
        return torch.where(self._outside(x) > 0, self.term_parameter("k", x), 0.0)

    def _outside(self, x: Tensor) -> Tensor:
        return (x - self.term_parameter("radius", x)).clamp(min=0)
