"""The Lennard-Jones potential, and its repulsive part."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.potentials.pairs.base import PairPotential


class LennardJones(PairPotential):
    """The Lennard-Jones potential, ``U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6)``.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`. By
            default the energy is shifted to zero at the cutoff, and the force has a small jump.
            Where energy conservation matters, use 2.5 sigma or more, or another truncation. In a
            box without a cutoff every pair counts once, at its nearest image.

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
        return self.pair_parameter("sigma", s.detach()).detach() ** 2

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6 and 1/r^2."""
        epsilon, sigma = self.pair_parameters(s)
        inverse = 1 / s
        ratio = sigma**2 * inverse
        return epsilon, ratio * ratio * ratio, inverse


class WCA(LennardJones):
    """The repulsive part of Lennard-Jones, of Weeks, Chandler and Andersen::

        U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6) + epsilon, for r < 2^(1/6) sigma

    See J. Chem. Phys. 54, 5237 (1971). Energy and force are continuous, and the derivative of the
    force has a jump at 2^(1/6) sigma. The energy ends there by itself, so no cutoff is needed.

    Args:
        {parameters}
        cutoff, box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: a cutoff below 2^(1/6) sigma.
    """

    epsilon: Tensor = declared("energy of a pair at the distance sigma", 1.0, depth=True)
    sigma: Tensor = declared("length", 1.0, positive=True)
    omitted_arguments = ("truncation",)

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
