"""Values that depend on the constants of a loop alone.

Some operators of torch are not part of an iteration (:class:`~adjsim.compiler.calls.Operators`).
Torch evaluates them before the loop begins, and their values are inputs of the loop. So are
transposed matrices by which an iteration multiplies, whose rows are then contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim.compiler.products import MATRIX_PRODUCTS


def transposed(x: Tensor) -> Tensor:
    """Copy the transpose of a matrix, with contiguous rows.

    The transpose of a matrix of one row is contiguous already, and no inputs of a loop may share
    memory.
    """
    return x.mT.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class LoopInvariant:
    """An operator whose first argument is the constant ``number``, and an example of its value.

    ``symmetric`` is whether its value is a symmetric matrix.
    """

    operator: Any
    number: int
    settings: tuple[Any, ...]
    example: Tensor = field(compare=False)
    symmetric: bool = False

    def value(self, constants: Sequence[Tensor]) -> Tensor:
        """Evaluate it for the constants of the loop."""
        return self.operator(constants[self.number], *self.settings)


def hoist_invariants(graph: GraphModule, constants: Sequence[Node]) -> list[LoopInvariant]:
    """Turn values of constants alone into the last inputs of a graph, and return them."""
    _name_transposes(graph, constants)
    found: dict[LoopInvariant, Node] = {}
    *_, after = graph.graph.find_nodes(op="placeholder")
    for node in [node for node in graph.graph.nodes if "invariant" in node.meta]:
        source, *settings = node.args
        if source not in constants:
            continue
        example = node.meta["val"]
        symmetric = node.meta.get("symmetric", False)
        number = constants.index(source)
        once = LoopInvariant(node.target, number, tuple(settings), example, symmetric)
        if once not in found:
            with graph.graph.inserting_after(after):
                found[once] = after = graph.graph.placeholder(f"once_{len(found)}")
            after.meta["val"] = example
        node.replace_all_uses_with(found[once])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(found)


def _name_transposes(graph: GraphModule, constants: Sequence[Node]) -> None:
    """Call :func:`transposed` for the transposed constants by which a graph multiplies."""
    for node in [node for node in graph.graph.nodes if node.target in MATRIX_PRODUCTS]:
        factor = node.args[-1]
        if factor.target is not torch.ops.aten.t.default:
            continue
        source = factor.args[0]
        if source in constants:
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(transposed, (source,))
            made.meta |= {"val": transposed(factor.args[0].meta["val"]), "invariant": True}
            node.replace_input_with(node.args[-1], made)
