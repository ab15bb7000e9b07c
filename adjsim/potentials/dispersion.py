"""The dispersion beyond a cutoff, averaged over the species of a box."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from adjsim._box import volume
from adjsim._grid import Grid
from adjsim._inputs import outside_inference_mode
from adjsim._typing import Energies, Positions
from adjsim.potentials.base import Potential, Pullback
from adjsim.potentials.noble import LennardJonesMixture

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
            :class:`~adjsim.potentials.truncation.SwitchedDistance`.

    Raises:
        ValueError: no box or no cutoff.
    """

    share: Tensor

    def __init__(self, lennard_jones: LennardJonesMixture, start: float | None = None) -> None:
        super().__init__()
        box, cutoff = lennard_jones.box, lennard_jones.cutoff
        if box is None or cutoff is None:
            raise ValueError("the dispersion correction needs a box and a cutoff.")
        assert lennard_jones.species is not None
        self.lennard_jones = lennard_jones
        count = torch.bincount(lennard_jones.species, minlength=len(lennard_jones.epsilon)).double()
        atoms = float(count.sum())
        pairs = (count.unsqueeze(-1) * count + torch.diag(count)) / (atoms * (atoms + 1))
        with outside_inference_mode():
            self.register_buffer("share", pairs.to(box))
        begin = cutoff if start is None else start
        self.twelfth, self.sixth = (_integral(n, begin, cutoff) for n in (12, 6))
        self.factor = 2 * math.pi * atoms**2

    @property
    def box(self) -> Tensor | None:
        """The box of the Lennard-Jones potential."""
        return self.lennard_jones.box

    def forward(self, position: Positions) -> Energies:
        return self._energy().to(position).expand(position.shape[:-2])

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        return torch.zeros_like(position)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
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
        mean = 4 * epsilon * sixth * (sixth * self.twelfth - self.sixth)
        return self.factor / volume(self.lennard_jones.box) * (self.share * mean).sum()


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
