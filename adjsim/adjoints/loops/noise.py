"""The noise of the steps of compiled loops."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.layout import packed


class LoopNoise:
    """The noise that the loops of one run read.

    Args:
        stepper: the steps.
        batch: the shape of the batch.
        length: the largest number of steps of a loop.
    """

    def __init__(self, stepper: Stepper, batch: torch.Size, length: int) -> None:
        self.source, self.batch, self.length = stepper.noise, batch, length
        # A step of some schemes reads the noise of the next one too.
        self.more = stepper.plan.noise_steps - 1
        self._last: tuple[int, int, Tensor] | None = None

    def of(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return the noise of a loop's steps, padded to the largest number of steps.

        Without noise, return an empty tuple.
        """
        if self.source is None:
            return ()
        if self._last is not None and self._last[:2] == (first, count):
            return (self._last[2],)
        drawn = [
            packed(part, self.batch, leading=2)
            for part in self.source.of_steps(first, count + self.more)
        ]
        padded = drawn[0].new_empty((self.length + self.more, *drawn[0].shape[1:]))
        torch.cat(drawn, out=padded[: count + self.more])
        # The backward pass begins with the noise that the forward pass ended with.
        self._last = (first, count, padded)
        return (padded,)
