"""Steps that are one map without an inverse, which evaluates the whole drift of a dynamics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.state import AnyState, State
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.moves import GeneralFlow
from adjsim.dynamics.sources import Coefficients, MoveContext, Random, Source, Time
from adjsim.solvers.base import LETTER, Stage, StepPlan


@dataclass(frozen=True)
class DriftMove(GeneralFlow):
    """A whole step as one map without an inverse, which counts its evaluations of the drift."""

    evaluations: int = 1

    def flow(self, state: State, context: MoveContext) -> State:
        context.forces.count(self.evaluations)
        context.forces.record(self.evaluations)
        return super().flow(state, context)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        # Each drift is evaluated again, and has one product.
        context.forces.count(2 * self.evaluations)
        return super().backward(after, context, cotangents, before)


def drift_plan(
    step: Callable[..., tuple[Tensor, ...]],
    state: AnyState,
    dt: float,
    order: int,
    *,
    noisy: bool = False,
    varying: bool = False,
    evaluations: int = 1,
    loses: str = "the state",
) -> StepPlan:
    """Return the plan of a step ``step(h, t, state)``, or with noise ``step(h, t, state, dW)``.

    Steps have the size dt, or, ``varying``, that of their coefficient "h".
    """
    kind, draws = type(state), int(noisy)
    reads: tuple[Source, ...] = (Time(), Random()) if noisy else (Time(),)

    def function(coefficients: Coefficients, t: Tensor, *values: Any) -> tuple[Tensor, ...]:
        drawn, fields = values[:draws], values[draws:]
        # A size is a constant of a run, so a coefficient of it is read as a number.
        h = float(coefficients["h"]) if varying else dt
        return step(h, t, kind._make(fields), *(math.sqrt(h) * xi for xi in drawn))

    move = DriftMove(
        state._fields,
        function,
        None,
        reads,
        Refusal(f"it loses {loses}"),
        reads_parameters=True,
        evaluations=evaluations,
    )
    return StepPlan((Stage(LETTER, (move,), 0.0, 0, draws),), dt, order, draws)
