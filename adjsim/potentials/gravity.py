"""Gravity near the ground: a constant force for each mass."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.core.rounding import Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.evaluated import DeclaredModule
from adjsim.potentials.products import DeferredVJP, Pullback


class Gravity(DeclaredModule, ClosedForm, inherits_forces=True):
    """Uniform gravity, ``U = sum over atoms of m g h``, with h the height along a direction.

    The force is ``-m g`` along the direction. An atom of infinite mass, which is pinned, has
    neither energy nor force.

    Args:
        mass: m; a scalar, ``(atoms,)`` or ``(atoms, 1)``, as that of the dynamics. Give both the
            same parameter to differentiate with respect to it.
        g: acceleration, length / time^2.
        direction: ``(dim,)``, upward, of any length but zero; None for the last axis.

    Raises:
        ValueError: a mass that is not positive or of another shape, a g that is not one finite
            number, a direction of length zero. At evaluation: a mass or a direction that does not
            fit the position.
    """

    mass: Tensor = declared("m", positive=True, shapes=((), ("atoms",), ("atoms", 1)))
    g: Tensor = declared("acceleration", finite=True, single=True)
    direction: Tensor | None = declared(
        "upward", None, keyword=True, finite=True, shapes=(("dim",),)
    )

    def validate(self) -> None:
        """Refuse a direction of length zero."""
        if self.direction is not None and not bool((self.direction.detach() != 0).any()):
            raise ValueError(f"direction must not be zero; got {self.direction.tolist()}.")

    def forward(self, position: Positions) -> Energies:
        return -(self._pull(position) * position).sum((-1, -2))

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            return torch.zeros_like(v), DeferredVJP(self, self._pull, v, position)

        return self._pull(position), product

    def _pull(self, position: Tensor) -> Tensor:
        """Compute the force, of the shape of the position."""
        atoms, dim = position.shape[-2:]
        mass = self.mass.to(position)
        if mass.numel() not in (1, atoms):
            raise ValueError(f"mass has {mass.numel()} entries and position {atoms} atoms.")
        weight = -self.g.to(position).reshape(()) * torch.where(torch.isfinite(mass), mass, 0.0)
        column = weight.reshape(-1, 1).expand(atoms, 1)
        if self.direction is None:
            none = torch.zeros_like(column).expand(atoms, dim - 1)
            return torch.cat([none, column], -1).expand_as(position)
        if len(self.direction) != dim:
            raise ValueError(
                f"direction has {len(self.direction)} entries and position has dim {dim}."
            )
        direction = self.direction.to(position)
        length = (direction * direction).sum().sqrt()
        return (column * (direction / length)).expand_as(position)
