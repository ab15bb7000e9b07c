"""Pair potentials written as a function of the distance."""

from __future__ import annotations

from torch import Tensor

from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.products import derivative


class RadialPotential(PairPotential):
    """A sum over pairs i<j of ``radial_energy(r)``, with r the distance.

    Subclasses write ``radial_energy``; ``radial_slope`` (du/dr) and ``radial_curvature`` (d2u/dr2)
    follow from it, or are written too. With s = r^2, du/ds = u_r / 2r and
    d2u/ds2 = (u_rr - u_r / r) / 4s. A function of the squared distance needs no root, so write it
    as a :class:`PairPotential`.
    """

    def radial_energy(self, r: Tensor) -> Tensor:
        """Compute u(r), elementwise."""
        raise TypeError(f"{type(self).__name__} has no radial_energy(r).")

    def radial_slope(self, r: Tensor) -> Tensor:
        """Compute du/dr, elementwise."""
        return derivative(self.radial_energy, r)

    def radial_curvature(self, r: Tensor) -> Tensor:
        """Compute d2u/dr2, elementwise."""
        return derivative(self.radial_slope, r)

    def pair_energy(self, s: Tensor) -> Tensor:
        return self.radial_energy(s.sqrt())

    def pair_slope(self, s: Tensor) -> Tensor:
        r = s.sqrt()
        return self.radial_slope(r) / (2 * r)

    def pair_curvature(self, s: Tensor) -> Tensor:
        r = s.sqrt()
        return (self.radial_curvature(r) - self.radial_slope(r) / r) / (4 * s)
