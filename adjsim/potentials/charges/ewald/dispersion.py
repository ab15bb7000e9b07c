"""Lennard-Jones with an Ewald sum of the dispersion, by a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.core.typing import Array, Number
from adjsim.potentials.charges.ewald.particle_mesh import MeshSum
from adjsim.potentials.pairs.noble import (
    SPECIES,
    LennardJonesMixture,
    check_lengths,
    lorentz_berthelot,
    root,
)


def strength(epsilon: Tensor, sigma: Tensor) -> Tensor:
    """Compute the charge of a species, ``2 sqrt(epsilon) sigma^3``."""
    return 2 * root(epsilon) * sigma**3


class DampedLennardJones(LennardJonesMixture):
    """Lennard-Jones whose geometric dispersion Gaussians leave out::

        u = 4 epsilon_ij ((sigma_ij / r)^12 - (sigma_ij / r)^6) + C_i C_j f(s)
        f(s) = (1 - exp(-y) (1 + y + y^2/2)) / s^3

    with s = r^2, y = alpha^2 s and C_i = 2 sqrt(epsilon_i) sigma_i^3. Numbers of pairs are mixed by
    the rules of Lorentz and Berthelot.
    """

    # A tensor, which kernels read. A number would be compiled into them.
    alpha: Tensor = declared("1/length")

    def operand_names(self) -> list[str]:
        return [*super().operand_names(), "attraction"]

    def pair_table(self, name: str) -> Tensor:
        if name != "attraction":
            return super().pair_table(name)
        each = strength(self.epsilon, self.sigma)
        return each.unsqueeze(-1) * each

    def pair_energy(self, s: Tensor) -> Tensor:
        return super().pair_energy(s) + self.pair_parameter("attraction", s) * self._functions(s)[0]

    def pair_slope(self, s: Tensor) -> Tensor:
        return super().pair_slope(s) + self.pair_parameter("attraction", s) * self._functions(s)[1]

    def pair_curvature(self, s: Tensor) -> Tensor:
        more = self.pair_parameter("attraction", s) * self._functions(s)[2]
        return super().pair_curvature(s) + more

    def _functions(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute f, df/ds and d2f/ds2."""
        square = self.pair_parameter("alpha", s) ** 2
        y = square * s
        decay = torch.exp(-y)
        value = (1 - decay * (1 + y * (1 + 0.5 * y))) / (s * s * s)
        rest = 0.5 * square * square * square * decay / s
        slope = rest - 3 * value / s
        return value, slope, (3 * value / s - 3 * slope - rest * (1 + y)) / s


class LennardJonesMesh(MeshSum):
    """Lennard-Jones in a periodic box, whose dispersion has no cutoff, as OpenMM's LJPME::

        U = sum over i<j within the cutoff of (u(r) - u(r_c)) - 1/2 sum over waves of G |S|^2
            + alpha^6 / 12 sum of C_i^2 + sum over excluded pairs of C_i C_j f(s)

    with u and f of :class:`DampedLennardJones`, and S the sum of the C_i times their phases, see
    :mod:`adjsim.potentials.charges.ewald.waves`. So within the cutoff numbers are mixed by the
    rules of Lorentz and Berthelot, and the dispersion beyond is mixed geometrically. See Wennberg
    et al., J. Chem. Theory Comput. 9, 3527 (2013). Use it at interfaces, whose dispersion a
    correction at uniform density has wrong. In a uniform liquid such a correction is cheaper, and
    the two must not be added.

    Args:
        species: see :class:`~adjsim.LennardJonesMixture`.
        {parameters}
        box, cutoff, alpha, grid, order, exclusions, skin: see :class:`~adjsim.ParticleMeshEwald`.

    Raises:
        ValueError: as :class:`~adjsim.LennardJonesMixture` and :class:`~adjsim.ParticleMeshEwald`.
    """

    epsilon: Tensor = declared("``(species,)``, energy", depth=True, **SPECIES)
    sigma: Tensor = declared("``(species,)``, length", positive=True, **SPECIES)
    corrects_tail = True
    power = 6
    constant = -1.0
    of_atoms = "species"

    def __init__(self, species: Array, *values: Number, **options: Any) -> None:
        super().__init__(*values, species=species, **options)

    def validate(self) -> None:
        """Refuse numbers that the constructor would refuse."""
        super().validate()
        check_lengths(self.epsilon, self.sigma)

    def checked(self, **options: Any) -> DampedLennardJones:
        assert self.species is not None
        return DampedLennardJones(self.species, self.epsilon, self.sigma, self.alpha, **options)

    @property
    def real(self) -> DampedLennardJones:
        with torch.enable_grad():
            numbers = {"epsilon": self.epsilon, "sigma": self.sigma}
        settings = {"mixing": lorentz_berthelot}
        return self.part(DampedLennardJones, settings, species=self.species, **numbers)

    @property
    def atoms(self) -> int:
        assert self.species is not None
        return len(self.species)

    def charges(self) -> Tensor:
        return strength(self.epsilon, self.sigma)[self.species]

    def own(self) -> float:
        return self.constant * self.alpha**6 / 12
