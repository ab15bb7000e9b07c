"""Terms: the summands of the equations of motion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic

from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.state import State
from adjsim.dynamics.moves import Move


class Term(Generic[State]):
    """One summand of the equations of motion.

    ``advances_time`` marks the term whose flow advances the time (dt/dt = 1): the streaming of
    positions. ``draws`` is the number of fields of standard normal numbers, each of the shape of
    position, that its flow takes. ``no_equation`` says, for error messages, why continuous solvers
    cannot take the term: it is not a drift with noise that is independent of the state. It is None
    for a term that they can take.
    """

    advances_time = False
    draws = 0
    no_equation: Refusal | None = None

    def drift(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the rates of change that the term contributes, by field."""
        raise TypeError(f"{type(self).__name__} has no drift.")

    def diffusion(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the amplitude of its white noise, by field.

        Without noise it is empty. SDE solvers take an amplitude that does not depend on the state;
        a term whose amplitude depends on it sets ``no_equation``.
        """
        return {}

    def coefficients(self, h: float, state: State) -> dict[str, Tensor]:
        """Compute the coefficients of its flow over a time h, differentiably.

        They are functions of the parameters, computed once a run.
        """
        return {}

    def moves(self, h: float, state: State) -> Sequence[Move]:
        """List the moves of its flow over a time h, in order."""
        raise TypeError(f"{type(self).__name__} cannot be solved alone.")
