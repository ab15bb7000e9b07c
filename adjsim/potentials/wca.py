"""The potential of Weeks, Chandler and Andersen."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.potentials.pair import LennardJones


class WCA(LennardJones):
    """The repulsive part of Lennard-Jones, of Weeks, Chandler and Andersen::

        U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6) + epsilon, for r < 2^(1/6) sigma

    See J. Chem. Phys. 54, 5237 (1971). Energy and force are continuous, and the derivative of the
    force has a jump at 2^(1/6) sigma. The energy ends there by itself, so a cutoff is needed only
    to limit the list of pairs, and has to be at least 2^(1/6) sigma.

    Args:
        epsilon: energy of a pair at the distance sigma; a scalar or ``(atoms, atoms)``, symmetric.
        sigma: length; likewise.
        cutoff, box, truncation: see :class:`~adjsim.potentials.PairPotential`.
    """

    _elementwise = True

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return torch.where(x > 0.5, 4 * epsilon * x * (x - 1) + epsilon, 0.0)

    def pair_slope(self, s: Tensor) -> Tensor:
        _, x, _ = self._sixth(s)
        return torch.where(x > 0.5, super().pair_slope(s), 0.0)

    def pair_curvature(self, s: Tensor) -> Tensor:
        _, x, _ = self._sixth(s)
        return torch.where(x > 0.5, super().pair_curvature(s), 0.0)
