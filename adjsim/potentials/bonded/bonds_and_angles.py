"""Bonds of two atoms and angles of three."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.coordinates import Angle, Cosine
from adjsim.core.declared import declared
from adjsim.potentials.bonded.base import BondedPotential


class HarmonicTerm(BondedPotential):
    """The base class of harmonic terms, ``k/2 d^2``, with d a stretch, a bend or a twist."""

    def change(self, x: Tensor) -> Tensor:
        """Compute d, the difference of the coordinate from its value at rest, of slope 1 or 0."""
        raise TypeError(f"{type(self).__name__} has no change(x).")

    def factor(self, x: Tensor) -> Tensor:
        """Return k of each term."""
        return self.term_parameter("k", x)

    def element(self, x: Tensor) -> Tensor:
        d = self.change(x)
        return 0.5 * self.factor(x) * d * d

    def slope(self, x: Tensor) -> Tensor:
        return self.factor(x) * self.change(x)

    def curvature(self, x: Tensor) -> Tensor:
        return self.factor(x).expand_as(x)


class HarmonicBond(HarmonicTerm):
    """Harmonic bonds, ``U = sum over bonds of k/2 (r - length)^2``.

    Force fields without the factor 1/2 (Amber, CHARMM) give half of this k.

    Args:
        index: ``(bonds, 2)``, the atoms of each bond.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    k: Tensor = declared("stiffness, energy / length^2")
    length: Tensor = declared("length of the bond at rest")

    def change(self, x: Tensor) -> Tensor:
        return x - self.term_parameter("length", x)


class MorseBond(BondedPotential):
    """Morse bonds, ``U = sum over bonds of depth (1 - exp(-width (r - length)))^2``.

    The energy at rest is zero, and depth far away. The curvature at rest is 2 depth width^2. The
    width of :class:`~adjsim.Morse`, which acts between all pairs, is 1/width here. See Morse, Phys.
    Rev. 34, 57 (1929).

    Args:
        index: ``(bonds, 2)``, the atoms of each bond.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    depth: Tensor = declared("energy to break the bond")
    width: Tensor = declared("inverse width of the well, 1/length", positive=True)
    length: Tensor = declared("length of the bond at rest")

    def element(self, x: Tensor) -> Tensor:
        depth, _, e = self._exponential(x)
        return depth * (1 - e) * (1 - e)

    def slope(self, x: Tensor) -> Tensor:
        depth, width, e = self._exponential(x)
        return 2 * depth * width * e * (1 - e)

    def curvature(self, x: Tensor) -> Tensor:
        depth, width, e = self._exponential(x)
        return 2 * depth * width * width * e * (2 * e - 1)

    def _exponential(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        depth, width, length = (
            self.term_parameter(name, x) for name in ("depth", "width", "length")
        )
        return depth, width, torch.exp(width * (length - x))


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
