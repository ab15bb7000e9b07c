"""The smallest box that a cutoff allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from adjsim.core.box import inverse, perpendicular_widths, volume
from adjsim.core.state import AnyState
from adjsim.core.strain import Strain
from adjsim.dynamics.pressure.terms import PistonState, volume_at


@dataclass(frozen=True)
class BoxLimit:
    """The smallest box of a cutoff, which half of its smallest width has to reach.

    ``box`` has the rows by which nearest images are found, and ``reference`` those that a strain
    stretches.
    """

    box: Tensor
    cutoff: float
    reference: Tensor

    def margin(self, state: AnyState, t: Any) -> Tensor:
        return self._widths(state) / 2 - self.cutoff * (1 - 1e-9)

    def refuse(self, state: AnyState, t: float) -> None:
        half = self._widths(state).detach().amin((-1, -2)) / 2
        # A box that is not finite is not small: the run stops for another reason.
        if bool((half < self.cutoff * (1 - 1e-9)).any()):
            small = cast(PistonState, state)
            atoms, dim = small.position.shape[-2:]
            now = volume_at(volume(self.box).to(small.strain), small.strain.detach(), dim).flatten()
            smallest = float(now[int(half.flatten().nan_to_num(torch.inf).argmin())])
            density = atoms / smallest if smallest > 0 else math.inf
            raise ValueError(
                f"cutoff {self.cutoff:g} is above half the smallest width of the box, "
                f"{float(half.min()):g}, at the density {density:g} atoms a volume. Use more "
                "atoms or a smaller cutoff: leave a tenth of it between cutoff and half the box at "
                "the start. If a few steps have changed the box by much, check the units of "
                "pressure, kT and tau."
            )

    def _widths(self, state: AnyState) -> Tensor:
        """Compute the widths of each box, ``(*batch, 1, dim)``."""
        strain = Strain.of(self.reference, cast(PistonState, state).strain)
        if not strain.full:
            return perpendicular_widths(self.box).to(strain.value) * torch.exp(strain.value)
        # A width is one over the length of a row of the reciprocal lattice.
        rows = inverse(self.box).transpose(-1, -2).to(strain.value)
        reciprocal = strain.pulled_back(rows, torch.exp(-strain.value))
        return reciprocal.square().sum(-1).rsqrt().unsqueeze(-2)
