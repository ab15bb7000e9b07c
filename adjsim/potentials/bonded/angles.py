"""Angles of three atoms."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.coordinates import Angle, Cosine
from adjsim.core.declared import declared
from adjsim.potentials.bonded.bonds import HarmonicBond, HarmonicTerm


class HarmonicAngle(HarmonicTerm):
    """Harmonic angles, ``U = sum over angles of k/2 (theta - angle)^2``.

    Theta is the angle at the middle atom, from 0 to pi. At 0 and pi the gradient of theta has no
    direction and counts as zero. So for angles that are straight at rest, Hessian-vector products
    are wrong on the straight line itself; there :class:`CosineAngle` is smooth. Force fields
    without the factor 1/2 (Amber, CHARMM) give half of this k.

    Args:
        index: ``(angles, 3)``, the atoms of each angle, the middle one second.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 3
    steps = ((0, 1), (1, 2))
    coordinate = Angle

    k: Tensor = declared("stiffness, energy / radian^2")
    angle: Tensor = declared("angle at rest, radians", angle=True)

    def change(self, x: Tensor) -> Tensor:
        return x - self.term_parameter("angle", x)


class CosineAngle(HarmonicTerm):
    """Angles harmonic in their cosine, ``U = sum over angles of k/2 (cos theta - cos angle)^2``.

    The force is smooth at 0 and pi too. See Mayo, Olafson and Goddard, J. Phys. Chem. 94, 8897
    (1990). The curvature in theta at rest is k sin(angle)^2.

    Args:
        index: ``(angles, 3)``, the atoms of each angle, the middle one second.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 3
    steps = ((0, 1), (1, 2))
    coordinate = Cosine

    k: Tensor = declared("stiffness, energy")
    angle: Tensor = declared("angle at rest, radians", angle=True)

    def change(self, x: Tensor) -> Tensor:
        return x - torch.cos(self.term_parameter("angle", x))


class UreyBradley(HarmonicBond):
    """Springs between the ends of angles, ``U = sum over angles of k/2 (r_13 - length)^2``.

    Args:
        index: ``(angles, 3)``, the atoms of each angle, the middle one second. It is not used, so
            that the list is that of the angles.
        k: stiffness, energy / length^2; a number, one for each angle or one for each type.
        length: distance of the ends at rest; likewise.
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 3
    steps = ((0, 2),)
