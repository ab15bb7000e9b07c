"""Compilation of a loop of steps to one function of tensors.

A :class:`LoopSpec` defines the loop by its parts. Each part is traced by running it on tensors that
record their operations. The graphs are printed as one C++ function, which a compiler takes about a
second to compile (:mod:`adjsim.compiler.to_cpp`), and which calls torch for operations that are not
printed. On a GPU torch's Inductor compiles the graphs (:mod:`adjsim.compiler.inductor`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from adjsim.compiler.along import SCAN_OPERATORS, SORT_OPERATORS
from adjsim.compiler.batched import batch_rows
from adjsim.compiler.calls import Operators
from adjsim.compiler.decompositions import decompositions
from adjsim.compiler.factors import FACTOR_OPERATORS
from adjsim.compiler.inductor import compile_with_torch
from adjsim.compiler.invariants import hoist_invariants
from adjsim.compiler.refusals import CompileError, explained
from adjsim.compiler.repetitions import merge_repetitions
from adjsim.compiler.systems import SYSTEM_OPERATORS
from adjsim.compiler.to_cpp import Part, Parts, compile_to_cpp
from adjsim.compiler.torch_calls import mutates, overwrites_its_own
from adjsim.compiler.tracing import graph_of
from adjsim.compiler.values import TYPES, UnprintableTypeError
from adjsim.compiler.versions import untested_torch

# Tracing and Inductor's options are global to the process, so one thread compiles at a time.
_compiling = RLock()

Constants = TypeVar("Constants")
Carry = TypeVar("Carry")


@dataclass(frozen=True)
class LoopSpec(Generic[Constants, Carry]):
    """The functions that define a loop.

    The constants do not change in the loop. The carry is passed from one iteration to the next.
    Both are named tuples (of tuples and dictionaries) of tensors.

    Attributes:
        start: runs before the first iteration and returns its number ``k`` and the initial carry.
        more: returns, for ``k`` and the number of steps, whether to run another iteration.
        body: runs one iteration and returns the next ``k``, the carry and the tensors that the
            iteration stores.
        iterations: returns their number for a number of steps; None if it follows from the state.
    """

    start: Callable[[Constants, Carry], tuple[Tensor, Carry]]
    more: Callable[[Tensor, Tensor], Tensor]
    body: Callable[[Constants, Tensor, Carry], tuple[Tensor, Carry, Sequence[Tensor]]]
    iterations: Callable[[int], int] | None = None


class CompiledLoop(NamedTuple, Generic[Constants, Carry]):
    """A compiled loop.

    Attributes:
        function: of constants and carry, returns the final carry and the stored rows.
        path: what compiled it, "C++" (with the operations that torch evaluates) or "Inductor".
        source: the file of its C++ source; None for Inductor.
    """

    function: Callable[[Constants, Carry], tuple[Carry, list[Tensor]]]
    path: str
    source: Path | None


def compile_loop(
    spec: LoopSpec[Constants, Carry],
    within: Callable[[Constants], AbstractContextManager[Constants]],
    constants: Constants,
    carry: Carry,
    *,
    exact: bool,
    short: bool,
    what: str,
    capacity: int = 0,
    operators: Sequence[Operators] = (),
) -> CompiledLoop[Constants, Carry]:
    """Compile a loop to a function of its constants and carry, of which there are examples.

    The function returns the final carry and the stored rows. The first constant is the number of
    steps.

    Args:
        within: makes the context in which the loop is traced, from traced constants; the context
            returns the constants to use.
        exact: whether results must have the same bits in every loop.
        short: whether contiguous rows are shorter than a vector.
        capacity: the largest number of steps of a loop that stores rows.
        operators: those that have ways of their own, beside the ones for linear systems.
    """
    constants_list, carry_list = leaves(constants), leaves(carry)
    constants_size, carry_size = len(constants_list), len(carry_list)

    def start(*values: Tensor) -> list[Tensor]:
        with within(filled(constants, iter(values[:constants_size]))) as traced:
            k, first = spec.start(traced, filled(carry, iter(values[constants_size:])))
        return [k, *leaves(first)]

    def more(k: Tensor, count: Tensor) -> list[Tensor]:
        return [spec.more(k, count)]

    def body(k: Tensor, *values: Tensor) -> list[Tensor]:
        with within(filled(constants, iter(values[carry_size:]))) as traced:
            k, after, rows = spec.body(traced, k, filled(carry, iter(values[:carry_size])))
        return [k, *leaves(after), *rows]

    untested = untested_torch()
    try:
        with _compiling:
            number, fixed = constants_list[0].clone(), slice(1 + carry_size, None)
            # Torch's own sort exchanges equal numbers, and LAPACK has other last bits.
            others = () if exact else (SORT_OPERATORS, FACTOR_OPERATORS)
            tables = (SYSTEM_OPERATORS, SCAN_OPERATORS, *others, *operators)
            decomposed = decompositions(exact)
            initial = (*constants_list, *carry_list)
            with _uncollected():
                parts = Parts(
                    start=_trace(tables, decomposed, start, slice(constants_size), *initial),
                    more=_trace(tables, decomposed, more, slice(0), number, constants_list[0]),
                    body=_trace(
                        tables, decomposed, body, fixed, number, *carry_list, *constants_list
                    ),
                    iterations=spec.iterations,
                )
            settings = (parts, constants_list, carry_list, exact)
            try:
                threads = torch.get_num_threads()
                with _uncollected():
                    compiled, by_torch, source = compile_to_cpp(*settings, threads, capacity)
                path = f"C++, and torch for {by_torch}" if by_torch else "C++"
            except UnprintableTypeError as reason:
                if constants_list[0].device.type == "cpu":
                    warnings.warn(
                        f"compile=True: {what} reads or records {reason}, which is not printed as "
                        "C++, so torch's Inductor compiles the loop, which can take a minute. Keep "
                        "and record real and imaginary parts (torch.view_as_real) instead.",
                        stacklevel=2,
                    )
                compiled, by = compile_with_torch(*settings, short, capacity)
                path, source = f"{by} ({reason})", None
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(explained(error, what, untested)) from error
    if untested is not None:
        warnings.warn(untested, stacklevel=2)

    def loop(
        constants: Constants, carry: Carry, *meanwhile: Callable[[], None]
    ) -> tuple[Carry, list[Tensor]]:
        values, stored = compiled(leaves(constants), leaves(carry), *meanwhile)
        return filled(carry, iter(values)), stored

    return CompiledLoop(loop, path, source)


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of nested tuples and dictionaries, in order.

    It is run for every loop. In a profile, torch's function for any tree took a tenth of a short
    run.
    """
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        found += (part,) if isinstance(part, Tensor) else leaves(part)
    return found


def filled(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same nesting of other tensors, in the order of :func:`leaves`."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: filled(part, tensors) for key, part in tree.items()}
    parts = [filled(part, tensors) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same nesting of a function's values."""
    return filled(tree, map(function, leaves(tree)))


def clone(x: Tensor) -> Tensor:
    """Copy a tensor, since no inputs or outputs of a loop may share memory."""
    return x.detach().clone(memory_format=torch.contiguous_format)


@contextmanager
def _uncollected() -> Generator[None]:
    """Pause the collection of reference cycles, which takes a third of the time of a trace.

    Nearly all that is made meanwhile is still in use at the end, so that there is little to find.
    The switch is global to the process; one thread compiles at a time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _trace(
    tables: Sequence[Operators],
    decomposed: dict[Any, Callable[..., Any]],
    function: Callable[..., list[Tensor]],
    constants: slice,
    *inputs: Tensor,
) -> Part:
    """Trace one part of a loop separately, since autograd does not differentiate the loop.

    ``constants`` says which of the inputs are the constants of the loop.
    """
    graph = graph_of(function, *inputs, decompositions=decomposed)
    if any(mutates(node) and not overwrites_its_own(node) for node in graph.graph.nodes):
        # Assignments to parts of a tensor, as operations that return a new one.
        without = torch.func.functionalize(graph, remove="mutations")
        graph = graph_of(without, *inputs, decompositions=decomposed)
    merge_repetitions(graph)
    batch_rows(graph)
    for table in tables:
        table.prepare(graph)
    baked = _lift(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")[: len(inputs)]
    return Part(graph, baked, hoist_invariants(graph, placeholders[constants]))


def _lift(graph: Any) -> list[Tensor]:
    """Turn the captured constants of a graph into inputs, and return them."""
    constants, (*_, after) = [], graph.graph.find_nodes(op="placeholder")
    for node in graph.graph.find_nodes(op="get_attr"):
        value = clone(getattr(graph, node.target))
        # Constants of types that are not printed are cast to wider ones, and cast back in the loop.
        other = torch.float32 if value.dtype.is_floating_point else torch.int64
        known = value.dtype in TYPES or value.is_complex()
        constants.append(value if known else value.to(other))
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(f"constant_{len(constants)}")
            after.meta["val"] = constants[-1]
        used = after
        if not known:
            with graph.graph.inserting_before(node):
                cast = torch.ops.aten._to_copy.default
                used = graph.graph.call_function(cast, (after,), {"dtype": value.dtype})
                used.meta["val"] = value
        node.replace_all_uses_with(used)
        graph.graph.erase_node(node)
    graph.recompile()
    return constants
