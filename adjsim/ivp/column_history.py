"""Sources of the states between which the columns have stepped, for the backward pass.

They differ in what is stored during the forward solution: the states before and after every attempt
(:class:`StoredSteps`), or states from which short segments are solved again
(:class:`CheckpointedSteps`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adjsim.ivp.column_steps import ColumnState, ColumnStepper
from adjsim.ivp.forward_states import SEGMENT_STEPS
from adjsim.ivp.rate_check import changed_message
from adjsim.ivp.thinned import Thinned

# The times (batch,) and the states (n, batch) before a step.
Point = tuple[Tensor, Tensor]


class StoredSteps:
    """The times and states before and after every attempt in which a column advanced."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def __call__(self, state: ColumnState) -> None:
        """Store the state after an attempt."""
        if not self.points or bool((state.t != self.points[-1][0]).any()):
            self.points.append((state.t, state.y))

    def forward(self) -> Iterator[tuple[Point, Point]]:
        """Yield the points before and after each step."""
        yield from zip(self.points, self.points[1:], strict=False)

    def backward(self) -> Iterator[tuple[Point, Point]]:
        """Yield the points before and after each step, last step first."""
        yield from zip(self.points[-2::-1], self.points[:0:-1], strict=True)


class CheckpointedSteps(Thinned[ColumnState]):
    """States from which segments of the forward solution are solved again, bit for bit.

    At most twice :data:`~adjsim.ivp.forward_states.SEGMENT_STEPS` states are stored, as in
    :class:`~adjsim.ivp.forward_states.Checkpointed`.

    Args:
        stepper: takes the steps again.
    """

    def __init__(self, stepper: ColumnStepper) -> None:
        super().__init__(2 * SEGMENT_STEPS, SEGMENT_STEPS, lambda state: state)
        self.stepper = stepper
        self.last: ColumnState | None = None

    def __call__(self, state: ColumnState) -> None:
        super().__call__(state)
        self.last = state

    def backward(self) -> Iterator[tuple[Point, Point]]:
        """Yield the points before and after each step, last step first.

        Raises:
            RuntimeError: a segment that is solved again does not end in the state that was found
                in the forward solution.
        """
        after = self.last
        for number in reversed(range(len(self.kept))):
            state = self.kept[number]
            attempts = min(self.every, self.count - 1 - number * self.every)
            storage = (
                StoredSteps() if attempts <= SEGMENT_STEPS else CheckpointedSteps(self.stepper)
            )
            storage(state)
            with torch.no_grad():
                for _ in range(attempts):
                    state = self.stepper.advance(state)[0]
                    storage(state)
            if after is not None and not torch.equal(state.t, after.t):
                changed = (state.t != after.t).nonzero()[0, 0]
                raise RuntimeError(changed_message(float(after.t[changed])))
            after = self.kept[number]
            yield from storage.backward()
