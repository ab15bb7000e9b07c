"""The memory layout of fields inside compiled steps.

A compiled loop over pairs reads many numbers at once along the last axis in memory. So inside
compiled steps coordinates come first, and atoms last, or replicas where there are enough of them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from adjsim.core.state import in_transform

# Float64 numbers that compiled loops process at once.
VECTOR = 16


def is_tracing() -> bool:
    """Return whether the operations of this thread are being recorded for compilation."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return True
    return any(getattr(mode, "records", False) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def outside_tracing() -> Generator[None, None, None]:
    """Compute constants, whose values can be read, without recording or transforming them."""
    with ExitStack() as stack:
        if in_transform():
            stack.enter_context(temporarily_clear_interpreter_stack())
        if is_tracing():
            stack.enter_context(_disable_current_modes())
        yield


def memory_order(axes: int, batch: int, replicas: int) -> tuple[int, ...]:
    """Order the axes of a field ``(*batch, ..., atoms, dim)`` for a compiled step.

    ``batch`` is the number of batch axes, and ``replicas`` the number of systems in the batch.
    """
    if axes < batch + 2:
        return tuple(range(axes))
    coordinates = axes - 1, axes - 2
    links, leading = range(batch, axes - 2), range(batch)
    if replicas >= VECTOR:
        return *coordinates, *links, *leading
    return *leading, *links, *coordinates


def packed(x: Tensor, batch: torch.Size, leading: int = 0) -> Tensor:
    """Permute a field ``(*batch, ..., atoms, dim)`` to memory order, behind ``leading`` axes."""
    order = memory_order(x.ndim - leading, len(batch), batch.numel())
    return x.permute((*range(leading), *(leading + i for i in order)))


def unpacked(x: Tensor, batch: torch.Size) -> Tensor:
    """Permute a field from memory order to ``(*batch, ..., atoms, dim)``."""
    order = memory_order(x.ndim, len(batch), batch.numel())
    return x.permute([order.index(i) for i in range(x.ndim)])


def number_on(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor, which on a GPU is filled, since a copy would be waited for."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def materialise(x: Tensor) -> Tensor:
    """Make the compiler write traced positions or forces ``(*batch, atoms, dim)`` to memory.

    Otherwise it computes them again for every pair that reads them.
    """
    if not is_tracing():
        return x
    return unpacked(materialise_contiguous(packed(x, x.shape[:-2])), x.shape[:-2])


def materialise_contiguous(x: Tensor) -> Tensor:
    """Make the compiler write a traced tensor to memory, with its axes in order."""
    flat = x.clone(memory_format=torch.contiguous_format)
    # Inductor writes a tensor to memory where as_strided requests its strides. A tensor that
    # requires grad is left as it is, since backpropagation through as_strided writes in place.
    return flat if flat.requires_grad else flat.as_strided(flat.shape, flat.stride())
