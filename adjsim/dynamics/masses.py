"""The masses of the atoms of a system, and other numbers that an atom has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjsim.core.parameters import check_count
from adjsim.core.typing import Energies, Positions

# The shapes of one number, or a number for each atom.
PER_ATOM = ((), ("atoms",), ("atoms", 1))


class Masses:
    """The masses of the atoms of a system, infinite for pinned ones.

    ``masses(like)`` returns them in the dtype of a field, a scalar or ``(atoms, 1)``, also where
    the number of atoms equals dim. ``pinned(atoms)`` says which are pinned in addition.
    """

    __slots__ = ("mass", "pinned")

    def __init__(self, mass: Tensor, pinned: Callable[[int], Tensor] | None = None) -> None:
        self.mass, self.pinned = mass, pinned

    def __call__(self, like: Tensor) -> Tensor:
        check_count("mass", self.mass, like.shape[-2])
        found = per_atom(self.mass, like)
        if self.pinned is None:
            return found
        return torch.where(self.pinned(like.shape[-2]), torch.inf, found)

    def mobile(self, like: Tensor) -> Tensor:
        """Return 1 for atoms that move, 0 for pinned ones; a scalar or ``(atoms, 1)``."""
        return torch.isfinite(self(like.detach())).to(like)

    def dof(self, position: Tensor) -> float:
        """Count the degrees of freedom of one system, without pinned atoms."""
        return float(self.mobile(position).expand(position.shape[-2], 1).sum()) * position.shape[-1]

    def thermal(self, like: Tensor, kT: Tensor) -> Tensor:
        """Compute the thermal momentum sqrt(m kT), a scalar or ``(atoms, 1)``; zero if pinned."""
        mass = self(like)
        mobile = torch.isfinite(mass.detach())
        thermal = torch.sqrt(torch.where(mobile, mass, 1.0) * kT.to(like))
        return torch.where(mobile, thermal, 0.0)

    def kinetic_energy(self, momentum: Positions) -> Energies:
        """Compute ``sum p^2 / 2m``, ``(*batch,)``."""
        return 0.5 * (momentum**2 / self(momentum)).sum((-1, -2))


def per_atom(value: Tensor, like: Tensor) -> Tensor:
    """Convert a number to a field's dtype, as a scalar or ``(atoms, 1)``."""
    value = value.to(like)
    return value.reshape(-1, 1) if value.ndim and value.numel() > 1 else value.reshape(())
