"""The screened Coulomb potential of Yukawa."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.formula import SHIFTED
from adjsim.potentials.pairs.radial import RadialPotential
from adjsim.potentials.pairs.truncation import Truncation


class Yukawa(RadialPotential):
    """The Yukawa potential, ``U = sum over i<j of A exp(-r/length) / r``.

    It is the interaction of charges in a screening medium (Debye and Hueckel), with the screening
    length of the medium. See Yukawa, Proc. Phys.-Math. Soc. Japan 17, 48 (1935).

    Args:
        amplitude: A, energy times length; a number or ``(atoms, atoms)``, symmetric.
        length: screening length; likewise.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    amplitude: Tensor
    length: Tensor

    def __init__(
        self,
        amplitude: Number = 1.0,
        length: Number = 1.0,
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
        self.register_pair_parameter("amplitude", amplitude)
        self.register_pair_parameter("length", length, positive=True)

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
