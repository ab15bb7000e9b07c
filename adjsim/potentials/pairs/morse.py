"""The Morse potential."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.formula import SHIFTED
from adjsim.potentials.pairs.radial import RadialPotential
from adjsim.potentials.pairs.truncation import Truncation


class Morse(RadialPotential):
    """The Morse potential, ``U = sum over i<j of depth ((1 - e)^2 - 1)``.

    Here ``e = exp(-(r - distance) / width)``. See Morse, Phys. Rev. 34, 57 (1929), who writes a for
    1/width. The curvature of the well is 2 depth / width^2.

    Args:
        depth: depth of the well, energy; a number or ``(atoms, atoms)``, symmetric.
        width: width of the well, length; likewise.
        distance: position of the minimum, length; likewise.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    depth: Tensor
    width: Tensor
    distance: Tensor

    def __init__(
        self,
        depth: Number = 1.0,
        width: Number = 1.0,
        distance: Number = 1.0,
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
        self.register_pair_parameter("depth", depth)
        self.register_pair_parameter("width", width, positive=True)
        self.register_pair_parameter("distance", distance, positive=True)

    def radial_energy(self, r: Tensor) -> Tensor:
        depth, _, e = self._exponential(r)
        return depth * e * (e - 2)

    def radial_slope(self, r: Tensor) -> Tensor:
        depth, width, e = self._exponential(r)
        return 2 * depth / width * e * (1 - e)

    def radial_curvature(self, r: Tensor) -> Tensor:
        depth, width, e = self._exponential(r)
        return 2 * depth / (width * width) * e * (2 * e - 1)

    def safe_distance(self, s: Tensor) -> Tensor:
        return self.pair_parameter("distance", s.detach()).detach() ** 2

    def _exponential(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        depth, width, distance = (
            self.pair_parameter(name, r) for name in ("depth", "width", "distance")
        )
        return depth, width, torch.exp((distance - r) / width)
