"""Pair potentials of powers of the distance: the soft sphere and the Mie potential."""

from __future__ import annotations

from torch import Tensor

from adjsim.core.declared import POSITIVE, declared, setting
from adjsim.potentials.pairs.base import PairPotential


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

    def pair_energy(self, s: Tensor) -> Tensor:
        return self.pair_parameter("epsilon", s) * self._power(s, self.exponent)

    def pair_slope(self, s: Tensor) -> Tensor:
        return -self.exponent / 2 * self.pair_energy(s) / s

    def pair_curvature(self, s: Tensor) -> Tensor:
        half = self.exponent / 2
        return half * (half + 1) * self.pair_energy(s) / (s * s)

    def safe_distance(self, s: Tensor) -> Tensor:
        return self.pair_parameter("sigma", s.detach()).detach() ** 2

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
