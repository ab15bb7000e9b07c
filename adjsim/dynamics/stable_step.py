"""The largest stable step of velocity Verlet."""

from __future__ import annotations

from torch import nn

from adjsim._typing import Number, PositionsLike
from adjsim.potentials.contact.base import SurfaceContact


def largest_stable_step(
    potential: nn.Module,
    mass: Number,
    position: PositionsLike,
    *,
    contact: SurfaceContact | None = None,
    energy: float | None = None,
) -> float:
    """Compute the largest stable step of velocity Verlet at a position, ``2 / omega_max``."""
    raise NotImplementedError
