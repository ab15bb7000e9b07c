"""Views of tensors as maps of indices.

A map takes the index of an element of the view to its index in the operand.

Each entry of :data:`VIEWS` makes the map from the operand's shape, the view's shape and the
arguments of torch's operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adjsim.compiler.values import Index, Indices, broadcast

IndexMap = Callable[[Indices], Indices]


def selecting(axis: int, at: int) -> IndexMap:
    """Map the index of a tensor with one axis selected to the operand's index."""
    return lambda index: (*index[:axis], Index(at), *index[axis:])


def slicing(axis: int, start: int, step: int) -> IndexMap:
    """Map the index of a tensor with one axis sliced to the operand's index."""
    return lambda index: (*index[:axis], index[axis] * step + start, *index[axis + 1 :])


def _permute(old: Sequence[int], new: Sequence[int], order: Sequence[int]) -> IndexMap:
    places = [axis % len(old) for axis in order]
    return lambda index: tuple(index[places.index(axis)] for axis in range(len(old)))


def _transpose(old: Sequence[int], new: Sequence[int], a: int, b: int) -> IndexMap:
    order = list(range(len(old)))
    order[a], order[b] = order[b], order[a]
    return _permute(old, new, order)


def _squeeze(old: Sequence[int], new: Sequence[int], axes: Any = None) -> IndexMap:
    axes = range(len(old)) if axes is None else [axes] if isinstance(axes, int) else axes
    gone = {axis % len(old) for axis in axes if old[axis] == 1}

    def map(index: Indices) -> Indices:
        rest = iter(index)
        return tuple(Index() if axis in gone else next(rest) for axis in range(len(old)))

    return map


def unsqueezed(old: Sequence[int], new: Sequence[int], axis: int) -> IndexMap:
    """Map the index of a tensor with a new axis to the operand's index."""
    axis %= len(new)
    return lambda index: (*index[:axis], *index[axis + 1 :])


def expanded(old: Sequence[int], new: Sequence[int], *_: Any) -> IndexMap:
    """Map the index of a tensor expanded along axes to the operand's index."""
    return lambda index: broadcast(index, tuple(old))


def _select(old: Sequence[int], new: Sequence[int], axis: int, at: int) -> IndexMap:
    axis %= len(old)
    return selecting(axis, at % old[axis])


def _slice(
    old: Sequence[int],
    new: Sequence[int],
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> IndexMap:
    axis %= len(old)
    return slicing(axis, range(old[axis])[slice(start, end, step)].start, step)


VIEWS: dict[str, Callable[..., IndexMap]] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda old, new: _permute(old, new, range(len(old))[::-1]),
    "squeeze": _squeeze,
    "unsqueeze": unsqueezed,
    "expand": expanded,
    "select": _select,
    "slice": _slice,
}
