"""Gravity near the ground: a constant force for each mass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Number, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.products import DeferredVJP, Pullback


class Gravity(Potential):
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

    mass: Tensor
    g: Tensor
    direction: Tensor | None

    def __init__(self, mass: Number, g: Number, *, direction: Number | None = None) -> None:
        super().__init__()
        register(self, "mass", mass, positive=True, shapes=[(), ("atoms",), ("atoms", 1)])
        register(self, "g", g, finite=True, single=True)
        if direction is None:
            self.direction = None
            return
        register(self, "direction", direction, finite=True, shapes=[("dim",)])
        self.validate()

    def validate(self) -> None:
        """Refuse a direction of length zero."""
        if self.direction is not None and not bool((self.direction.detach() != 0).any()):
            raise ValueError(f"direction must not be zero; got {self.direction.tolist()}.")

    def forward(self, position: Positions) -> Energies:
        return -(self._pull(position) * position).sum((-1, -2))

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return self._pull(position)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            value = self._pull(position)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            return torch.zeros_like(v), DeferredVJP(self, self._pull, v, position)

        return value, pullback

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
