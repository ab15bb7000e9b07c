"""Pair potentials of powers of the distance."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import POSITIVE, declared, setting
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
    safe_length = "sigma"

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return 4 * epsilon * x * (x - 1)

    def pair_slope(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 12 * epsilon * x * (1 - 2 * x) * inverse

    def pair_curvature(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 24 * epsilon * x * (7 * x - 2) * (inverse * inverse)

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6 and 1/r^2."""
        epsilon, inverse = self.pair_parameter("epsilon", s), 1 / s
        ratio = self.pair_parameter("sigma", s) ** 2 * inverse
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


class SoftSphere(PairPotential):
    """An inverse power, ``U = sum over i<j of epsilon (sigma/r)^exponent``.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    epsilon: Tensor = declared("energy of a pair at the distance sigma", 1.0)
    sigma: Tensor = declared("length", 1.0, positive=True)
    exponent: float = setting(
        "a positive number, which is not trained. In three dimensions, with an exponent of 3 or "
        "less, the energy of a fluid grows without limit with the cutoff",
        POSITIVE,
        12.0,
    )
    safe_length = "sigma"

    def pair_energy(self, s: Tensor) -> Tensor:
        return self.pair_parameter("epsilon", s) * self._power(s, self.exponent)

    def pair_slope(self, s: Tensor) -> Tensor:
        return -self.exponent / 2 * self.pair_energy(s) / s

    def pair_curvature(self, s: Tensor) -> Tensor:
        half = self.exponent / 2
        return half * (half + 1) * self.pair_energy(s) / (s * s)

    def _power(self, s: Tensor, exponent: float) -> Tensor:
        return (self.pair_parameter("sigma", s) ** 2 / s) ** (exponent / 2)


class Mie(SoftSphere):
    """The Mie potential, ``U = sum over i<j of C epsilon ((sigma/r)^n - (sigma/r)^m)``.

    Here ``C = n/(n-m) (n/m)^(m/(n-m))``, so that epsilon is the depth of the well. See Mie, Ann.
    Phys. 316, 657 (1903). With n = 12 and m = 6 it is :class:`~adjsim.LennardJones`, which is
    faster.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    epsilon: Tensor = declared("depth of the well, energy", 1.0, depth=True)
    sigma: Tensor = declared("distance where the energy is zero, length", 1.0, positive=True)
    exponent: float = setting("n of the repulsion, which is not trained", POSITIVE, 12.0)
    attraction: float = setting("m of the attraction, below n, which is not trained", POSITIVE, 6.0)

    def validate(self) -> None:
        """Refuse an attraction that is not below the repulsion."""
        super().validate()
        n, m = self.exponent, self.attraction
        if not m < n:
            raise ValueError(
                f"attraction must be positive, and below the exponent {n:g}; got {m:g}."
            )

    def pair_energy(self, s: Tensor) -> Tensor:
        return self._combined(s, 1.0, 1.0)

    def pair_slope(self, s: Tensor) -> Tensor:
        return -self._combined(s, self.exponent / 2, self.attraction / 2) / s

    def pair_curvature(self, s: Tensor) -> Tensor:
        n, m = self.exponent / 2, self.attraction / 2
        return self._combined(s, n * (n + 1), m * (m + 1)) / (s * s)

    def _combined(self, s: Tensor, repulsion: float, attraction: float) -> Tensor:
        n, m = self.exponent, self.attraction
        difference = repulsion * self._power(s, n) - attraction * self._power(s, m)
        factor = n / (n - m) * (n / m) ** (m / (n - m))
        return factor * self.pair_parameter("epsilon", s) * difference
