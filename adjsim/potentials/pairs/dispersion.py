"""The dispersion beyond a cutoff, averaged over the species of a box."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number
from adjsim.core.box import volume
from adjsim.core.derived import derived
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.noble import LennardJonesMixture
from adjsim.potentials.products import Pullback

NODES = 200


class DispersionCorrection(Potential):
    """The Lennard-Jones energy that a cutoff leaves out, at uniform density, as OpenMM adds it::

        U = 2 pi N^2 / V  <4 epsilon (sigma^12 I_12 - sigma^6 I_6)>
        I_n = integral from 0 to infinity of (1 - S(r)) r^(2 - n) dr

    S is the share of the energy that the cutoff leaves: 1 within it, 0 beyond it, and a switch in
    between. The mean is over all pairs of atoms, an atom paired with itself included, so for few
    atoms it differs from :func:`~adjsim.potentials.tail_corrections`, which leaves these out. The
    energy does not depend on positions: it gives no force, but a virial and a gradient with respect
    to epsilon and sigma. Do not use it in a slab, a droplet or a crystal.

    Args:
        lennard_jones: the potential, with a box in three dimensions and a cutoff; it shares its
            parameters.
        start: where the switch begins, at most the cutoff; None: no switch. The switch is that of
            :class:`~adjsim.potentials.pairs.truncation.SwitchedDistance`.

    Raises:
        ValueError: no box or no cutoff.
    """

    def __init__(self, lennard_jones: LennardJonesMixture, start: float | None = None) -> None:
        super().__init__()
        if lennard_jones.box is None or lennard_jones.cutoff is None:
            raise ValueError("the dispersion correction needs a box and a cutoff.")
        self.lennard_jones = lennard_jones
        self.start = None if start is None else as_number("start", start)
        self.validate()

    def validate(self) -> None:
        """Refuse a switch that begins beyond the cutoff."""
        if self.start is not None and not 0 < self.start <= self.cutoff:
            raise ValueError(
                f"start must be positive and at most the cutoff, {self.cutoff:g}; got "
                f"{self.start:g}."
            )

    @property
    def cutoff(self) -> float:
        """The cutoff of the Lennard-Jones potential."""
        assert self.lennard_jones.cutoff is not None
        return self.lennard_jones.cutoff

    @property
    def species(self) -> Tensor:
        """The species of the Lennard-Jones potential."""
        assert self.lennard_jones.species is not None
        return self.lennard_jones.species

    @property
    def kinds(self) -> int:
        """The number of species."""
        return len(self.lennard_jones.epsilon)

    @derived("species", "kinds")
    def share(self) -> Tensor:
        """The share of each two species in the pairs."""
        count = torch.bincount(self.species, minlength=self.kinds).double()
        atoms = count.sum()
        return (count.unsqueeze(-1) * count + torch.diag(count)) / (atoms * (atoms + 1))

    @derived("cutoff", "start")
    def integrals(self) -> tuple[float, float]:
        """The integrals I_12 and I_6."""
        begin = self.cutoff if self.start is None else self.start
        return _integral(12, begin, self.cutoff), _integral(6, begin, self.cutoff)

    @property
    def box(self) -> Tensor | None:
        """The box of the Lennard-Jones potential."""
        return self.lennard_jones.box

    def forward(self, position: Positions) -> Energies:
        return self._energy().to(position).expand(position.shape[:-2])

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return torch.zeros_like(position)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        nothing: list[Tensor | None] = [None] * len(parameters)
        return torch.zeros_like(position), lambda v: (torch.zeros_like(v), nothing)

    def virial(self, position: Positions) -> Tensor:
        """Compute the energy times the unit matrix, since the energy is inverse to the volume."""
        unit = torch.eye(3, dtype=position.dtype, device=position.device)
        return self.forward(position)[..., None, None] * unit

    def _energy(self) -> Tensor:
        assert self.lennard_jones.box is not None
        epsilon, sigma = (self.lennard_jones.pair_table(name) for name in ("epsilon", "sigma"))
        sixth = sigma**6
        repulsion, attraction = self.integrals
        mean = 4 * epsilon * sixth * (sixth * repulsion - attraction)
        factor = 2 * math.pi * len(self.species) ** 2
        return factor / volume(self.lennard_jones.box) * (self.share.to(mean) * mean).sum()


def _integral(n: int, begin: float, cutoff: float) -> float:
    """Integrate (1 - S(r)) r^(2 - n) from the start of the switch to infinity."""
    beyond = cutoff ** (3 - n) / (n - 3)
    if begin == cutoff:
        return beyond
    # The integrand is smooth within the switch, so that Gauss-Legendre nodes converge at once.
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    x = (1 + nodes) / 2
    r = begin + (cutoff - begin) * x
    missing = x**3 * (10 - 15 * x + 6 * x**2)
    return beyond + float((cutoff - begin) / 2 * (weights * missing * r ** (2.0 - n)).sum())
