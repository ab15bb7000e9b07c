"""The history of a compiled direct run, which stores the state before every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.history import (
    History,
    Rewind,
    StateRows,
    StatesRewind,
    rounding_tolerance,
)
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.durable.stateful import Entries
from adjsim.core.state import AnyState, detached
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator


class AllStates(History):
    """The states before all steps, which the compiled loops of the run store.

    Args:
        stepper: the steps of the run.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.block_length = stepper, stepper.clock.last
        self._rows: StateRows = {}
        self.state_rows = self._rows
        self.last: AnyState | None = None

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return (stepper.clock.last,)

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if step == self.stepper.clock.last:
            self.last = detached(state)

    def state(self) -> dict[str, Any]:
        rows = [[first, *rows] for first, rows in self._rows.items()]
        return {"rows": Entries(rows), "last": self.last}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._rows.update({first: tuple(rows) for first, *rows in state["rows"]})
        self.last = None if state["last"] is None else self.stepper.state_of(state["last"])

    def rewind(
        self, inputs: Inputs, forces: ForceEvaluator, frames: AnyState | None, final: AnyState
    ) -> Rewind:
        assert self.last is not None
        return StoredRewind(self._rows, self.last)


class StoredRewind(StatesRewind):
    """Earlier states, as they were stored.

    Args:
        states: the states before the steps of each loop.
        last: the last state.
    """

    def __init__(self, states: StateRows, last: AnyState) -> None:
        self.states, self.last = states, last
        self.tolerance = rounding_tolerance(last[0].dtype)

    def final(self) -> AnyState:
        return self.last

    def restore(self, step: int, state: AnyState) -> AnyState:
        return state

    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        return self.states[first]
