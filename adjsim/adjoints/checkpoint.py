"""Recomputation from stored states."""

from __future__ import annotations

import math

from adjsim._state import State, detached
from adjsim.adjoints.base import Adjoint, Result
from adjsim.adjoints.march import March
from adjsim.adjoints.sweep import Backtrack, run_swept
from adjsim.dynamics.sources import Gradients
from adjsim.solvers.base import Problem, SteppingSolver


class CheckpointAdjoint(Adjoint):
    """Exact backpropagation that stores the state at segment ends and runs each segment again on the way back.

    The gradient equals :class:`DirectAdjoint`'s for any scheme, reversible or not, chaotic or dissipative. With n steps in
    s segments, s + n/s states are held: the root of n at the default. It costs one more forward run. Use it where
    :class:`ReversibleAdjoint` refuses, or when its error is in doubt.

    Args:
        segments: number of segments; None: about sqrt(steps).
    """

    accepts = (SteppingSolver,)

    def __init__(self, segments: int | None = None) -> None:
        if segments is not None and segments < 1:
            raise ValueError(f"segments must be at least 1; got {segments}.")
        self.segments = segments

    def run(self, problem: Problem) -> Result:
        return run_swept(problem, _Replay(self.segments))


class _Replay(Backtrack):
    def __init__(self, segments: int | None) -> None:
        self.segments = segments
        self.stored: dict[int, State] = {}

    def keep(self, march: March, step: int, state: State) -> None:
        if step % self._length(march) == 0 and step < march.last:
            self.stored[step] = detached(state)

    def begin(self, march: March, outputs: State | None, final: State) -> State:
        self.march, self.trail, self.start = march, [], march.last
        return final

    def moves_before(self, step: int) -> list[State] | None:
        per_step = len(self.march.program.moves)
        if step <= self.start:
            stop, self.start = self.start, (step - 1) // self._length(self.march) * self._length(self.march)
            self.trail = self.march.trail(self.stored[self.start], self.start, stop)
        before = self.trail[-per_step:]
        del self.trail[-per_step:]
        return before

    def arrive(self, step: int, state: State, grads: Gradients) -> State:
        return state

    def _length(self, march: March) -> int:
        segments = self.segments or max(1, round(math.sqrt(march.last)))
        return math.ceil(march.last / segments)
