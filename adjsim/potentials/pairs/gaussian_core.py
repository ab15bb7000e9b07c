"""The Gaussian core model."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.base import PairPotential


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
