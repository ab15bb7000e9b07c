"""From a traced graph to values: which operation becomes what, and which values are stored.

Stored are outputs, sums, what is joined, what the trace marks as stored (:func:`adjsim._layout.stored`), and

- single numbers, as variables;
- values that broadcast into a larger one, so that they are not computed again for each of its elements;
- values of at most the size of a state that are read more than once, unless they cost next to nothing.

All others, matrices of pairs above all, are computed where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim._cpp.operations import BITS, EXACT, INEXACT, LOGICAL, literal, power, scaled
from adjsim._cpp.values import (
    TYPES,
    Buffer,
    Counting,
    Gathered,
    Index,
    Indices,
    Joined,
    Literal,
    Pointwise,
    Reduced,
    Seen,
    Selected,
    UnprintableError,
    Value,
    View,
    laid_out,
)

CHEAP = 4
# Keyword arguments that are looked at, or that say nothing about values on the CPU.
KNOWN = {
    "alpha", "value", "rounding_mode", "min", "max", "dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking",
    "decimals", "implicit", "copy",
}  # fmt: skip


class Lowering:
    """The values of one graph.

    Args:
        graph: of tensors of known shapes on the CPU, without dead code.
        inputs: the buffers of its placeholders.
        large: values of more numbers are never stored for being read more than once.
        exact: refuse operations whose last bit is not IEEE's.
        prefix: of the names of buffers.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Buffer], large: int, exact: bool, prefix: str) -> None:
        self.large, self.exact, self.prefix = large, exact, prefix
        self.stored: list[Value] = []
        self.values: dict[Node, Any] = {}
        placeholders = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                buffer = next(placeholders)
                self.values[node] = Value(buffer.shape, buffer.dtype, buffer=buffer, strides=buffer.strides)
            elif node.op == "call_function":
                self.values[node] = self._lower(node)
            elif node.op == "output":
                self.outputs: list[Value] = [self.values[x] for x in node.args[0]]
            else:
                raise UnprintableError(node.op)

    # Storing.

    def store(self, value: Value, fill: bool = True) -> None:
        """Keep a value in memory, or in a variable."""
        value = value.source
        if value.buffer is not None or isinstance(value, Literal):
            return
        name = f"{self.prefix}{len(self.stored)}"
        if value.numel == 1:
            value.buffer = Buffer(name, value.dtype, value.shape, (0,) * len(value.shape), variable=True)
        else:
            value.buffer = laid_out(name, value.dtype, value.shape, value.strides, fill)
        self.stored.append(value)

    def _hoist(self, operand: Value, numel: int) -> None:
        source = operand.source
        if source.computed and source.numel < numel and (source.numel == 1 or cost(source) > 1):
            self.store(source)

    # Lowering.

    def _lower(self, node: Any) -> Any:
        if node.target.__class__.__name__ == "builtin_function_or_method":
            return self.values[node.args[0]][node.args[1]]
        name = str(node.target).removeprefix("aten.")
        base = name.split(".")[0]
        meta = node.meta.get("val")
        unknown = node.kwargs.keys() - KNOWN
        if unknown:
            raise UnprintableError(f"{name} with {', '.join(sorted(unknown))}")
        args = [self.values[x] if isinstance(x, Node) else x for x in node.args]
        if isinstance(meta, (list, tuple)):
            return self._pieces(base, meta, *args)
        if not isinstance(meta, Tensor):
            raise UnprintableError(name)
        if meta.device.type != "cpu" or meta.dtype not in TYPES or meta.numel() == 0:
            raise UnprintableError(f"{name} of {tuple(meta.shape)} {meta.dtype} on {meta.device}")
        value = self._value(base, name, node, meta, args)
        value.strides = value.strides or tuple(meta.stride())
        if isinstance(value, (Pointwise, Reduced)):
            self._settle(value, node)
        return value

    def _settle(self, value: Value, node: Node) -> None:
        for operand in value.operands:
            self._hoist(operand, sum_numel(value))
        if (
            value.numel == 1
            or isinstance(value, Reduced)
            or (value.numel <= self.large and len(node.users) > 1 and cost(value) >= CHEAP)
        ):
            self.store(value)

    def _value(self, base: str, name: str, node: Any, meta: Tensor, args: list[Any]) -> Value:
        shape, dtype = tuple(meta.shape), meta.dtype
        view = VIEWS.get(base)
        if view is not None:
            return View(shape, dtype, (args[0],), map=view(args[0].shape, shape, *args[1:]))
        if base in ("view", "_unsafe_view", "reshape") and dtype == args[0].dtype:
            return self._reshaped(args[0], meta)
        if base in ("clone", "_to_copy", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "to"):
            return self._copied(args[0], meta)
        if base == "as_strided":
            source, rows = node.args[0].meta["val"], torch.empty(shape, device="meta").stride()
            if shape != args[0].shape or tuple(source.stride()) != rows or tuple(args[2]) != rows or args[3:]:
                raise UnprintableError(name)
            kept = Pointwise(shape, dtype, (args[0],), strides=tuple(meta.stride()), expression=lambda x: x)
            self.store(kept)
            return kept
        if base in ("zeros_like", "zeros", "new_zeros"):
            return Literal(shape, dtype, text=literal(0, dtype))
        if base in ("ones_like", "ones", "new_ones"):
            return Literal(shape, dtype, text=literal(1, dtype))
        if base in ("full", "full_like", "new_full", "scalar_tensor"):
            number = args[0] if base == "scalar_tensor" else args[1] if base != "new_full" else args[2]
            if not isinstance(number, (int, float, bool)):
                raise UnprintableError(name)
            return Literal(shape, dtype, text=literal(number, dtype))
        if base == "arange":
            begin, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
            return Counting(shape, dtype, begin=begin, step=step)
        if base == "index_select":
            x, axis, number = args
            if number.numel != 1:
                raise UnprintableError("index_select of several")
            self.store(number)
            self.store(x)
            return Selected(shape, dtype, (x, number), axis=axis % len(x.shape))
        if base == "index":
            return self._gathered(meta, *args)
        if base in ("cat", "stack"):
            axis = args[1] % len(shape) if len(args) > 1 else 0
            parts = [self.values[part] for part in args[0]]
            if base == "stack":
                rows = (*shape[:axis], 1, *shape[axis + 1 :])
                parts = [View(rows, dtype, (part,), map=_unsqueeze((), rows, axis)) for part in parts]
            joined = Joined(shape, dtype, tuple(parts), strides=tuple(meta.stride()), axis=axis)
            self.store(joined)
            return joined
        if base in ("select_scatter", "slice_scatter"):
            return self._patched(base, meta, *args)
        if base in ("select_backward", "slice_backward"):
            zeros = Literal(shape, dtype, text=literal(0, dtype))
            return self._patched(base.replace("backward", "scatter"), meta, zeros, args[0], *args[2:])
        if base in ("sum", "mean"):
            return self._summed(base, node, meta, args)
        return self._pointwise(base, name, node, meta, args)

    def _pieces(self, base: str, meta: Sequence[Tensor], x: Value, *args: Any) -> list[Value]:
        """The results of split and unbind."""
        axis = (args[-1] if base == "unbind" and args else args[1] if len(args) > 1 else 0) % len(x.shape)
        pieces, at = [], 0
        for part in meta:
            shape = tuple(part.shape)
            if part.numel() == 0:
                raise UnprintableError(f"{base} into a part without elements")
            if base == "unbind":
                pieces.append(View(shape, part.dtype, (x,), strides=tuple(part.stride()), map=selecting(axis, at)))
                at += 1
            elif base in ("split", "split_with_sizes", "chunk"):
                pieces.append(View(shape, part.dtype, (x,), strides=tuple(part.stride()), map=slicing(axis, at, 1)))
                at += shape[axis]
            else:
                raise UnprintableError(base)
        return pieces

    def _copied(self, x: Value, meta: Tensor) -> Value:
        if x.dtype == meta.dtype:
            return View(tuple(meta.shape), meta.dtype, (x,))
        kind = TYPES[meta.dtype]
        return Pointwise(tuple(meta.shape), meta.dtype, (x,), strides=tuple(meta.stride()), expression=lambda x: f"({kind}){x}")

    def _reshaped(self, x: Value, meta: Tensor) -> Value:
        old, new = [n for n in x.shape if n > 1], [n for n in meta.shape if n > 1]
        if old == new:
            axes = [axis for axis, n in enumerate(meta.shape) if n > 1]

            def squeezed(index: Indices) -> Indices:
                rest = iter([index[axis] for axis in axes])
                return tuple(next(rest) if n > 1 else Index() for n in x.shape)

            return View(tuple(meta.shape), meta.dtype, (x,), map=squeezed)
        # Rows are one after the other in memory, so a stored copy is seen with other axes.
        flat = Pointwise(x.shape, x.dtype, (x,), strides=torch.empty(x.shape, device="meta").stride(), expression=lambda x: x)
        self.store(flat, fill=False)
        strides = torch.empty(meta.shape, device="meta").stride()

        def merged(index: Indices) -> Indices:
            total = Index()
            for i, stride in zip(index, strides, strict=True):
                total = total + i * stride
            return (total,)

        assert flat.buffer is not None
        line = Seen((x.numel,), x.dtype, (flat,), buffer=as_line(flat.buffer))
        return View(tuple(meta.shape), meta.dtype, (line,), map=merged)

    def _gathered(self, meta: Tensor, x: Value, numbers: list[Any]) -> Value:
        """Elements that tensors of whole numbers choose."""
        given = [(axis, self.values[node]) for axis, node in enumerate(numbers) if node is not None]
        axes = [axis for axis, _ in given]
        if axes != list(range(axes[0], axes[0] + len(axes))) or any(number.dtype != torch.int64 for _, number in given):
            raise UnprintableError("index by masks, or along axes that are apart")
        for value in (x, *(number for _, number in given)):
            self.store(value)
        return Gathered(tuple(meta.shape), meta.dtype, (x, *(number for _, number in given)), axis=axes[0])

    def _patched(self, base: str, meta: Tensor, x: Value, patch: Value, *args: Any) -> Value:
        """A tensor of which a part is replaced: the parts before, the patch, and the parts after it."""
        axis, shape = (args[0] if args else 0) % len(x.shape), x.shape
        if base == "select_scatter":
            start, step = args[1] % shape[axis], 1
            stop = start + 1
            kept = View((*shape[:axis], 1, *shape[axis + 1 :]), x.dtype, (patch,), map=_unsqueeze((), shape, axis))
            patch = kept
        else:
            start, stop, step = slice(*(*args[1:4], None, None, None)[:3]).indices(shape[axis])
        if step != 1:
            raise UnprintableError(base)

        def part(begin: int, end: int) -> list[Value]:
            short = (*shape[:axis], end - begin, *shape[axis + 1 :])
            return [View(short, x.dtype, (x,), map=slicing(axis, begin, 1))] if end > begin else []

        parts = (*part(0, start), patch, *part(stop, shape[axis]))
        joined = Joined(shape, meta.dtype, parts, strides=tuple(meta.stride()), axis=axis)
        self.store(joined)
        return joined

    def _summed(self, base: str, node: Node, meta: Tensor, args: list[Any]) -> Value:
        x, axes = args[0], args[1] if len(args) > 1 and args[1] else range(len(args[0].shape))
        axes = tuple(sorted({axis % len(x.shape) for axis in axes})) if x.shape else ()
        if x.dtype != meta.dtype:
            if x.dtype == torch.bool or meta.dtype in (torch.float64, torch.float32):
                x = self._copied(x, torch.empty(x.shape, dtype=meta.dtype, device="meta"))
            else:
                raise UnprintableError(f"sum of {x.dtype} to {meta.dtype}")
        if base == "mean" and meta.dtype not in (torch.float32, torch.float64):
            raise UnprintableError("mean of integers")
        count = x.numel // max(1, meta.numel())
        # A sum over all pairs takes rows first, in the loop that other sums over rows are in.
        if len([axis for axis in axes if x.shape[axis] > 1]) > 1 and x.numel > self.large:
            last = max(axis for axis in axes if x.shape[axis] > 1)
            keep = len(meta.shape) == len(x.shape)
            rows = tuple(n if axis != last else 1 for axis, n in enumerate(x.shape) if keep or axis != last)
            part = Reduced(rows, x.dtype, (x,), strides=x.strides if keep else _without(x.strides, (last,)), axes=(last,))
            self._settle(part, node)
            x, axes = part, tuple(axis - (not keep and axis > last) for axis in axes if axis != last)
        # In memory the sums lie as what is summed does.
        strides = x.strides if len(meta.shape) == len(x.shape) else _without(x.strides, axes)
        total = Reduced(tuple(meta.shape), meta.dtype, (x,), strides=tuple(strides), axes=axes)
        if base == "sum":
            return total
        self._settle(total, node)
        return Pointwise(tuple(meta.shape), meta.dtype, (total,), expression=lambda x: f"{x} / {literal(count, meta.dtype)}")

    def _pointwise(self, base: str, name: str, node: Node, meta: Tensor, args: list[Any]) -> Value:
        dtype, kwargs = meta.dtype, dict(node.kwargs)
        if base in INEXACT and meta.numel() > (1 if self.exact else self.large):
            raise UnprintableError(f"{name}, which torch computes in vectors, to a last bit of its own")
        tensors = [x for x in args if isinstance(x, Value)]
        common = dtype
        if base in LOGICAL and tensors:
            common = torch.result_type(*_examples(args)) if len(args) > 1 else tensors[0].dtype
        operands, expression = self._expression(base, name, args, kwargs, common)
        if any(isinstance(x, Value) and x.dtype not in TYPES for x in args):
            raise UnprintableError(name)
        # A condition stays one; all else is computed in the common type.
        conditions = 1 if base == "where" else 0
        cast = [
            x if i < conditions or x.dtype == common else self._copied(x, torch.empty(x.shape, dtype=common, device="meta"))
            for i, x in enumerate(operands)
        ]
        # Where no operand varies along an axis, nor does the result.
        shape, axes = tuple(meta.shape), len(meta.shape)
        varies = [any(x.varies[a - axes + len(x.shape)] for x in cast if a >= axes - len(x.shape)) for a in range(axes)]
        short = tuple(n if v else 1 for n, v in zip(shape, varies, strict=True))
        value = Pointwise(short, dtype, tuple(cast), strides=tuple(meta.stride()), expression=expression)
        if short == shape:
            return value
        self._settle(value, node)
        return View(shape, dtype, (value,), map=_expand(short, shape))

    def _expression(
        self, base: str, name: str, args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> tuple[list[Value], Callable[..., str]]:
        """The operands of an operation, and its printer."""

        def printed(function: Callable[..., str], *given: Any) -> tuple[list[Value], Callable[..., str]]:
            operands = [x for x in given if isinstance(x, Value)]

            def expression(*texts: str) -> str:
                rest = iter(texts)
                return function(*(next(rest) if isinstance(x, Value) else literal(x, dtype) for x in given))

            return operands, expression

        whole = dtype == torch.int64
        alpha = kwargs.get("alpha", 1)
        if base == "add":
            alpha = args[2] if len(args) > 2 else alpha
            return printed(lambda x, y: f"{x} + {scaled(alpha, dtype, y)}", *args[:2])
        if base == "sub":
            alpha = args[2] if len(args) > 2 else alpha
            return printed(lambda x, y: f"{x} - {scaled(alpha, dtype, y)}", *args[:2])
        if base == "rsub":
            alpha = args[2] if len(args) > 2 else alpha
            return printed(lambda x, y: f"{y} - {scaled(alpha, dtype, x)}", *args[:2])
        if base == "addcmul":
            value = kwargs.get("value", 1)
            return printed(lambda x, y, z: f"{x} + {scaled(value, dtype, y)} * {z}", *args[:3])
        if base == "addcdiv":
            value = kwargs.get("value", 1)
            return printed(lambda x, y, z: f"{x} + {scaled(value, dtype, y)} / {z}", *args[:3])
        if base == "div":
            mode = kwargs.get("rounding_mode")
            if mode is None:
                return printed(lambda x, y: f"{x} / {y}", *args[:2])
            return printed(lambda x, y: f"{mode}_quotient({x}, {y})", *args[:2])
        if base == "floor_divide":
            return printed(lambda x, y: f"floor_quotient({x}, {y})", *args[:2])
        if base == "remainder":
            return printed(lambda x, y: f"floor_rest({x}, {y})", *args[:2])
        if base == "pow" and not isinstance(args[1], Value) and isinstance(args[0], Value):
            exponent = args[1]
            text, few = power("x", exponent), args[0].numel <= (1 if self.exact else self.large)
            if (whole and exponent not in (1, 2, 3)) or (text is None and not few):
                raise UnprintableError(name)
            if text is None:
                return printed(lambda x: f"std::pow({x}, {literal(exponent, dtype)})", args[0])
            return printed(lambda x: str(power(x, exponent)), args[0])
        if base == "square":
            return printed(lambda x: f"{x} * {x}", args[0])
        if base == "clamp" or base in ("clamp_min", "clamp_max"):
            low = args[1] if len(args) > 1 and base != "clamp_max" else kwargs.get("min")
            high = args[1] if base == "clamp_max" else args[2] if len(args) > 2 else kwargs.get("max")
            bounds = [x for x in (low, high) if x is not None]

            def clamp(x: str, *limits: str) -> str:
                rest = iter(limits)
                if low is not None:
                    least = next(rest)
                    x = f"({x} < {least} || {least} != {least} ? {least} : {x})"
                if high is not None:
                    most = next(rest)
                    x = f"({x} > {most} || {most} != {most} ? {most} : {x})"
                return x

            return printed(clamp, args[0], *bounds)
        if base == "round" and not whole and len(args) == 1 and not kwargs.get("decimals"):
            return printed(EXACT["round"], args[0])
        table = LOGICAL if base in LOGICAL else BITS if base in BITS else INEXACT if base in INEXACT else EXACT
        if (
            base not in table
            or base == "round"
            or (whole and base in ("reciprocal", "sqrt", "rsqrt", "floor", "ceil", "trunc"))
        ):
            raise UnprintableError(name)
        return printed(table[base], *args)


def as_line(buffer: Buffer) -> Buffer:
    """A buffer without gaps, seen as one row."""
    return Buffer(buffer.name, buffer.dtype, (buffer.size,), (1,))


def sum_numel(value: Value) -> int:
    """The elements that are computed for a value."""
    return max([value.numel, *(x.numel for x in value.operands)]) if isinstance(value, Reduced) else value.numel


def cost(value: Value) -> int:
    """Operations for an element, up to a few."""
    if isinstance(value, View):
        return cost(value.operands[0])
    if not value.computed:
        return 0
    total = 1
    for operand in value.operands:
        total += cost(operand)
        if total >= CHEAP:
            break
    return total


def _without(strides: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(stride for axis, stride in enumerate(strides) if axis not in axes)


def _examples(args: Sequence[Any]) -> list[Any]:
    """Numbers and empty tensors of the types of operands, for torch's rules of promotion."""
    return [torch.empty((1,) * len(x.shape), dtype=x.dtype) if isinstance(x, Value) else x for x in args]


# Views: of the operand's shape, the result's shape and the arguments, to a map of indices.


def selecting(axis: int, at: int) -> Callable[[Indices], Indices]:
    return lambda index: (*index[:axis], Index(at), *index[axis:])


def slicing(axis: int, start: int, step: int) -> Callable[[Indices], Indices]:
    return lambda index: (*index[:axis], index[axis] * step + start, *index[axis + 1 :])


def _permute(old: Sequence[int], new: Sequence[int], order: Sequence[int]) -> Callable[[Indices], Indices]:
    places = [axis % len(old) for axis in order]
    return lambda index: tuple(index[places.index(axis)] for axis in range(len(old)))


def _transpose(old: Sequence[int], new: Sequence[int], a: int, b: int) -> Callable[[Indices], Indices]:
    order = list(range(len(old)))
    order[a], order[b] = order[b], order[a]
    return _permute(old, new, order)


def _squeeze(old: Sequence[int], new: Sequence[int], axes: Any = None) -> Callable[[Indices], Indices]:
    axes = range(len(old)) if axes is None else [axes] if isinstance(axes, int) else axes
    gone = {axis % len(old) for axis in axes if old[axis] == 1}

    def map(index: Indices) -> Indices:
        rest = iter(index)
        return tuple(Index() if axis in gone else next(rest) for axis in range(len(old)))

    return map


def _unsqueeze(old: Sequence[int], new: Sequence[int], axis: int) -> Callable[[Indices], Indices]:
    axis %= len(new)
    return lambda index: (*index[:axis], *index[axis + 1 :])


def _expand(old: Sequence[int], new: Sequence[int], *_: Any) -> Callable[[Indices], Indices]:
    lead = len(new) - len(old)
    return lambda index: tuple(Index() if n == 1 else i for i, n in zip(index[lead:], old, strict=True))


def _select(old: Sequence[int], new: Sequence[int], axis: int, at: int) -> Callable[[Indices], Indices]:
    axis %= len(old)
    return selecting(axis, at % old[axis])


def _slice(
    old: Sequence[int], new: Sequence[int], axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Callable[[Indices], Indices]:
    axis %= len(old)
    return slicing(axis, range(old[axis])[slice(start, end, step)].start, step)


VIEWS: dict[str, Callable[..., Callable[[Indices], Indices]]] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda old, new: _permute(old, new, range(len(old))[::-1]),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "select": _select,
    "slice": _slice,
}
