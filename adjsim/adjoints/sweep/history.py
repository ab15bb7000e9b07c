"""The data from which a backward sweep recovers earlier states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.error_budget import ErrorBudget
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.durable.stateful import Entries, Stateful
from adjsim.core.state import AnyState, detached
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator

# The states before the steps of compiled loops, packed, by the first step of each loop. A loop has
# one tensor for each field, whose first axis numbers its steps.
StateRows = dict[int, tuple[Tensor, ...]]


class Rewind:
    """The source of the earlier states of a run during one backward sweep.

    Args:
        final: the last state, from which the sweep starts.

    Attributes:
        tolerance: allowed relative difference between values computed again and those of the run.
        error: the largest relative error of a recovered state; None if states are not
            reconstructed.
    """

    error: float | None = None

    def __init__(self, final: AnyState) -> None:
        self.final, self.tolerance = final, rounding_tolerance(final[0].dtype)

    def before(self, step: int) -> Sequence[AnyState] | None:
        """Return the states before each move of the step ending at ``step``.

        None means that the moves are inverted.
        """
        return None

    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        """Return the rows of the loop that begins at step ``first``, if loops store states."""
        raise NotImplementedError

    def restore(self, step: int, state: AnyState) -> AnyState:
        """Return the state from which the sweep continues at ``step``."""
        return state

    def state(self) -> dict[str, Any]:
        return {"error": self.error}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.error = state["error"]


class History(Stateful, ABC):
    """The stored data of one run, collected by observing its states.

    It makes a :class:`Rewind` for each backward sweep.

    Attributes:
        checkpoints: stored states, by the number of steps before them.
        error_budget: observes the growth of errors, on which the stored steps depend; None where
            they do not.
        block_length: the number of steps before which compiled loops store states at a time,
            for a sweep to read; 0: a compiled sweep inverts steps.
        state_rows: receives the states before all steps of a compiled run; None: none are stored.
    """

    error_budget: ErrorBudget | None = None
    block_length: int = 0
    state_rows: StateRows | None = None

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.checkpoints: dict[int, AnyState] = {}

    @abstractmethod
    def stops(self, stepper: Stepper) -> Iterable[int]:
        """Return the steps after which it stores or restores a state."""

    @abstractmethod
    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        """Store the required data of the state after ``step`` steps, and of its buffers' spills."""

    @abstractmethod
    def rewind(
        self, inputs: Inputs, forces: ForceEvaluator, frames: AnyState | None, final: AnyState
    ) -> Rewind:
        """Make the rewind of one backward sweep.

        Args:
            inputs: the inputs of the run.
            forces: evaluates the forces of the sweep.
            frames: the saved states, time leading, if whole states were saved.
            final: the last state of the dynamics.
        """

    def store(self, step: int, state: AnyState) -> None:
        self.checkpoints[step] = detached(state)

    def state(self) -> dict[str, Any]:
        return {"checkpoints": Entries([[step, *x] for step, x in self.checkpoints.items()])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        stored = state["checkpoints"]
        self.checkpoints = {step: self.stepper.state_of(fields) for step, *fields in stored}


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference between two computations of one number."""
    return 100 * torch.finfo(dtype).eps ** 0.5
