"""The results of common operations on tensors that have shapes and no values.

Torch's mode of such tensors takes a fifth of a millisecond for an operation, in which it looks for
symbolic sizes and constants. Most operations of a step compute tensors of fixed shapes from others,
and the same shapes come again and again.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations on numbers that have the same place in their operands, which are broadcast.
ELEMENTWISE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "_to_copy", "abs", "add", "addcmul", "atan2", "bitwise_and", "bitwise_not", "bitwise_or",
        "ceil", "clamp", "clone", "cos", "div", "eq", "erf", "exp", "floor", "ge", "gt", "le",
        "log", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "ne",
        "neg", "ones_like", "pow", "reciprocal", "round", "rsqrt", "rsub", "sigmoid", "sign", "sin",
        "sqrt", "sub", "tanh", "where", "zeros_like",
    )
)  # fmt: skip
# Other operations without side effects, whose results are on the device of their operands.
COMMON = ELEMENTWISE | frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "cat", "detach", "expand", "index", "index_select", "new_zeros",
        "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "sum", "t",
        "transpose", "unbind", "unsqueeze", "view",
    )
)  # fmt: skip
# Examples with fewer elements are evaluated, in milliseconds.
_SMALL = 2**22
# Operations without operands, on the device that they name.
FILLS = frozenset(
    getattr(torch.ops.aten, name) for name in ("arange", "full", "ones", "scalar_tensor", "zeros")
)
# One changes the dtype of memory, and the others permute or swap their operands first.
_UNCOMMON = frozenset(
    {torch.ops.aten.view.dtype, torch.ops.aten.pow.Scalar, torch.ops.aten.rsub.Tensor}
)
# Arguments that are no tensors.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class ShapeMode(FakeTensorMode):
    """Torch's mode of tensors that have shapes and no values, with the settings of its default.

    The constructor of torch reads these settings from Dynamo, whose import takes a second.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.enter_stack = []
        self.fake_tensor_converter = _Converter()
        self.in_kernel_invocation = False
        # A tensor that no operation has made is a constant of the graph.
        self.allow_non_fake_inputs = self.allow_fallback_kernels = True
        self.allow_meta = self._allow_unsafe_data_ptr_access = True
        self.allow_scalar_outputs = self.propagate_real_tensors = False
        self.cache_enabled, self.cache_crosscheck_enabled = True, False
        self.static_shapes, self.shape_env = True, None
        self._stack_trace, self._stack = traceback.StackSummary(), None
        self.nt_tensor_id_counter = self.nt_tensor_id_initial_count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})


class _Converter(FakeTensorConverter):
    """Makes tensors of the same shape; torch's converter imports Dynamo, to name their source."""

    def from_real_tensor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, fake_mode: FakeTensorMode, t: Tensor, make_constant: bool = False, **options: Any
    ) -> FakeTensor:
        if not _is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, **options)
        if (found := self._get_memo(t)) is not None:
            return found
        with no_dispatch():
            storage = torch.empty(
                t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="meta"
            )
            shaped = storage.as_strided(t.shape, t.stride(), t.storage_offset())
            found = FakeTensor(
                fake_mode,
                shaped.requires_grad_(t.requires_grad),
                t.device,
                constant=t if make_constant else None,
            )
        if make_constant:
            self.add_constant_storage_mapping(found)
        self.set_tensor_memo(t, found)
        return found


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is a storage with a shape and strides, and no subclass or wrapper."""
    return (
        type(x) in {Tensor, nn.Parameter}
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_conj() or x.is_neg())
        and not is_functorch_wrapped_tensor(x)
        and not torch._is_functional_tensor(x)
    )


def common_result(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: FakeTensorMode
) -> Any:
    """Return the result of a common operation, or NotImplemented for another operation.

    Tensors among the arguments are those of the mode ``fakes``.
    """
    if not _is_common(func):
        return NotImplemented
    args, options = (_without_values(x, fakes) for x in (list(args), dict(kwargs)))
    named, fills = options.pop("device", None), func.overloadpacket in FILLS
    devices = _devices([*args, *options.values()])
    if named is not None or fills:
        devices.add(torch.device(named or "cpu"))
    if len(devices) != 1 or None in devices or _has_masks(func, args):
        return NotImplemented
    device = devices.pop()
    # Operators of this library have arguments whose meaning may change.
    find = _results.__wrapped__ if func.namespace == "adjsim" else _results
    # An offset that as_strided is given is not relative to that of its argument.
    given = func is torch.ops.aten.as_strided.default and args[3:] not in ([], [None])
    first = args[0].storage_offset() if func.is_view and not given else 0
    with torch._C.DisableTorchFunction(), no_dispatch():
        made = [
            FakeTensor(fakes, _meta(shape, strides, first + offset, dtype), device)
            for shape, strides, offset, dtype in find(
                func,
                tuple(map(_described, args)),
                tuple(map(_described, options.items())),
                fills,
                torch.get_default_dtype(),
            )
        ]
    returns = func._schema.returns
    if len(returns) == 1 and not isinstance(returns[0].type, torch.ListType):
        return made[0]
    return made if len(returns) == 1 else tuple(made) or None


def without_gradient(x: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that does not require grad."""
    found: Any = NotImplemented
    if isinstance(x, FakeTensor):
        found = common_result(torch.ops.aten.detach.default, (x,), {}, x.fake_mode)
    return x.detach() if found is NotImplemented else found


def _without_values(x: Any, fakes: FakeTensorMode) -> Any:
    """Return an argument with tensors of the mode in the place of constants."""
    if isinstance(x, dict):
        return {k: _without_values(v, fakes) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_without_values(v, fakes) for v in x]
    return fakes.from_tensor(x) if isinstance(x, Tensor) and _is_plain(x) else x


def _has_masks(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation selects by values, which determine the shape of its result."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return any(x.dtype in {torch.bool, torch.uint8} for x in args[1] if x is not None)


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
    if func.namespace == "adjsim":
        return not func._schema.is_mutable
    if func in _UNCOMMON:
        return False
    # Some overloads consist of other operations, which are evaluated instead.
    return func.overloadpacket in COMMON | FILLS and not func._can_decompose()


def _described(x: Any) -> Any:
    """Return the parts of an argument that determine the shape of a result."""
    if isinstance(x, Tensor):
        return Tensor, x.shape, x.stride(), x.dtype
    return (list, *map(_described, x)) if isinstance(x, list | tuple) else (type(x), x)


@lru_cache(4096)
def _results(
    func: Any,
    arguments: tuple[Any, ...],
    options: tuple[Any, ...],
    fills: bool,
    default: torch.dtype,
) -> list[tuple[Any, Any, Any, Any]]:
    """Return shape, strides, offset and dtype of each result of an operation.

    Fills, and fractions of integers, have the default dtype, so it is an argument.
    Small examples are evaluated, since torch's functions of shapes alone import SymPy and Dynamo.
    """
    if func is torch.ops.aten.as_strided.default:
        shape, strides, *offset = map(_example, arguments[1:])
        first = 0 if offset in ([], [None]) else offset[0]
        return [(torch.Size(shape), tuple(strides), first, arguments[0][-1])]
    if func.overloadpacket in ELEMENTWISE:
        examples = [_example(x) for x in arguments]
        first, *others = torch.broadcast_tensors(*(x for x in examples if isinstance(x, Tensor)))
        named = dict(map(_example, options))
        strides = _common_strides([first, *others])
        if (layout := named.pop("memory_format", torch.preserve_format)) != torch.preserve_format:
            strides = torch.empty(first.shape, device="meta", memory_format=layout).stride()
        return [(first.shape, strides, 0, func(*map(_ones, arguments), **named).dtype)]
    is_small = sum(map(_size, arguments)) < _SMALL
    device = "cpu" if is_small and func.namespace != "adjsim" else "meta"
    named = dict(_example(x, device) for x in options) | ({"device": device} if fills else {})
    found = func(*(_example(x, device) for x in arguments), **named)
    tensors = [found] if isinstance(found, Tensor) else found or []
    return [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in tensors]


def _size(description: Any) -> int:
    """Return the number of elements of the tensors of a described argument."""
    kind, *rest = description
    if kind is Tensor:
        return rest[0].numel()
    return sum(map(_size, rest)) if kind is list else 0


def _common_strides(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the strides of a new tensor whose elements are computed from those of others.

    A dense tensor keeps its strides. Otherwise axes are sorted as torch's iterator sorts them: from
    the last on, an axis moves before axes of larger strides, and strides of zero say nothing.
    """
    shape = tensors[0].shape
    if len(tensors) == 1 and _is_dense(tensors[0]):
        return tensors[0].stride()
    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        place = i
        for k in reversed(range(i)):
            compared = _compared(tensors, order[k], order[place])
            if compared > 0:
                order[k], order[place] = order[place], order[k]
                place = k
            elif compared < 0:
                break
    strides, size = [0] * len(shape), 1
    for axis in order:
        strides[axis] = size
        size *= max(shape[axis], 1)
    return tuple(strides)


def _compared(tensors: Sequence[Tensor], first: int, second: int) -> int:
    """Return a positive number if an axis has larger strides than another, 0 if none is larger."""
    for x in tensors:
        a, b = x.stride(first), x.stride(second)
        if a and b and (a != b or x.shape[first] > x.shape[second]):
            return 1 if a >= b else -1
    return 0


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each in a place of its own."""
    size = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1:
            if stride != size:
                return False
            size *= length
    return True


def _meta(shape: torch.Size, strides: Any, offset: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this layout without values."""
    if not offset:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    size = 1 + offset + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    return torch.empty(size, dtype=dtype, device="meta").as_strided(shape, strides, offset)


def _example(description: Any, device: str = "meta") -> Any:
    kind, *rest = description
    if kind is Tensor:
        shape, strides, dtype = rest
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        # Indices of an example are valid ones.
        return made if dtype.is_floating_point else made.zero_()
    return [_example(x, device) for x in rest] if kind is list else rest[0]


def _ones(description: Any) -> Any:
    """Return an argument with a single number, one, in each tensor."""
    kind, *rest = description
    if kind is Tensor:
        shape, _, dtype = rest
        return torch.ones([1] * len(shape), dtype=dtype)
    return rest[0]
