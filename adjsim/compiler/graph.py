"""Lowering of a traced graph to values, and the choice of stored values.

The stored values are outputs, sums, concatenated tensors, tensors that the trace marks
(:func:`adjsim.core.layout.materialise_contiguous`), and

- scalars, as variables;
- values that broadcast into a larger one, so that they are not computed again for each of its
  elements;
- values of about the size of a state that are read more than once, unless they are very cheap.

All other values, such as matrices of pairs, are computed where they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from adjsim.compiler.calls import Call, Called
from adjsim.compiler.halves import is_halved
from adjsim.compiler.operations import (
    COPIES,
    LOGICAL,
    SLOW,
    filling,
    is_inexact,
    literal,
    pointwise,
    refuses,
)
from adjsim.compiler.products import FEW, MatrixProduct, sum_of_products
from adjsim.compiler.scatters import Scatter
from adjsim.compiler.sums import runs_of
from adjsim.compiler.torch_calls import (
    Region,
    TorchCall,
    is_printable,
    mutates,
    overwrites_its_own,
    schedule,
)
from adjsim.compiler.values import (
    CHEAP,
    TYPES,
    Arange,
    Buffer,
    Joined,
    Literal,
    Pointwise,
    Reduced,
    UnprintableError,
    Value,
    View,
    dense_copy,
    make_buffer,
    row_major,
)
from adjsim.compiler.views import (
    SPLITS,
    VIEWS,
    Checked,
    expanded,
    gathered,
    indexed,
    reshaped,
    scattered,
    split,
    unsqueezed,
)

# Keyword arguments that are handled, or that do not affect values on the CPU.
KNOWN = {
    "alpha", "value", "rounding_mode", "min", "max", "dtype", "layout", "device", "pin_memory",
    "memory_format", "non_blocking", "decimals", "implicit", "copy",
}  # fmt: skip


def lowered(graph: GraphModule, inputs: Sequence[Buffer], large: int, exact: bool) -> Lowering:
    """Lower a graph, in which torch evaluates what is not printed."""
    found = Lowering(graph, inputs, large, exact)
    unprinted, more = list[Node](), found.unprinted
    while more:
        unprinted += more
        found = Lowering(graph, inputs, large, exact, unprinted)
        more = found.unprinted
    found.unprinted = unprinted
    return found


class Lowering:
    """The values of a graph of tensors of known shapes on the CPU, without dead code.

    ``inputs`` are the buffers of its placeholders, and ``by_torch`` the operations that torch
    evaluates.

    Attributes:
        large: values with more elements are not stored merely for being read more than once.
        exact: whether sums must have the same bits in every program.
        stored: the stored values, in the order of the graph.
        checked: the constants that are indices.
        unprinted: the operations that have no C++ translation, which torch has to evaluate
            (:func:`lowered`).
    """

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Buffer],
        large: int,
        exact: bool,
        by_torch: Collection[Node] = (),
    ) -> None:
        self.large, self.exact = large, exact
        self.stored: list[Value] = []
        self.calls: list[Call] = []
        self.checked: list[Checked] = []
        self.unprinted: list[Node] = []
        self.values: dict[Node, Any] = {}
        placeholders = iter(inputs)
        order: Iterable[Any] = graph.graph.nodes
        if by_torch:
            order = schedule(graph, set(by_torch))
        for node in order:
            if isinstance(node, Region):
                self._add_region(node)
            elif node.op == "placeholder":
                x = next(placeholders)
                self.values[node] = Value(x.shape, x.dtype, buffer=x, strides=x.strides)
            elif node.op == "call_function":
                self._try(node)
            elif node.op == "output":
                results: Any = node.args[0]
                self.outputs: list[Value] = [self.values[x] for x in results]
            else:
                raise UnprintableError(node.op)

    def _try(self, node: Node) -> None:
        """Lower an operation, or note that it is not printed and go on."""
        of_others = any(not is_printable(x) for x in node.all_input_nodes if x in self.unprinted)
        try:
            if of_others:
                raise UnprintableError(str(node.target).removeprefix("aten."))
            self.values[node] = self._lower(node)
        except UnprintableError:
            if mutates(node) and not overwrites_its_own(node):
                raise
            self.unprinted.append(node)
            meta = node.meta.get("val")
            if isinstance(meta, Tensor):
                shape, strides = tuple(meta.shape), tuple(meta.stride())
                buffer = make_buffer("", meta.dtype, shape, strides, fill=False)
                self.values[node] = Value(shape, meta.dtype, (), buffer, strides)

    def _add_region(self, region: Region) -> None:
        before = next((call for call in reversed(self.calls) if isinstance(call, TorchCall)), None)
        token = before.outputs[-1] if before else None
        values = [self.values[node] for node in region.printed]
        found = self._add_call(TorchCall(region, values, token, self.store))
        for node, value in zip(region.results, found, strict=False):
            self.values[node] = value

    def store(self, value: Value, fill: bool = True) -> None:
        """Store a value in a buffer, or in a variable if it is a scalar."""
        value = value.source
        if value.buffer is not None or isinstance(value, Literal):
            return
        name, shape = f"b{len(self.stored)}", value.shape
        if value.numel == 1:
            value.buffer = Buffer(name, value.dtype, shape, (0,) * len(shape), variable=True)
        else:
            value.buffer = make_buffer(name, value.dtype, shape, value.strides, fill)
        self.stored.append(value)

    def _store_operand(self, operand: Value, numel: int) -> None:
        source = operand.source
        if source.computed and source.numel < numel and (source.numel == 1 or source.cost > 1):
            self.store(source)

    def _lower(self, node: Any) -> Any:
        if node.target.__class__.__name__ == "builtin_function_or_method":
            return self.values[node.args[0]][node.args[1]]
        args: list[Any] = list(map_arg(node.args, lambda x: self.values[x]))
        meta = node.meta.get("val")
        if "call" in node.meta:
            single = isinstance(meta, Tensor)
            call = node.meta["call"](args, [meta] if single else meta, self.store)
            outputs = self._add_call(call)
            return outputs[0] if single else outputs
        name = str(node.target).removeprefix("aten.")
        base = name.split(".")[0]
        if overwrites_its_own(node):
            base = base.removesuffix("_")
        unknown = node.kwargs.keys() - KNOWN
        if unknown:
            raise UnprintableError(f"{name} with {', '.join(sorted(unknown))}")
        if isinstance(meta, (list, tuple)):
            if base not in SPLITS:
                raise UnprintableError(name)
            return split(base, meta, *args)
        if not isinstance(meta, Tensor):
            raise UnprintableError(name)
        if meta.device.type != "cpu" or meta.dtype not in TYPES:
            raise UnprintableError(f"{name} of {tuple(meta.shape)} {meta.dtype} on {meta.device}")
        if meta.numel() == 0:
            # No element is ever read, so the operation need not be known.
            text = literal(0, meta.dtype)
            return Literal(tuple(meta.shape), meta.dtype, strides=tuple(meta.stride()), text=text)
        value = self._value(base, name, node, meta, args)
        value.origin = value.origin or f"{name}, {node.meta.get('line', '')}"
        value.strides = value.strides or tuple(meta.stride())
        if isinstance(value, (Pointwise, Reduced)):
            self._store_if_needed(value, node)
        return value

    def _add_call(self, call: Call) -> tuple[Called, ...]:
        self.calls.append(call)
        for output in call.outputs:
            assert output.buffer is not None
            # Names that do not differ between processes keep compiled libraries usable.
            output.buffer.name = f"r{len(self.stored)}"
            self.stored.append(output)
        return call.outputs

    def _product(self, name: str, node: Node, meta: Tensor, args: list[Any]) -> Value:
        if node.kwargs:
            raise UnprintableError(f"{name} with {', '.join(node.kwargs)}")
        *bias, left, right = args
        if not left.shape[1]:
            product: Value = Literal(tuple(meta.shape), meta.dtype, text=literal(0, meta.dtype))
        elif left.shape[1] <= FEW and meta.dtype.is_floating_point:
            product = sum_of_products(left, right, meta, self.store)
            for factor in product.operands:
                self._store_operand(factor, product.numel)
        else:
            product = self._add_call(MatrixProduct(left, right, meta, self.store))[0]
        if not bias:
            return product
        return self._pointwise("add", name, node, meta, [product, bias[0]])

    def _store_if_needed(self, value: Value, node: Node) -> None:
        for operand in value.operands:
            self._store_operand(operand, value.work)
        if (
            value.numel == 1
            or isinstance(value, Reduced)
            or (value.numel <= self.large and len(node.users) > 1 and value.cost >= CHEAP)
        ):
            self.store(value)

    def _value(self, base: str, name: str, node: Any, meta: Tensor, args: list[Any]) -> Value:
        shape, dtype = tuple(meta.shape), meta.dtype
        view = VIEWS.get(base)
        if view is not None:
            return View(shape, dtype, (args[0],), map=view(args[0].shape, *args[1:]))
        if base in ("view", "_unsafe_view", "reshape") and dtype == args[0].dtype:
            return reshaped(self.store, args[0], meta)
        if base == "copy":
            source = self._cast(args[1], dtype)
            return View(shape, dtype, (source,), map=expanded(source.shape))
        if base in COPIES:
            if isinstance(args[0], (int, float)):
                # vmap writes a number of an operation as a copy of the number.
                return Literal(shape, dtype, text=literal(args[0], dtype))
            return self._converted(args[0], meta)
        if base == "as_strided":
            source, rows = node.args[0].meta["val"], row_major(shape)
            whole = source.is_contiguous() and source.numel() == meta.numel()
            if not whole or tuple(args[2]) != rows or args[3:]:
                raise UnprintableError(name)
            if source.stride() != rows or shape != args[0].shape:
                return reshaped(self.store, args[0], meta)
            kept = dense_copy(args[0], meta.stride())
            self.store(kept)
            return kept
        number = filling(base, args)
        if number is not None:
            return Literal(shape, dtype, text=literal(number, dtype))
        if base == "arange":
            begin, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
            return Arange(shape, dtype, begin=begin, step=step)
        if base == "index_select":
            x, axis, number = args
            axis %= len(x.shape)
            return gathered(self.store, self.checked, meta, x, axis, [number], wraps=False)
        if base == "index":
            return indexed(self.store, self.checked, meta, *args)
        if base in ("index_put", "_unsafe_index_put"):
            x, indices, numbers, *accumulate = args
            scatter = Scatter(x, indices, numbers, any(accumulate), meta, self.store)
            return self._add_call(scatter)[0]
        if base in ("cat", "stack"):
            return self._joined(base, node, meta, args)
        if base in ("select_scatter", "slice_scatter"):
            return scattered(self.store, base, meta, *args)
        if base in ("select_backward", "slice_backward"):
            zeros = Literal(shape, dtype, text=literal(0, dtype))
            scatter = base.replace("backward", "scatter")
            return scattered(self.store, scatter, meta, zeros, args[0], *args[2:])
        if base in ("mm", "addmm"):
            return self._product(name, node, meta, args)
        if base == "sum":
            return self._reduced(meta, args)
        return self._pointwise(base, name, node, meta, args)

    def _joined(self, base: str, node: Any, meta: Tensor, args: list[Any]) -> Value:
        shape, dtype = tuple(meta.shape), meta.dtype
        axis = args[1] % len(shape) if len(args) > 1 else 0
        parts: list[Value] = []
        for source, part in zip(node.args[0], args[0], strict=True):
            if not part.numel:
                continue
            if base == "stack":
                row = (*shape[:axis], 1, *shape[axis + 1 :])
                part = View(row, dtype, (part,), map=unsqueezed(part.shape, axis))
            # A concatenation that is read here alone needs no memory of its own.
            merged = isinstance(part, Joined) and part.axis == axis and len(source.users) == 1
            parts += part.operands if merged else (part,)
        joined = Joined(shape, dtype, tuple(parts), strides=meta.stride(), axis=axis)
        self.store(joined)
        return joined

    def _cast(self, x: Value, dtype: torch.dtype) -> Value:
        return self._converted(x, torch.empty(x.shape, dtype=dtype, device="meta"))

    def _converted(self, x: Value, meta: Tensor) -> Value:
        if x.dtype == meta.dtype:
            return View(tuple(meta.shape), meta.dtype, (x,))
        to_integer = meta.dtype == torch.int64 and x.dtype.is_floating_point
        convert = "integer" if to_integer else f"({TYPES[meta.dtype]})"
        value = dense_copy(x, meta.stride())
        return replace(value, dtype=meta.dtype, expression=lambda x: f"{convert}({x})")

    def _reduced(self, meta: Tensor, args: list[Any]) -> Value:
        x, axes = args[0], args[1] if len(args) > 1 and args[1] else range(len(args[0].shape))
        axes = tuple(sorted({axis % len(x.shape) for axis in axes})) if x.shape else ()
        if x.dtype != meta.dtype:
            if x.dtype == torch.bool or meta.dtype in (torch.float64, torch.float32):
                x = self._cast(x, meta.dtype)
            else:
                raise UnprintableError(f"sum of {x.dtype} to {meta.dtype}")
        if x.numel == 0:
            return Literal(tuple(meta.shape), meta.dtype, text=literal(0, meta.dtype))
        if all(x.shape[axis] == 1 for axis in axes):
            # A stored sum would keep the loop of its readers from computing it.
            drop = len(meta.shape) < len(x.shape)
            found = VIEWS["squeeze"](x.shape, axes) if drop else tuple
            return View(tuple(meta.shape), meta.dtype, (x,), map=found)
        # The sums have the memory order of their operand.
        dropped = () if len(meta.shape) == len(x.shape) else axes
        strides = tuple(stride for axis, stride in enumerate(x.strides) if axis not in dropped)
        run = runs_of(x, axes, self.exact)
        found = Reduced(tuple(meta.shape), meta.dtype, (x,), None, strides, axes=axes, run=run)
        return replace(found, halved=is_halved(found))

    def _pointwise(self, base: str, name: str, node: Node, meta: Tensor, args: list[Any]) -> Value:
        tensors, common = [x for x in args if isinstance(x, Value)], meta.dtype
        if base in LOGICAL and tensors:
            # Torch promotes the types of example operands.
            examples = [
                torch.empty((1,) * len(x.shape), dtype=x.dtype) if isinstance(x, Value) else x
                for x in args
            ]
            common = torch.result_type(*examples) if len(args) > 1 else tensors[0].dtype
        operands, expression = pointwise(base, name, args, node.kwargs, common)
        # The condition of `where` stays bool; all other operands are computed in the common type.
        conditions = 1 if base == "where" else 0
        cast = [
            x if i < conditions or x.dtype == common else self._cast(x, common)
            for i, x in enumerate(operands)
        ]
        # Along an axis where no operand varies, the result is computed once and expanded.
        shape, axes = tuple(meta.shape), len(meta.shape)
        varies = [any(x.varies[a] for x in cast if -a <= len(x.shape)) for a in range(-axes, 0)]
        short = tuple(n if v else 1 for n, v in zip(shape, varies, strict=True))
        value = Pointwise(
            short,
            meta.dtype,
            tuple(cast),
            strides=meta.stride(),
            expression=expression,
            refuses=refuses(base, node.kwargs, common),
            # Vectors and single numbers have other last bits. So a value of more than one reader is
            # stored, or a maximum would not be equal to its element.
            own_cost=CHEAP if is_inexact(base, node.args) and not self.exact else 1,
            slow=2 if is_inexact(base, node.args) else int(base in SLOW),
        )
        if short == shape:
            return value
        self._store_if_needed(value, node)
        return View(shape, meta.dtype, (value,), map=expanded(short))
