"""The terms of all dynamics with masses: streaming (A) and kick (B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim._state import MomentumState
from adjsim.dynamics.base import MassiveDynamics, Term
from adjsim.dynamics.couplings import Move, Shear
from adjsim.dynamics.sources import Field, Force
from adjsim.potentials.base import force


class Stream(Term[MomentumState]):
    """Streaming, A: ``dq/dt = p/m``.

    Its flow ``q' = q + h p/m`` also advances the time.
    """

    advances_time = True

    def __init__(self, dynamics: MassiveDynamics[MomentumState]) -> None:
        self.dynamics = dynamics

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        return {"position": state.momentum / self.dynamics.masses(state.momentum)}

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        return {"h/m": h / self.dynamics.masses(state.momentum)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("position", Field("momentum"), "h/m"),)


class Kick(Term[MomentumState]):
    """The kick, B: ``dp/dt = F(q)``, zero on pinned atoms.

    Its flow is ``p' = p + h F(q)`` at fixed position.
    """

    def __init__(self, dynamics: MassiveDynamics[MomentumState]) -> None:
        self.dynamics = dynamics

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        return {
            "momentum": self.dynamics.mobile(state.position)
            * force(self.dynamics.potential, state.position, t)
        }

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"h": h * self.dynamics.mobile(state.position)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("momentum", Force(), "h"),)
