"""The data from which a backward sweep recovers earlier states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adjsim.adjoints.durable.saves import Saved
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.error_growth import ErrorGrowth
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.durable.store import Nested
from adjsim.core.state import AnyState
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator

# The states before the steps of compiled loops, packed, by the first step of each loop. A loop has
# one tensor for each field, whose first axis numbers its steps.
StoredStates = dict[int, tuple[Tensor, ...]]


class Rewind(ABC):
    """The source of the earlier states of a run during one backward sweep.

    Attributes:
        tolerance: allowed relative difference between values computed again and those of the run.
        error: the largest relative error of a recovered state; None if states are not
            reconstructed.
    """

    tolerance: float
    error: float | None = None

    @abstractmethod
    def final(self) -> AnyState:
        """Return the last state, from which the sweep starts."""

    def before(self, step: int) -> Sequence[AnyState] | None:
        """Return the states before each move of the step ending at ``step``.

        None means that the moves are inverted.
        """
        return None

    @abstractmethod
    def restore(self, step: int, state: AnyState) -> AnyState:
        """Return the state from which the sweep continues at ``step``."""

    def resume(self, error: float | None) -> None:
        """Go on with a sweep that was interrupted, in which this was the largest error."""
        self.error = error


class StatesRewind(Rewind):
    """A rewind that has the states before the steps of compiled loops."""

    @abstractmethod
    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        """Return the states before the steps of the loop that begins at step ``first``."""


class History(Saved):
    """The stored data of one run, collected by observing its states.

    It makes a :class:`Rewind` for each backward sweep.

    Attributes:
        growth: the growth of errors, to which drivers add that of their steps; None where the
            stored steps do not depend on it.
        kept: the number of steps before which compiled loops store states at a time, for a sweep to
            read; 0: a compiled sweep inverts steps.
        states: receives the states before all steps of a compiled run; None: none are stored.
    """

    growth: ErrorGrowth | None = None
    kept: int = 0
    states: StoredStates | None = None

    def stops(self, stepper: Stepper) -> Iterable[int]:
        """Return the steps after which it stores or restores a state.

        These are all steps by default.
        """
        return range(stepper.clock.last + 1)

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        self.save(step, state, spills)

    @abstractmethod
    def save(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
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


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference between two computations of one number."""
    return 100 * torch.finfo(dtype).eps ** 0.5


def states_tree(states: Mapping[int, AnyState], first: int) -> Nested:
    """Return stored states from number ``first`` on, with their steps, for a save."""
    return [[step, list(state)] for step, state in list(states.items())[first:]]


def states_from_tree(parts: Sequence[Nested], like: AnyState) -> dict[int, AnyState]:
    """Return the states of :func:`states_tree`, from the parts of all saves."""
    return {
        step: type(like)._make(x.to(like[0].device) for x in fields)
        for part in parts
        for step, fields in part
    }
