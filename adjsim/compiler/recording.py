"""Recording of common operations in a trace, in a fraction of the tracer's time.

Torch's tracer takes up to a millisecond for an operation. It looks for symbolic sizes, constants
and subclasses, and derives the shape of the result in Python. Most operations of a step compute
tensors of fixed shapes from others, and the same shapes come again and again. Such operations are
recorded here; the tracer takes all others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.fx import Node, Proxy

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


class _LeftError(Exception):
    """Raised for an operation that is left to the tracer."""


class _Recording:
    """The recording of a trace on fake tensors of ``fakes``, by the tracer's ``mode``."""

    def __init__(self, mode: Any, fakes: FakeTensorMode) -> None:
        self.tracer, self.decompositions, self.fakes = mode.tracer, mode.decomposition_table, fakes
        # The tracer's own way, by which an operation that is left to it is recorded.
        self.leave = mode.__torch_dispatch__

    def record(self, _: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation of fake tensors, and return its results."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func in self.decompositions or not _is_common(func):
            return self.leave(func, types, args, kwargs)
        fills = func.overloadpacket in FILLS
        kwargs = kwargs or {}
        device = kwargs.get("device")
        options = {name: x for name, x in kwargs.items() if name != "device"}
        try:
            if fills != (device is not None):
                raise _LeftError
            devices = {device} if fills else set()
            nodes = tuple(self._node(x, devices) for x in args)
            named = {
                name: x if name == "device" else self._node(x, devices)
                for name, x in kwargs.items()
            }
            if len(devices) != 1:
                raise _LeftError
        except _LeftError:
            return self.leave(func, types, args, kwargs)
        (device,) = devices
        with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(self.fakes):
            if func.is_view:
                metas = func(*args, **options)
            else:
                described = tuple(map(_described, args)), tuple(map(_described, options.items()))
                shape, strides, dtype = _result(func, *described, fills)
                metas = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        name = func.overloadpacket.__name__
        node = self.tracer.graph.create_node("call_function", func, nodes, named, name)
        if isinstance(metas, Tensor):
            return self._tracked(metas, device, node)
        found = []
        for at, meta in enumerate(metas):
            part = self.tracer.graph.create_node("call_function", operator.getitem, (node, at))
            found.append(self._tracked(meta, device, part))
        node.meta["val"] = type(metas)(self._slot(x).proxy.node.meta["val"] for x in found)
        return type(metas)(found)

    def _node(self, x: Any, devices: set[torch.device]) -> Any:
        """Return an argument of a node, and add the devices of the tensors in it."""
        if type(x) in _PLAIN:
            return x
        if type(x) in (list, tuple):
            return [self._node(y, devices) for y in x]
        if type(x) is FakeTensor and x.constant is None:
            slot = self._slot(x)
            if slot is not None and slot.constant is None:
                devices.add(x.fake_device)
                return slot.proxy.node
        raise _LeftError

    def _tracked(self, meta: Tensor, device: torch.device, node: Node) -> FakeTensor:
        """Return the result that a node has, from a tensor of its shape."""
        from torch.fx.experimental.proxy_tensor import _ProxyTensor

        node.meta["val"] = FakeTensor(self.fakes, meta, device)
        found = FakeTensor(self.fakes, meta, device)
        self.tracer.tensor_tracker[found] = _ProxyTensor(Proxy(node, self.tracer), None)
        return found

    def _slot(self, x: FakeTensor) -> Any:
        return self.tracer.tensor_tracker.get(x)


def recording(mode: Any, fakes: FakeTensorMode) -> Callable[..., Any]:
    """Return the method by which the mode of a trace records operations, in place of its own."""
    # Torch calls no other functions than methods.
    return MethodType(_Recording(mode, fakes).record, mode)


@cache
def _is_common(func: Any) -> bool:
    # Some overloads write to an argument, and others consist of operations that are recorded.
    common = func.overloadpacket in COMMON | FILLS
    return common and not func._schema.is_mutable and not func._can_decompose()


def _described(x: Any) -> Any:
    """Return all of an argument on which the shape of a result depends."""
    if isinstance(x, Tensor):
        return Tensor, x.shape, x.stride(), x.dtype
    return (list, *map(_described, x)) if isinstance(x, (list, tuple)) else (type(x), x)


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
