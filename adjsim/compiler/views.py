"""Views, and the splitting, reshaping and indexing of values.

A view is a map from the index of one of its elements to its index in the operand. Each entry of
:data:`VIEWS` makes the map from the operand's shape and the arguments of torch's operation.
Indices that are constants of a loop are checked once, before the loop; others where they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.calls import is_dense
from adjsim.compiler.values import (
    Buffer,
    Gathered,
    Index,
    Indices,
    Joined,
    Reinterpreted,
    Store,
    UnprintableError,
    Value,
    View,
    broadcast,
    dense_copy,
    offset,
    row_major,
)

IndexMap = Callable[[Indices], Indices]


def selecting(axis: int, at: int) -> IndexMap:
    """Map the index of a tensor with one axis selected to the operand's index."""
    return lambda index: (*index[:axis], Index(at), *index[axis:])


def slicing(axis: int, start: int, step: int) -> IndexMap:
    """Map the index of a tensor with one axis sliced to the operand's index."""
    return lambda index: (*index[:axis], index[axis] * step + start, *index[axis + 1 :])


def _permute(old: Sequence[int], order: Sequence[int]) -> IndexMap:
    places = [axis % len(old) for axis in order]
    return lambda index: tuple(index[places.index(axis)] for axis in range(len(old)))


def _transpose(old: Sequence[int], a: int, b: int) -> IndexMap:
    order = list(range(len(old)))
    order[a], order[b] = order[b], order[a]
    return _permute(old, order)


def _squeeze(old: Sequence[int], axes: Any = None) -> IndexMap:
    axes = range(len(old)) if axes is None else [axes] if isinstance(axes, int) else axes
    if not old:
        return tuple
    gone = {axis % len(old) for axis in axes if old[axis] == 1}

    def map(index: Indices) -> Indices:
        rest = iter(index)
        return tuple(Index() if axis in gone else next(rest) for axis in range(len(old)))

    return map


def unsqueezed(old: Sequence[int], axis: int) -> IndexMap:
    """Map the index of a tensor with a new axis to the operand's index."""
    axis %= len(old) + 1
    return lambda index: (*index[:axis], *index[axis + 1 :])


def expanded(old: Sequence[int], *_: Any) -> IndexMap:
    """Map the index of a tensor expanded along axes to the operand's index."""
    return lambda index: broadcast(index, tuple(old))


def _select(old: Sequence[int], axis: int, at: int) -> IndexMap:
    axis %= len(old)
    return selecting(axis, at % old[axis])


def _slice(
    old: Sequence[int],
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> IndexMap:
    axis %= len(old)
    return slicing(axis, range(old[axis])[slice(start, end, step)].start, step)


def _flip(old: Sequence[int], axes: Sequence[int]) -> IndexMap:
    turned = {axis % len(old) for axis in axes}
    return lambda index: tuple(
        i * -1 + (n - 1) if axis in turned else i
        for axis, (i, n) in enumerate(zip(index, old, strict=True))
    )


def _diagonal(old: Sequence[int], shift: int = 0, a: int = 0, b: int = 1) -> IndexMap:
    a, b = a % len(old), b % len(old)

    def map(index: Indices) -> Indices:
        rest, along = iter(index[:-1]), index[-1]
        begin = {a: max(0, -shift), b: max(0, shift)}
        return tuple(
            along + begin[axis] if axis in begin else next(rest) for axis in range(len(old))
        )

    return map


VIEWS: dict[str, Callable[..., IndexMap]] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda old: _permute(old, range(len(old))[::-1]),
    "squeeze": _squeeze,
    "unsqueeze": unsqueezed,
    "expand": expanded,
    "select": _select,
    "slice": _slice,
    "flip": _flip,
    "diagonal": _diagonal,
}


@dataclass(frozen=True)
class Checked:
    """Constants of a loop that are indices, and their copy in the range from 0 to length - 1.

    Indices from ``least`` on are allowed. Negative ones count from the end.
    """

    source: Buffer
    least: int
    length: int

    @cached_property
    def buffer(self) -> Buffer:
        """The copy. The ends of its rows, like those of the constants, are zeros."""
        ends = "" if self.least == 0 else "_from_end"
        return replace(self.source, name=f"{self.source.name}_below{self.length}{ends}")

    @property
    def lines(self) -> list[str]:
        """The statements that fill the copy."""
        number = _in_range(f"{self.source.name}[i]", self.least, self.length, "&refused")
        return [
            f"for (int64_t i = 0; i < {self.buffer.size}; ++i) {self.buffer.name}[i] = {number};"
        ]


# Operators of torch with several outputs, each a view of their argument.
SPLITS = ("split", "split_with_sizes", "chunk", "unbind")


def split(base: str, meta: Sequence[Tensor], x: Value, *args: Any) -> list[Value]:
    """Lower one of :data:`SPLITS`."""
    given = args if base == "unbind" else args[1:]
    axis = (given[0] if given else 0) % len(x.shape)
    pieces, at = [], 0
    for part in meta:
        shape = tuple(part.shape)
        if base == "unbind":
            map, step = selecting(axis, at), 1
        else:
            map, step = slicing(axis, at, 1), shape[axis]
        pieces.append(View(shape, part.dtype, (x,), strides=tuple(part.stride()), map=map))
        at += step
    return pieces


def reshaped(store: Store, x: Value, meta: Tensor) -> Value:
    old, new = [n for n in x.shape if n > 1], [n for n in meta.shape if n > 1]
    if old == new:
        axes = [axis for axis, n in enumerate(meta.shape) if n > 1]

        def squeezed(index: Indices) -> Indices:
            rest = iter([index[axis] for axis in axes])
            return tuple(next(rest) if n > 1 else Index() for n in x.shape)

        return View(tuple(meta.shape), meta.dtype, (x,), map=squeezed)
    # A stored value with contiguous rows can be reinterpreted with other axes.
    flat, strides = x.source, row_major(meta.shape)
    if not is_dense(x):
        flat = dense_copy(x, row_major(x.shape))
        store(flat, fill=False)
    assert flat.buffer is not None
    row = Buffer(flat.buffer.name, x.dtype, (flat.buffer.size,), (1,))
    memory = Reinterpreted((x.numel,), x.dtype, (flat,), buffer=row)
    return View(
        tuple(meta.shape), meta.dtype, (memory,), map=lambda index: (offset(index, strides),)
    )


def indexed(
    store: Store, checked: list[Checked], meta: Tensor, x: Value, indices: Sequence[Value | None]
) -> Value:
    """Lower indexing by index tensors along adjacent axes."""
    numbers = {axis: index for axis, index in enumerate(indices) if index is not None}
    first = min(numbers)
    neighbours = list(numbers) == list(range(first, first + len(numbers)))
    if not neighbours or any(number.dtype != torch.int64 for number in numbers.values()):
        raise UnprintableError("index by masks, or along axes that are not adjacent")
    return gathered(store, checked, meta, x, first, list(numbers.values()), wraps=True)


def gathered(
    store: Store,
    checked: list[Checked],
    meta: Tensor,
    x: Value,
    axis: int,
    numbers: list[Value],
    wraps: bool,
) -> Value:
    """Select elements by index tensors along the axes from ``axis`` on.

    With ``wraps``, negative indices count from the end. Constant indices are added to ``checked``.
    """
    store(x)
    places: list[Value] = []
    for length, number in zip(x.shape[axis:], numbers, strict=False):
        least = -length if wraps else 0
        constant = _constant(number)
        if constant is not None:
            checked.append(Checked(constant, least, length))
            places.append(_reading(number, checked[-1].buffer))
            continue
        expression = partial(_in_range, least=least, length=length, refused="refused")
        places.append(
            replace(dense_copy(number, number.strides), expression=expression, refuses=True)
        )
        # Rows of indices are not padded, since the padding would be read as indices.
        store(places[-1], fill=False)
    return Gathered(tuple(meta.shape), meta.dtype, (x, *places), axis=axis)


def _in_range(text: str, least: int, length: int, refused: str) -> str:
    return f"in_range({text}, {least}, {length}, {refused})"


def _constant(value: Value) -> Buffer | None:
    """Return the constant of which a value is a view with all of its elements."""
    whole = value.numel == value.source.numel and all(
        varies or n == 1 for varies, n in zip(value.varies, value.shape, strict=True)
    )
    buffer = value.source.buffer
    return buffer if buffer and buffer.constant and not buffer.variable and whole else None


def _reading(value: Value, buffer: Buffer) -> Value:
    """Return a value, or a view of it, that reads another buffer."""
    if isinstance(value, View):
        return replace(value, operands=(_reading(value.operands[0], buffer),))
    return replace(value, buffer=buffer)


def scattered(store: Store, base: str, meta: Tensor, x: Value, patch: Value, *args: Any) -> Value:
    """Lower select_scatter and slice_scatter, which replace a part of a tensor.

    The result is the concatenation of the part before, the patch and the part after.
    """
    axis, shape = (args[0] if args else 0) % len(x.shape), x.shape
    if base == "select_scatter":
        start = args[1] % shape[axis]
        stop, row = start + 1, (*shape[:axis], 1, *shape[axis + 1 :])
        patch = View(row, x.dtype, (patch,), map=unsqueezed(patch.shape, axis))
    else:
        start, stop, step = slice(*(*args[1:4], None, None, None)[:3]).indices(shape[axis])
        if step != 1:
            raise UnprintableError(base)

    def part(begin: int, end: int) -> list[Value]:
        short = (*shape[:axis], end - begin, *shape[axis + 1 :])
        return [View(short, x.dtype, (x,), map=slicing(axis, begin, 1))] if end > begin else []

    middle = (patch,) if patch.numel else ()
    parts = (*part(0, start), *middle, *part(stop, shape[axis]))
    joined = Joined(shape, meta.dtype, parts, strides=tuple(meta.stride()), axis=axis)
    store(joined)
    return joined
