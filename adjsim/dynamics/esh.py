"""Energy-sampling Hamiltonian dynamics (ESH), which samples deterministically at kT = 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_positive, as_tensor
from adjsim.core.refusal import Refusal
from adjsim.core.state import AnyState
from adjsim.core.typing import Array, Energies, Positions, Seed
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import GeneralFlow, Move, Shear
from adjsim.dynamics.sources import Field, Force, Source
from adjsim.dynamics.starts import check_dof, check_shape, standard_normal
from adjsim.dynamics.terms import Holder, Term
from adjsim.potentials.base import force


class ESHState(NamedTuple):
    """Position and direction ``(*batch, atoms, dim)``, logarithm of the speed ``(*batch,)``.

    The direction of one system has unit length.
    """

    position: Positions
    direction: Positions
    log_speed: Float[Tensor, "*batch"]


class Glide(Term[ESHState]):
    """The glide, A: ``dq/ds = u``; its flow is ``q' = q + h u``."""

    advances_time = True

    def drift(self, t: Any, state: ESHState) -> Mapping[str, Tensor]:
        return {"position": state.direction}

    def coefficients(self, h: float, state: ESHState) -> dict[str, Tensor]:
        return {"h": torch.as_tensor(h, dtype=torch.float64).to(state.position)}

    def moves(self, h: float, state: ESHState) -> Sequence[Move]:
        return (Shear("position", Field("direction"), "h"),)

    def constrained(self, holder: Holder) -> Term[Any] | Refusal:
        return holder.gliding(self)


class Turn(Term[ESHState]):
    """The turn of the direction, E, at fixed position.

    Its exact flow, with ``e = F/|F|``, ``delta = h |F|/d`` and d = dof, is::

        Z  = cosh delta + (u.e) sinh delta
        u' = (u + e (sinh delta + (u.e)(cosh delta - 1))) / Z
        r' = r + log Z

    and its inverse is the flow over -h. The direction is normalised again after each turn, which
    removes rounding only. Keep ``h |F|/d`` below about 1.
    """

    def __init__(self, potential: nn.Module, dof: float | None = None) -> None:
        self.potential, self.dof = potential, dof

    def drift(self, t: Any, state: ESHState) -> Mapping[str, Tensor]:
        return self.rates(state, force(self.potential, state.position, t))

    def rates(self, state: ESHState, force: Tensor) -> Mapping[str, Tensor]:
        """Compute the rates of change by a force."""
        e = force / degrees(self.dof, force)
        along = (state.direction * e).sum((-1, -2), keepdim=True)
        return {"direction": e - along * state.direction, "log_speed": along[..., 0, 0]}

    def moves(self, h: float, state: ESHState) -> Sequence[Move]:
        return self.turns(h, Force())

    def turns(self, h: float, source: Source) -> Sequence[Move]:
        """List the moves of the flow by the force of a source."""

        def along(h: float) -> Callable[..., tuple[Tensor, Tensor]]:
            return lambda c, force, u, r: turn(h / degrees(self.dof, force), force, u, r)

        return (GeneralFlow(("direction", "log_speed"), along(h), along(-h), (source,)),)

    def constrained(self, holder: Holder) -> Term[Any] | Refusal:
        return holder.turning(self)


def degrees(dof: float | None, like: Tensor) -> float:
    """Return the degrees of freedom, which are atoms x dim if they are not given."""
    return float(like.shape[-1] * like.shape[-2]) if dof is None else dof


def turn(h: float, force: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the flow of :class:`Turn` over h times d, smooth at zero force."""
    a = force * h
    square = (a * a).sum((-1, -2), keepdim=True)
    small = square < 1e-4
    delta = torch.where(small, 1.0, square).sqrt()
    # Series where cosh(delta) - 1 would cancel; the first omitted term is below 1e-20.
    sinhc = torch.where(
        small, 1 + square / 6 * (1 + square / 20 * (1 + square / 42)), torch.sinh(delta) / delta
    )
    coshc = torch.where(
        small,
        0.5 + square / 24 * (1 + square / 30 * (1 + square / 56)),
        (torch.cosh(delta) - 1) / delta**2,
    )
    along = (u * a).sum((-1, -2), keepdim=True)
    Z = 1 + coshc * square + sinhc * along
    turned = u + a * (sinhc + along * coshc)
    norm = (turned * turned).sum((-1, -2), keepdim=True).sqrt()
    return turned / norm, r + torch.log(Z)[..., 0, 0]


class ESH(Dynamics[ESHState]):
    """Energy-sampling Hamiltonian dynamics, with kinetic energy ``d log |v|``.

    See Ver Steeg and Galstyan, arXiv:2111.02434.

    In scaled time s, with unit direction u, log-speed r and d = dof::

        dq/ds = u        du/ds = (1 - u u^T) F/d        dr/ds = u . F/d

    Terms: A (glide), E (turn). Scheme: "EAE". The invariant is ``U + d r``. Time averages weighted
    by the speed are canonical at kT = 1: see :func:`canonical_weights`. ESH needs at least two
    dimensions (in one, the direction never turns) and a potential for which it is ergodic. Scale
    the potential by 1/kT for another temperature. A start has speed 1, along the momentum that is
    given or a random direction.

    With constraints (:class:`~adjsim.Constrained`) u is along them, e is the direction of the
    projected force, and A is a glide along them:
    :class:`~adjsim.dynamics.constraints.glide.ConstrainedGlide`.

    Args:
        potential: energy module, in units of kT.
        dof: degrees of freedom of one system. None: atoms x dim. With constraints give atoms x dim
            less their number n; another number samples the temperature kT = dof/(atoms x dim - n).
    """

    state_type = ESHState
    potential: nn.Module  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, potential: nn.Module, dof: float | int | None = None) -> None:
        super().__init__(potential)
        self.dof = None if dof is None else as_positive("dof", dof)

    def validate(self) -> None:
        """Refuse degrees of freedom that the constructor would refuse."""
        if self.dof is not None:
            as_positive("dof", self.dof)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {"A": Glide(), "E": Turn(self.potential, self.dof)}

    @property
    def metric(self) -> Masses:
        return Masses(torch.ones((), dtype=torch.float64))

    def projected(self, state: ESHState, project: Callable[[Tensor], Tensor]) -> ESHState:
        return state._replace(direction=_unit(project(state.direction)))

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        if degrees(None, position) < 2:
            raise ValueError(
                "ESH needs at least two dimensions in all (atoms x dim): in one the direction "
                "never turns. Use a Nose-Hoover chain there."
            )
        p = standard_normal(position, generator) if p is None else p
        return position, _unit(p), torch.zeros_like(position[..., 0, 0])

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_dof(self.dof, state[0])
        check_shape(state, "direction", tuple(state[0].shape))
        check_shape(state, "log_speed", tuple(state[0].shape[:-2]))

    def invariant(self, state: ESHState) -> Energies:
        dof = degrees(self.dof, state.position)
        return self.potential(state.position) + dof * state.log_speed


def _unit(p: Tensor) -> Tensor:
    norm = p.pow(2).sum((-1, -2), keepdim=True).sqrt()
    if not bool((norm.detach() > 0).all()):
        raise ValueError("ESH.init: a momentum of zero has no direction.")
    return p / norm


def canonical_weights(
    log_speed: Float[Tensor, "time *batch"] | Array,
) -> Float[Tensor, "time *batch"]:
    """Compute weights that make averages over ESH frames canonical, at kT = 1.

    The frames are equally spaced in scaled time. The weight of a frame is proportional to the speed
    ``exp(r)``; each replica's weights sum to one over time::

        w = canonical_weights(trajectory.log_speed)
        mean = (w * observable(trajectory.position)).sum(0)
    """
    return torch.softmax(as_tensor("log_speed", log_speed), dim=0)
