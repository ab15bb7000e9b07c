"""The results of common operations on tensors that have shapes and no values.

Torch's mode of such tensors takes a fifth of a millisecond for an operation, in which it looks for
symbolic sizes and constants. Most operations of a step compute tensors of fixed shapes from others,
and the same shapes come again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Operations without side effects, whose results are tensors on the device of their operands.
COMMON = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "_to_copy", "abs", "add", "addcmul", "alias", "as_strided", "atan2", "bitwise_and",
        "bitwise_not", "bitwise_or", "cat", "ceil", "clamp", "clone", "cos", "detach", "div", "eq",
        "erf", "exp", "expand", "floor", "ge", "gt", "index_select", "le", "log", "logical_and",
        "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "ne", "neg", "ones_like",
        "permute", "pow", "reciprocal", "round", "rsqrt", "rsub", "select", "sigmoid", "sign",
        "sin", "slice", "split", "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sum", "t",
        "tanh", "transpose", "unbind", "unsqueeze", "view", "where", "zeros_like",
    )
)  # fmt: skip
# Operations without operands, on the device that they name.
FILLS = frozenset(
    getattr(torch.ops.aten, name) for name in ("full", "ones", "scalar_tensor", "zeros")
)
# Arguments that are no tensors.
_PLAIN = (int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format)


def common_result(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: FakeTensorMode
) -> Any:
    """Return the result of a common operation, or NotImplemented for another operation.

    Tensors among the arguments are those of the mode ``fakes``.
    """
    if not _is_common(func):
        return NotImplemented
    options = dict(kwargs)
    named, fills = options.pop("device", None), func.overloadpacket in FILLS
    devices = _devices([*args, *options.values()])
    if fills != (named is not None) or len(devices) != (0 if fills else 1) or None in devices:
        return NotImplemented
    device = torch.device(named) if fills else devices.pop()
    with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(fakes):
        if func.is_view:
            found = func(*args, **options)
        else:
            described = tuple(map(_described, args)), tuple(map(_described, options.items()))
            shape, strides, dtype = _result(func, *described, fills)
            found = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if isinstance(found, Tensor):
        return FakeTensor(fakes, found, device)
    return type(found)(FakeTensor(fakes, x, device) for x in found)


def without_gradient(x: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that does not require grad."""
    found: Any = NotImplemented
    if isinstance(x, FakeTensor):
        found = common_result(torch.ops.aten.detach.default, (x,), {}, x.fake_mode)
    return x.detach() if found is NotImplemented else found


def _devices(values: Sequence[Any]) -> set[torch.device | None]:
    """Return the devices of tensors among arguments, and None for an argument that is uncommon."""
    found = set[torch.device | None]()
    for x in values:
        if isinstance(x, FakeTensor):
            found.add(x.fake_device if x.constant is None else None)
        elif isinstance(x, list | tuple):
            found |= _devices(x)
        elif not isinstance(x, _PLAIN):
            found.add(None)
    return found


@cache
def _is_common(func: Any) -> bool:
    # Some overloads consist of other operations, which are evaluated instead.
    return func.overloadpacket in COMMON | FILLS and not func._can_decompose()


def _described(x: Any) -> Any:
    """Return the parts of an argument that determine the shape of a result."""
    if isinstance(x, Tensor):
        return Tensor, x.shape, x.stride(), x.dtype
    return (list, *map(_described, x)) if isinstance(x, list | tuple) else (type(x), x)


@lru_cache(4096)
def _result(
    func: Any, arguments: tuple[Any, ...], options: tuple[Any, ...], fills: bool
) -> tuple[torch.Size, Any, torch.dtype]:
    """Return shape, strides and dtype of the result of an operation of described arguments."""
    named = dict(map(_example, options)) | ({"device": "meta"} if fills else {})
    found = func(*map(_example, arguments), **named)
    return found.shape, found.stride(), found.dtype


def _example(description: Any) -> Any:
    kind, *rest = description
    if kind is Tensor:
        shape, strides, dtype = rest
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return list(map(_example, rest)) if kind is list else rest[0]
