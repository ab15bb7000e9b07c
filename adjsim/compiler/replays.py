"""Loops whose iterations torch runs: on a GPU one iteration is captured as a CUDA graph.

A CUDA graph is a list of kernels on fixed memory, which the host launches at once, so an iteration
costs the time of its kernels. A call copies the inputs of the loop to this memory, replays the
graph as often as the loop has iterations, and copies the results. The number of iterations is known
to the host, unless it follows from the state; then the host waits for each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock

import torch
from torch import Tensor

from adjsim.compiler.rows import stored_examples
from adjsim.compiler.to_cpp import Compiled, Parts, Results, last_inputs
from adjsim.core.lists_in_loops import LoopLists

# The graphs of a device share the memory of intermediate values, so one is replayed at a time.
_replaying = RLock()
# A graph that does nothing keeps this memory while there is no other.
_pools: dict[torch.device, torch.cuda.CUDAGraph] = {}


def replayed(
    parts: Parts,
    begin: Callable[..., Sequence[Tensor]],
    iteration: Callable[..., Sequence[Tensor]],
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    capacity: int,
    capture: Callable[[Callable[[], None]], Callable[[], None]],
) -> Compiled:
    """Make a function of constants and carry that runs a loop.

    Args:
        begin, iteration: compute what the graphs of the start and of an iteration compute, from
            the same inputs.
        capacity: the number of rows that a loop stores.
        capture: turns a function without arguments into one that repeats what it did to the same
            memory: :func:`captured`, or the identity.
    """
    start, more, body = parts.start, parts.more, parts.body
    at_start, at_body = last_inputs((start, body), constants)
    carried = list(map(torch.clone, begin(*constants, *carry, *at_start)))
    fixed = list(map(torch.clone, (*constants, *at_body)))
    rows = [
        torch.empty((capacity, *x.shape), dtype=x.dtype, device=carried[0].device)
        for x in stored_examples(body.graph, len(carry))
    ]

    lists = LoopLists()

    def iterate() -> None:
        number, places = carried[0].reshape(1), {x.data_ptr() for x in carried}
        with lists.evaluated():
            found = iteration(*carried, *fixed)
        for row, x in zip(rows, found[len(carried) :], strict=True):
            row.index_copy_(0, number, x[None])
        # A result may be the carry of another field, which is overwritten first.
        after = [x.clone() if x.data_ptr() in places else x for x in found[: len(carried)]]
        _copy(carried, after)

    replay: Callable[[], None] = iterate

    def capture_anew() -> None:
        nonlocal replay
        replay = capture(iterate)

    def run(count: int) -> None:
        lists.repeat(count, carried, lambda: replay(), capture_anew)

    with torch.no_grad():
        capture_anew()

    @torch.no_grad()
    def loop(
        constants: Sequence[Tensor], carry: Sequence[Tensor], *meanwhile: Callable[[], None]
    ) -> Results:
        at_start, at_body = last_inputs((start, body), constants)
        first = begin(*constants, *carry, *at_start)
        with _replaying:
            _copy((*carried, *fixed), (*first, *constants, *at_body))
            if parts.iterations is None:
                while bool(more.graph(carried[0], fixed[0])[0]):
                    run(1)
            else:
                run(parts.iterations(int(constants[0])))
            found = [x.clone() for x in carried[1:]], [x.clone() for x in rows]
            for function in meanwhile:
                function()
            if carried[0].is_cuda:
                torch.cuda.current_stream(carried[0].device).synchronize()
        return found

    return loop


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to fixed memory, by one kernel for those of one type.

    A backward step of a liquid carries eleven tensors, most of them single numbers, and a kernel
    for each takes longer than its work.
    """
    together: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for x, new in zip(places, values, strict=True):
        if x.dtype == new.dtype and x.stride() == new.stride():
            together.setdefault(x.dtype, []).append((x, new))
        else:
            x.copy_(new)
    for pairs in together.values():
        torch._foreach_copy_([x for x, _ in pairs], [new for _, new in pairs])


def captured(iterate: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture what a function does as a CUDA graph; return a function that replays it.

    It is run once before, since kernels are loaded when they are first called. Once only: a loop of
    one step has no second iteration, whose rows lie beyond the ends of its tensors.
    """
    with _replaying, torch.cuda.device(device):
        if device not in _pools:
            _pools[device] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(_pools[device]):
                torch.zeros((), device=device)
        present, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(present)
        with torch.cuda.stream(side):
            iterate()
        present.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pools[device].pool()):
            iterate()
    return graph.replay
