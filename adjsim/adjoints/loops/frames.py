"""Saved frames of compiled loops; to stop for one would take as long as a hundred steps.

Forward, a loop stores the states before all of its steps, and the recording takes those that are
saved. Backward, a loop reads a cotangent for each step, zero where no frame is saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adjsim.adjoints.loops.loop import FrameCotangent
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.recorder import Recording, RecordSweep
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.layout import packed
from adjsim.core.rows import shown


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


def frame_cotangents(
    runner: LoopRunner, saved: RecordSweep, first: int, steps: int, level: int, count: int
) -> dict[str, FrameCotangent]:
    """Return the cotangents of the frames that are saved after each of a loop's steps.

    With ``count`` rows of cotangents, hidden at ``level``, they follow the axis of steps.
    """
    saves, found = runner.clock.saves, dict[str, FrameCotangent]()
    part = slice(bisect_right(saves, first), bisect_right(saves, first + steps))
    index = torch.tensor(
        [step - first - 1 for step in saves[part]], device=runner.device, dtype=torch.int64
    )
    for name, cotangent in zip(runner.stepper.kind._fields, saved.received, strict=True):
        if cotangent is None:
            continue
        frames = packed(cotangent[part], runner.batch, 1)
        if count:
            frames = shown(frames, level, count).movedim(0, 1)
        sizes = vector_norm(frames.flatten(2 if count else 1), dim=-1)
        found[name] = FrameCotangent(
            *(
                x.new_zeros((runner.capacity, *x.shape[1:])).index_copy(0, index, x)
                for x in (frames, sizes)
            )
        )
    return found
