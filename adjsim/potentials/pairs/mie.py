"""The Mie potential and the soft sphere, whose exponents are free."""

from __future__ import annotations

import math

from torch import Tensor

from adjsim.core.arguments import as_number
from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.formula import SHIFTED
from adjsim.potentials.pairs.truncation import Truncation


class SoftSphere(PairPotential):
    """An inverse power, ``U = sum over i<j of epsilon (sigma/r)^exponent``.

    Args:
        epsilon: energy of a pair at the distance sigma; a number or ``(atoms, atoms)``, symmetric.
        sigma: length; likewise.
        exponent: a positive number, which is not trained. In three dimensions, with an exponent
            of 3 or less, the energy of a fluid grows without limit with the cutoff.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    epsilon: Tensor
    sigma: Tensor

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        exponent: float = 12.0,
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
        self.register_pair_parameter("epsilon", epsilon)
        self.register_pair_parameter("sigma", sigma, positive=True)
        self.exponent = _positive("exponent", exponent)

    def validate(self) -> None:
        """Refuse an exponent that the constructor would refuse."""
        super().validate()
        _positive("exponent", self.exponent)

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
        epsilon: depth of the well, energy; a number or ``(atoms, atoms)``, symmetric.
        sigma: distance where the energy is zero, length; likewise.
        exponent: n of the repulsion, which is not trained.
        attraction: m of the attraction, below n, which is not trained.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        exponent: float = 12.0,
        attraction: float = 6.0,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(
            epsilon,
            sigma,
            exponent,
            cutoff=cutoff,
            box=box,
            truncation=truncation,
            skin=skin,
            exclusions=exclusions,
        )
        self.register_pair_parameter("epsilon", self.epsilon, depth=True)
        self.attraction = _positive("attraction", attraction)
        self.validate()

    def validate(self) -> None:
        """Refuse exponents that the constructor would refuse."""
        super().validate()
        n, m = self.exponent, self.attraction
        if not 0 < m < n < math.inf:
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
        difference = repulsion * self._power(s, self.exponent) - attraction * self._power(
            s, self.attraction
        )
        n, m = self.exponent, self.attraction
        factor = n / (n - m) * (n / m) ** (m / (n - m))
        return factor * self.pair_parameter("epsilon", s) * difference


def _positive(name: str, value: float) -> float:
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}.")
    return number
