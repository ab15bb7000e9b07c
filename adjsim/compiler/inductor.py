"""Compilation of iterations by torch: on a GPU, and for tensors of types that C++ lacks.

Inductor compiles the graph of one iteration. In exact runs on a GPU it fuses only what has the same
bits in every kernel (:mod:`adjsim.compiler.exact_kernels`), there also of what precedes the first
iteration: the force at the start of a loop is that at the end of the loop before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from adjsim.compiler.replays import captured, replayed
from adjsim.compiler.to_cpp import Compiled, Part, Parts, last_inputs
from adjsim.compiler.tracing import graph_of

# The thresholds make Inductor compute intermediate values of pairs of atoms inside the loop over
# pairs, without storing them; values of single atoms are stored, see materialise().
OPTIONS: dict[str, Any] = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    "unroll_reductions_threshold": 1,
}
# Vectorised functions such as exp have other last bits than scalar ones, and vectors and threads
# add terms in other orders. Which loops are vectorised or shared depends on the program.
SCALAR: dict[str, Any] = {"cpp.simdlen": 1}
EXACT: dict[str, Any] = {**SCALAR, "cpp.threads": 1}


def compile_with_torch(
    parts: Parts,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    exact: bool,
    short: bool,
    capacity: int,
) -> tuple[Compiled, str]:
    """Compile a loop whose iterations torch runs; return it and what compiled it.

    Rows are ``short`` if they are shorter than a vector; see
    :func:`~adjsim.compiler.to_cpp.compile_to_cpp` for the other arguments.
    """
    device = constants[0].device
    on_gpu = device.type == "cuda"
    parts = on_device(parts, device)
    # An operation that only checks its operands, as torch.linalg.solve has one, waits for the GPU.
    checks = any(
        node.op == "call_function" and node.is_impure() for node in parts.body.graph.graph.nodes
    )
    options = options_of(on_gpu, exact, short)
    begin, iteration = by_inductor(parts, constants, carry, options, with_start=on_gpu and exact)
    path = "Inductor"
    if on_gpu and not checks:
        path = f"{path}, in a CUDA graph"
        capture = partial(captured, device=device)
    else:
        capture = _repeated
    return replayed(parts, begin, iteration, constants, carry, capacity, capture), path


def on_device(parts: Parts, device: torch.device) -> Parts:
    """Move what a loop makes on the CPU, such as indices, to the device of its inputs."""

    def moved(part: Part) -> Part:
        for node in part.graph.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", device)
        part.graph.recompile()
        return replace(part, baked=[x.to(device) for x in part.baked])

    return replace(parts, start=moved(parts.start), body=moved(parts.body))


def options_of(on_gpu: bool, exact: bool, short: bool) -> dict[str, Any]:
    """Return Inductor's options of a loop."""
    if not on_gpu:
        return {**OPTIONS, **(EXACT if exact else SCALAR if short else {})}
    if not exact:
        return OPTIONS
    # Importing Inductor takes a second, and most runs do not need it.
    from adjsim.compiler import exact_kernels

    return {**OPTIONS, **exact_kernels.OPTIONS}


def by_inductor(
    parts: Parts,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    options: dict[str, Any],
    with_start: bool,
) -> tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]:
    """Return a loop's start and compiled iteration; ``with_start`` compiles the start too."""
    from torch._inductor import compile as inductor

    def compiled(graph: GraphModule, *examples: Tensor) -> Callable[..., Sequence[Tensor]]:
        traced = graph_of(graph, *examples)
        like = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
        with tracing(TracingContext(like[0].fake_mode)):
            found: Any = inductor(traced, like, options=options)
        return found

    at_start, at_body = last_inputs((parts.start, parts.body), constants)
    begin: Callable[..., Sequence[Tensor]] = parts.start.graph
    if with_start:
        begin = compiled(parts.start.graph, *constants, *carry, *at_start)
    number = constants[0].clone()
    return begin, compiled(parts.body.graph, number, *carry, *constants, *at_body)


def _repeated(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that is called anew in each iteration."""
    return function
