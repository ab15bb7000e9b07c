"""Lennard-Jones parameters of the noble gases, and mixtures of species."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, outside_inference_mode, wrong_shape
from adjsim.core.declared import declared
from adjsim.core.derived import derived
from adjsim.core.parameters import describe
from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.formula import check_symmetric
from adjsim.potentials.pairs.powers import LennardJones

MixingRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# The rule of a number for each species.
SPECIES: dict[str, Any] = {"shapes": (("species",),), "each": "one number for each species"}


class NobleGas(NamedTuple):
    """Well depth as a temperature, epsilon/kB in kelvin, and sigma in angstrom."""

    kelvin: float
    angstrom: float


NOBLE_GASES = {
    "Ne": NobleGas(33.921, 2.8010),
    "Ar": NobleGas(116.79, 3.3952),
    "Kr": NobleGas(162.58, 3.6274),
    "Xe": NobleGas(227.55, 3.9011),
}
"""Lennard-Jones parameters by symbol, fitted to vapour-liquid equilibria: Vrabec, Stoll and Hasse,
J. Phys. Chem. B 105, 12126 (2001). Helium is left out: at the temperatures where it is liquid, it
is not classical."""


def lorentz_berthelot(
    epsilon_i: Tensor, sigma_i: Tensor, epsilon_j: Tensor, sigma_j: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix by ``epsilon = sqrt(epsilon_i epsilon_j)`` and ``sigma = (sigma_i + sigma_j) / 2``.

    The rules overestimate the depth of the well between atoms of different sizes. The derivative
    of the root is infinite at epsilon zero, as of hydrogen in many force fields, and is given as
    zero, so training leaves such an epsilon at zero.
    """
    return root(epsilon_i) * root(epsilon_j), sigma_i / 2 + sigma_j / 2


def kong(
    epsilon_i: Tensor, sigma_i: Tensor, epsilon_j: Tensor, sigma_j: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix attractions as dispersion, and repulsions by Smith's model of distorted atoms::

        A = epsilon sigma^6  = sqrt(A_i A_j)
        B = epsilon sigma^12 = ((B_i^(1/13) + B_j^(1/13)) / 2)^13

    so sigma^6 = B/A and epsilon = A^2/B. See Kong, J. Chem. Phys. 59, 2464 (1973). For noble gases
    it is closer to measured mixtures than :func:`lorentz_berthelot`. Epsilon has to be positive.
    """
    sixth_i, sixth_j = sigma_i**6, sigma_j**6
    attraction = (epsilon_i * sixth_i).sqrt() * (epsilon_j * sixth_j).sqrt()
    root_i = (epsilon_i * sixth_i * sixth_i) ** (1 / 13)
    root_j = (epsilon_j * sixth_j * sixth_j) ** (1 / 13)
    repulsion = ((root_i + root_j) / 2) ** 13
    return attraction * attraction / repulsion, (repulsion / attraction) ** (1 / 6)


def root(x: Tensor) -> Tensor:
    """Compute the square root, with derivative zero at zero."""
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())


class LennardJonesMixture(LennardJones):
    """Lennard-Jones between atoms of several species, whose parameters are mixed by a rule.

    Args:
        species: ``(atoms,)`` integers, each an index into epsilon and sigma; ``range(atoms)`` if
            every atom has its own parameters.
        {parameters}
        mixing: the rule, :func:`~adjsim.potentials.lorentz_berthelot` or
            :func:`~adjsim.potentials.kong`, or any function of the same arguments that is symmetric
            in i and j.
        cutoff, box, truncation, skin, exclusions: as for :class:`LennardJones`.

    Raises:
        ValueError: epsilon and sigma of different lengths, a species without parameters, a
            position with more or fewer atoms than ``species``.
    """

    epsilon: Tensor = declared("``(species,)``, energy", depth=True, **SPECIES)
    sigma: Tensor = declared("``(species,)``, length", positive=True, **SPECIES)

    def __init__(
        self,
        species: Array,
        *values: Number,
        mixing: MixingRule = lorentz_berthelot,
        **options: Any,
    ) -> None:
        super().__init__(*values, **options)
        self.mixing = mixing
        with outside_inference_mode():
            self.register_buffer("species", _checked_species(species, len(self.epsilon)))
        self.validate()

    def validate(self) -> None:
        """Refuse numbers or a rule that the constructor would refuse."""
        super().validate()
        check_lengths(self.epsilon, self.sigma)
        _ = self.is_symmetric

    @derived("mixing")
    def is_symmetric(self) -> bool:
        """Refuse a mixing rule without one finite number for each pair of species."""
        e, s = self.epsilon.detach(), self.sigma.detach()
        mixed = self.mixing(e[:, None], s[:, None], e, s)
        for name, value in zip(("epsilon", "sigma"), mixed, strict=True):
            count = len(self.epsilon)
            if value.shape != (count, count) or not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"mixing gives {describe(value)} for {name}; it must give a finite number for "
                    "each pair of species."
                )
            check_symmetric(name, value)
        return True

    def pair_table(self, name: str) -> Tensor:
        if name not in ("epsilon", "sigma"):
            return super().pair_table(name)
        epsilon, sigma = self.epsilon, self.sigma
        mixed = self.mixing(epsilon.unsqueeze(-1), sigma.unsqueeze(-1), epsilon, sigma)
        return mixed[("epsilon", "sigma").index(name)]


def check_lengths(epsilon: Tensor, sigma: Tensor) -> None:
    """Refuse numbers of different species."""
    if epsilon.shape != sigma.shape:
        raise ValueError(
            "epsilon and sigma must list one number for each species; got shapes "
            f"{tuple(epsilon.shape)} and {tuple(sigma.shape)}."
        )


def _checked_species(species: Array, count: int) -> Tensor:
    found = as_indices("species", species)
    if found.ndim != 1 or len(found) == 0:
        raise wrong_shape("species", "(atoms,), the index of each atom's species", found)
    if not 0 <= int(found.min()) <= int(found.max()) < count:
        raise ValueError(
            f"species must be indices from 0 to {count - 1}, since epsilon and sigma list {count}; "
            f"got {int(found.min())} to {int(found.max())}."
        )
    return found
