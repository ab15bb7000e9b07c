"""Impropers, which keep four atoms in a plane or at a chirality."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.coordinates import Dihedral
from adjsim.core.declared import declared
from adjsim.potentials.bonded.bonds import HarmonicTerm


class HarmonicImproper(HarmonicTerm):
    """Harmonic impropers, ``U = sum over impropers of k/2 d^2``.

    d is the difference of the dihedral angle of the four atoms, in their given order, from
    ``angle``, by at most half a turn. The force jumps where d is half a turn.

    Args:
        index: ``(impropers, 4)``, the atoms of each improper.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 4
    steps = ((0, 1), (1, 2), (2, 3))
    coordinate = Dihedral
    dim = 3

    k: Tensor = declared("stiffness, energy / radian^2")
    angle: Tensor = declared("dihedral angle at rest, radians", angle=True)

    def change(self, x: Tensor) -> Tensor:
        d = x - self.term_parameter("angle", x)
        turns = torch.round(d.detach() * (1 / (2 * math.pi)))
        return d - 2 * math.pi * turns
