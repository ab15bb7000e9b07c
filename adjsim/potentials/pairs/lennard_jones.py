"""The Lennard-Jones potential."""

from __future__ import annotations

from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.base import PairPotential


class LennardJones(PairPotential):
    """The Lennard-Jones potential, ``U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6)``.

    Args:
        {parameters}
        cutoff: pairs beyond this distance are left out. None: all pairs.
        truncation: how the energy ends at the cutoff, see
            :class:`~adjsim.potentials.PairPotential`. By default it is shifted to zero, and the
            force has a small jump. Where energy conservation matters, use 2.5 sigma or more, or
            another truncation.
        box: periodic cell, ``(dim,)`` lengths or ``(dim, dim)`` rows. Without a cutoff every pair
            counts once, at its nearest image.
        skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: epsilon is negative; epsilon or sigma is not symmetric, or is a vector. For a
            number per atom or species, with a mixing rule, see :class:`LennardJonesMixture`.
    """

    epsilon: Tensor = declared("depth of the well, energy", 1.0, depth=True)
    sigma: Tensor = declared(
        "distance where the energy is zero, length, 2^(-1/6) of the distance of the minimum",
        1.0,
        positive=True,
    )

    def pair_parameters(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return epsilon and sigma of every pair, to broadcast against the squared distances."""
        return self.pair_parameter("epsilon", s), self.pair_parameter("sigma", s)

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return 4 * epsilon * x * (x - 1)

    def pair_slope(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 12 * epsilon * x * (1 - 2 * x) * inverse

    def pair_curvature(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 24 * epsilon * x * (7 * x - 2) * (inverse * inverse)

    def safe_distance(self, s: Tensor) -> Tensor:
        return self.pair_parameters(s.detach())[1].detach() ** 2

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6 and 1/r^2."""
        epsilon, sigma = self.pair_parameters(s)
        inverse = 1 / s
        ratio = sigma**2 * inverse
        return epsilon, ratio * ratio * ratio, inverse
