"""Operations that torch's vmap has unrolled: one for all rows in the place of one for each.

For an operation without a rule, the vmap of rows of cotangents takes each row, and stacks results.
The 25 rows of a Jacobian are then 25 operations, each of which is traced, printed and compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from adjsim.compiler.torch_calls import has_effect
from adjsim.compiler.tracing import inserted

_ATEN = torch.ops.aten


def batch_rows(graph: GraphModule) -> None:
    """Replace stacks of what is computed alike from each row of a tensor by operations on it."""
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.stack.default):
        rows, *axis = node.args
        if len(rows) > 1 and not any(axis):
            with graph.graph.inserting_before(node):
                found = _Rows(graph, len(rows)).together(rows)
            if found is not None:
                node.replace_all_uses_with(found)
                graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code(has_effect)
    graph.recompile()


class _Rows:
    """The operations on all of ``count`` rows, made as they are needed."""

    def __init__(self, graph: GraphModule, count: int) -> None:
        self._graph, self._count = graph, count
        self._known: dict[tuple[Node, ...], Node | None] = {}

    def together(self, nodes: Sequence[Node]) -> Node | None:
        """Return the value whose rows are these nodes, if they are computed alike from rows."""
        key = tuple(nodes)
        if key not in self._known:
            self._known[key] = self._made(nodes)
        return self._known[key]

    def _made(self, nodes: Sequence[Node]) -> Node | None:
        first: Any = nodes[0]
        if any((x.target, repr(x.kwargs)) != (first.target, repr(first.kwargs)) for x in nodes):
            return None
        if first.target is _ATEN.select.int:
            source = first.args[0]
            is_whole = source.meta["val"].shape[0] == self._count
            alike = all(x.args == (source, 0, i) for i, x in enumerate(nodes))
            return source if is_whole and alike else None
        if not _is_pointwise(first):
            return None
        ndim, args, rows = first.meta["val"].ndim, list[Any](), list[bool]()
        for each in zip(*(x.args for x in nodes), strict=True):
            arg = each[0]
            rows.append(any(x is not arg for x in each[1:]) and isinstance(arg, Node))
            if rows[-1]:
                arg = self.together(each)
                # Rows with fewer axes would be broadcast along others.
                if arg is None or arg.meta["val"].ndim != ndim + 1:
                    return None
            elif any(repr(x) != repr(arg) for x in each[1:]):
                # 1, 1.0 and True print differently.
                return None
            args.append(arg)
        return inserted(self._graph, first.target, *args, **first.kwargs) if any(rows) else None


def _is_pointwise(node: Node) -> bool:
    target: Any = node.target
    is_operation = isinstance(target, torch._ops.OpOverload)
    return is_operation and torch.Tag.pointwise in target.tags and not target._schema.is_mutable
