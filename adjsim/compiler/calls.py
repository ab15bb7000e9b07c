"""Calls of compiled functions from a printed loop.

An operator of torch that has a compiled function is printed as a call of it. Who compiles a loop
names such operators (:class:`Operators`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from adjsim.compiler.values import (
    Buffer,
    Gathered,
    Index,
    Indices,
    Reinterpreted,
    Store,
    Value,
    View,
    dense_copy,
    make_buffer,
    row_major,
)


@dataclass(eq=False)
class Called(Value):
    """An output of a call; always stored."""

    call: Call | None = None


class Call(ABC):
    """A call of compiled functions at ``addresses``, whose outputs have dense buffers."""

    inputs: tuple[Value, ...]
    outputs: tuple[Called, ...]
    addresses: tuple[int, ...] = ()
    # Whether it is run even if nothing reads its outputs.
    checks: bool = False
    # Whether ``team.threads`` share its work.
    parallel: bool = False
    # C++ declarations that the call needs, the same for all calls of a loop.
    declarations: str

    def output(self, example: torch.Tensor) -> Called:
        """Make an output of the shape and memory order of an example."""
        shape, strides = tuple(example.shape), tuple(example.stride())
        buffer = make_buffer("", example.dtype, shape, strides, fill=False)
        return Called(shape, example.dtype, self.inputs, buffer, strides, call=self)

    @abstractmethod
    def lines(self, functions: Sequence[str]) -> list[str]:
        """Print the call; the functions are expressions of type ``void*``."""


@dataclass(frozen=True)
class Operators:
    """Operators of torch that a loop calls, or that torch evaluates before the loop.

    Attributes:
        calls: makes the call of an operator, from its arguments as values, the example tensors of
            its outputs, and a function that stores a value.
        invariant: those that are evaluated before, if their first argument is constant in the loop.
        symmetric: those among them whose values are symmetric matrices.
        merge: changes a traced graph so that operators share what they compute.
    """

    calls: Mapping[Any, Callable[[Sequence[Any], Sequence[torch.Tensor], Store], Call]]
    invariant: Collection[Any] = ()
    symmetric: Collection[Any] = ()
    merge: Callable[[GraphModule], None] = lambda graph: None

    def prepare(self, graph: GraphModule) -> None:
        """Merge operators of a traced graph, and note at its nodes what loops do with them."""
        self.merge(graph)
        for node in graph.graph.nodes:
            if node.target in self.calls:
                node.meta["call"] = self.calls[node.target]
            if node.target in self.invariant:
                node.meta |= {"invariant": True, "symmetric": node.target in self.symmetric}


@dataclass(frozen=True)
class Address:
    """The memory of a stored value: its strides, and an expression of the address of its start."""

    pointer: str
    strides: tuple[int, ...]

    @property
    def mT(self) -> Address:
        """The transpose of a matrix."""
        return Address(self.pointer, self.strides[::-1])


def in_order(value: Value, store: Store, strides: Sequence[int] | None = None) -> Value:
    """Return a value stored with these strides, or else those of its shape, itself if it is."""
    strides = row_major(value.shape) if strides is None else strides
    address = address_of(value)
    if address is None or any(
        n > 1 and a != b for n, a, b in zip(value.shape, address.strides, strides, strict=True)
    ):
        value = dense_copy(value, strides)
        store(value, fill=False)
    return value


def stored_address(value: Value) -> Address:
    """Return where a stored value is in memory."""
    address = address_of(value)
    assert address is not None
    return address


def pointer_to(value: Value) -> str:
    """Return an expression of the address of the first element of a stored value."""
    return stored_address(value).pointer


def address_of(value: Value) -> Address | None:
    """Return where a value is in memory; None if it is not stored, or not with fixed strides."""
    place = _place(value)
    if place is None:
        return None
    buffer, begin, strides = place
    if buffer.variable:
        return Address(f"&{buffer.name}", (0,) * len(value.shape)) if value.numel == 1 else None
    return Address(f"({buffer.name} + {begin})", strides)


def is_dense(value: Value) -> bool:
    """Return whether a value is the whole of a stored value, in row-major order."""
    place = _place(value)
    if place is None or place[0].variable:
        return False
    buffer, begin, strides = place
    axes = zip(value.shape, strides, row_major(value.shape), strict=True)
    whole = begin == Index() and buffer.size == value.numel
    return whole and all(own == dense for n, own, dense in axes if n > 1)


def in_place(value: Value) -> Value | None:
    """Return a part of a constant that one stored number selects, as a value in memory.

    Such a part is a row, by the number of an iteration. Its place stays the same if the given value
    is stored later. Other values give None.
    """
    place = _place(value, selected=True)
    if place is None or place[0].variable or not place[0].constant:
        return None
    buffer, begin, strides = place
    memory = Buffer(f"({buffer.name} + {begin})", value.dtype, value.shape, strides)
    return Reinterpreted(value.shape, value.dtype, (value,), memory, strides)


def _place(value: Value, selected: bool = False) -> tuple[Buffer, Index, tuple[int, ...]] | None:
    """Return the buffer of a value, the offset of its first element in it, and its strides.

    With ``selected``, the value may be a part that one stored number selects.
    """
    origin = _offset(value, tuple(Index() for _ in value.shape), selected)
    if origin is None:
        return None
    buffer, begin = origin
    strides = [0] * len(value.shape)
    for axis in [axis for axis, length in enumerate(value.shape) if length > 1]:
        found = _offset(value, tuple(Index(int(a == axis)) for a in range(len(strides))), selected)
        assert found is not None
        strides[axis] = found[1].const - begin.const
    return buffer, begin, tuple(strides)


def _offset(value: Value, index: Indices, selected: bool) -> tuple[Buffer, Index] | None:
    while value.buffer is None:
        if isinstance(value, View):
            value, index = value.operands[0], value.map(index)
        elif selected and isinstance(value, Gathered) and (place := _scalar(value.operands[1:])):
            number, axis = value.operands[1], value.axis
            value = value.operands[0]
            index = (*index[:axis], place, *index[axis + len(number.shape) :])
        else:
            return None
    return value.buffer, Index() if value.buffer.variable else value.buffer.at(index)


def _scalar(numbers: Sequence[Value]) -> Index | None:
    """Return the index that one stored number is; None for other index tensors."""
    buffer = numbers[0].source.buffer if len(numbers) == 1 and numbers[0].numel == 1 else None
    return Index.of(buffer.name) if buffer is not None and buffer.variable else None
