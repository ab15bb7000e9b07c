"""The state of ``torch.autocast``, which a run keeps until the end of its backward pass."""

from __future__ import annotations

from contextlib import ExitStack

import torch

# The dtype that autocast gives to operations on the CPU and on a GPU; None where it is off.
AutocastState = tuple[torch.dtype | None, torch.dtype | None]


def autocast_state() -> AutocastState:
    """Return the state of autocast."""
    return _dtype_on("cpu"), _dtype_on("cuda")


def under_autocast(remedy: str) -> str:
    """Return a sentence for an error about a dtype: empty without autocast."""
    if all(dtype is None for dtype in autocast_state()):
        return ""
    return f" torch.autocast is on, and lowers float32 results to fewer bits: {remedy}"


def restored_autocast(state: AutocastState) -> ExitStack:
    """Make a context with a former state of autocast."""
    stack = ExitStack()
    for device, dtype in zip(("cpu", "cuda"), state, strict=True):
        if dtype != _dtype_on(device):
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
    return stack


def _dtype_on(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
