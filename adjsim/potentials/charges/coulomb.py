"""Coulomb's law between point charges, and two ways to cut it off."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import COSTLY_SKIN
from adjsim.core.declared import FINITE, NOT_NEGATIVE, Limits, declared, setting
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs.formula import ATOMS
from adjsim.potentials.pairs.radial import RadialPotential
from adjsim.potentials.pairs.truncation import ForceShifted, Shifted

PERMITTIVITY = Limits("at least 1", lambda x: x >= 1)
CONSTANT = (
    "1/(4 pi epsilon_0) in the units of the simulation, energy times length over the square of a "
    "charge: 14.39964548 in eV, angstrom and elementary charges"
)


class Coulomb(RadialPotential):
    """Coulomb's law, ``U = sum over i<j of constant q_i q_j / r``.

    A cutoff is a poor approximation, since the sphere within it has a net charge. Use
    :class:`ReactionField` or :class:`Wolf` in a periodic box.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: charges that are not one number for each atom.
    """

    charge: Tensor = declared("``(atoms,)``", **ATOMS)
    constant: float = setting(CONSTANT, FINITE, 1.0)

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) * (1 / r)

    def radial_slope(self, r: Tensor) -> Tensor:
        inverse = 1 / r
        return -self._products(r) * (inverse * inverse)

    def radial_curvature(self, r: Tensor) -> Tensor:
        inverse = 1 / r
        return 2 * self._products(r) * (inverse * inverse * inverse)

    def _products(self, r: Tensor) -> Tensor:
        """Compute constant q_i q_j of every pair."""
        charge, other = self.atom_parameter("charge", r)
        return self.constant * (charge * other)


class ReactionField(Coulomb, inherits_forces=True):
    """Coulomb's law within the cutoff, with a dielectric medium beyond it::

        u = constant q_i q_j (1/r + k r^2 - c)

    Here k = (e - 1) / ((2 e + 1) r_c^3) and c = 1/r_c + k r_c^2, with the cutoff r_c and the
    permittivity e of the medium. The energy is zero at the cutoff. With an infinite permittivity
    the force is zero there too. U has in addition the energy -constant c q^2 / 2 of each charge in
    its own field. See Tironi et al., J. Chem. Phys. 102, 5451 (1995).

    Args:
        {parameters}
        cutoff: the radius of the sphere.
        box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`. An excluded pair has
            none of the three terms, as in OpenMM's ``NonbondedForce``, nor a part through the
            medium.
    """

    permittivity: float = setting(
        "e, relative to the inside; ``math.inf`` for a conductor", PERMITTIVITY, math.inf
    )
    constant: float = setting("see :class:`Coulomb`", FINITE, 1.0)
    needed_arguments = ("cutoff",)
    omitted_arguments = ("truncation",)

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


class DampedCoulomb(Coulomb):
    """Coulomb's law that Gaussians screen: ``u = constant q_i q_j erfc(alpha r) / r``."""

    costly = True
    skin_share = COSTLY_SKIN

    def damping(self, r: Tensor) -> tuple[Any, Any]:
        """Return alpha and ``2 alpha / sqrt(pi)``, numbers or tensors like r."""
        raise TypeError(f"{type(self).__name__} has no damping(r).")

    def radial_energy(self, r: Tensor) -> Tensor:
        return self._products(r) * torch.erfc(self.damping(r)[0] * r) * (1 / r)

    def radial_slope(self, r: Tensor) -> Tensor:
        return -self._products(r) * self._decay(r) * (1 / r)

    def radial_curvature(self, r: Tensor) -> Tensor:
        decay, bend, inverse = self._decay(r), self.damping(r)[0] ** 2 * self._gaussian(r), 1 / r
        return 2 * self._products(r) * (decay * (inverse * inverse) + bend)

    def _decay(self, r: Tensor) -> Tensor:
        """Compute minus the derivative of erfc(alpha r)/r, times r."""
        return torch.erfc(self.damping(r)[0] * r) * (1 / r) + self._gaussian(r)

    def _gaussian(self, r: Tensor) -> Tensor:
        alpha, factor = self.damping(r)
        return factor * torch.exp(-((alpha * r) ** 2))


class Wolf(DampedCoulomb, inherits_forces=True):
    """Coulomb's law, damped and shifted so that the sphere within the cutoff is neutral::

        u = constant q_i q_j (erfc(alpha r)/r - erfc(alpha r_c)/r_c)

    U has in addition -constant (erfc(alpha r_c)/(2 r_c) + alpha/sqrt(pi)) q^2 of each charge. See
    Wolf, Keblinski, Phillpot and Eggebrecht, J. Chem. Phys. 110, 8254 (1999). With
    ``truncation=ForceShifted()`` the energy of a pair is that of Fennell and Gezelter, J. Chem.
    Phys. 124, 234104 (2006), whose force is continuous.

    Args:
        {parameters}
        cutoff: the radius of the neutral sphere.
        box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.
    """

    alpha: float = setting(
        "damping, 1/length. With a larger alpha a smaller cutoff is enough, but the energy is "
        "changed more",
        NOT_NEGATIVE,
    )
    constant: float = setting("see :class:`Coulomb`", FINITE, 1.0)
    needed_arguments = ("cutoff",)

    def validate(self) -> None:
        """Refuse a truncation that the constructor would refuse."""
        super().validate()
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

    def damping(self, r: Tensor) -> tuple[float, float]:
        return self.alpha, 2 * self.alpha / math.sqrt(math.pi)
