"""Bonds between two atoms."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.coordinates import Distance
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

    members = 2
    steps = ((0, 1),)
    coordinate = Distance

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

    members = 2
    steps = ((0, 1),)
    coordinate = Distance

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
