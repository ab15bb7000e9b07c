"""Contact of vertices with surfaces.

With the gap g, the unit normal n and the curvature H of the surface (see
:mod:`adjsim.potentials.contact.surfaces`), and the energy u(g) of one vertex (see
:mod:`adjsim.potentials.contact.penalties`), force and product are closed forms::

    F = -u'(g) n
    (dF/dq) v = -u''(g) (n . v) n - u'(g) H v
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim.core.arguments import describe_type, outside_inference_mode, wrong_shape
from adjsim.core.coordinates import Coordinate, Vector, combined, scaled
from adjsim.core.parameters import refuse_unknown
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.base import ForceField
from adjsim.potentials.bonded.selection import as_vertices
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.contact.penalties import Penalty, Softplus
from adjsim.potentials.contact.surfaces import Moving, Plane, Surface
from adjsim.potentials.products import DeferredVJP, Pullback, Tensors, VJPSum


class SurfaceContact(nn.Module):
    """The base class of contacts with a surface, at rest or moving.

    All results are for all vertices. Those not in ``index`` have a gap and a normal, and no force.

    Attributes:
        surface: the surface, or a moving one.
        penalty: the energy of a vertex as a function of its gap.
    """

    _kind: ClassVar[type]
    _needed: ClassVar[str]
    penalty: Penalty
    _chosen: Tensor | None

    def __init__(
        self, surface: Surface | Moving, penalty: Penalty, *, index: Array | None = None
    ) -> None:
        super().__init__()
        if not isinstance(surface, self._kind):
            raise TypeError(f"surface must be {self._needed}; got {describe_type(surface)}.")
        if not isinstance(penalty, Penalty):
            raise TypeError(
                "penalty must be Quadratic(stiffness), Softplus(stiffness, width) or "
                f"Barrier(stiffness, distance); got {describe_type(penalty)}."
            )
        self.surface, self.penalty = surface, penalty
        with outside_inference_mode():
            chosen: Tensor | None = None
            if index is not None:
                # Which vertices, up to the last one of the index, are in it.
                found = as_vertices(index)
                chosen = torch.zeros(int(found.max()) + 1, dtype=torch.bool)
                chosen[found] = True
            self.register_buffer("_chosen", chosen, persistent=False)

    @property
    def _resting(self) -> Surface:
        """The surface where it was at first."""
        return self.surface.surface if isinstance(self.surface, Moving) else self.surface

    def _shift(self, like: Tensor, t: Any) -> Tensor | None:
        """Compute by how much the surface has moved, ``(dim,)``; None at rest."""
        return None

    def gap(self, position: Positions, t: Any = 0.0) -> Tensor:
        """Compute the gap of each vertex, ``(*batch, atoms)``, negative behind the surface."""
        return self._coordinate(self._relative(position, t)).value.squeeze(-2)

    def normal(self, position: Positions, t: Any = 0.0) -> Positions:
        """Compute the unit normal of the surface at each vertex, ``(*batch, atoms, dim)``."""
        return _joined(self._coordinate(self._relative(position, t)).gradient[0], position)

    def normal_force(self, position: Positions, t: Any = 0.0) -> Tensor:
        """Compute the size of the contact force on each vertex, ``(*batch, atoms)``, >= 0."""
        return -self._masked(self.penalty.slope(self.gap(position, t)))

    def surface_velocity(self, position: Positions, t: Any = 0.0) -> Positions:
        """Compute the velocity of the surface at each vertex, ``(*batch, atoms, dim)``."""
        return torch.zeros_like(position)

    def largest_curvature(self, atoms: int, energy: float | None = None) -> Tensor:
        """Compute :meth:`Penalty.largest_curvature` of each vertex, ``(atoms,)``."""
        return self._masked(self.penalty.largest_curvature(energy).expand(atoms))

    def margin(self, position: Positions, t: Any = 0.0) -> Tensor | None:
        """Compute how much lower each gap may be, ``(*batch, atoms)``; None: without a limit."""
        lowest = self.penalty.lowest
        if lowest is None:
            return None
        return self._masked(self.gap(position, t), torch.inf) - lowest

    def refuse_penetration(self, position: Positions, t: Any = 0.0) -> None:
        """Refuse a vertex that is behind the surface by more than the penalty allows."""
        lowest = self.penalty.lowest
        with torch.no_grad():
            margin = self.margin(position, t)
            if lowest is None or margin is None:
                return
            worst = int(margin.argmin())
            found = float(self.gap(position, t).flatten()[worst])
        if found < lowest:
            raise ValueError(
                f"vertex {worst % position.shape[-2]} is at the gap {found:g} from the surface, "
                f"below {lowest:g}, the lowest one that {type(self.penalty).__name__} allows: "
                f"decrease dt, or increase the stiffness or the {self.penalty.reach}."
            )

    def _relative(self, position: Tensor, t: Any) -> Tensor:
        """Return positions relative to the surface where it was at first."""
        shift = self._shift(position, t)
        return position if shift is None else position - shift

    def _coordinate(self, x: Tensor) -> Coordinate:
        if x.shape[-1] != self._resting.dim:
            raise ValueError(
                f"{type(self._resting).__name__} is in {self._resting.dim} dimensions; position "
                f"has dim {x.shape[-1]}."
            )
        return self._resting.coordinate(_columns(x))

    def _masked(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Replace the entries ``(*batch, atoms)`` of vertices that are not in contact."""
        if self._chosen is None:
            return x
        rest = x.shape[-1] - len(self._chosen)
        if rest < 0:
            raise ValueError(
                f"index names vertex {len(self._chosen) - 1} and position has {x.shape[-1]}, "
                "numbered from 0."
            )
        chosen = torch.cat([self._chosen, self._chosen.new_zeros(rest)])
        return torch.where(chosen, x, fill)

    def _push(self, x: Tensor) -> Tensor:
        """Compute the forces at positions relative to the surface."""
        return self.linearised(x, UNROUNDED)[0]

    def linearised(self, x: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        # A vertex has one contribution, so there is no sum to round for.
        gap = self._coordinate(x)
        slope = self._masked(self.penalty.slope(gap.value))
        (normal,) = gap.gradient

        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            rate, (turn,) = gap.along(_columns(v))
            second = self._masked(self.penalty.curvature(gap.value)) * rate
            along = _joined(combined(scaled(-second, normal), -slope, turn), x)
            return along, DeferredVJP(self, self._push, v, x)

        return _joined(scaled(-slope, normal), x), product


class Contact(SurfaceContact, ClosedForm, inherits_forces=True):
    """Contact of vertices with a surface at rest, ``U = sum over vertices of u(g(q))``.

    Args:
        surface: where the gap g is measured from, such as :class:`Plane`.
        penalty: the energy u of a vertex, such as :class:`Quadratic`.
        index: the vertices that feel the surface, such as those of a mesh's surface. None: all.

    Raises:
        TypeError: no surface or a :class:`Moving` one, no penalty.
        ValueError: an index that is empty, negative or not integers; at evaluation, positions of
            another dimension than the surface, or without a vertex of the index.
    """

    _kind = Surface
    _needed = "a Surface at rest, such as Plane(normal, offset) (for Moving, use MovingContact)"
    surface: Surface

    def forward(self, position: Positions) -> Energies:
        gap = self._coordinate(position).value
        return self._masked(self.penalty.element(gap)).sum((-1, -2))


class MovingContact(SurfaceContact, ForceField):
    """Contact of vertices with a moving surface, the force ``F(t, q) = -du(g(q - path(t)))/dq``.

    The surface does work on the vertices, so energy is not conserved.

    Args:
        surface: a surface with a path, ``Moving(surface, path)``.
        penalty, index: as for :class:`Contact`.

    Raises:
        TypeError, ValueError: as for :class:`Contact`; a surface at rest, a path whose value is not
            ``(dim,)``.
    """

    _kind = Moving
    _needed = "Moving(surface, path) (for a surface at rest, use Contact)"
    surface: Moving

    def _shift(self, like: Tensor, t: Any) -> Tensor:
        found, dim = self.surface.path(t), self._resting.dim
        if found.shape != (dim,):
            raise wrong_shape(f"the path of a {type(self._resting).__name__}", f"({dim},)", found)
        return found.to(like)

    def surface_velocity(self, position: Positions, t: Any = 0.0) -> Positions:
        rate = getattr(self.surface.path, "rate", None)
        if rate is None:
            raise TypeError(
                f"the path, a {type(self.surface.path).__name__}, has no rate(t), which the "
                "velocity of the surface needs; the signals of adjsim.potentials have one."
            )
        return rate(t).to(position).expand_as(position)

    def forward(self, t: Any, position: Positions) -> Positions:
        return self._push(self._relative(position, t))

    def force_vjp(
        self, t: Any, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.enable_grad():
            shift = self._shift(position, t)
        refuse_unknown(shift, self, parameters, f"the path of {type(self._resting).__name__}")
        with torch.no_grad():
            value, product = self.linearised(position - shift, rounding)

        def pullback(v: Tensor) -> tuple[Tensor, VJPSum]:
            with torch.no_grad():
                along, rest = product(v)
            if not (shift.requires_grad and parameters):
                return along, VJPSum((rest,))
            # The force depends on the difference of position and shift.
            lead = tuple(range(along.ndim - 1))
            found = torch.autograd.grad(shift, parameters, -along.sum(lead), allow_unused=True)
            return along, VJPSum((rest, list[Tensor | None](found)))

        return value, pullback


class PlaneContact(Contact):
    """Contact with a plane by the smooth penalty: ``Contact(Plane(...), Softplus(...))``.

    Args:
        normal, offset: see :class:`Plane`.
        stiffness, width: see :class:`Softplus`.
        index: see :class:`Contact`.
    """

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


def _columns(x: Tensor) -> Vector:
    """Split ``(*batch, atoms, dim)`` into coordinates ``(*batch, 1, atoms)``."""
    return list(x.transpose(-1, -2).split(1, -2))


def _joined(x: Vector, like: Tensor) -> Tensor:
    """Join coordinates to ``(*batch, atoms, dim)``, of which some may be constants."""
    row = (*like.shape[:-2], 1, like.shape[-2])
    return torch.cat([part.expand(row) for part in x], -2).transpose(-1, -2)
