"""The noise of compiled loops, which the host draws for the next loop while a GPU runs one.

The host draws few numbers a step, see :mod:`adjsim.core.noise`. A thread draws for the loop that is
expected next, and a GPU copies its numbers while it runs the present loop. A loop that comes
instead draws its own numbers, which are the same whoever draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Thread

import torch
from torch import Tensor

from adjsim.adjoints.loops.tiles import fastest_draw
from adjsim.adjoints.loops.uploads import Buffer, Upload, Uploads, queue_of
from adjsim.adjoints.sweep.stepper import StepNoise
from adjsim.core.layout import packed

# Threads that draw, with the memory that they write. A thread whose run has failed would otherwise
# free this memory, by a call of CUDA.
_drawing: list[tuple[Thread, Tensor]] = []


@dataclass
class _Ahead:
    """Numbers that are drawn ahead of the loop that reads them, and their copy once it is begun."""

    place: tuple[int, int]
    buffer: Buffer
    drawn: Future[None] = field(default_factory=Future)
    upload: Upload | None = None


class LoopNoise:
    """The noise of loops of at most ``length`` steps.

    Loops read that of ``more`` further steps.
    """

    def __init__(self, source: StepNoise, length: int, more: int, device: torch.device) -> None:
        draw = fastest_draw()
        self._source = replace(source, noise=source.noise.twin(draw))
        self._length, self._more, self._device = length, more, device
        queue = queue_of(device)
        self._uploads = None if queue is None else Uploads(queue)
        # For the thread, which may still draw when another pass reads the source.
        like = source.like.new_empty(0, device="cpu")
        self._on_host = replace(source, noise=source.noise.twin(draw), like=like)
        self._last: tuple[int, int, Tensor] | None = None
        self._ahead: _Ahead | None = None

    def of(self, first: int, count: int) -> Tensor:
        """Return the noise of ``count`` steps, padded to the largest number of steps."""
        # The backward pass begins with the noise that the forward pass ended with.
        if self._last is None or self._last[:2] != (first, count):
            padded = self._taken(first, count)
            if padded is None:
                drawn = self._source.of_steps(first, count + self._more)
                rows = [self._packed(part).to(self._device) for part in drawn]
                padded = rows[0].new_empty((self._length + self._more, *rows[0].shape[1:]))
                torch.cat(rows, out=padded[: count + self._more])
            self._last = first, count, padded
        return self._last[2]

    def draw_ahead(self, first: int, count: int) -> None:
        """Begin to draw the noise of the steps that are expected next, where the host draws it."""
        source, place = self._source, (first, count)
        if self._uploads is None or not source.drawn_by_host(count):
            return
        if self._ahead is not None or (self._last is not None and self._last[:2] == place):
            return
        steps, like = count + self._more, self._on_host.like
        draw_shape = (1, source.plan.draws, *source.batch, *source.shape)
        row = self._packed(torch.empty(draw_shape, device="meta")).shape[1:]
        ahead = _Ahead(place, self._uploads.buffer((steps, *row), like.dtype))
        rows, drawn, on_host, pack = ahead.buffer.rows, ahead.drawn, self._on_host, self._packed

        def draw() -> None:
            try:
                torch.cat([pack(part) for part in on_host.of_steps(first, steps)], out=rows)
                drawn.set_result(None)
            except BaseException as error:  # The loop that takes the numbers raises it.
                drawn.set_exception(error)

        self._ahead, thread = ahead, Thread(target=draw, daemon=True)
        _drawing[:] = [x for x in _drawing if x[0].is_alive()] + [(thread, rows)]
        thread.start()

    @property
    def meanwhile(self) -> list[Callable[[], None]]:
        """What the host does while a device runs a loop."""
        return [] if self._uploads is None else [self._send]

    def _send(self) -> None:
        """Begin to copy the numbers drawn ahead, once the thread has ended, while a loop runs."""
        if self._ahead is not None and self._ahead.drawn.exception() is None:
            self._sent(self._ahead)

    def _taken(self, first: int, count: int) -> Tensor | None:
        """Return what was drawn ahead for these steps, on the device."""
        ahead = self._ahead
        if ahead is None:
            return None
        self._ahead = None
        ahead.drawn.result()
        if ahead.place != (first, count):
            return None
        return self._sent(ahead).received()

    def _sent(self, ahead: _Ahead) -> Upload:
        if ahead.upload is None:
            assert self._uploads is not None
            ahead.upload = self._uploads.send(ahead.buffer, self._length + self._more)
        return ahead.upload

    def _packed(self, part: Tensor) -> Tensor:
        return packed(part, self._source.batch, leading=2)
