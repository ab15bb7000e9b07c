"""The growth of rounding errors in reversed steps, where it varies along a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.durable.store import Nested
from adjsim.core.state import AnyState, detached
from adjsim.dynamics.base import Dynamics


class ErrorGrowth:
    """The growth of rounding errors over the steps since the last stored state.

    Undoing step k multiplies the rounding errors of vertex i by ``exp(dt r_ik)`` at most, so from a
    stored state a to b they grow by the exponential of the sum of ``dt r_ik``. The next state is
    stored before this sum passes a budget for one of the vertices. The rates are those of the
    dynamics, :meth:`~adjsim.dynamics.Dynamics.error_growth`, at the end of each step. The
    growth is written during the forward run only.

    Args:
        dynamics: the dynamics.
        dt: the step.
        constant: the growth in each step that does not vary along the run.
        budget: the growth allowed between stored states.

    Attributes:
        ahead: the growth that is expected until the driver stops next.
    """

    def __init__(self, dynamics: Dynamics[Any], dt: float, constant: float, budget: float) -> None:
        self.dynamics, self.dt, self.constant, self.budget = dynamics, dt, constant, budget
        self._since: Tensor | None = None
        self.ahead = 0.0

    @property
    def left(self) -> float:
        """The growth that the budget still allows."""
        return self.budget - (0.0 if self._since is None else float(self._since.max()))

    @property
    def due(self) -> bool:
        """Whether a state has to be stored now."""
        return self.ahead > self.left

    @torch.no_grad()
    def add_step(self, t: float, state: AnyState) -> None:
        """Add the growth of a step; the next one is expected to have the same."""
        found = growth_in_step(self.dynamics, self.dt, t, detached(state))
        self.add(found, 1, self.largest(found, 1))

    def add(self, varying: Tensor, steps: int, ahead: float) -> None:
        """Add the growth of steps, of which a part varies, and set what is expected ahead."""
        found = varying + steps * self.constant
        self._since = found if self._since is None else self._since + found
        self.ahead = ahead

    def largest(self, varying: Tensor, steps: int) -> float:
        """Return the growth of steps at the vertex where it is largest."""
        return float(varying.max()) + steps * self.constant

    def carried(self) -> Nested:
        """Return what later steps need, for a save."""
        return {"since": self._since, "ahead": self.ahead}

    def resume(self, carried: Nested, like: Tensor) -> None:
        """Go on from a save."""
        since = carried["since"]
        self._since, self.ahead = None if since is None else since.to(like.device), carried["ahead"]

    def restart(self) -> None:
        """Begin again at a stored state."""
        self._since = None


def growth_in_step(dynamics: Dynamics[Any], dt: float, t: Any, state: AnyState) -> Tensor:
    """Compute the part of the growth that varies, for the step that ends in a state."""
    rate = dynamics.error_growth(t, state)
    assert rate is not None
    return dt * rate
