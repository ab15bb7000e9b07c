"""Lennard-Jones parameters of the noble gases, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, outside_inference_mode
from adjsim.core.derived import derived
from adjsim.core.parameters import describe, register
from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.formula import SHIFTED, check_symmetric
from adjsim.potentials.pairs.lennard_jones import LennardJones
from adjsim.potentials.pairs.mixing import MixingRule, lorentz_berthelot
from adjsim.potentials.pairs.truncation import Truncation


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


class LennardJonesMixture(LennardJones):
    """Lennard-Jones between atoms of several species, whose parameters are mixed by a rule.

    Args:
        species: ``(atoms,)`` integers, each an index into epsilon and sigma; ``range(atoms)`` if
            every atom has its own parameters.
        epsilon: ``(species,)``, energy.
        sigma: ``(species,)``, length.
        mixing: the rule, :func:`~adjsim.potentials.lorentz_berthelot` or
            :func:`~adjsim.potentials.kong`, or any function of the same arguments that is symmetric
            in i and j.
        cutoff, box, truncation, skin, exclusions: as for :class:`LennardJones`.

    Raises:
        ValueError: epsilon and sigma of different lengths, a species without parameters, a
            position with more or fewer atoms than ``species``.
    """

    # Numbers of species, which are checked here.
    _tables = ()

    def __init__(
        self,
        species: Array,
        epsilon: Number,
        sigma: Number,
        *,
        mixing: MixingRule = lorentz_berthelot,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(
            epsilon,
            sigma,
            cutoff=cutoff,
            box=box,
            truncation=truncation,
            skin=skin,
            exclusions=exclusions,
        )
        self._check_parameters()
        self.mixing = mixing
        with outside_inference_mode():
            self.register_buffer("species", _checked_species(species, len(self.epsilon)))
        self.validate()

    def validate(self) -> None:
        """Refuse numbers or a rule that the constructor would refuse."""
        super().validate()
        self._check_parameters()
        _ = self.is_symmetric

    @derived("mixing")
    def is_symmetric(self) -> bool:
        """That the rule gives one finite number for each pair of species; others are refused."""
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

    def register_pair_parameter(
        self, name: str, value: Number, *, positive: bool = False, depth: bool = False
    ) -> None:
        """Store a number for each species, which becomes a table of pairs by the rule."""
        register(self, name, value, positive=positive, depth=depth)

    def _check_parameters(self) -> None:
        if self.epsilon.ndim != 1 or self.epsilon.shape != self.sigma.shape:
            raise ValueError(
                "epsilon and sigma must list one number for each species; got shapes "
                f"{tuple(self.epsilon.shape)} and {tuple(self.sigma.shape)}."
            )

    def pair_table(self, name: str) -> Tensor:
        if name not in ("epsilon", "sigma"):
            return super().pair_table(name)
        epsilon, sigma = self.epsilon, self.sigma
        mixed = self.mixing(epsilon.unsqueeze(-1), sigma.unsqueeze(-1), epsilon, sigma)
        return mixed[("epsilon", "sigma").index(name)]


def _checked_species(species: Array, count: int) -> Tensor:
    found = as_indices("species", species)
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(
            "species must be (atoms,), the index of each atom's species; got shape "
            f"{tuple(found.shape)}."
        )
    if not 0 <= int(found.min()) <= int(found.max()) < count:
        raise ValueError(
            f"species must be indices from 0 to {count - 1}, since epsilon and sigma list {count}; "
            f"got {int(found.min())} to {int(found.max())}."
        )
    return found


def trainable_numbers(values: Sequence[float]) -> nn.Parameter:
    """Make a float64 parameter, a scalar from one number or a vector from several."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return nn.Parameter(tensor[0] if len(values) == 1 else tensor)
