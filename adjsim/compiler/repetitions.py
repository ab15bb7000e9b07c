"""Operations that a traced step repeats: each is left once.

Terms of a dynamics do not know of each other, so each takes differences of the same positions, and
two gradients may need the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from adjsim.compiler.torch_calls import has_effect, mutates


def merge_repetitions(graph: GraphModule) -> None:
    """Let nodes with the same operation and arguments be one node, the first of them."""
    first: dict[Any, Node] = {}
    for node in list(graph.graph.nodes):
        if _is_pure(node):
            # The name of a node is its own, and 1, 1.0 and True print differently.
            known = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.graph.erase_node(node)
    graph.recompile()


def _is_pure(node: Node) -> bool:
    """Whether the value of a node follows from its arguments, and stays as it is."""
    target: Any = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not has_effect(node)
        and not any(map(mutates, [node, *node.users]))
    )
