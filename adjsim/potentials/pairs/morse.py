"""The Morse potential."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.radial import RadialPotential


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
