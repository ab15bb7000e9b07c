"""The terms of all dynamics with masses: streaming (A) and kick (B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.state import MomentumState
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, Shear
from adjsim.dynamics.sources import Field, Force
from adjsim.dynamics.term import Term
from adjsim.potentials.base import force


class Stream(Term[MomentumState]):
    """Streaming, A: ``dq/dt = p/m``.

    Its flow ``q' = q + h p/m`` also advances the time.
    """

    advances_time = True

    def __init__(self, masses: Masses) -> None:
        self.masses = masses

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        return {"position": state.momentum / self.masses(state.momentum)}

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        return {"h/m": h / self.masses(state.momentum)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("position", Field("momentum"), "h/m"),)


class Kick(Term[MomentumState]):
    """The kick, B: ``dp/dt = F(q)``, zero on pinned atoms.

    Its flow is ``p' = p + h F(q)`` at fixed position.
    """

    def __init__(self, masses: Masses, potential: nn.Module) -> None:
        self.masses, self.potential = masses, potential

    def drift(self, t: Any, state: MomentumState) -> Mapping[str, Tensor]:
        return {
            "momentum": self.masses.mobile(state.position)
            * force(self.potential, state.position, t)
        }

    def coefficients(self, h: float, state: MomentumState) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"h": h * self.masses.mobile(state.position)}

    def moves(self, h: float, state: MomentumState) -> Sequence[Move]:
        return (Shear("momentum", Force(), "h"),)
