"""Products of cotangents with Jacobians, of one cotangent or of several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad

from adjsim.core.transforms import (
    are_forward,
    has_tangent,
    in_forward_mode,
    is_wrapped,
    outside_transforms,
    unwrapped,
)

# Takes cotangents, None for those that are zero, to others.
Pull = Callable[..., Sequence[Tensor | None]]
# Torch has no public functions for these.
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_core: Any = torch._C
_torch: Any = torch
_NESTED = partial(
    NotImplementedError,
    "a backward pass of adjsim inside torch.func takes cotangents that torch.vmap alone or one "
    "torch.func.jvp alone has wrapped: call it outside of the other transforms, and torch.func.jvp "
    "for each tangent.",
)


def pulled(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    keep_graph: bool = True,
) -> list[Tensor]:
    """Return the cotangents of the inputs, zero where no output depends on one."""
    pairs = [x for x in zip(outputs, cotangents, strict=True) if x[0].requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=keep_graph, materialize_grads=True
    )
    return list(found)


def pulled_rows(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: Sequence[Tensor]
) -> list[Tensor]:
    """Return the cotangents ``(k, ...)`` of the inputs for rows ``(k, ...)`` of the outputs.

    Operations that vmap does not know take the rows one by one.
    """

    def pull(*row: Tensor) -> list[Tensor]:
        return pulled(outputs, inputs, row)

    found = _of_each_row(pull, rows, torch.vmap(pull))
    return [x for x in found if x is not None]


def pulled_together(
    pull: Pull, cotangents: Sequence[Tensor | None], one_by_one: bool = False
) -> list[Tensor | None]:
    """Return ``pull(*cotangents)``, where torch may hide rows of cotangents.

    ``torch.autograd.grad(..., is_grads_batched=True)`` and ``torch.func.vmap`` over cotangents hand
    all rows to one backward pass, as tensors with a hidden axis. Here pull is called once for all
    rows, or, ``one_by_one``, once for each. Operations that vmap does not know take the rows one by
    one. The pull has to be linear: tangents of the cotangents, of forward mode, are pulled as they
    are.

    Raises:
        NotImplementedError: several transforms of torch.func are active, of which one has wrapped a
            cotangent.
    """
    given = [x for x in cotangents if x is not None]
    level = level_of_rows() if any(map(are_hidden, given)) else None
    rows = given if level is None else _shown_alike(given, level)
    if in_forward_mode() and any(map(has_tangent, rows)):
        if not are_forward(rows):
            raise _NESTED()
        return _pulled_with_tangents(pull, _filled(cotangents, rows), one_by_one, level)
    if level is not None or any(map(has_rows, given)):
        return _pulled_in_rows(pull, cotangents, rows, one_by_one, level)
    if any(map(is_wrapped, given)):
        raise _NESTED()
    # What a pass differentiates was recorded outside of the transforms.
    with outside_transforms():
        return list(pull(*cotangents))


def shown_rows(x: Tensor) -> Tensor:
    """Return a tensor inside of ``pull`` with its hidden rows as first axis, any other as it is."""
    return shown(x, level_of_rows(), 1) if are_hidden(x) else x


def rows_of(tensors: Sequence[Tensor]) -> int:
    """Return how many rows torch hides in some of the tensors; 0: none."""
    return max((len(shown_rows(x)) for x in tensors if are_hidden(x)), default=0)


def vmap_rows(function: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor]) -> list[Tensor]:
    """Call a function once for rows on leading axes, which torch hides inside of it."""
    return list(_vmap(function)(*rows))


def hide_rows(x: Tensor, level: int) -> Tensor:
    """Return a tensor whose first axis is hidden, as ``is_grads_batched`` hides it."""
    return _torch._add_batch_dim(x, 0, level)


def of_each_row(
    function: Callable[[dict[str, Any]], Sequence[Tensor]], inputs: dict[str, Any]
) -> list[Tensor]:
    """Call a function of named inputs once for each of the rows that torch hides in some of them.

    The function, such as a kernel, has no rule for them. Without rows it is called once.
    """
    rows = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and are_hidden(x)}
    if not rows:
        return list(function(inputs))
    level = level_of_rows()
    shown = {name: shown_rows(x) for name, x in rows.items()}
    found = [
        function(inputs | {name: x[k] for name, x in shown.items()})
        for k in range(len(next(iter(shown.values()))))
    ]
    return [hide_rows(torch.stack(x), level) for x in zip(*found, strict=True)]


def where(condition: Tensor, x: Tensor | float, y: Tensor) -> Tensor:
    """Return ``torch.where`` of a condition without rows, which the vmap of rows does not know."""
    count, level = rows_of([z for z in (x, y) if isinstance(z, Tensor)]), level_of_rows()
    if not count:
        return torch.where(condition, x, y)
    each = shown(x, level, count) if isinstance(x, Tensor) else x
    return hide_rows(torch.where(condition, each, shown(y, level, count)), level)


def has_rows(x: Tensor) -> bool:
    """Return whether a cotangent has rows that torch hides."""
    return are_hidden(x) or _functorch.is_batchedtensor(x)


def differentiates_backward() -> bool:
    """Return whether a backward pass has to be written in operations of torch.

    It has, while torch records or transforms it: ``create_graph``, forward mode, ``torch.func``.
    Rows of cotangents alone do not ask for it, as :func:`pulled_together` takes them, whether
    ``is_grads_batched`` or ``torch.vmap`` hides them; where both do, torch's operations take them.
    """
    levels = _functorch.get_interpreter_stack() or ()
    return (
        torch.is_grad_enabled()
        or in_forward_mode()
        or any(level.key() != _functorch.TransformType.Vmap for level in levels)
        or (len(levels) > 0 and vmap_depth() > 0)
    )


def _pulled_with_tangents(
    pull: Pull, cotangents: Sequence[Tensor | None], one_by_one: bool, level: int | None
) -> list[Tensor | None]:
    """Pull cotangents with tangents of forward mode; a pass is linear, and pulls both alike.

    With a level they have rows on a leading axis, which are hidden at this level.
    """

    def hidden(x: Tensor | None) -> Tensor | None:
        return x if x is None or level is None else hide_rows(x, level)

    duals = [(None, None) if x is None else forward_ad.unpack_dual(x) for x in cotangents]
    with outside_transforms(), _outside_forward_mode():
        values, tangents = (
            [x if x is None else hidden(unwrapped(x, _NESTED, _NESTED)) for x in part]
            for part in zip(*duals, strict=True)
        )
        found, moved = (pulled_together(pull, part, one_by_one) for part in (values, tangents))
        if level is not None:
            found, moved = ([x if x is None else shown_rows(x) for x in y] for y in (found, moved))
    return [
        hidden(x if x is None or y is None else forward_ad.make_dual(x, y))
        for x, y in zip(found, moved, strict=True)
    ]


def _pulled_in_rows(
    pull: Pull,
    cotangents: Sequence[Tensor | None],
    rows: Sequence[Tensor],
    one_by_one: bool,
    level: int | None,
) -> list[Tensor | None]:
    """Pull all rows at once, on a leading axis at a level, or those of the vmaps of torch.func."""
    present: list[bool] = []

    def pull_rows(*rows: Tensor) -> list[Tensor]:
        with outside_vmap():
            found = _rows_of(pull, _filled(cotangents, rows), one_by_one)
        present[:] = [x is not None for x in found]
        return [x for x in found if x is not None]

    parts = iter(_Rows.apply(pull_rows, *(rows if level is not None else [x[None] for x in rows])))
    found = [next(parts) if there else None for there in present]
    if level is not None:
        return [None if x is None else hide_rows(x, level) for x in found]
    return [None if x is None else x[0] for x in found]


def _shown_alike(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    """Return tensors with the rows of a level as first axis, equal ones for those without."""
    count = max(len(shown(x, level, 1)) for x in tensors)
    return [shown(x, level, count) for x in tensors]


def _filled(places: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Put tensors at the places that are not None."""
    parts = iter(tensors)
    return [None if x is None else next(parts) for x in places]


def _rows_of(pull: Pull, rows: Sequence[Tensor | None], one_by_one: bool) -> list[Tensor | None]:
    """Pull rows, all at once if possible, as ``is_grads_batched`` hides them.

    The vmap of torch.func would forbid leaves inside, and let potentials take other ways than in
    the forward run, with other rounding errors.
    """
    given = [x for x in rows if x is not None]

    def pull_row(*row: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(pull(*_filled(rows, row)))

    together = None if one_by_one else _vmap(pull_row, allow_none_pass_through=True)
    return _of_each_row(pull_row, given, together)


def _of_each_row(pull: Pull, rows: Sequence[Tensor], together: Pull | None) -> list[Tensor | None]:
    """Pull each of the rows ``(k, ...)``, by one call of ``together`` if there is one."""
    count = len(rows[0])
    if count > 1 and together is not None:
        try:
            return list(together(*rows))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation without a rule for vmap. The loop below raises any other error again.
            pass
    found = [pull(*(x[k] for x in rows)) for k in range(count)]
    return [
        None if any(x is None for x in parts) else torch.stack([x for x in parts if x is not None])
        for parts in zip(*found, strict=True)
    ]


def are_hidden(x: Tensor) -> bool:
    """Return whether a tensor has rows that ``is_grads_batched`` hides."""
    return _functorch.is_legacy_batchedtensor(x)


def shown(x: Tensor, level: int, count: int) -> Tensor:
    """Return a tensor with its hidden rows as first axis, ``count`` equal rows if it has none."""
    return _torch._remove_batch_dim(x, level, count, 0)


def level_of_rows() -> int:
    """Return the level at which rows are hidden, that of the innermost vmap.

    A thread of autograd for a GPU does not know of the vmap around the call, which is the first.
    """
    return max(1, vmap_depth())


def vmap_depth() -> int:
    """Return how many vmaps of ``is_grads_batched`` are active in this thread."""
    depth = _core._vmapmode_increment_nesting() - 1
    _core._vmapmode_decrement_nesting()
    return depth


@contextmanager
def outside_vmap() -> Generator[None, None, None]:
    """Let go of the vmaps of ``is_grads_batched``, in which no random number may be drawn."""
    depth = vmap_depth()
    for _ in range(depth):
        _core._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            _core._vmapmode_increment_nesting()


@contextmanager
def _outside_forward_mode() -> Generator[None, None, None]:
    """Let a pass take the ways of its forward run, which was not in forward mode."""
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        yield
    finally:
        forward_ad._current_level = level


class _Rows(torch.autograd.Function):
    """A function of rows; each level of torch.func.vmap adds its rows to their first axis."""

    @staticmethod
    def forward(function: Callable[..., list[Tensor]], *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(*rows))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        return

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (function, *given), size = args, info.batch_size
        rows = tuple(
            x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            for x, axis in zip(given, in_dims[1:], strict=True)
        )
        each = rows[0].shape[:2]
        found = _Rows.apply(function, *(x.flatten(0, 1) for x in rows))
        return tuple(x.unflatten(0, each) for x in found), (0,) * len(found)
