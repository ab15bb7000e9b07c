"""How much memory a piece of work takes at its peak.

On a GPU the allocator knows. On a CPU torch keeps no count, and Python's own tracer does not see
tensors; so the resident set of the process is sampled every millisecond, from a baseline taken
after freed memory has been given back. It is good to about a megabyte; for figures to rely on,
measure in a fresh process, as the command line does.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from types import TracebackType

import psutil
import torch


def release() -> None:
    """Collect what nobody holds, and give freed memory back to the system: what a method finds to
    reuse would not be counted as its own. It takes about a tenth of a second."""
    gc.collect()
    _trim()


def _trim() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Context manager; afterwards ``bytes`` is the growth at the peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        # Young garbage only: to release() all of it would take a tenth of a second from every
        # estimate.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
