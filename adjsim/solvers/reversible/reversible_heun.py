"""The reversible Heun step of stochastic and ordinary differential equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from adjsim.core.arguments import as_flag
from adjsim.core.state import AnyState, State
from adjsim.core.tableaus import TABLEAUS
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.copies import LARGEST_DISTANCE, Copies
from adjsim.dynamics.fields.ode import FieldDynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.moves import Reflection, Shear
from adjsim.dynamics.sources import MoveContext, Time
from adjsim.solvers.base import LETTER, Stage, SteppingSolver, StepPlan
from adjsim.solvers.clock import check_dt
from adjsim.solvers.reversible.increment import AHEAD, Increment, reversed_growth
from adjsim.solvers.runge_kutta.runge_kutta import increment

EULER = TABLEAUS["euler"]
# With noise the copies of a good run differ by about (diffusion dW)^2, which is large for a few of
# many replicas; copies that move apart reach any limit.
LARGEST_NOISY_DISTANCE = 1.0


@dataclass(frozen=True)
class HalfIncrement(Increment):
    """Half the increment of a step at one state: ``(h f(t, x) + g(t, x) dW)/2``."""

    def evaluate(self, inputs: Sequence[Tensor], state: AnyState, context: MoveContext) -> Tensor:
        assert self.h is not None
        context.forces.count(1)
        t, inner = Time().value(state, context), self.kind._make(inputs)
        step = increment(self.dynamics, self.tableau, t, self.h, inner)[self.index]
        if isinstance(self.dynamics, SDE):
            assert context.noise is not None
            dW = math.sqrt(self.h) * context.noise[0]
            step = step + self.dynamics.noise_increments(t, inner, dW)[self.index]
        return 0.5 * step


class ReversibleHeun(SteppingSolver):
    """Take Heun steps of size dt that can be undone, with noise or without::

        a  = y + F_t(z)/2        z' = 2 a - z        y' = a + F_{t+dt}(z')/2
        F_t(z) = drift(t, z) dt + diffusion(t, z) dW

    Here z is a second copy of the state, equal to y at the start, and both F have the same dW
    (Kidger, Foster, Li and Lyons 2021, arXiv:2105.13493). The result is y. The inverse is explicit,
    so with :class:`~adjsim.ReversibleAdjoint` the gradient is exact for the steps, in constant
    memory. A step evaluates drift and diffusion twice.

    It solves an :class:`~adjsim.SDE` in the sense of Stratonovich, for every noise. The path is of
    order 1/2, or 1 where the diffusion does not depend on y; tests find 1 for diagonal and scalar
    noise too. An :class:`~adjsim.ODE` is solved to second order.

    The distance between the copies grows where the drift contracts: on x' = -a x a step multiplies
    it by ``-(a dt + sqrt(1 + (a dt)^2))``, about exp(a t) over a time t, and rounding of an undone
    step too. So use it over a few times 1/a, and otherwise :class:`~adjsim.StochasticHeun` with
    CheckpointAdjoint, or :class:`~adjsim.Coupled` for an ODE. A run whose copies move apart by a
    tenth of their size stops (with noise, by their whole size).

    Args:
        dt: the step, time.
        exact: run the steps on a lattice (:mod:`adjsim.dynamics.lattice`), where they are undone
            bit for bit, without information buffers; the state is float64.

    Raises:
        TypeError: dynamics that are neither an ODE nor an SDE (when a run begins).
        FloatingPointError: the copies moved apart; the message names the step.
    """

    def __init__(self, dt: float, *, exact: bool = False) -> None:
        self.dt, self.exact = check_dt(dt), as_flag("exact", exact)

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        if not isinstance(dynamics, FieldDynamics):
            raise TypeError(
                f"ReversibleHeun is for SDE and ODE; for {type(dynamics).__name__} use a "
                "splitting, which is reversible too."
            )
        limit = LARGEST_NOISY_DISTANCE if dynamics.stochastic else LARGEST_DISTANCE
        copies = Copies(dynamics, t, state, self.dt, partial(self._remedy, dynamics), limit)
        names, copied = state._fields, copies.names
        shears = [
            Shear(name, HalfIncrement(dynamics, EULER, self.dt, type(state), copied, i))
            for i, name in enumerate(names)
        ]
        mirrored = [Reflection(copy, name) for name, copy in zip(names, copied, strict=True)]
        draws, order = (1, 1) if dynamics.stochastic else (0, 2)
        stages = (
            Stage(LETTER, (*shears, *mirrored), 0.0, 0, draws),
            Stage(LETTER, tuple(shears), 1.0, 0, draws),
        )
        return StepPlan(stages, self.dt, order, draws, copies=copies)

    def _remedy(self, dynamics: Dynamics[Any], state: Any, t: float, smaller: str) -> str:
        """Say why the copies of a state move apart, and the way out."""
        growth = max(reversed_growth(dynamics, EULER, [self.dt] * AHEAD, state, t), 0.0)
        other = (
            "StochasticHeun(dt) with CheckpointAdjoint()"
            if dynamics.stochastic
            else "Coupled(method, dt), whose rate keeps them together"
        )
        return (
            "reversible Heun steps amplify the distance where the drift contracts (here at up to "
            f"{growth:.3g} per unit of time). Use {other}, or {smaller} for a short run."
        )
