"""What runs and solutions share inside of transforms of ``torch.func``.

Inside of ``torch.func.grad``, ``vjp``, ``jacrev`` and ``jacfwd`` a tensor is a wrapper around its
values. A computation whose derivatives do not come from its graph computes with the values, outside
of the transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from adjsim.core.state import in_transform

# Makes an error anew for each raise, since a raised one keeps its frames.
MakeError = Callable[[], Exception]

# Torch has no public functions for these.
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_wrapped(x: Tensor) -> bool:
    """Return whether a transform of torch.func has wrapped a tensor."""
    return _functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: Tensor, batched: MakeError, nested: MakeError) -> Tensor:
    """Return the values inside of a wrapper; raise the error of a batch, or of two wrappers."""
    levels = 0
    while is_wrapped(x):
        if _functorch.is_batchedtensor(x):
            raise batched()
        x, levels = _functorch.get_unwrapped(x), levels + 1
    if levels > 1:
        raise nested()
    return x


@contextmanager
def outside_transforms() -> Generator[None, None, None]:
    """Compute without the active transforms of torch.func."""
    if not in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


def has_tangent(x: Tensor) -> bool:
    """Return whether a tensor is dual: a value with a derivative forward in time."""
    return forward_ad.unpack_dual(x).tangent is not None


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents now: torch.func.jvp or a dual level is active."""
    return forward_ad._current_level >= 0


def are_forward(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors has a tangent, of the innermost transform."""
    if not in_forward_mode():
        return False
    inner = _functorch.peek_interpreter_stack()
    known = inner is None or inner.key() == _functorch.TransformType.Jvp
    return known and any(map(has_tangent, tensors))


def without_graph(x: Tensor) -> Tensor:
    """Return a tensor detached from its graph, with its tangent if it has one."""
    value, tangent = forward_ad.unpack_dual(x)
    return value.detach() if tangent is None else forward_ad.make_dual(value.detach(), tangent)


def with_tangent(x: Tensor) -> Tensor:
    """Return a tensor with a tangent, of zeros if it has none.

    Torch differentiates a product forward ten times more slowly where a factor has no tangent: it
    evaluates the shapes of the terms that are zero in Python.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x
    return x if has_tangent(x) else forward_ad.make_dual(x, torch.zeros_like(x))


class RefuseWrapped(TorchFunctionMode):
    """Refuses tensors that torch.func has wrapped, whose derivative would be lost.

    Outside of the transforms of the user, one transform may be active: a vmap of the library.
    """

    def __init__(self, error: MakeError) -> None:
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        own = _functorch.is_batchedtensor if in_transform() else lambda _: False
        if any(is_wrapped(x) and not own(x) for x in given):
            raise self.error()
        return func(*args, **(kwargs or {}))


class FunctionOfRows(torch.autograd.Function):
    """A function of rows, the first ``count`` tensors, to which each level of vmap adds rows.

    The other tensors say what else it depends on. A second derivative raises the error ``again``.
    """

    @staticmethod
    def forward(
        function: Callable[..., Any], again: MakeError, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(function(*tensors[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.again = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise ctx.again()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.again()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (function, again, count, *tensors), size = args, info.batch_size
        rows = [
            x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            for x, axis in zip(tensors[:count], in_dims[3 : 3 + count], strict=True)
        ]
        each = rows[0].shape[:2]
        given = *(x.flatten(0, 1) for x in rows), *tensors[count:]
        found = FunctionOfRows.apply(function, again, count, *given)
        return tuple(x.unflatten(0, each) for x in found), (0,) * len(found)
