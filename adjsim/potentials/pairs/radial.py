"""Pair potentials of exponentials: Morse, Yukawa, Buckingham and the Gaussian core."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
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
        return self.radial_slope(r) * (0.5 * (1 / r))

    def pair_curvature(self, s: Tensor) -> Tensor:
        # One division, which takes longer than the products.
        r = s.sqrt()
        inverse = 1 / r
        bend = self.radial_curvature(r) - self.radial_slope(r) * inverse
        return 0.25 * inverse * inverse * bend


class Morse(RadialPotential):
    """The Morse potential, ``U = sum over i<j of depth ((1 - e)^2 - 1)``.

    Here ``e = exp(-(r - distance) / width)``. See Morse, Phys. Rev. 34, 57 (1929), who writes a for
    1/width. The curvature of the well is 2 depth / width^2.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    depth: Tensor = declared("depth of the well, energy", 1.0)
    width: Tensor = declared("width of the well, length", 1.0, positive=True)
    distance: Tensor = declared("position of the minimum, length", 1.0, positive=True)
    safe_length = "distance"

    def radial_energy(self, r: Tensor) -> Tensor:
        depth, _, e = self._exponential(r)
        return depth * e * (e - 2)

    def radial_slope(self, r: Tensor) -> Tensor:
        depth, width, e = self._exponential(r)
        return 2 * depth / width * e * (1 - e)

    def radial_curvature(self, r: Tensor) -> Tensor:
        depth, width, e = self._exponential(r)
        return 2 * depth / (width * width) * e * (2 * e - 1)

    def _exponential(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        depth, width, distance = (
            self.pair_parameter(name, r) for name in ("depth", "width", "distance")
        )
        return depth, width, torch.exp((distance - r) / width)


class Yukawa(RadialPotential):
    """The Yukawa potential, ``U = sum over i<j of A exp(-r/length) / r``.

    It is the interaction of charges in a screening medium (Debye and Hueckel), with the screening
    length of the medium. See Yukawa, Proc. Phys.-Math. Soc. Japan 17, 48 (1935).

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    amplitude: Tensor = declared("A, energy times length", 1.0)
    length: Tensor = declared("screening length", 1.0, positive=True)

    def radial_energy(self, r: Tensor) -> Tensor:
        length = self.pair_parameter("length", r)
        return self.pair_parameter("amplitude", r) * torch.exp(-r / length) / r

    def radial_slope(self, r: Tensor) -> Tensor:
        return -self.radial_energy(r) * self._decay(r)

    def radial_curvature(self, r: Tensor) -> Tensor:
        # The energy comes first, since the square of a short range may underflow.
        energy, decay = self.radial_energy(r), self._decay(r)
        return energy * decay * decay + energy / (r * r)

    def safe_distance(self, s: Tensor) -> Tensor:
        return 1 + self.pair_parameter("length", s.detach()).detach() ** 2

    def _decay(self, r: Tensor) -> Tensor:
        """Compute -d(log u)/dr."""
        return 1 / self.pair_parameter("length", r) + 1 / r


class Buckingham(RadialPotential):
    """The Buckingham potential, ``U = sum over i<j of A exp(-r/length) - C/r^6``.

    See Buckingham, Proc. R. Soc. A 168, 264 (1938). It falls to minus infinity at short distances,
    behind a barrier. Do not start a run with pairs inside the barrier, and do not use it where
    collisions are hot enough to cross the barrier.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    amplitude: Tensor = declared("A, energy")
    length: Tensor = declared("decay length of the repulsion", positive=True)
    dispersion: Tensor = declared("C, energy times length^6")

    def radial_energy(self, r: Tensor) -> Tensor:
        repulsion, _, attraction = self._terms(r)
        return repulsion - attraction

    def radial_slope(self, r: Tensor) -> Tensor:
        repulsion, length, attraction = self._terms(r)
        return -repulsion / length + 6 * attraction / r

    def radial_curvature(self, r: Tensor) -> Tensor:
        repulsion, length, attraction = self._terms(r)
        return repulsion / (length * length) - 42 * attraction / (r * r)

    def safe_distance(self, s: Tensor) -> Tensor:
        return 1 + self.pair_parameter("length", s.detach()).detach() ** 2

    def _terms(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length, inverse = self.pair_parameter("length", r), 1 / (r * r)
        repulsion = self.pair_parameter("amplitude", r) * torch.exp(-r / length)
        return repulsion, length, self.pair_parameter("dispersion", r) * inverse**3


class GaussianCore(PairPotential):
    """The Gaussian core model, ``U = sum over i<j of epsilon exp(-r^2/sigma^2)``.

    See Stillinger, J. Chem. Phys. 65, 3968 (1976). Atoms can pass through each other, as the
    centres of polymer coils do.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    epsilon: Tensor = declared("energy of a pair at zero distance", 1.0)
    sigma: Tensor = declared("range, length", 1.0, positive=True)

    def pair_energy(self, s: Tensor) -> Tensor:
        return self.pair_parameter("epsilon", s) * torch.exp(s * self._rate(s))

    def pair_slope(self, s: Tensor) -> Tensor:
        return self._rate(s) * self.pair_energy(s)

    def pair_curvature(self, s: Tensor) -> Tensor:
        rate = self._rate(s)
        return rate * rate * self.pair_energy(s)

    def _rate(self, s: Tensor) -> Tensor:
        sigma = self.pair_parameter("sigma", s)
        return -1 / (sigma * sigma)
