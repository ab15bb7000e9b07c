"""Memory of the host that a thread writes, and from which a GPU copies while it computes.

A GPU copies from pinned memory while it runs kernels and the host goes on. A call of CUDA by a
second thread may break the capture of a graph, so the thread writes memory and does nothing else.
The thread that runs loops allocates the memory, begins the copies, and waits for the end of a copy
before its buffer is written again. There are two buffers: one is written while the other is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Queue(Protocol):
    """Copies from the host to a device, in their order."""

    def allocate(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory of the host from which the device copies."""
        ...

    def copy(self, rows: Tensor, length: int) -> tuple[Tensor, Any]:
        """Begin a copy of rows; return a tensor of ``length`` rows, and the event of its end."""
        ...

    def receive(self, x: Tensor, copied: Any) -> Tensor:
        """Let the kernels that are launched from now on read a copy."""
        ...


class CudaQueue:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def allocate(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numbers, dtype=dtype, pin_memory=True)

    def copy(self, rows: Tensor, length: int) -> tuple[Tensor, Any]:
        # Memory of this stream, since kernels of another may still use what it has freed.
        with torch.cuda.stream(self._stream):
            found = torch.empty((length, *rows.shape[1:]), dtype=rows.dtype, device=self._device)
            found[: len(rows)].copy_(rows, non_blocking=True)
            return found, self._stream.record_event()

    def receive(self, x: Tensor, copied: Any) -> Tensor:
        present = torch.cuda.current_stream(self._device)
        present.wait_event(copied)
        x.record_stream(present)
        return x


def queue_of(device: torch.device) -> Queue | None:
    """Return the queue of a GPU; None for the CPU, whose own threads a second one would slow."""
    return CudaQueue(device) if device.type == "cuda" else None


@dataclass
class Buffer:
    """Memory of the host, its part that is written, and the event of its last copy's end."""

    memory: Tensor
    rows: Tensor
    copied: Any = None


@dataclass(frozen=True)
class Upload:
    """A copy on the device that has begun."""

    queue: Queue
    copy: Tensor
    copied: Any

    def received(self) -> Tensor:
        """Return the copy, for kernels that are launched from now on."""
        return self.queue.receive(self.copy, self.copied)


class Uploads:
    """Two buffers, each of which is written while the other is copied."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._buffers = queue, list[Buffer]()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Return a buffer that may be written, with rows of this shape."""
        numbers, memory = math.prod(shape), None
        if len(self._buffers) == 2:
            oldest = self._buffers.pop(0)
            if oldest.copied is not None:
                oldest.copied.synchronize()
            memory = oldest.memory
        if memory is None or len(memory) < numbers:
            memory = self._queue.allocate(numbers, dtype)
        self._buffers.append(Buffer(memory, memory[:numbers].view(shape)))
        return self._buffers[-1]

    def send(self, buffer: Buffer, length: int) -> Upload:
        """Begin to copy the rows of a buffer to the start of a tensor of ``length`` rows."""
        copy, buffer.copied = self._queue.copy(buffer.rows, length)
        return Upload(self._queue, copy, buffer.copied)
