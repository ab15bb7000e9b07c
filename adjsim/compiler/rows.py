"""Rows: the tensors that each iteration of a loop stores.

A loop that stores a tensor fills a tensor ``(capacity, *shape)``, whose row k an iteration of
number k writes. Where several iterations have one number, the last one's row is left.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler.calls import Address, Called, address_of
from adjsim.compiler.values import Buffer, Joined, Pointwise, Value

# Bytes to whose multiples rows are aligned.
ALIGNMENT = 64


def stored_examples(body: GraphModule, carry_size: int) -> list[Tensor]:
    """Return examples of the tensors that an iteration stores, the last outputs of its graph."""
    (output,) = body.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0][1 + carry_size :]]


def fitting_buffer(value: Value, row: Buffer) -> str | None:
    """Return the name of a value's buffer if it has the layout of a row, which can replace it."""
    source, address = value.source, address_of(value)
    if (
        not isinstance(source, (Called, Joined, Pointwise))
        or source.buffer is None
        # A loop over padded rows would write behind a row, into the next one.
        or source.buffer.size != row.size
        # Of views, those alone that are the whole value with its axes in place.
        or _axes(source.shape, source.buffer.strides) != _axes(row.shape, row.strides)
        or address != Address(f"({source.buffer.name} + 0)", row.strides)
        or value.shape != row.shape
    ):
        return None
    return source.buffer.name


def _axes(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return the lengths and strides of axes of more than one element."""
    return [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1]


# The memory of rows that are no longer in use: at most one block, the largest.
_spare: list[np.ndarray] = []


def new_rows(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return new tensors of rows, in one block of memory.

    The first access of memory that is new to the process takes longer than writing it. So when
    rows are no longer in use, their memory is kept for the next run of any loop.
    """
    if not shapes:
        return []
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    needed, memory = sum(aligned) + ALIGNMENT, None
    with suppress(IndexError):  # None is kept, or another thread was first.
        memory = _spare.pop()
    if memory is None or len(memory) < needed:
        memory = np.empty(needed, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    # Each tensor has a part of its own, whose end is noticed. Tensors of one storage would be
    # aliases, which torch's while_loop refuses.
    ends = [first + end for end in itertools.accumulate(aligned)]
    parts = [
        memory[end - n : end][:size] for end, n, size in zip(ends, aligned, sizes, strict=True)
    ]
    in_use = list(range(len(parts)))
    for part in parts:
        weakref.finalize(part, _give_back, in_use, memory).atexit = False
    return [
        torch.from_numpy(part).view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, shapes, strict=True)
    ]


def _give_back(in_use: list[int], memory: np.ndarray) -> None:
    """Note the end of a part, and after the last one keep the memory, unless more is kept."""
    in_use.pop()
    if not in_use and len(memory) > sum(map(len, _spare)):
        _spare[:] = [memory]
