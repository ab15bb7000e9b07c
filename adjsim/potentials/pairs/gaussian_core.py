"""The Gaussian core model."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.formula import SHIFTED
from adjsim.potentials.pairs.truncation import Truncation


class GaussianCore(PairPotential):
    """The Gaussian core model, ``U = sum over i<j of epsilon exp(-r^2/sigma^2)``.

    See Stillinger, J. Chem. Phys. 65, 3968 (1976). Atoms can pass through each other, as the
    centres of polymer coils do.

    Args:
        epsilon: energy of a pair at zero distance; a number or ``(atoms, atoms)``, symmetric.
        sigma: range, length; likewise.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    epsilon: Tensor
    sigma: Tensor

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(
            cutoff=cutoff, box=box, truncation=truncation, skin=skin, exclusions=exclusions
        )
        self.register_pair_parameter("epsilon", epsilon)
        self.register_pair_parameter("sigma", sigma, positive=True)

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
