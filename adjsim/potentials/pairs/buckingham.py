"""The Buckingham potential."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.radial import RadialPotential


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
