"""The part of an Ewald sum that is short-ranged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.reading import as_part
from adjsim.core.typing import Array, Number
from adjsim.potentials.charges.coulomb import Coulomb
from adjsim.potentials.pairs.formula import SHIFTED


class ScreenedCoulomb(Coulomb):
    """Point charges that Gaussians screen: ``u = constant q_i q_j erfc(alpha r) / r``.

    The energy is not shifted at the cutoff, since the rest of an Ewald sum is its complement. Pairs
    at the cutoff have about the energy ``2 tolerance constant q_i q_j / cutoff``.

    Args:
        charge, constant: see :class:`~adjsim.Coulomb`.
        alpha: 1/length.
        cutoff, box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    alpha: Tensor

    def __init__(
        self,
        charge: Number,
        alpha: float,
        constant: float,
        *,
        cutoff: float,
        box: Array,
        exclusions: Array | None,
        skin: float | None,
    ) -> None:
        super().__init__(charge, constant, cutoff=cutoff, box=box, exclusions=exclusions, skin=skin)
        # A tensor, which kernels read. A number would be compiled into them.
        self.register_buffer("alpha", torch.tensor(alpha, dtype=torch.float64))

    @classmethod
    def part_of(
        cls,
        whole: nn.Module,
        tensors: Mapping[str, Tensor | None],
        settings: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> ScreenedCoulomb:
        """Make the part of a sum that has checked these tensors, settings and derived values."""
        part = object.__new__(cls)
        nn.Module.__init__(part)
        part._buffers.update(tensors)
        vars(part).update(truncation=SHIFTED, **settings)
        return as_part(part, whole, **values)

    def truncated_energy(self, s: Tensor) -> Tensor:
        return self.pair_energy(s)

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) * torch.erfc(self.alpha.to(r) * r) / r

    def radial_slope(self, r: Tensor) -> Tensor:
        return -self._products(r) * (torch.erfc(self.alpha.to(r) * r) / r + self._gaussian(r)) / r

    def radial_curvature(self, r: Tensor) -> Tensor:
        damped = torch.erfc(self.alpha.to(r) * r) / r + self._gaussian(r)
        rest = self.alpha.to(r).square() * self._gaussian(r)
        return 2 * self._products(r) * (damped / (r * r) + rest)

    def _gaussian(self, r: Tensor) -> Tensor:
        alpha = self.alpha.to(r)
        return 2 / math.sqrt(math.pi) * alpha * torch.exp(-(alpha * r).square())
