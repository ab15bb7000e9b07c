"""Coulomb's law between point charges, and two ways to cut it off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_number
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.pairs.formula import SHIFTED
from adjsim.potentials.pairs.radial import RadialPotential
from adjsim.potentials.pairs.truncation import ForceShifted, Shifted, Truncation


class Coulomb(RadialPotential):
    """Coulomb's law, ``U = sum over i<j of constant q_i q_j / r``.

    A cutoff of this potential is a poor approximation, since the sphere within the cutoff of an
    atom has a net charge. Use :class:`ReactionField` or :class:`Wolf` in a periodic box.

    Args:
        charge: ``(atoms,)``.
        constant: 1/(4 pi epsilon_0) in the units of the simulation, energy times length over the
            square of a charge: 14.39964548 in eV, angstrom and elementary charges.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: charges that are not one number for each atom.
    """

    charge: Tensor

    def __init__(
        self,
        charge: Number,
        constant: float = 1.0,
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
        register(self, "charge", charge, shapes=[("atoms",)], each="one number for each atom")
        self.constant = as_number("constant", constant)
        if not math.isfinite(self.constant):
            raise ValueError(f"constant must be finite; got {constant}.")

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) / r

    def radial_slope(self, r: Tensor) -> Tensor:
        return -self._products(r) / (r * r)

    def radial_curvature(self, r: Tensor) -> Tensor:
        return 2 * self._products(r) / (r * r * r)

    def _products(self, r: Tensor) -> Tensor:
        """Compute constant q_i q_j of every pair."""
        charge, other = self.atom_parameter("charge", r)
        return self.constant * charge * other


class ReactionField(Coulomb, inherits_forces=True):
    """Coulomb's law within the cutoff, with a dielectric medium beyond it::

        u = constant q_i q_j (1/r + k r^2 - c)

    Here k = (e - 1) / ((2 e + 1) r_c^3) and c = 1/r_c + k r_c^2, with the cutoff r_c and the
    permittivity e of the medium. The energy is zero at the cutoff. With an infinite permittivity
    the force is zero there too. U has in addition the energy -constant c q^2 / 2 of each charge in
    its own field. See Tironi et al., J. Chem. Phys. 102, 5451 (1995).

    Args:
        charge: ``(atoms,)``.
        permittivity: e, relative to the inside; ``math.inf`` for a conductor.
        constant: see :class:`Coulomb`.
        cutoff: the radius of the sphere.
        box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`. An excluded pair has
            none of the three terms, as in OpenMM's ``NonbondedForce``. In a medium its two charges
            would still act on each other through the medium; that part is left out.
    """

    def __init__(
        self,
        charge: Number,
        permittivity: float = math.inf,
        constant: float = 1.0,
        *,
        cutoff: float,
        box: Array | None = None,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(charge, constant, cutoff=cutoff, box=box, skin=skin, exclusions=exclusions)
        self.permittivity = as_number("permittivity", permittivity)
        self.validate()

    def validate(self) -> None:
        """Refuse a permittivity below that of vacuum."""
        super().validate()
        if not self.permittivity >= 1:
            raise ValueError(f"permittivity must be at least 1; got {self.permittivity}.")

    @property
    def share(self) -> float:
        """The share (e - 1)/(2 e + 1) of the medium."""
        e = self.permittivity
        return 0.5 if math.isinf(e) else (e - 1) / (2 * e + 1)

    @property
    def quadratic(self) -> float:
        """The factor of r^2."""
        assert self.cutoff is not None
        return self.share / self.cutoff**3

    @property
    def shift(self) -> float:
        """The energy at the cutoff without the shift."""
        assert self.cutoff is not None
        return (1 + self.share) / self.cutoff

    def forward(self, position: Positions) -> Energies:
        own = 0.5 * self.shift * self.constant * self.charge.to(position).square().sum()
        return super().forward(position) - own

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) * (1 / r + self.quadratic * r * r - self.shift)

    def radial_slope(self, r: Tensor) -> Tensor:
        return self._products(r) * (2 * self.quadratic * r - 1 / (r * r))

    def radial_curvature(self, r: Tensor) -> Tensor:
        return 2 * self._products(r) * (self.quadratic + 1 / (r * r * r))


class Wolf(Coulomb, inherits_forces=True):
    """Coulomb's law, damped and shifted so that the sphere within the cutoff is neutral::

        u = constant q_i q_j (erfc(alpha r)/r - erfc(alpha r_c)/r_c)

    U has in addition -constant (erfc(alpha r_c)/(2 r_c) + alpha/sqrt(pi)) q^2 of each charge. See
    Wolf, Keblinski, Phillpot and Eggebrecht, J. Chem. Phys. 110, 8254 (1999). With
    ``truncation=ForceShifted()`` the energy of a pair is that of Fennell and Gezelter, J. Chem.
    Phys. 124, 234104 (2006), whose force is continuous.

    Args:
        charge: ``(atoms,)``.
        alpha: damping, 1/length. With a larger alpha a smaller cutoff is enough, but the energy is
            changed more.
        constant: see :class:`Coulomb`.
        cutoff: the radius of the neutral sphere.
        box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    def __init__(
        self,
        charge: Number,
        alpha: float,
        constant: float = 1.0,
        *,
        cutoff: float,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(
            charge,
            constant,
            cutoff=cutoff,
            box=box,
            truncation=truncation,
            skin=skin,
            exclusions=exclusions,
        )
        self.alpha = as_number("alpha", alpha)
        self.validate()

    def validate(self) -> None:
        """Refuse a damping or a truncation that the constructor would refuse."""
        super().validate()
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be zero or positive, and finite; got {self.alpha}.")
        if type(self.truncation) not in (Shifted, ForceShifted):
            raise ValueError(
                "Wolf's sum is shifted: truncation must be Shifted() or ForceShifted(); got "
                f"{self.truncation}."
            )

    def forward(self, position: Positions) -> Energies:
        assert self.cutoff is not None
        own = math.erfc(self.alpha * self.cutoff) / (2 * self.cutoff)
        own += self.alpha / math.sqrt(math.pi)
        charge = self.charge.to(position)
        return super().forward(position) - own * self.constant * charge.square().sum()

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) * torch.erfc(self.alpha * r) / r

    def radial_slope(self, r: Tensor) -> Tensor:
        return -self._products(r) * (torch.erfc(self.alpha * r) / r + self._gaussian(r)) / r

    def radial_curvature(self, r: Tensor) -> Tensor:
        damped = torch.erfc(self.alpha * r) / r + self._gaussian(r)
        rest = self.alpha**2 * self._gaussian(r)
        return 2 * self._products(r) * (damped / (r * r) + rest)

    def _gaussian(self, r: Tensor) -> Tensor:
        factor = 2 * self.alpha / math.sqrt(math.pi)
        return factor * torch.exp(-((self.alpha * r) ** 2))
