"""Saved frames of compiled loops; to stop for one would take as long as a hundred steps.

Forward, a loop stores the states before all of its steps, and the recording takes those that are
saved. Backward, a loop reads a cotangent for each step, zero where no frame is saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adjsim.adjoints.loops.loop import FrameCotangent, lengthened
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.history import Rewind
from adjsim.adjoints.sweep.recorder import CotangentGrowth, Recording, RecordSweep
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.layout import packed
from adjsim.core.rows import shown
from adjsim.core.state import AnyState
from adjsim.dynamics.cotangents import Cotangents


class LoopRecording(Recording):
    """A recording for which compiled loops do not stop where they average or store states."""

    def __init__(self, runner: LoopRunner) -> None:
        super().__init__(runner.recorder, runner.stepper)
        self.runner, self.saves = runner, runner.clock.saves

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return () if self.runner.records_in_loops else super().stops(stepper)

    def take(self, first: int, rows: tuple[Tensor, ...], count: int) -> None:
        """Save frames of the states before ``count`` steps from number ``first``."""
        known = len(self.frames)
        found = self.saves[
            max(known, bisect_left(self.saves, first)) : bisect_left(self.saves, first + count)
        ]
        if not found:
            return
        index = torch.tensor([step - first for step in found], device=rows[0].device)
        # Copies: a view of one row would keep all.
        fields = [x.index_select(0, index) for x in rows[: self.runner.width]]
        for step, *state in zip(found, *fields, strict=True):
            self.visit(step, self.runner.unpack_state(state), ())


def received_frames(
    runner: LoopRunner, saved: RecordSweep, rewind: Rewind, last: AnyState, start: int, stop: int
) -> dict[str, Tensor]:
    """Return the cotangents ``(frames, ...)`` of the states that are saved between some steps.

    A frame after ``start`` steps is left out, and one after ``stop`` steps, of the state ``last``,
    is included. A saved function is differentiated at stored states.
    """
    part = _between(runner.clock.saves, start, stop)
    if runner.recorder.function is None:
        named = zip(runner.stepper.kind._fields, saved.received, strict=True)
        return {name: cotangent[part] for name, cotangent in named if cotangent is not None}
    if saved.received[0] is None:
        return {}
    sums = Cotangents({}, saved.sums.parameters, None, saved.sums.parameter_sums)
    like = runner.stepper.from_lattice(last)._asdict()
    # A first row that is not a frame, so that there is something to stack where none is saved.
    found = {name: [torch.zeros_like(x)] for name, x in like.items()}
    for step in runner.clock.saves[part]:
        state = last
        if step < stop:
            # The parts of the forward run begin at ``start``.
            first = start + (step - start) // runner.length * runner.length
            rows = rewind.states_from(first, runner)[: runner.width]
            state = runner.unpack_state(x[step - first] for x in rows)
        state = runner.stepper.from_lattice(state)
        for name, x in zip(state._fields, state, strict=True):
            sums[name] = torch.zeros_like(x)
        # The loop counts how large these cotangents are.
        growth = CotangentGrowth({name: sums[name].norm() for name in found})
        replace(saved, sums=sums, growth=growth).accumulate(step, state)
        for name, cotangents in found.items():
            cotangents.append(sums[name])
    saved.sums.parameter_sums.update(sums.parameter_sums)
    return {name: torch.stack(cotangents)[1:] for name, cotangents in found.items()}


def _between(saves: Sequence[int], start: int, stop: int) -> slice:
    """Return which saves are after ``start`` steps, and after ``stop`` steps at most."""
    return slice(bisect_right(saves, start), bisect_right(saves, stop))


def frame_cotangents(
    runner: LoopRunner,
    received: Mapping[str, Tensor],
    start: int,
    first: int,
    steps: int,
    level: int,
    count: int,
) -> dict[str, FrameCotangent]:
    """Return the cotangents of the frames that are saved after each of a loop's steps.

    ``received`` are those of the frames after ``start`` steps. With ``count`` rows of cotangents,
    hidden at ``level``, they follow the axis of steps.
    """
    saves, found = runner.clock.saves, dict[str, FrameCotangent]()
    part, skipped = _between(saves, first, first + steps), _between(saves, start, first)
    here = slice(skipped.stop - skipped.start, part.stop - skipped.start)
    index = [step - first - 1 for step in saves[part]]
    index = torch.tensor(index, device=runner.device, dtype=torch.int64)
    for name, cotangent in received.items():
        frames = packed(cotangent[here], runner.batch, 1)
        if count:
            frames = shown(frames, level, count).movedim(0, 1)
        # A field may have no axes.
        sizes = vector_norm(frames[..., None].flatten(2 if count else 1), dim=-1)
        # The rows behind the steps of a short loop are not read.
        rows = (x.new_zeros((steps, *x.shape[1:])).index_copy(0, index, x) for x in (frames, sizes))
        found[name] = FrameCotangent(*(lengthened(x, runner.capacity) for x in rows))
    return found
