"""The checkpoint adjoint, which runs segments again from stored states."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint, ReconstructionError, Result
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.runner import FINITE_EVERY, NUMBERS_PER_LOOP, LoopRunner
from adjsim.adjoints.loops.saved_tensors import MOST_STEPS, keeps_activations
from adjsim.adjoints.sweep.history import History, Rewind, SweepStart, rounding_tolerance
from adjsim.adjoints.sweep.passes import run_swept
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.arguments import as_whole
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.run import Run

# Trainable numbers times systems of a vector field, from which the activations that short segments
# keep save more time than the loops of more segments take.
LARGE = 2**17


class CheckpointAdjoint(Adjoint):
    """Exact backpropagation that stores the ends of segments and runs each segment again.

    The gradient equals that of :class:`DirectAdjoint` for any scheme, reversible or not, chaotic or
    dissipative. With n steps in s segments, s + n/s states are stored: about 2 sqrt(n) by default.
    A step takes four passes over the energy, where :class:`DirectAdjoint` takes two. (With
    ``compile=True`` a segment stores the states before its steps, and each step is evaluated once
    more: five passes, and four for :class:`DirectAdjoint`; seven and six where steps share a force,
    as those of velocity Verlet and BAOAB do, since no forces are stored. Segments of up to 100
    steps of an :class:`~adjsim.ODE` or an :class:`~adjsim.SDE` store the activations too: three
    passes, and two for :class:`DirectAdjoint`.) Use it where :class:`ReversibleAdjoint` refuses, or
    when its error is in doubt. A segment that is run again has to end in the stored state, so a
    force that is random, or that has changed since the run, is an error.

    Args:
        segments: number of segments; None: about sqrt(steps), and with ``compile=True`` fewer if
            states are small: of 1,024 steps, up to four megabytes of float64 for the states of a
            segment, and of 100 steps of an ODE or an SDE whose trainable numbers times its systems
            are more than 131,072.
    """

    accepts = (SteppingSolver,)

    def __init__(self, segments: int | None = None) -> None:
        self.segments = None if segments is None else as_whole("segments", segments, least=1)

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        def history(stepper: Stepper) -> History:
            last = stepper.clock.last
            segments = self.segments or max(1, round(math.sqrt(last)))
            length = math.ceil(last / segments)
            if run.compile and self.segments is None:
                # A loop takes as long to begin as a hundred steps of a small system.
                numbers = sum(x.numel() for x in run.reading.trainable(run.tensors).values())
                large = numbers * run.dynamics.batch_shape(run.state).numel() >= LARGE
                keeps = large and keeps_activations(stepper.plan)
                most = MOST_STEPS if keeps else FINITE_EVERY
                length = max(length, min(most, NUMBERS_PER_LOOP // run.state[0].numel()))
            return Checkpoints(stepper, length)

        return run_swept(run, report, history)


class Checkpoints(History):
    """The states at the ends of segments of ``length`` steps."""

    def __init__(self, stepper: Stepper, length: int) -> None:
        super().__init__(stepper)
        self.length = self.block_length = length

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return {*range(0, stepper.clock.last, self.length), stepper.clock.last}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if step % self.length == 0 or step == self.stepper.clock.last:
            self.store(step, state)

    def segment_of(self, step: int) -> tuple[int, int]:
        """Return the first and the last step of the segment in which a step begins."""
        start = step // self.length * self.length
        return start, min(start + self.length, self.stepper.clock.last)

    def rewind(self, given: SweepStart) -> Rewind:
        return Recompute(self, given.inputs, given.forces)


class Recompute(Rewind):
    """Earlier states, recovered by running a segment again."""

    def __init__(self, history: Checkpoints, inputs: Inputs, forces: ForceEvaluator) -> None:
        super().__init__(history.checkpoints[history.stepper.clock.last])
        self.history, self.stepper = history, history.stepper
        self.inputs, self.forces = inputs, forces
        # For the current segment: the states before each move of each of its steps.
        self.segment: list[Sequence[AnyState]] = []

    def before(self, step: int) -> Sequence[AnyState]:
        if not self.segment:
            start, stop = self.history.segment_of(step - 1)
            self._run_again(start, stop)
            # A sweep that was interrupted goes on in the middle of a segment.
            del self.segment[step - start :]
        return self.segment.pop()

    def states_from(self, first: int, runner: LoopRunner) -> tuple[Tensor, ...]:
        if first not in self.rows:
            self.rows.clear()
            self._run_loops_again(*self.history.segment_of(first), runner)
        return self.rows[first]

    @torch.no_grad()
    def _run_loops_again(self, start: int, end: int, runner: LoopRunner) -> None:
        loops = ForwardLoops(runner, None, state_rows=self.rows)
        state, k = self.history.checkpoints[start], start
        stops = runner.stops
        for stop in stops[bisect_right(stops, start) : bisect_right(stops, end)]:
            state, k = loops.advance(state, k, stop)
            state, _ = self.stepper.spill(k, state)
        self._compare(state, start, end)

    @torch.no_grad()
    def _run_again(self, start: int, stop: int) -> None:
        stepper, state = self.stepper, self.history.checkpoints[start]
        for k in range(start, stop):
            context = stepper.context(k, self.inputs, self.forces)
            *before, state = stepper.plan.intermediate_states(state, context)
            self.segment.append(before)
            state, _ = stepper.spill(k + 1, state)
        self._compare(state, start, stop)

    def _compare(self, found: AnyState, start: int, stop: int) -> None:
        # The same operations on the same numbers give the same bits, except for kernels that sum in
        # varying order. A chaotic segment amplifies their differences in the last bits.
        stored = self.history.checkpoints[stop]
        sizes = [((x - y).abs().amax(), y.abs().amax()) for x, y in zip(found, stored, strict=True)]
        # The host reads all at once.
        known = torch.stack([x.to(torch.float64) for pair in sizes for x in pair]).tolist()
        pairs = zip(known[::2], known[1::2], strict=True)
        for name, y, (distance, size) in zip(stored._fields, stored, pairs, strict=True):
            dtype = y.dtype if y.is_floating_point() else torch.float64
            if not distance <= rounding_tolerance(dtype) * size:
                raise ReconstructionError(
                    f"running steps {start} to {stop} again did not recover their end ({name} is "
                    f"{distance:.1e} off), so the gradient would be wrong. The force is random "
                    "(dropout?), or reads a value that has changed since the run (a plain "
                    "attribute, a mode). Make it reproducible, or use DirectAdjoint()."
                )
