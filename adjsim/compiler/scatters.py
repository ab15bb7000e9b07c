"""Scatters in a printed loop: numbers that are written, or added, at places that tensors select.

They are the derivatives of index operations. The numbers are added in the order of the index
tensors, so a sum has the same bits in every program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from adjsim.compiler.calls import Address, Call, address_of, stored_address
from adjsim.compiler.values import Literal, Store, UnprintableError, Value, dense_copy


class Scatter(Call):
    """The tensor x after ``x[indices] = values``, or ``+=``.

    The index tensors are those of adjacent axes, and broadcast against each other.
    """

    declarations = ""

    def __init__(
        self,
        x: Value,
        indices: Sequence[Value | None],
        values: Value,
        accumulate: bool,
        example: Tensor,
        store: Store,
    ) -> None:
        numbers = {axis: index for axis, index in enumerate(indices) if index is not None}
        self.first, self.shape, self.accumulate = min(numbers), x.shape, accumulate
        neighbours = list(numbers) == list(range(self.first, self.first + len(numbers)))
        if not neighbours or any(number.dtype != torch.int64 for number in numbers.values()):
            raise UnprintableError("index_put by masks, or along axes that are not adjacent")
        if values.dtype != x.dtype:
            raise UnprintableError("index_put of numbers of another type")
        self.places = np.broadcast_shapes(*(number.shape for number in numbers.values()))
        self.fill = x.text if isinstance(x, Literal) else None
        read = [values, *numbers.values(), *([] if self.fill else [x])]
        self.inputs = tuple(stored(value, store) for value in read)
        self.outputs = (self.output(example),)

    def lines(self, functions: Sequence[str]) -> list[str]:
        values, *others = map(stored_address, self.inputs)
        (out,) = map(stored_address, self.outputs)
        count = len(self.inputs) - 1 - (self.fill is None)
        numbers, base = others[:count], others[count:]
        every = [f"i{axis}" for axis in range(len(self.shape))]
        begin = self.fill or element(base[0], every)
        after = self.first + count
        outer, inner = every[: self.first], every[after:]
        places = [f"n{axis}" for axis in range(len(self.places))]
        shape = (*self.shape[: self.first], *self.places, *self.shape[after:])
        axes = [*outer, *places, *inner]
        selected = [f"p{k}" for k in range(count)]
        read = [
            f"const int64_t {name} = in_range({element(number, places)}, {-n}, {n}, refused);"
            for name, number, n in zip(selected, numbers, self.shape[self.first :], strict=False)
        ]
        known = len(outer) + len(places)
        heads = [head(name, n) for name, n in zip(axes, shape, strict=True)]
        to = element(out, [*outer, *selected, *inner])
        return [
            *map(head, every, self.shape),
            f"{element(out, every)} = {begin};",
            *["}"] * len(every),
            *heads[:known],
            *read,
            *heads[known:],
            f"{to} {'+=' if self.accumulate else '='} {element(values, axes)};",
            *["}"] * len(axes),
        ]


def head(name: str, length: int) -> str:
    return f"for (int64_t {name} = 0; {name} < {length}; ++{name}) {{"


def element(address: Address, index: Sequence[str]) -> str:
    """Print an element of a tensor that broadcasts to the axes of an index."""
    mine = index[len(index) - len(address.strides) :]
    terms = [f"{stride} * {i}" for stride, i in zip(address.strides, mine, strict=True) if stride]
    return f"({address.pointer})[{' + '.join(terms) or '0'}]"


def stored(value: Value, store: Store) -> Value:
    """Return a value in memory of fixed strides, itself if it is; those of short axes are 0."""
    if address_of(value) is None:
        value = dense_copy(value, value.strides)
        store(value, fill=False)
    return value
