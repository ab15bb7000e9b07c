"""Terms, the summands of the equations of motion, and those of all dynamics with masses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import torch
from torch import Tensor, nn

from adjsim.core.refusal import Refusal
from adjsim.core.state import MomentumState, State
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, Shear
from adjsim.dynamics.sources import Field, Force
from adjsim.potentials.base import force

if TYPE_CHECKING:
    from adjsim.dynamics.bodies import Atoms


class Holder(Protocol):
    """The interface of constraints, as terms see them that are to be held by them."""

    @property
    def bodies(self) -> Atoms:
        """The clusters of atoms that constraints join, and the single atoms."""
        ...

    def streaming(self, term: Term[Any]) -> Term[Any]:
        """Return streaming along the constraints in place of straight streaming."""
        ...

    def projecting(self, term: Term[Any]) -> Term[Any]:
        """Return the term with its shears of momenta projected to what constraints allow."""
        ...

    def remembering(self, term: Any) -> Term[Any]:
        """Return :class:`~adjsim.dynamics.thermostats.gle.MemoryBath` along constraints."""
        ...

    def colliding(self, term: Term[Any]) -> Term[Any]:
        """Return collisions of the atoms of a cluster together, projected likewise."""
        ...

    def diffusing(self, term: Any) -> Term[Any]:
        """Return :class:`~adjsim.dynamics.thermostats.overdamped.Diffuse` along constraints."""
        ...

    def gliding(self, term: Term[Any]) -> Term[Any]:
        """Return :class:`~adjsim.dynamics.esh.Glide` along constraints."""
        ...

    def turning(self, term: Any) -> Term[Any]:
        """Return :class:`~adjsim.dynamics.esh.Turn` by the projected force."""
        ...


class Term(Generic[State]):
    """One summand of the equations of motion.

    ``advances_time`` marks the term whose flow advances the time: the streaming of positions.
    ``draws`` is the number of fields of standard normal numbers, each of the shape of position,
    that its flow takes. ``no_equation`` says why continuous solvers cannot take the term, which is
    not a drift with noise that is independent of the state; None if they can. ``solved_by`` names
    the solvers that can.
    """

    advances_time = False
    draws = 0
    no_equation: Refusal | None = None
    solved_by: ClassVar[str] = "a splitting"

    def drift(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the rates of change that the term contributes, by field."""
        raise TypeError(f"{type(self).__name__} has no drift.")

    def diffusion(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the amplitude of its white noise, by field; empty without noise.

        A term whose amplitude depends on the state sets ``no_equation``.
        """
        return {}

    def coefficients(self, h: float, state: State) -> dict[str, Tensor]:
        """Compute the coefficients of its flow over a time h from the parameters, once a run."""
        return {}

    def moves(self, h: float, state: State) -> Sequence[Move]:
        """List the moves of its flow over a time h, in order."""
        raise TypeError(f"{type(self).__name__} cannot be solved alone.")

    def constrained(self, holder: Holder) -> Term[State] | Refusal:
        """Return the term as :class:`~adjsim.Constrained` holds it, or why it cannot be held.

        A flow that keeps distances, and momenta that do not change them, such as a scale of all
        momenta by one factor, is held as it is. The holder makes the terms in place of streaming
        and of shears of momenta.
        """
        return Refusal("it does not say how constraints hold it")


class Stream(Term[MomentumState]):
    """Streaming, A: ``dq/dt = p/m``; its flow ``q' = q + h p/m`` also advances the time."""

    advances_time = True

    def __init__(self, masses: Masses) -> None:
        self.masses = masses

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        return {"position": state.momentum / self.masses(state.momentum)}

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        return {"h/m": h / self.masses(state.momentum)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("position", Field("momentum"), "h/m"),)

    def constrained(self, holder: Holder) -> Term[Any] | Refusal:
        return holder.streaming(self)


class Kick(Term[MomentumState]):
    """The kick, B: ``dp/dt = F(q)``, zero on pinned atoms; its flow is ``p' = p + h F(q)``."""

    def __init__(self, masses: Masses, potential: nn.Module) -> None:
        self.masses, self.potential = masses, potential

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        q = state.position
        return {"momentum": self.masses.mobile(q) * force(self.potential, q, t)}

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"h": h * self.masses.mobile(state.position)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("momentum", Force(), "h"),)

    def constrained(self, holder: Holder) -> Term[Any] | Refusal:
        return holder.projecting(self)
