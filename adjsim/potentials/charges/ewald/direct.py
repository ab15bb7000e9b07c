"""Ewald's sum over waves, one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adjsim.core.derived import derived
from adjsim.core.typing import Array, Number
from adjsim.potentials.charges.ewald.base import EwaldSum
from adjsim.potentials.charges.ewald.splitting import three_numbers, wave_numbers
from adjsim.potentials.charges.ewald.waves import Waves, wave_vectors, wave_weights


class Ewald(EwaldSum):
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
        charge: ``(atoms,)``.
        box: ``(3,)`` lengths or ``(3, 3)`` rows.
        cutoff: of the sum in real space, at most half the smallest perpendicular width of the box.
        alpha: 1/length. None: ``sqrt(-log(2 tolerance)) / cutoff``, as OpenMM chooses it.
        tolerance: the approximate relative error of forces, between 0 and 0.5.
        kmax: the largest wave number, or one for each row of the box. None: from the tolerance, as
            OpenMM chooses it.
        exclusions: ``(pairs, 2)`` atoms that do not interact. Their nearest images are excluded.
        constant: see :class:`~adjsim.Coulomb`.
        skin: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: charges that are not one number for each atom, no box, a box that is not
            three-dimensional, a cutoff that is too large, a tolerance outside (0, 0.5).
    """

    def __init__(
        self,
        charge: Number,
        *,
        box: Array,
        cutoff: float,
        alpha: float | None = None,
        tolerance: float = 5e-4,
        kmax: int | Sequence[int] | None = None,
        exclusions: Array | None = None,
        constant: float = 1.0,
        skin: float | None = None,
    ) -> None:
        super().__init__(
            charge, box=box, cutoff=cutoff, alpha=alpha, tolerance=tolerance,
            exclusions=exclusions, constant=constant, skin=skin,
        )  # fmt: skip
        self.given = None if kmax is None else three_numbers("kmax", kmax, 0)

    def validate(self) -> None:
        """Refuse wave numbers that the constructor would refuse."""
        super().validate()
        if self.given is not None:
            three_numbers("kmax", self.given, 0)

    @derived("cell", "given", "alpha", "tolerance")
    def kmax(self) -> tuple[int, ...]:
        """The largest wave number along each row of the box."""
        if self.given is not None:
            return self.given
        return wave_numbers(self.alpha, self.lengths(), self.tolerance)

    @derived("cell", "kmax")
    def vectors(self) -> Tensor:
        """The vectors of the waves, ``(waves, 3)``."""
        return wave_vectors(self.cell, self.kmax)

    @derived("cell", "vectors", "alpha", "constant")
    def weight(self) -> Tensor:
        """The factor of ``|S(k)|^2`` of each wave."""
        return wave_weights(self.cell, self.vectors, self.alpha, self.constant)

    def reciprocal(self, position: Tensor) -> Waves:
        return Waves(self.vectors.to(position), self.weight.to(position), self.alpha)
