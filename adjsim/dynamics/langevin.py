"""Langevin dynamics: friction and noise on the momenta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim._params import register
from adjsim._state import AnyState, PhaseState
from adjsim._typing import Number, PositionsLike, Seed
from adjsim.dynamics.base import (
    MassiveDynamics,
    Term,
    as_start,
    check_entries,
    check_per_atom,
    per_atom,
)
from adjsim.dynamics.couplings import Move, Scale, Shear
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.heat import HeatLimit
from adjsim.dynamics.sources import Coefficient, Random
from adjsim.dynamics.terms import Kick, Stream


class OrnsteinUhlenbeck(Term[PhaseState]):
    """The Ornstein-Uhlenbeck term, O: ``dp = -friction p dt + sqrt(2 friction m kT) dW``.

    Its flow is exact in distribution::

        p' = c p + sqrt(m kT (1 - c^2)) xi,    c = exp(-friction h),    xi standard normal
    """

    draws = 1

    def __init__(self, dynamics: Langevin) -> None:
        self.dynamics = dynamics

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        return {"momentum": -self.dynamics.frictions(state.momentum) * state.momentum}

    def diffusion(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        thermal = self.dynamics.thermal_scale(state.momentum, self.dynamics.kT)
        return {"momentum": torch.sqrt(2 * self.dynamics.frictions(state.momentum)) * thermal}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        friction = self.dynamics.frictions(state.momentum)
        # expm1 keeps the digits of 1 - c^2 where friction h is small.
        noise = torch.sqrt(-torch.expm1(-2 * h * friction)) * self.dynamics.thermal_scale(
            state.momentum, self.dynamics.kT
        )
        return {"decay": torch.exp(-h * friction), "noise": noise}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        return (Scale("momentum", Coefficient("decay")), Shear("momentum", Random(), "noise"))


class Langevin(MassiveDynamics[PhaseState]):
    """Underdamped Langevin dynamics::

        dq = p/m dt
        dp = (F(q) - friction p) dt + sqrt(2 friction m kT) dW

    It samples the canonical distribution exp(-(U + sum p^2/2m)/kT). Terms: A (stream), B (kick), O
    (:class:`OrnsteinUhlenbeck`). Schemes: "BAOAB" (positions exact for harmonic forces, the first
    choice; Leimkuhler and Matthews, Appl. Math. Res. Express 2013, 34), "OBABO" (momenta exact for
    harmonic forces), "ABOBA", and any other word. As an SDE: :class:`~adjsim.SDESolver`.

    Reversing a step divides momenta by exp(-friction dt), so rounding errors grow as
    exp(friction t). :class:`~adjsim.ReversibleAdjoint` therefore stores checkpoints here,
    unless the steps are exact (``Splitting("BAOAB", dt, exact=True)``).

    Args:
        potential: energy module, or a force field.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``; infinite for pinned atoms.
        kT: temperature, energy; one number.
        friction: rate at which momenta decay, 1/time; scalar, ``(atoms,)`` or ``(atoms, 1)``.
    """

    kT: Tensor
    friction: Tensor

    def __init__(
        self, potential: nn.Module, mass: Number = 1.0, kT: Number = 1.0, friction: Number = 1.0
    ) -> None:
        super().__init__(potential, mass)
        register(self, "kT", kT, positive=True, single=True)
        register(self, "friction", friction, positive=True)
        check_per_atom("friction", self.friction)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {"A": Stream(self), "B": Kick(self), "O": OrnsteinUhlenbeck(self)}

    def frictions(self, like: Tensor) -> Tensor:
        """Return the friction in the dtype of a field, a scalar or ``(atoms, 1)``."""
        return per_atom(self.friction, like)

    def init(
        self, position: PositionsLike, momentum: PositionsLike | None = None, generator: Seed = None
    ) -> PhaseState:
        """Make a start; momenta not given are drawn as sqrt(m kT) xi."""
        at, p = as_start(position, momentum)
        state = PhaseState(at, self.thermal_momentum(at, self.kT, generator) if p is None else p)
        self.check(state)
        return state

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_entries("friction", self.friction, state)

    def heat_limit(self, start: AnyState) -> HeatLimit:
        return HeatLimit(self, start)

    def stationary_density(self) -> Canonical:
        return Canonical(self)

    def damping(self, state: PhaseState) -> float:
        return float(self.friction.detach().max())
