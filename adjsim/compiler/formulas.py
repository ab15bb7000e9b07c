"""Formulas of pairs, printed from a trace: on vectors of C++, or on blocks of Triton.

Both languages read the tables of :mod:`adjsim.compiler.operations`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim.compiler.mathematics import FUNCTIONS, FUNCTIONS_OF_TWO
from adjsim.compiler.operations import (
    BITWISE,
    COPIES,
    CPP,
    LOGICAL,
    Dialect,
    Printer,
    filling,
    lookup,
    pointwise,
)
from adjsim.compiler.torch_calls import overwrites_its_own
from adjsim.compiler.values import UnprintableError

# Libdevice's functions, whose names are those of C, compute in the type of their operands. Triton's
# own, such as tl.exp, are less accurate for float32.
_CALLED = [*FUNCTIONS, *FUNCTIONS_OF_TWO, "fmod", "sqrt", "floor", "ceil", "trunc"]
_IN_TRITON: dict[str, Printer] = {
    **{
        name: (lambda *x, function=name: f"libdevice.{function}({', '.join(x)})")
        for name in _CALLED
    },
    "round": lambda x: f"libdevice.nearbyint({x})",
    "rsqrt": lambda x: f"1 / libdevice.sqrt({x})",
    "sigmoid": lambda x: f"1 / (1 + libdevice.exp(-{x}))",
    "abs": lambda x: f"tl.abs({x})",
    "where": lambda c, x, y: f"tl.where({c}, {x}, {y})",
    "maximum": lambda x, y: f"tl.where(({x} > {y}) | ({x} != {x}), {x}, {y})",
    "minimum": lambda x, y: f"tl.where(({x} < {y}) | ({x} != {x}), {x}, {y})",
    "relu": lambda x: f"tl.where({x} < 0, 0 * {x}, {x})",
    "logical_and": lambda x, y: f"{x} & {y}",
    "logical_or": lambda x, y: f"{x} | {y}",
    "logical_not": lambda x: f"~{x}",
    "bitwise_not": lambda x: f"~{x}",
}


def _number(x: float, dtype: torch.dtype) -> str:
    text = repr(float(x)) if math.isfinite(x) else f'float("{float(x)}")'
    # A number of Python is a float32 in some of Triton's operations.
    return f"tl.full([1, 1], {text}, {triton_type(dtype)})"


def _looked_up(values: str, place: str, count: int) -> str:
    # The place of a distance that is not finite is no place.
    within = f"({place} >= 0) & ({place} < {count})"
    return f'tl.load({values} + tl.cast({place}, tl.int64), mask={within}, other=float("nan"))'


TRITON = Dialect(
    "libdevice.",
    _number,
    _number,
    lambda name, text, condition: f"{name} = {text}",
    _looked_up,
    _IN_TRITON,
)


def triton_type(dtype: torch.dtype) -> str:
    """Return the name of a type of numbers."""
    return str(dtype).replace("torch.", "tl.")


def print_on_vectors(
    graph: GraphModule,
    dtype: torch.dtype,
    chosen: Sequence[int] | None = None,
    tables: Collection[int] = (),
) -> str:
    """Print a trace as the C++ function ``functions(s, operands, tables, results)``.

    Its results are the ``chosen`` outputs of the trace; None: all of them. ``tables`` are the
    numbers of the inputs after the first one that :func:`lookup` reads.
    """

    def inputs() -> Iterator[str]:
        vectors, pointers = count(), count()
        yield "s"
        for k in count():
            yield f"tables[{next(pointers)}]" if k in tables else f"operands[{next(vectors)}]"

    lines, results = print_formulas(graph, dtype, chosen, inputs(), CPP)
    return "\n".join(
        [
            "static inline __attribute__((always_inline))",
            "void functions(const V s, const V* operands, const REAL* const* tables, V* results) {",
            *lines,
            *(f"  results[{i}] = {x};" for i, x in enumerate(results)),
            "}",
        ]
    )


def print_formulas(
    graph: GraphModule,
    dtype: torch.dtype,
    chosen: Sequence[int] | None,
    inputs: Iterator[str],
    dialect: Dialect,
) -> tuple[list[str], list[str]]:
    """Print a trace of inputs as statements; return them and the expressions of chosen outputs."""
    lines: list[str] = []
    texts: dict[Node, str] = {}
    constants: set[Node] = set()
    outputs: Any = graph.graph.output_node().args[0]
    results = outputs if chosen is None else [outputs[i] for i in chosen]
    needed = _needed(results)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            texts[node] = next(inputs)
        elif node.op == "get_attr":
            texts[node] = _constant(graph, node, dtype, dialect)
            constants.add(node)
        elif node.op == "call_function" and node in needed:
            if node.args and node.args[0] in constants:
                texts[node] = texts[node.args[0]]
                continue
            condition = node.meta["val"].dtype == torch.bool
            text, texts[node] = _expression(node, texts, dtype, dialect), f"t{len(lines)}"
            lines.append(dialect.statement(texts[node], text, condition))
    return lines, [texts[x] for x in results]


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


def _constant(graph: GraphModule, node: Node, dtype: torch.dtype, dialect: Dialect) -> str:
    """Print a tensor of one number that the formula itself creates."""
    value = getattr(graph, str(node.target))
    fresh = all(str(user.target).startswith("aten.lift_fresh") for user in node.users)
    if not fresh or value.numel() != 1 or value.requires_grad or value.dtype == torch.bool:
        raise UnprintableError(
            f"its formulas read a tensor of shape {tuple(value.shape)} that is not a number or a "
            "parameter of pairs"
        )
    return dialect.splat(float(value), dtype)


def _expression(node: Any, texts: Mapping[Node, str], dtype: torch.dtype, dialect: Dialect) -> str:
    name, base = str(node.target).removeprefix("aten."), _base(node)
    meta = node.meta.get("val")
    if not isinstance(meta, Tensor) or meta.dtype not in (dtype, torch.bool):
        raise UnprintableError(f"its formulas use {name}")
    tensors = [x for x in node.args if isinstance(x, Node)]
    if node.target is lookup:
        values, place = tensors
        return dialect.lookup(texts[values], texts[place], values.meta["val"].numel())
    masks = [x for x in tensors if x.meta["val"].dtype == torch.bool]
    if base in (*COPIES, "expand", "view") and meta.dtype == tensors[0].meta["val"].dtype:
        return texts[tensors[0]]
    number = filling(base, node.args)
    if number is not None and meta.dtype != torch.bool:
        return dialect.splat(number, dtype)
    choose: Any = dialect.printer("where")
    one, zero = dialect.splat(1, dtype), dialect.splat(0, dtype)
    if masks and base == "_to_copy":
        return choose(texts[masks[0]], one, zero)
    if base == "masked_fill" or (base == "masked_fill_" and overwrites_its_own(node)):
        x, mask, value = node.args
        filled = texts[value] if isinstance(value, Node) else dialect.splat(value, dtype)
        return choose(texts[mask], filled, texts[x])
    # True is -1 in a vector of conditions, so conditions have no order.
    known = {"where", *LOGICAL, *BITWISE} - {"lt", "le", "gt", "ge"}
    if masks and (base not in known or (base == "where" and tensors[0] is not masks[0])):
        raise UnprintableError(f"its formulas use {name} of conditions")
    if base == "pow" and node.args[1] == 0:
        return one
    if base in ("sign", "sgn"):
        x = texts[tensors[0]]
        return choose(f"{x} > 0", one, choose(f"{x} < 0", dialect.splat(-1, dtype), x))

    def operand(x: Any) -> Any:
        number = isinstance(x, (int, float)) and base != "pow"
        return texts[x] if isinstance(x, Node) else dialect.splat(x, dtype) if number else x

    factors = node.args[2:] if base in ("add", "sub", "rsub") else ()
    arguments = [*map(operand, node.args[: len(node.args) - len(factors)]), *factors]
    operands, expression = pointwise(base, name, arguments, node.kwargs, dtype, dialect)
    return expression(*operands)
