"""Rows: the tensors that each iteration of a loop stores.

A loop that stores a tensor fills a tensor ``(capacity, *shape)``, whose row n the n-th iteration
writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim._cpp.calls import Called, address_of
from adjsim._cpp.values import TYPES, Buffer, Pointwise, Value

# Bytes to whose multiples rows are aligned.
ALIGNMENT = 64


def stored_examples(body: GraphModule, carry_size: int) -> list[Tensor]:
    """Return examples of the tensors that an iteration stores, the last outputs of its graph."""
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    return [node.meta["val"] for node in output.args[0][1 + carry_size :]]


def declaration(buffer: Buffer, target: str) -> str:
    """Print the declaration of the row of a target that an iteration fills."""
    kind, count = TYPES[buffer.dtype], torch.Size(buffer.shape).numel()
    return f"{kind}* {buffer.name} = ({kind}*){target} + iteration * {count};"


def store_in(value: Value, buffer: Buffer) -> bool:
    """Store a value in a row if it is stored in that layout anyway; return whether it is."""
    source, address = value.source, address_of(value)
    if (
        not isinstance(source, (Called, Pointwise))
        or source.buffer is None
        or source.buffer.variable
        or address is None
        or address.pointer != f"({source.buffer.name} + 0)"
        or address.strides != buffer.strides
        or source.buffer.size != buffer.size
    ):
        return False
    source.buffer = buffer
    return True


class RowMemory:
    """The memory of the rows of one compiled loop.

    The first access of memory that is new to the process takes longer than writing it. So when
    rows are no longer in use, their memory is kept for the next run of the loop.

    Args:
        capacity: the number of rows.
        examples: examples of the stored tensors.
    """

    def __init__(self, capacity: int, examples: Sequence[Tensor]) -> None:
        self.shapes = [((capacity, *x.shape), x.dtype) for x in examples]
        # At most one block.
        self._spare: list[np.ndarray] = []

    def take(self) -> list[Tensor]:
        """Return new tensors of rows, in one block of memory."""
        if not self.shapes:
            return []
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(sum(aligned) + ALIGNMENT, dtype=np.uint8)
        # The tensors alone refer to this view, whose end gives the memory back.
        lent = memory[:]
        weakref.finalize(lent, _give_back, self._spare, memory).atexit = False
        block = torch.from_numpy(lent)
        parts = block[-block.data_ptr() % ALIGNMENT :][: sum(aligned)].split(aligned)
        return [
            part[:size].view(dtype).view(shape)
            for part, size, (shape, dtype) in zip(parts, sizes, self.shapes, strict=True)
        ]


def _give_back(spare: list[np.ndarray], memory: np.ndarray) -> None:
    if not spare:
        spare.append(memory)
