"""The formulas of a pair potential, traced and printed as C++ on vectors of pairs.

A formula is elementwise in the squared distance and in the operands of a pair: numbers, entries of
tables by species, and numbers of either atom. It is traced on tensors with one element a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from adjsim.compiler.operations import BITWISE, COPIES, LOGICAL, filling, pointwise
from adjsim.compiler.tracing import graph_of
from adjsim.compiler.values import UnprintableError, Value
from adjsim.potentials.pairs.kernels.kernel import ATOM, NUMBER, TABLE

# The number of the second atom of a pair, where that of the first is of the kind ATOM.
OTHER = "OTHER"
# An operand of a pair: its name, and 1 for the number of the second atom, 0 for any other.
Slot = tuple[str, int]
Formula = Callable[[Tensor, Mapping[Slot, Tensor]], Tensor]
_BOOLEAN = {"where", *LOGICAL, *BITWISE}


# The length of a row of pairs, and of the axes of a matrix of pairs.
_ROW, _AXIS = 8, 11


def trace_elementwise(
    formulas: Sequence[Formula], kinds: Mapping[Slot, str], dtype: torch.dtype
) -> GraphModule:
    """Trace formulas, and refuse those that depend on the shape of their operands.

    A kernel evaluates one pair at a time. So the formulas have to be the same for a row of pairs
    and for a matrix of pairs with axes of another length, where numbers are scalars.
    """
    shape = {NUMBER: (), TABLE: (_AXIS, _AXIS), ATOM: (_AXIS, 1), OTHER: (_AXIS,)}
    shapes = [(_AXIS, _AXIS), *(shape[kind] for kind in kinds.values())]
    row, matrix = (trace(formulas, list(kinds), dtype, shapes=x) for x in (None, shapes))
    if printed(row, dtype) != printed(matrix, dtype):
        raise UnprintableError("its formulas depend on the shape of their operands")
    return row


def trace(
    formulas: Sequence[Formula],
    slots: Sequence[Slot],
    dtype: torch.dtype,
    *,
    differentiated: Formula | None = None,
    wanted: Sequence[Slot] = (),
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> GraphModule:
    """Trace formulas, and the derivatives of one of them with respect to the operands wanted.

    The derivative with respect to a number of each atom is the sum over both: that of the second
    has the two exchanged. Without ``shapes`` of squared distances and operands there is one row of
    pairs.
    """

    def derivative(s: Tensor, values: dict[Slot, Tensor], slot: Slot) -> Tensor:
        assert differentiated is not None
        leaves = {key: x.detach().requires_grad_() for key, x in values.items()}
        with torch.enable_grad():
            total = differentiated(s, leaves).sum()
        if not total.requires_grad:
            return torch.zeros_like(s)
        (found,) = torch.autograd.grad(total, leaves[slot], allow_unused=True)
        return torch.zeros_like(s) if found is None else found.expand(s.shape)

    def outputs(s: Tensor, *operands: Tensor) -> list[Tensor]:
        values = dict(zip(slots, operands, strict=True))
        with torch.no_grad():
            found = [formula(s, values) for formula in formulas]
            for slot in wanted:
                grad, second = derivative(s, values, slot), (slot[0], 1)
                if second in values:
                    exchanged = {
                        key: values.get((key[0], 1 - key[1]), x) for key, x in values.items()
                    }
                    grad = grad + derivative(s, exchanged, second)
                found.append(grad)
        for x in found:
            if x.ndim > s.ndim or torch.broadcast_shapes(x.shape, s.shape) != s.shape:
                raise UnprintableError("its formulas are not elementwise")
        return found

    # A kernel may be made while a step is traced, which must not see this trace.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        examples = [
            torch.full(shape, 1.1, dtype=dtype, device="cpu")
            for shape in shapes or [(_ROW,)] * (1 + len(slots))
        ]
        try:
            graph = graph_of(outputs, *examples)
        except UnprintableError:
            raise
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UnprintableError(f"its formulas could not be traced: {reason}") from error
    graph.graph.eliminate_dead_code()
    # The derivative of abs is not finite at the distances of masked pairs.
    if any("sgn" in str(node.target) for node in graph.graph.nodes):
        raise UnprintableError("its formulas have derivatives of abs")
    return graph


def printed(graph: GraphModule, dtype: torch.dtype, chosen: Sequence[int] | None = None) -> str:
    """Print a trace as the C++ function ``functions(s, operands, results)``.

    Its results are the ``chosen`` outputs of the trace; None: all of them.
    """
    lines: list[str] = []
    texts: dict[Node, str] = {}
    constants: set[Node] = set()
    inputs = chain(["s"], (f"operands[{k}]" for k in count()))
    outputs: Any = graph.graph.output_node().args[0]
    results = outputs if chosen is None else [outputs[i] for i in chosen]
    needed = _needed(results)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            texts[node] = next(inputs)
        elif node.op == "get_attr":
            texts[node] = _constant(graph, node)
            constants.add(node)
        elif node.op == "call_function" and node in needed:
            if node.args and node.args[0] in constants:
                texts[node] = texts[node.args[0]]
                continue
            kind = "Mask" if node.meta["val"].dtype == torch.bool else "V"
            text, texts[node] = _expression(node, texts, dtype), f"t{len(lines)}"
            lines.append(f"  const {kind} {texts[node]} = {text};")
    lines += [f"  results[{i}] = {texts[x]};" for i, x in enumerate(results)]
    return "\n".join(
        [
            "static inline __attribute__((always_inline))",
            "void functions(const V s, const V* operands, V* results) {",
            *lines,
            "}",
        ]
    )


def _needed(results: Sequence[Node]) -> set[Node]:
    """Collect the nodes that results depend on; a tensor like another needs only its shape."""
    found, todo = set[Node](), list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if filling(_base(node), node.args) is None:
                todo.extend(node.all_input_nodes)
    return found


def _base(node: Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _constant(graph: GraphModule, node: Node) -> str:
    """Print a tensor of one number that the formula itself creates."""
    value = getattr(graph, str(node.target))
    fresh = all(str(user.target).startswith("aten.lift_fresh") for user in node.users)
    if not fresh or value.numel() != 1 or value.requires_grad or value.dtype == torch.bool:
        raise UnprintableError(
            f"its formulas read a tensor of shape {tuple(value.shape)} that is not a number or a "
            "parameter of pairs"
        )
    return f"splat({float(value)!r})"


def _expression(node: Any, texts: Mapping[Node, str], dtype: torch.dtype) -> str:
    name, base = str(node.target).removeprefix("aten."), _base(node)
    meta = node.meta.get("val")
    if not isinstance(meta, Tensor) or meta.dtype not in (dtype, torch.bool):
        raise UnprintableError(f"its formulas use {name}")
    tensors = [x for x in node.args if isinstance(x, Node)]
    masks = [x for x in tensors if x.meta["val"].dtype == torch.bool]
    if base in (*COPIES, "expand", "view") and meta.dtype == tensors[0].meta["val"].dtype:
        return texts[tensors[0]]
    number = filling(base, node.args)
    if number is not None and meta.dtype != torch.bool:
        return f"splat({float(number)!r})"
    if masks and base == "_to_copy":
        return f"{texts[masks[0]]} ? splat(1) : splat(0)"
    ordered = base in ("lt", "le", "gt", "ge")  # True is -1 in a vector of conditions.
    if masks and (
        ordered or base not in _BOOLEAN or (base == "where" and tensors[0] is not masks[0])
    ):
        raise UnprintableError(f"its formulas use {name} of conditions")
    if base == "pow" and node.args[1] == 0:
        return "splat(1)"
    if base == "sign":
        x = texts[tensors[0]]
        return f"{x} > 0 ? splat(1) : {x} < 0 ? splat(-1) : {x}"
    # Values by identity, with their texts.
    known: dict[int, tuple[Value, str]] = {}

    def operand(x: Any) -> Any:
        if isinstance(x, Node):
            value, text = Value((8,), x.meta["val"].dtype), texts[x]
        elif isinstance(x, (int, float)) and base != "pow":
            value, text = Value((8,), dtype), f"splat({float(x)!r})"
        else:
            return x
        known[id(value)] = value, text
        return value

    factors = node.args[2:] if base in ("add", "sub", "rsub") else ()
    arguments = [*map(operand, node.args[: len(node.args) - len(factors)]), *factors]
    operands, expression = pointwise(base, name, arguments, node.kwargs, dtype)
    return expression(*(known[id(x)][1] for x in operands))
