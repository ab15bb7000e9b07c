"""The base class of Ewald sums of point charges, and their part in real space."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import COSTLY_SKIN
from adjsim.core.declared import FINITE, declared, setting
from adjsim.potentials.charges.coulomb import DampedCoulomb
from adjsim.potentials.charges.ewald.base import EwaldSum
from adjsim.potentials.pairs.formula import ATOMS


class ScreenedCoulomb(DampedCoulomb):
    """Point charges that Gaussians screen: ``u = constant q_i q_j erfc(alpha r) / r``.

    The energy is not shifted at the cutoff, since the rest of an Ewald sum is its complement. Pairs
    at the cutoff have about the energy ``2 tolerance constant q_i q_j / cutoff``.
    """

    # A tensor, which kernels read. A number would be compiled into them.
    alpha: Tensor = declared("1/length")
    constant: float = setting("see :class:`~adjsim.Coulomb`", FINITE)

    def truncated_energy(self, s: Tensor) -> Tensor:
        return self.pair_energy(s)

    def damping(self, r: Tensor) -> tuple[Tensor, Tensor]:
        alpha = self.alpha.to(r)
        return alpha, 2 / math.sqrt(math.pi) * alpha


class PointCharges(EwaldSum):
    """Base class of Ewald sums of point charges."""

    charge: Tensor = declared("``(atoms,)``", **ATOMS)
    constant: float = setting("see :class:`~adjsim.Coulomb`", FINITE, 1.0, keyword=True)
    omitted_arguments = ("species",)
    skin_share = COSTLY_SKIN
    power = 1
    of_atoms = "charge"

    def checked(self, **options: Any) -> ScreenedCoulomb:
        return ScreenedCoulomb(self.charge, self.alpha, self.constant, **options)

    @property
    def real(self) -> ScreenedCoulomb:
        # Charges may be computed, by a parametrisation, also where a sweep records no graph.
        with torch.enable_grad():
            charge = self.charge
        return self.part(ScreenedCoulomb, {"constant": self.constant}, charge=charge)

    @property
    def atoms(self) -> int:
        return len(self.charge)

    def charges(self) -> Tensor:
        return self.charge

    def own(self) -> float:
        return self.constant * self.alpha / math.sqrt(math.pi)
