"""Loops compiled by torch's Inductor: on a GPU, and where :mod:`adjsim._cpp` does not print an
operation.

The graphs of a loop are put around torch's own ``while_loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing

from adjsim._cpp.program import Parts

# What a pair of atoms needs is computed in its loop, and not stored for each; what an atom needs is
# stored, see materialise(). With the C++ wrapper an iteration does not come back to Python. Steps
# of the noise are counted here and need no check.
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    "unroll_reductions_threshold": 1,
    "cpp_wrapper": True,
    "assert_indirect_indexing": False,
    # Graphs of loops are part of the key of torch's cache, so that a loop may be remembered across
    # processes.
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "adjsim"},
}


def by_inductor(
    parts: Parts, constants: Sequence[Tensor], carry: Sequence[Tensor], short: bool
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]:
    """The loop around torch's own ``while_loop``, compiled by torch's Inductor."""
    # Inductor takes a second to import, which most runs have no use for.
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    split, kept = len(constants), len(carry)
    start, more, body, finish = parts.start, parts.more, parts.body, parts.finish

    def whole(*values: Tensor) -> list[Tensor]:
        around = values[:split]

        def goes_on(k: Tensor, *inside: Tensor) -> Tensor:
            return more.graph(k, inside[kept])[0]

        begun = start.graph(*values, *start.baked)
        _, *out = torch.ops.higher_order.while_loop(
            goes_on, body.graph, tuple(begun), (*around, *body.baked)
        )
        # What a loop of no iterations gives lies where its input lay, which Inductor would take for
        # free if it were not asked for.
        return [*finish.graph(*out, *around, *finish.baked), *begun]

    graph = make_fx(whole, tracing_mode="fake", _allow_non_fake_inputs=True)(*constants, *carry)
    like = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Where less than a vector lies side by side, plain numbers are faster, and compile in half the
    # time.
    options = {**OPTIONS, "cpp.simdlen": 1} if short else OPTIONS
    with tracing(TracingContext(like[0].fake_mode)):
        compiled: Any = inductor(graph, like, options=options)
    return lambda constants, carry: list(compiled(*constants, *carry)[:kept])
