"""Contact of vertices with surfaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim._geometry import Coordinate, Vector, combined, scaled
from adjsim._grid import Grid
from adjsim._inputs import as_indices, describe_type, outside_inference_mode
from adjsim._typing import Array, Energies, Number, Positions
from adjsim.potentials.base import DeferredVJP, ForceField, Potential, Pullback
from adjsim.potentials.contact.penalties import Penalty, Softplus
from adjsim.potentials.contact.surfaces import Moving, Plane, Surface


class SurfaceContact(nn.Module):
    """What contact with a surface at rest and with a moving one have in common.

    All results are for all vertices. Those not in ``index`` have a gap and a normal, and no force.
    """

    surface: Surface | Moving
    penalty: Penalty
    index: Tensor | None

    def gap(self, position: Positions, t: Any = 0.0) -> Tensor:
        """Compute the gap of each vertex, ``(*batch, atoms)``, negative behind the surface."""
        raise NotImplementedError

    def normal(self, position: Positions, t: Any = 0.0) -> Positions:
        """Compute the unit normal of the surface at each vertex, ``(*batch, atoms, dim)``."""
        raise NotImplementedError

    def normal_force(self, position: Positions, t: Any = 0.0) -> Tensor:
        """Compute the size of the contact force on each vertex, ``(*batch, atoms)``, >= 0."""
        raise NotImplementedError

    def surface_velocity(self, position: Positions, t: Any = 0.0) -> Positions:
        """Compute the velocity of the surface at each vertex, ``(*batch, atoms, dim)``."""
        raise NotImplementedError

    def largest_curvature(self, atoms: int, energy: float | None = None) -> Tensor:
        """Compute the largest curvature of the penalty at each vertex, ``(atoms,)``.

        See :meth:`Penalty.largest_curvature`. Vertices not in ``index`` have zero.
        """
        raise NotImplementedError

    def refuse_penetration(self, position: Positions, t: Any = 0.0) -> None:
        """Raise if a vertex is behind the surface by more than the penalty allows.

        Raises:
            ValueError: it names the vertex, its gap and the ways out.
        """
        raise NotImplementedError


class Contact(SurfaceContact, Potential):
    """Contact of vertices with a surface at rest, ``U = sum over vertices of u(g(q))``."""

    def __init__(self, surface: Surface, penalty: Penalty, *, index: Array | None = None) -> None:
        super().__init__()
        raise NotImplementedError


class MovingContact(SurfaceContact, ForceField):
    """Contact of vertices with a moving surface, ``F(t, q) = -du/dq at q - path(t)``."""

    def __init__(self, surface: Moving, penalty: Penalty, *, index: Array | None = None) -> None:
        super().__init__()
        raise NotImplementedError


class PlaneContact(Contact):
    """Contact with a plane by the smooth penalty."""

    def __init__(
        self,
        normal: Number,
        offset: Number,
        stiffness: Number,
        width: Number,
        *,
        index: Array | None = None,
    ) -> None:
        super().__init__(Plane(normal, offset), Softplus(stiffness, width), index=index)
