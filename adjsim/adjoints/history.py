"""What a run keeps so that its earlier states can be had again on the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from adjsim._state import State
from adjsim.adjoints.stepper import Inputs, Stepper
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator


class Rewind(ABC):
    """Where the earlier states of a run come from during one backward sweep.

    Attributes:
        tolerance: relative difference that values computed on the way back may have from those of the run.
        error: the largest relative error of a state that was found; None if states are not reconstructed.
    """

    tolerance: float
    error: float | None = None

    @abstractmethod
    def final(self) -> State:
        """The last state, from which the sweep starts."""

    def before(self, step: int) -> Sequence[State] | None:
        """The states before each move of the step that ends at ``step``; None: by inverting the moves."""
        return None

    @abstractmethod
    def restore(self, step: int, state: State) -> State:
        """Having gone back to ``step``: the state to go on with."""


class History(ABC):
    """What is kept of one run: an observer of its states, of which every backward sweep gets a rewind of its own."""

    def stops(self, stepper: Stepper) -> Iterable[int]:
        """The steps after which it keeps the state, or does something on the way back; all of them if it does not say."""
        return range(stepper.clock.last + 1)

    def visit(self, step: int, state: State, spills: Sequence[Spill]) -> None:
        self.save(step, state, spills)

    @abstractmethod
    def save(self, step: int, state: State, spills: Sequence[Spill]) -> None:
        """See the state after ``step`` steps, and what its buffers spilled there, and keep what is needed."""

    @abstractmethod
    def rewind(self, inputs: Inputs, forces: ForceEvaluator, frames: State | None, final: State) -> Rewind:
        """The way back, for one sweep.

        Args:
            inputs: what the run read.
            forces: where the sweep's forces are evaluated.
            frames: the states that were saved, time leading, if whole states were.
            final: the last state of the dynamics.
        """


def rounding_tolerance(dtype: torch.dtype) -> float:
    """The relative difference that is allowed between a number and the same number computed again by other kernels."""
    return 100 * torch.finfo(dtype).eps ** 0.5
