"""Langevin dynamics: friction and noise on the momenta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.parameters import register
from adjsim.core.state import PhaseState
from adjsim.core.typing import Number
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.masses import PER_ATOM, Masses, per_atom
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Coefficient, Random
from adjsim.dynamics.terms import Holder, Term
from adjsim.dynamics.thermostats.base import Thermostat


class OrnsteinUhlenbeck(Term[PhaseState]):
    """The Ornstein-Uhlenbeck term, O: ``dp = -friction p dt + sqrt(2 friction m kT) dW``.

    Its flow is exact in distribution::

        p' = c p + sqrt(m kT (1 - c^2)) xi,    c = exp(-friction h),    xi standard normal
    """

    draws = 1

    def __init__(self, masses: Masses, kT: Tensor, friction: Tensor) -> None:
        self.masses, self.kT, self.friction = masses, kT, friction

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        return {"momentum": -per_atom(self.friction, state.momentum) * state.momentum}

    def diffusion(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        thermal = self.masses.thermal(state.momentum, self.kT)
        return {"momentum": torch.sqrt(2 * per_atom(self.friction, state.momentum)) * thermal}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        friction = per_atom(self.friction, state.momentum)
        # expm1 keeps the digits of 1 - c^2 where friction h is small.
        thermal = self.masses.thermal(state.momentum, self.kT)
        noise = torch.sqrt(-torch.expm1(-2 * h * friction)) * thermal
        return {"decay": torch.exp(-h * friction), "noise": noise}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        return (Scale("momentum", Coefficient("decay")), Shear("momentum", Random(), "noise"))

    def constrained(self, holder: Holder) -> Term[Any]:
        return holder.projecting(self)


class Langevin(Thermostat[PhaseState]):
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
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        friction: rate at which momenta decay, 1/time; scalar, ``(atoms,)`` or ``(atoms, 1)``.
    """

    per_atom = ("mass", "friction")
    friction: Tensor

    def __init__(
        self, potential: nn.Module, mass: Number = 1.0, kT: Number = 1.0, friction: Number = 1.0
    ) -> None:
        super().__init__(potential, mass, kT)
        register(self, "friction", friction, positive=True, shapes=PER_ATOM)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "O": OrnsteinUhlenbeck(self.masses, self.kT, self.friction)}

    def stationary_density(self) -> Canonical:
        return Canonical(self)

    def damping(self, state: PhaseState) -> float:
        return float(self.friction.detach().max())
