"""Kernels of a GPU that round alike in every graph: for exact runs.

The forward and the backward loop of an exact run compute increments of the same state in other
graphs, and Inductor fuses other operations of each to kernels. These increments have the same bits
if every operation has the same bits for the same operands, whatever is computed beside it:

* Inductor compiles operations on single elements, and moves of elements. Products are not
  contracted with sums, and functions are those of torch (``emulate_precision_casts``), and float32
  quotients are rounded as torch's are, so each operation rounds alone.
* Torch computes all others, such as sums, whose order in a fused kernel depends on the kernel.
* No pattern of several operations is replaced by other operations.

This module is imported where a loop is compiled, since it imports Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from adjsim.core.operators import operator, shapes_of

aten: Any = torch.ops.aten
# Operations, beside views, that copy elements.
MOVES = frozenset(
    {
        aten.cat,
        aten.constant_pad_nd,
        aten.copy,
        aten.expand_copy,
        aten.flip,
        aten.full,
        aten.gather,
        aten.index,
        aten.index_select,
        aten.lift_fresh_copy,
        aten.repeat,
        aten.select_scatter,
        aten.slice_scatter,
        aten._to_copy,
        aten._unsafe_index,
        aten._unsafe_view,
        torch.ops.prims.iota,
    }
)


def is_fused(target: Any) -> bool:
    """Return whether Inductor compiles an operation: one on single elements, or a move."""
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket in MOVES:
        return True
    schema = target._schema
    is_view = any(x.alias_info is not None for x in schema.returns)
    return is_view or schema.is_mutable or torch.Tag.pointwise in target.tags


@operator("index_put")
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Return what torch's operation returns.

    Inductor makes torch's own an operation in place, and loses its result where torch computes it.
    """
    return aten.index_put.default(x, indices, values, accumulate)


@shapes_of(index_put)
def _(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    return torch.empty_like(x)


class LeaveToTorch(CustomGraphPass):
    """The pass that leaves to torch what Inductor would compute in an order of its own."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and not is_fused(node.target):
                node.meta["should_fallback"] = True
                if node.target.overloadpacket in (aten.index_put, aten._unsafe_index_put):
                    node.target = index_put

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "pattern_matcher": False,
    "shape_padding": False,
    "post_grad_custom_post_pass": LeaveToTorch(),
}
