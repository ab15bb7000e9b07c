"""The screened Coulomb potential of Yukawa."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.radial import RadialPotential


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
