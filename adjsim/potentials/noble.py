"""Lennard-Jones parameters of the noble gases, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adjsim._typing import Number
from adjsim.potentials.pair import LennardJones


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
"""Lennard-Jones numbers by symbol, fitted to vapour-liquid equilibria: Vrabec, Stoll and Hasse, J. Phys. Chem. B 105, 12126
(2001). Helium is left out: at the temperatures where it is liquid it is not classical."""


class LennardJonesMixture(LennardJones):
    """Lennard-Jones between atoms of several species, mixed by the Lorentz-Berthelot rules.

    ``epsilon_ij = sqrt(epsilon_i epsilon_j)``, ``sigma_ij = (sigma_i + sigma_j) / 2``.

    Args:
        species: ``(atoms,)`` whole numbers, each an index into epsilon and sigma.
        epsilon: ``(species,)``, energy.
        sigma: ``(species,)``, length.
        cutoff, box: as for :class:`LennardJones`.
    """

    species: Tensor

    def __init__(
        self,
        species: Tensor,
        epsilon: Number,
        sigma: Number,
        *,
        cutoff: float | None = None,
        box: Tensor | Sequence[float] | None = None,
    ) -> None:
        super().__init__(epsilon, sigma, cutoff=cutoff, box=box)
        self.register_buffer("species", species.long())

    def pair_parameters(self, s: Tensor) -> tuple[Tensor, Tensor]:
        root, half = self.epsilon.to(s).sqrt()[self.species], self.sigma.to(s)[self.species] / 2
        return root[:, None] * root, half[:, None] + half


def trainable_numbers(values: Sequence[float]) -> nn.Parameter:
    """Numbers as one float64 parameter: a scalar if there is one, else a vector."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return nn.Parameter(tensor[0] if len(values) == 1 else tensor)
