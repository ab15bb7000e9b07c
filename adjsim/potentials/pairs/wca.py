"""The potential of Weeks, Chandler and Andersen."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.lennard_jones import LennardJones


class WCA(LennardJones):
    """The repulsive part of Lennard-Jones, of Weeks, Chandler and Andersen::

        U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6) + epsilon, for r < 2^(1/6) sigma

    See J. Chem. Phys. 54, 5237 (1971). Energy and force are continuous, and the derivative of the
    force has a jump at 2^(1/6) sigma. The energy ends there by itself, so no cutoff is needed.
    A cutoff that is given has to be at least 2^(1/6) sigma.

    Args:
        epsilon: energy of a pair at the distance sigma; a scalar or ``(atoms, atoms)``, symmetric.
        sigma: length; likewise.
        cutoff, box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: a cutoff below 2^(1/6) sigma.
    """

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(epsilon, sigma, cutoff=cutoff, box=box, skin=skin, exclusions=exclusions)
        self.validate()

    def validate(self) -> None:
        """Refuse a cutoff below the end of the potential."""
        super().validate()
        end = 2 ** (1 / 6) * float(self.sigma.detach().max())
        if self.cutoff is not None and self.cutoff < end * (1 - 1e-12):
            raise ValueError(
                f"WCA ends at 2^(1/6) sigma = {end:g}; cutoff {self.cutoff:g} is below it."
            )

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return torch.where(x > 0.5, 4 * epsilon * x * (x - 1) + epsilon, 0.0)

    def pair_slope(self, s: Tensor) -> Tensor:
        _, x, _ = self._sixth(s)
        return torch.where(x > 0.5, super().pair_slope(s), 0.0)

    def pair_curvature(self, s: Tensor) -> Tensor:
        _, x, _ = self._sixth(s)
        return torch.where(x > 0.5, super().pair_curvature(s), 0.0)
