"""The noise of compiled loops, which the host draws for the next loop while a GPU runs one.

The host draws few numbers a step, see :mod:`adjsim.core.noise`. One thread draws for the loop that
is expected next. A loop that comes instead draws its own numbers, which are the same whoever draws
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import StepNoise
from adjsim.core.layout import packed

# Whether a thread draws numbers for loops of the CPU too; it would slow down their own threads.
ON_CPU = False


class LoopNoise:
    """The noise of loops of at most ``length`` steps.

    Loops read that of ``more`` further steps.
    """

    def __init__(self, source: StepNoise, length: int, more: int, device: torch.device) -> None:
        self._source, self._length, self._more, self._device = source, length, more, device
        # For the thread, which may still draw when another pass reads the source.
        like = source.like.new_empty(0, device="cpu")
        self._on_host = replace(source, noise=source.noise.twin(), like=like)
        self._last: tuple[int, int, Tensor] | None = None
        self._ahead: tuple[tuple[int, int], Future[list[Tensor]]] | None = None

    def of(self, first: int, count: int) -> Tensor:
        """Return the noise of ``count`` steps, padded to the largest number of steps."""
        # The backward pass begins with the noise that the forward pass ended with.
        if self._last is None or self._last[:2] != (first, count):
            parts, source = self._taken(first, count), self._source
            if parts is None:
                parts = source.of_steps(first, count + self._more)
            drawn = [packed(part, source.batch, leading=2) for part in parts]
            rows = [part.to(self._device) for part in drawn]
            padded = rows[0].new_empty((self._length + self._more, *rows[0].shape[1:]))
            torch.cat(rows, out=padded[: count + self._more])
            self._last = first, count, padded
        return self._last[2]

    def draw_ahead(self, first: int, count: int) -> None:
        """Begin to draw the noise of the steps that are expected next, where the host draws it."""
        source, place = self._source, (first, count)
        if (self._device.type == "cpu" and not ON_CPU) or not source.drawn_by_host(count):
            return
        if self._ahead is not None or (self._last is not None and self._last[:2] == place):
            return
        future: Future[list[Tensor]] = Future()

        def draw() -> None:
            try:
                future.set_result(self._on_host.of_steps(first, count + self._more))
            except BaseException as error:  # The loop that takes the numbers raises it.
                future.set_exception(error)

        self._ahead = place, future
        Thread(target=draw, daemon=True).start()

    def _taken(self, first: int, count: int) -> Sequence[Tensor] | None:
        """Return what was drawn for these steps, once the thread has ended."""
        if self._ahead is None:
            return None
        (place, future), self._ahead = self._ahead, None
        parts = future.result()
        return parts if place == (first, count) else None
