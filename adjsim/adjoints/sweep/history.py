"""The data from which a backward sweep recovers earlier states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.durable.saves import AttributeState
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.stepper import Inputs, Observer, Stepper
from adjsim.core.durable.stateful import Entries, Stateful
from adjsim.core.state import AnyState, detached
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.clock import Clock

# The states before the steps of compiled loops, packed, by the first step of each loop. A loop has
# one tensor for each field, whose first axis numbers its steps.
StateRows = dict[int, tuple[Tensor, ...]]

# Least number of steps between saved frames at which a run stops that does not stop at all.
APART = 100


class SweepStart(NamedTuple):
    """The inputs of a run, the forces of a sweep, frames of whole states, and the final state."""

    inputs: Inputs
    forces: ForceEvaluator
    frames: AnyState | None
    final: AnyState


class Rewind(AttributeState):
    """The source of the earlier states of a run during one backward sweep from ``final``.

    Attributes:
        tolerance: allowed relative difference between values computed again and those of the run.
        error: the largest relative error of a recovered state; None if none is reconstructed.
    """

    saved_attributes = ("error",)
    error: float | None = None

    def __init__(self, final: AnyState, rows: StateRows | None = None) -> None:
        self.final, self.tolerance = final, rounding_tolerance(final[0].dtype)
        self.rows: StateRows = {} if rows is None else rows

    def before(self, step: int) -> Sequence[AnyState] | None:
        """Return the states before each move of the step ending at ``step``; None: invert moves."""
        return None

    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        """Return the rows of the loop that begins at step ``first``."""
        return self.rows[first]

    def restore(self, step: int, state: AnyState) -> AnyState:
        """Return the state from which the sweep continues at ``step``."""
        return state


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
    # Steps with a second copy of the state have its fields behind those of the dynamics.
    kind: Any = dynamics.state_type
    rate = dynamics.error_growth(t, kind._make(state[: len(kind._fields)]))
    assert rate is not None
    return dt * rate


class History(Observer, Stateful):
    """The stored data of one run, which observes its states and makes a rewind for each sweep.

    Attributes:
        every: the number of steps between regularly stored data; None: there are none.
        checkpoints: stored states, by the number of steps before them.
        error_budget: observes the growth of errors where the stored steps depend on it.
        block_length: the number of steps before which compiled loops store states at a time,
            for a sweep to read; 0: a compiled sweep inverts steps.
        stops_at_frames: whether a run stops at every saved frame, where a sweep compares states, or
            goes on from the frame; if not, at frames that are :data:`APART` steps apart.
        state_rows: receives the states before all steps of a compiled run, if they are stored.
    """

    error_budget: ErrorBudget | None = None
    block_length: int = 0
    state_rows: StateRows | None = None

    def __init__(
        self, stepper: Stepper, every: int | None = None, stops_at_frames: bool = False
    ) -> None:
        self.stepper, self.every, self.stops_at_frames = stepper, every, stops_at_frames
        self.checkpoints: dict[int, AnyState] = {}

    def stops(self, stepper: Stepper) -> Iterable[int]:
        regular = () if self.every is None else range(0, stepper.clock.last, self.every)
        return {*spaced(stepper.clock.saves, 1 if self.stops_at_frames else APART), *regular}

    def is_regular(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    @abstractmethod
    def rewind(self, given: SweepStart) -> Rewind:
        """Make the rewind of one backward sweep."""

    def store(self, step: int, state: AnyState) -> None:
        self.checkpoints[step] = detached(state)

    def state(self) -> dict[str, Any]:
        return {"checkpoints": Entries([[step, *x] for step, x in self.checkpoints.items()])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        stored = state["checkpoints"]
        make = self.stepper.plan.kind(self.stepper.kind)._make
        self.checkpoints = {step: make(fields) for step, *fields in stored}


def spaced(steps: Sequence[int], apart: int) -> list[int]:
    """Return the first of ordered steps, and the next of them that are at least so far apart."""
    found: list[int] = []
    for step in steps:
        if not found or step >= found[-1] + apart:
            found.append(step)
    return found


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference between two computations of one number."""
    return 100 * torch.finfo(dtype).eps ** 0.5
