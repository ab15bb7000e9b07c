"""The budget of rounding errors between the stored states of a reversed run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.durable.saves import AttributeState
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.state import AnyState, detached
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import Spill
from adjsim.solvers.clock import Clock


@dataclass(eq=False)
class ErrorBudget(AttributeState):
    """An observer of how much rounding errors have grown since the last stored state.

    Undoing step k multiplies the rounding errors of vertex i by ``exp(dt r_ik)`` at most, so from a
    stored state a to b they grow by the exponential of the sum of ``dt r_ik``. The next state is
    stored before this sum passes a budget for one of the vertices. The rates are those of the
    dynamics, :meth:`~adjsim.dynamics.Dynamics.error_growth`, at the end of each step. Compiled
    loops add the growth of their steps themselves.

    Attributes:
        constant: the growth in each step that does not vary along the run.
        allowed: the growth allowed between stored states.
        since, step: the sum since the last stored state, None at one, and the last step in it.
        ahead: the growth that is expected until the driver stops next.
    """

    saved_attributes = ("since", "step", "ahead")
    dynamics: Dynamics[Any]
    clock: Clock
    constant: float
    allowed: float
    since: Tensor | None = None
    step: int = 0
    ahead: float = 0.0

    @property
    def left(self) -> float:
        """The growth that the budget still allows."""
        return self.allowed - (0.0 if self.since is None else float(self.since.max()))

    @property
    def due(self) -> bool:
        """Whether a state has to be stored now."""
        return self.ahead > self.left

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return ()

    @torch.no_grad()
    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        """Add the growth of a step, if no loop has; the next step is expected to have the same."""
        if step > self.step:
            t = self.clock.time(step)
            found = growth_in_step(self.dynamics, self.clock.dt, t, detached(state))
            self.add(found, step, self.largest(found, 1))

    def add(self, varying: Tensor, step: int, ahead: float) -> None:
        """Add the growth up to a step, of which a part varies, and set what is expected ahead."""
        found = varying + (step - self.step) * self.constant
        self.since = found if self.since is None else self.since + found
        self.step, self.ahead = step, ahead

    def largest(self, varying: Tensor, steps: int) -> float:
        """Return the growth of steps at the vertex where it is largest."""
        return float(varying.max()) + steps * self.constant


def growth_in_step(dynamics: Dynamics[Any], dt: float, t: Any, state: AnyState) -> Tensor:
    """Compute the part of the growth that varies, for the step that ends in a state."""
    rate = dynamics.error_growth(t, state)
    assert rate is not None
    return dt * rate
