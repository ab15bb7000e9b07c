"""Ewald's sum over waves, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import volume
from adjsim.core.derived import derived
from adjsim.core.strain import Strain
from adjsim.core.typing import Number
from adjsim.potentials.charges.ewald.autograd import ChargeSum, Forces, Product
from adjsim.potentials.charges.ewald.base import three_numbers
from adjsim.potentials.charges.ewald.point_charges import PointCharges
from adjsim.potentials.charges.ewald.waves import shortened, wave_virial

# OpenMM searches the number of waves from here, upwards or downwards.
FIRST_GUESS = 10


class Ewald(PointCharges):
    """Point charges in a periodic box, by Ewald's sum::

        U = constant (U_real + U_reciprocal - U_self - U_excluded - U_background)
        U_real       = sum over i<j within the cutoff of q_i q_j erfc(alpha r) / r
        U_reciprocal = 2 pi / V sum over k != 0 of exp(-k^2 / 4 alpha^2) / k^2 |S(k)|^2
        U_self       = alpha / sqrt(pi) sum of q_i^2
        U_excluded   = sum over excluded pairs of q_i q_j erf(alpha r) / r
        U_background = pi / (2 V alpha^2) (sum of q_i)^2

    S(k) = sum of q_i exp(i k . r_i), V is the volume, and the surroundings conduct. The last term
    is a uniform background that makes a charged box neutral. See Ewald, Ann. Phys. 369, 253 (1921).

    Each evaluation takes the number of atoms times the number of waves. From some hundred atoms on
    use :class:`ParticleMeshEwald`. An excluded pair is the pair of nearest images, so a molecule
    has to be smaller than half the box.

    Args:
        {parameters}
        box: ``(3,)`` lengths or ``(3, 3)`` rows.
        cutoff: of the sum in real space, at most half the smallest perpendicular width of the box.
        alpha: 1/length. None: ``sqrt(-log(2 tolerance)) / cutoff``, as OpenMM chooses it.
        kmax: the largest wave number, or one for each row of the box. None: likewise by OpenMM's
            formula.
        exclusions, skin: see :class:`~adjsim.potentials.PairPotential`; for nearest images.

    Raises:
        ValueError: charges that are not one number for each atom, no box, a box that is not
            three-dimensional, a cutoff that is too large, a tolerance outside (0, 0.5).
    """

    def __init__(
        self, *values: Number, kmax: int | Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__(*values, **options)
        self.given_kmax = None if kmax is None else three_numbers("kmax", kmax, 0)

    def validate(self) -> None:
        """Refuse wave numbers that the constructor would refuse."""
        super().validate()
        if self.given_kmax is not None:
            three_numbers("kmax", self.given_kmax, 0)

    @derived("cell", "given_kmax", "alpha", "tolerance")
    def kmax(self) -> tuple[int, ...]:
        """The largest wave number along each row of the box."""
        if self.given_kmax is not None:
            return self.given_kmax
        lengths: list[float] = self.cell.norm(dim=1).tolist()
        return tuple(wave_number(self.alpha * d, self.tolerance) for d in lengths)

    @derived("cell", "kmax")
    def numbers(self) -> Tensor:
        """The integers of the waves, one of n and -n, ``(1, 3, waves)``."""
        ranges = (range(-k, k + 1) for k in self.kmax)
        integers = [n for n in product(*ranges) if n >= (0, 0, 0)]
        return torch.tensor([integers], dtype=torch.float64, device=self.cell.device).mT

    @derived("numbers", "constant", "cell")
    def share(self) -> Tensor:
        """The constant over the volume, twice for a wave that stands for two."""
        twice = torch.where((self.numbers[0] != 0).any(0), 2.0, 1.0)
        return twice * self.constant / volume(self.cell)

    @derived("share")
    def multiplicity(self) -> Tensor:
        """One for each wave."""
        return torch.ones_like(self.share)

    def reciprocal(self, position: Tensor, strain: Strain | None = None) -> WaveSum:
        dual = self.dual if strain is None else shortened(self.dual, strain.value)
        vectors = 2 * math.pi * self.numbers[0].mT.to(dual) @ dual
        law = self.alpha, self.power
        return WaveSum(vectors.to(position), self.influence_at(strain), *law, strain)


def wave_number(width: float, tolerance: float) -> int:
    """Choose the largest wave number along a row of the cell, by the formula of OpenMM's guide.

    The ``width`` is alpha times the length of the row. n is the smallest number whose error
    ``0.05 sqrt(width) n exp(-(pi n / width)^2)`` is within the tolerance. The largest wave number
    is n if n is even, and else n - 1: OpenMM counts waves from zero, an odd number of them.
    """

    def within(n: int) -> bool:
        error = 0.05 * math.sqrt(width) * n * math.exp(-((math.pi * n / width) ** 2))
        return error <= tolerance

    n = FIRST_GUESS
    if within(n):
        while n > 1 and within(n - 1):
            n -= 1
    else:
        while not within(n):
            n += 1
    return n - n % 2


@dataclass(frozen=True)
class WaveSum(ChargeSum):
    """The energy and force of the reciprocal part.

    ``vectors`` are ``(*batch, waves, 3)``; ``influence`` computes the columns of
    :func:`~.ewald.waves.influence`, of which a box that does not move needs the first.
    """

    vectors: Tensor
    influence: Callable[..., Tensor]
    alpha: float
    power: int
    strain: Strain | None

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        return self._energies(position, charge).sum(-1)

    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Forces, Product]:
        cos, sin = self._waves(position)
        influence = self.influence().to(position)
        weight = influence[..., 0, :]
        real, imaginary = charge @ cos, charge @ sin
        force = self._force(charge, cos, sin, weight * real, weight * imaginary)
        square = real * real + imaginary * imaginary

        def product_along(v: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            rate = v @ self.vectors.mT
            cos_v, sin_v = -rate * sin, rate * cos
            real_v, imaginary_v = charge @ cos_v, charge @ sin_v
            a, b = weight * real_v, weight * imaginary_v
            moved = v.new_zeros(0)
            if self.strain is not None and c is not None:
                _, first, along, second = (
                    self.influence(c).to(position).split([1, c.shape[-1]] * 2, -2)
                )
                a, b = a + along[..., 0, :] * real, b + along[..., 0, :] * imaginary
                turned = real * real_v + imaginary * imaginary_v
                moved = -self.strain.along(v, force) - _sums(first, turned)
                moved = moved - 0.5 * _sums(second, square)
            here = a[..., None, :] * cos + b[..., None, :] * sin
            there = real[..., None, :] * cos_v + imaginary[..., None, :] * sin_v
            found = -(here + there * weight[..., None, :]).sum(-1)
            return (
                self._force(charge, cos, sin, a, b)
                + self._force(charge, cos_v, sin_v, weight * real, weight * imaginary),
                moved,
                found.reshape(-1, len(charge)).sum(0),
            )

        return (force, -0.5 * _sums(influence[..., 1:, :], square)), product_along

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        return wave_virial(self._energies(position, charge), self.vectors, self.alpha, self.power)

    def _energies(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the energy of each wave."""
        cos, sin = self._waves(position)
        real, imaginary = charge @ cos, charge @ sin
        weight = self.influence().to(position)[..., 0, :]
        return 0.5 * weight * (real * real + imaginary * imaginary)

    def _waves(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosine and sine of k . r, ``(*batch, atoms, waves)``."""
        phase = position @ self.vectors.mT
        return phase.cos(), phase.sin()

    def _force(
        self, charge: Tensor, cos: Tensor, sin: Tensor, real: Tensor, imaginary: Tensor
    ) -> Tensor:
        field = real[..., None, :] * sin - imaginary[..., None, :] * cos
        return charge.unsqueeze(-1) * (field @ self.vectors)


def _sums(columns: Tensor, squares: Tensor) -> Tensor:
    """Sum products of derivatives of G with waves, ``(*batch, 1, rows)``."""
    return (columns * squares.unsqueeze(-2)).sum(-1).unsqueeze(-2)
