"""Feedback control: forces that see positions and velocities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import GeneralFlow, Move
from adjsim.dynamics.sources import Coefficients, Field, Time
from adjsim.dynamics.terms import Term
from adjsim.potentials.signals.controls import Controller

# Iterations of the inverse. A contraction by 0.8 a step reaches rounding within them.
ITERATIONS = 200
ITERATES = Refusal("its inverse is an iteration whose length depends on the numbers")


class Feedback(Term[PhaseState]):
    """Feedback, U: ``dp/dt = u(t, q, p/m)`` at fixed position and time, zero on pinned vertices.

    Its flow is a step of the explicit midpoint rule, of second order as a palindrome needs it::

        p' = p + h u(t, q, (p + h/2 u(t, q, p/m)) / m)

    The inverse iterates ``p <- p' - h u(...)`` from p' until the momenta stay the same to rounding.
    It converges where h times the derivative of u/m with respect to the velocity is below one.
    Elsewhere :class:`~adjsim.CheckpointAdjoint` gives the gradient.
    """

    def __init__(self, masses: Masses, control: Controller) -> None:
        self.masses, self.control = masses, control

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        q, p = state
        return {"momentum": self.masses.mobile(q) * self.control(t, q, p / self.masses(p))}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        with torch.no_grad():
            step = torch.as_tensor(h, dtype=torch.float64).to(state.momentum)
            mobile = self.masses.mobile(state.momentum)
        return {"h": step, "1/m": 1 / self.masses(state.momentum), "mobile": mobile}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        flow = GeneralFlow(
            ("momentum",),
            lambda c, q, t, p: (p + self._increment(c, q, t, p),),
            lambda c, q, t, p: (self._solved(c, q, t, p),),
            (Field("position"), Time()),
            reads_parameters=True,
            no_compiled_inverse=ITERATES,
        )
        return (flow,)

    def _increment(self, c: Coefficients, q: Tensor, t: Any, p: Tensor) -> Tensor:
        step = c["h"] * c["mobile"]
        middle = p + 0.5 * step * self.control(t, q, p * c["1/m"])
        return step * self.control(t, q, middle * c["1/m"])

    def _solved(self, c: Coefficients, q: Tensor, t: Any, after: Tensor) -> Tensor:
        p, change, last = after, math.inf, math.inf
        rounding = 2 * torch.finfo(after.dtype).eps * float(after.detach().abs().amax())
        for _ in range(ITERATIONS):
            found = after - self._increment(c, q, t, p)
            change = float((found - p).detach().abs().amax())
            p = found
            # The control may have rounding errors of its own, at which the change stays.
            if change <= rounding or last <= change <= 1e3 * rounding:
                return p
            if not math.isfinite(change):
                break
            last = change
        raise ArithmeticError(
            "term 'U' cannot be undone: the iteration for the momenta before "
            f"{type(self.control).__name__} acts does not converge (change {change:.1e}), "
            "since the control varies too much with the velocity over a step. Use "
            "CheckpointAdjoint(), or a smaller dt."
        )
