"""Measurement of peak memory.

On a GPU torch's allocator counts. On a CPU the resident set of the process is sampled every
millisecond, and compared with that after freed memory has been returned to the system. The result
is good to about a megabyte. For reliable figures measure in a new process, as the command line
does.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading

import psutil
import torch


def release() -> None:
    """Collect garbage, and return freed memory to the system, which takes about 0.1 seconds."""
    gc.collect()
    _trim()


def _trim() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """A context manager; afterwards ``bytes`` is the growth of memory at the peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        # The young generations only: a full release() would cost every estimate 0.1 seconds.
        gc.collect(1)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
            return self
        _trim()
        self._process = psutil.Process()
        self._base = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._base
            return
        self._done.set()
        self._thread.join()
        self._measure()
        self.bytes = max(0, self._peak - self._base)

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self._measure()

    def _measure(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss)
