"""The checkpoint adjoint, which runs segments again from stored states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint, ReconstructionError, Result
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.backward import run_swept
from adjsim.adjoints.sweep.history import (
    History,
    Rewind,
    StateRows,
    StatesRewind,
    rounding_tolerance,
    state_entries,
    states_of,
)
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.arguments import as_whole
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, detached
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.run import Run


class CheckpointAdjoint(Adjoint):
    """Exact backpropagation that stores the ends of segments and runs each segment again.

    The gradient equals that of :class:`DirectAdjoint` for any scheme, reversible or not, chaotic or
    dissipative. With n steps in s segments, s + n/s states are stored: about 2 sqrt(n) by default.
    A step takes four passes over the energy, where :class:`DirectAdjoint` takes two. (With
    ``compile=True`` a segment stores the states before its steps, and each step is evaluated once
    more: five passes, and four for :class:`DirectAdjoint`. Segments of up to 100 steps of an
    :class:`~adjsim.ODE` or an :class:`~adjsim.SDE` store the activations too: three passes, and two
    for :class:`DirectAdjoint`.) Use it where :class:`ReversibleAdjoint` refuses, or when its error
    is in doubt. A segment that is run again has to end in the stored state, so a force that is
    random, or that has changed since the run, is an error.

    Args:
        segments: number of segments; None: about sqrt(steps).
    """

    accepts = (SteppingSolver,)

    def __init__(self, segments: int | None = None) -> None:
        segments = None if segments is None else as_whole("segments", segments)
        if segments is not None and segments < 1:
            raise ValueError(f"segments must be at least 1; got {segments}.")
        self.segments = segments

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        def history(stepper: Stepper) -> History:
            return Checkpoints(stepper, self._length(stepper.clock.last))

        return run_swept(run, report, history)

    def _length(self, last: int) -> int:
        """Return the number of steps in a segment."""
        return math.ceil(last / (self.segments or max(1, round(math.sqrt(last)))))


class Checkpoints(History):
    """The states at the ends of segments.

    Args:
        stepper: the steps of the run.
        length: steps of a segment.
    """

    def __init__(self, stepper: Stepper, length: int) -> None:
        self.stepper, self.length, self.block_length = stepper, length, length
        self.checkpoints: dict[int, AnyState] = {}

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return {*range(0, stepper.clock.last, self.length), stepper.clock.last}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if step % self.length == 0 or step == self.stepper.clock.last:
            self.checkpoints[step] = detached(state)

    def state(self) -> dict[str, Any]:
        return {"checkpoints": state_entries(self.checkpoints)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.checkpoints = states_of(state["checkpoints"], self.stepper)

    def rewind(
        self, inputs: Inputs, forces: ForceEvaluator, frames: AnyState | None, final: AnyState
    ) -> Rewind:
        return Recompute(self, inputs, forces)


class Recompute(StatesRewind):
    """Earlier states, recovered by running a segment again.

    Args:
        history: the states at the ends of segments.
        inputs: the inputs of the run.
        forces: evaluates the forces of the segments.
    """

    def __init__(self, history: Checkpoints, inputs: Inputs, forces: ForceEvaluator) -> None:
        self.history, self.stepper, self.inputs, self.forces = (
            history,
            history.stepper,
            inputs,
            forces,
        )
        self.tolerance = rounding_tolerance(inputs.state[0].dtype)
        # For the current segment: the states before each move of each of its steps.
        self.segment: list[Sequence[AnyState]] = []
        # The same of compiled loops.
        self.states: StateRows = {}

    def final(self) -> AnyState:
        return self.history.checkpoints[self.stepper.clock.last]

    def before(self, step: int) -> Sequence[AnyState]:
        if not self.segment:
            start = (step - 1) // self.history.length * self.history.length
            end = min(start + self.history.length, self.stepper.clock.last)
            self._run_again(start, end)
            # A sweep that was interrupted goes on in the middle of a segment.
            del self.segment[step - start :]
        return self.segment.pop()

    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        if first not in self.states:
            self.states.clear()
            self._run_loops_again(first // self.history.length * self.history.length, runner)
        return self.states[first]

    def restore(self, step: int, state: AnyState) -> AnyState:
        return state

    @torch.no_grad()
    def _run_loops_again(self, start: int, runner: LoopRunner) -> None:
        end = min(start + self.history.length, self.stepper.clock.last)
        loops = ForwardLoops(runner, None, state_rows=self.states)
        state, k = self.history.checkpoints[start], start
        for stop in (step for step in runner.stops if start < step <= end):
            state, k = loops.advance(state, k, stop)
            state, _ = self.stepper.spill(k, state)
        self._compare(state, self.history.checkpoints[end], start, end)

    @torch.no_grad()
    def _run_again(self, start: int, stop: int) -> None:
        stepper, state = self.stepper, self.history.checkpoints[start]
        for k in range(start, stop):
            context = stepper.context(k, self.inputs, self.forces)
            *before, state = stepper.plan.intermediate_states(state, context)
            self.segment.append(before)
            state, _ = stepper.spill(k + 1, state)
        self._compare(state, self.history.checkpoints[stop], start, stop)

    @staticmethod
    def _compare(found: AnyState, stored: AnyState, start: int, stop: int) -> None:
        # The same operations on the same numbers give the same bits, except for kernels that sum in
        # varying order. A chaotic segment amplifies their differences in the last bits.
        for name, x, y in zip(stored._fields, found, stored, strict=True):
            allowed = rounding_tolerance(
                torch.float64 if not y.is_floating_point() else y.dtype
            ) * float(y.abs().amax())
            if not float((x - y).abs().amax()) <= allowed:
                raise ReconstructionError(
                    f"running steps {start} to {stop} again did not recover their end ({name} is "
                    f"{float((x - y).abs().amax()):.1e} off), so the gradient would be wrong. The "
                    "force is random (dropout?), or reads a value that has changed since the run "
                    "(a plain attribute, a mode). Make it reproducible, or use DirectAdjoint()."
                )
