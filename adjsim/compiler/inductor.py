"""Compilation of loops by torch's Inductor.

It is used on a GPU, and if :mod:`adjsim.compiler` does not support an operation or finds no
compiler. The graphs of a loop are combined by torch's own ``while_loop``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing

from adjsim.compiler.rows import stored_examples
from adjsim.compiler.to_cpp import Compiled, Parts, Results, last_inputs
from adjsim.compiler.tracing import graph_of

# The thresholds make Inductor compute intermediate values of pairs of atoms inside the loop over
# pairs, without storing them; values of single atoms are stored, see materialise(). With the C++
# wrapper no iteration returns to Python.
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    "unroll_reductions_threshold": 1,
    "cpp_wrapper": True,
    # The graphs of a loop are part of the key of torch's cache, so a compiled loop may be reused in
    # other processes.
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "adjsim"},
}
# Vectorised functions such as exp have other last bits than scalar ones, and vectors and threads
# add terms in other orders. Which loops are vectorised or shared depends on the program.
SCALAR: dict[str, Any] = {"cpp.simdlen": 1}
EXACT: dict[str, Any] = {**SCALAR, "cpp.threads": 1}


def compile_with_inductor(
    parts: Parts,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    exact: bool,
    short: bool,
    capacity: int,
) -> Compiled:
    """Compile a loop by torch's Inductor.

    A loop that stores rows returns to Python after each iteration, since torch's ``while_loop``
    would copy all rows in each. So does a loop with an operation that only checks its operands, as
    ``torch.linalg.solve`` has one: Inductor does not compile it inside a ``while_loop``.

    Rows are ``short`` if they are shorter than a vector; see
    :func:`~adjsim.compiler.to_cpp.compile_to_cpp` for the other arguments.
    """
    # Importing Inductor takes a second, and most runs do not need it.
    from torch._inductor import compile as inductor

    constants_size, carry_size = len(constants), len(carry)
    start, more, body = parts.start, parts.more, parts.body
    rows = stored_examples(body.graph, carry_size)

    def loop(*values: Tensor) -> list[Tensor]:
        fixed = values[:constants_size]
        at_start, at_body = last_inputs((start, body), fixed)

        def condition(k: Tensor, *operands: Tensor) -> Tensor:
            return more.graph(k, operands[carry_size])[0]

        initial = start.graph(*values, *at_start)
        _, *out = torch.ops.higher_order.while_loop(
            condition, body.graph, tuple(initial), (*fixed, *at_body)
        )
        # Without iterations the result shares memory with the initial carry. Inductor would reuse
        # that memory if the initial carry were not an output too.
        return [*out, *initial]

    def iteration(*values: Tensor) -> list[Tensor]:
        at_body = last_inputs((start, body), values[1 + carry_size :])[1]
        return body.graph(*values, *at_body)

    checks = any(node.op == "call_function" and node.is_impure() for node in body.graph.graph.nodes)
    stepwise = bool(rows) or checks
    function, examples = loop, [*constants, *carry]
    if stepwise:
        function, examples = iteration, [constants[0].clone(), *carry, *constants]
    graph = graph_of(function, *examples)
    like = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # For rows shorter than a vector, scalar code is faster and compiles in half the time.
    options = {**OPTIONS, **(EXACT if exact else SCALAR if short else {})}
    with tracing(TracingContext(like[0].fake_mode)):
        compiled: Any = inductor(graph, like, options=options)

    def run_loop(constants: Sequence[Tensor], carry: Sequence[Tensor]) -> Results:
        return list(compiled(*constants, *carry)[:carry_size]), []

    def run_iterations(constants: Sequence[Tensor], carry: Sequence[Tensor]) -> Results:
        at_start, _ = last_inputs((start, body), constants)
        k, *state = start.graph(*constants, *carry, *at_start)
        found = [torch.empty((capacity, *x.shape), dtype=x.dtype, device=k.device) for x in rows]
        while bool(more.graph(k, constants[0])[0]):
            number = int(k)
            k, *state = compiled(k, *state, *constants)
            for row, x in zip(found, state[carry_size:], strict=True):
                row[number] = x
            del state[carry_size:]
        return state, found

    return run_iterations if stepwise else run_loop
