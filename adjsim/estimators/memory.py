"""Measurement of peak memory.

On a GPU torch's allocator counts. On a CPU the peak of the process's resident set is compared with
its size before, once freed memory has been returned to the system. Linux counts this peak, for one
measurement at a time; on other systems the size at the end stands for it, which is a lower bound.
The result is good to about a megabyte. For reliable figures measure in a new process, as the
command line does.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def release() -> None:
    """Collect garbage, and return freed memory to the system, which takes about 0.1 seconds."""
    gc.collect()
    _trim()


def _trim() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _peak() -> int:
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.exists() else None
    return psutil.Process().memory_info().rss if found is None else 1024 * int(found[1])


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
        # Resets the peak. Where the system refuses, the growth above an earlier peak is measured.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._base = _peak()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._base
        else:
            self.bytes = max(0, _peak() - self._base)
