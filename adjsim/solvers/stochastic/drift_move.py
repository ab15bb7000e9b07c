"""The move of steps that evaluate the whole drift of a dynamics."""

from __future__ import annotations

from dataclasses import dataclass

from adjsim.core.state import State
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.moves import GeneralFlow
from adjsim.dynamics.sources import MoveContext


@dataclass(frozen=True)
class DriftMove(GeneralFlow):
    """A whole step as one map without an inverse, which counts its evaluations of the drift."""

    evaluations: int = 1

    def flow(self, state: State, context: MoveContext) -> State:
        """Return the state after the step."""
        context.forces.count(self.evaluations)
        after = super().flow(state, context)
        context.forces.count_backward(after, self.evaluations)
        return after

    def backward(
        self,
        after: State,
        context: MoveContext,
        cotangents: Cotangents,
        before: State | None = None,
    ) -> State:
        """Propagate the cotangents back through the step, from the state before it."""
        # Each drift is evaluated again, and has one product.
        context.forces.count(2 * self.evaluations)
        return super().backward(after, context, cotangents, before)
