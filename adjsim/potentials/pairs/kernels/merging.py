"""Evaluation of a force and its product in one pass.

A backward step needs the force at a position before it knows the vector of the product there, so it
asks for the force and then for the product, which computes the force again. In a trace both are
known, and the force is taken from the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import legalize_graph

from adjsim.potentials.pairs.kernels.kernel import FORCE, KERNELS, PRODUCT, PairInputs, pairs

_OPERATOR = pairs._opoverload
# The arguments other than the vector.
_SAME = tuple(i for i, name in enumerate(PairInputs._fields) if name != "vector")


def merge_pairs(graph: GraphModule) -> None:
    """Take forces from the products at the same position, unless the vector depends on them."""
    calls = [node for node in graph.graph.nodes if node.target is _OPERATOR]
    products = [node for node in calls if _mode(node) == PRODUCT]
    changed = False
    for force in [node for node in calls if _mode(node) == FORCE]:
        for product in products:
            if _same(force, product) and not _depends(product, force):
                force.replace_all_uses_with(product)
                graph.graph.erase_node(force)
                changed = True
                break
    if changed:
        legalize_graph(graph)
        graph.recompile()


def _mode(node: Node) -> str:
    return KERNELS[str(node.args[-1])].spec.mode


def _same(force: Node, product: Node) -> bool:
    kernels = KERNELS[str(force.args[-1])], KERNELS[str(product.args[-1])]
    return kernels[0].shares_force(kernels[1]) and all(
        _origin(force.args[i]) == _origin(product.args[i]) for i in _SAME
    )


def _origin(x: Any) -> Any:
    """Return the node of which an argument is a copy without history."""
    if isinstance(x, (list, tuple)):
        return [_origin(y) for y in x]
    while isinstance(x, Node) and x.target is torch.ops.aten.detach.default:
        x = x.args[0]
    return x


def _depends(node: Node, on: Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for before in todo.pop().all_input_nodes:
            if before is on:
                return True
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return False
