"""The formulas of a pair potential, traced to be printed as C++ on vectors of pairs.

A formula is elementwise in the squared distance and in the operands of a pair: numbers, entries of
tables by species, and numbers of either atom. It is traced on tensors with one element a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from adjsim.compiler import FUNCTIONS, UnprintableError, graph_of, lookup, print_on_vectors
from adjsim.potentials.pairs.kernels.kernel import ATOM, FUNCTION, NUMBER, TABLE

# The number of the second atom of a pair, where that of the first is of the kind ATOM.
OTHER = "OTHER"
# An operand of a pair: its name, and 1 for the number of the second atom, 0 for any other.
Slot = tuple[str, int]
# A function is an operand that returns its coefficients at places.
Formula = Callable[[Tensor, Mapping[Slot, Any]], Tensor]
# The length of a row of pairs, and of the axes of a matrix of pairs.
_ROW, _AXIS = 8, 11
# The number of rows of pairs that are tried with their atoms exchanged.
_TRIALS = 24


def is_costly(graph: GraphModule) -> bool:
    """Return whether formulas call functions such as exp, which take longer than to find a pair."""
    names = (getattr(node.target, "__name__", "") for node in graph.graph.nodes)
    return any(name.partition(".")[0] in FUNCTIONS for name in names)


def is_symmetric(
    graph: GraphModule,
    slots: Sequence[Slot],
    dtype: torch.dtype,
    lengths: Mapping[Slot, int],
    chosen: Sequence[int],
) -> bool:
    """Return whether the chosen formulas have the same bits for exchanged atoms of a pair.

    It is tried with random numbers of both signs and of several sizes, so that conditions are true
    for some pairs and false for others: ``(k q_i) q_j`` and ``(k q_j) q_i`` differ for many.
    """
    if not any(end for _, end in slots):
        return True
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, signs: bool) -> Tensor:
        size, sign = torch.rand(2, count, generator=generator, dtype=torch.float64)
        size = 10.0 ** (3 * size - 1.5)
        return torch.where((sign < 0.25) & signs, -size, size).to(dtype)

    def same() -> bool:
        signs = bool(torch.rand((), generator=generator) < 0.5)
        values = {x: drawn(lengths.get(x, _ROW), signs) for x in slots}
        exchanged = [values.get((name, 1 - end), values[name, end]) for name, end in slots]
        s = drawn(_ROW, False)
        results = graph(s, *values.values()), graph(s, *exchanged)
        pairs = [[x[k] for x in results] for k in chosen]
        return all(bool(((x == y) | (x.isnan() & y.isnan())).all()) for x, y in pairs)

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        return all(same() for _ in range(_TRIALS))


def trace_elementwise(
    formulas: Sequence[Formula],
    kinds: Mapping[Slot, str],
    dtype: torch.dtype,
    lengths: Mapping[Slot, int],
) -> GraphModule:
    """Trace formulas, and refuse those that depend on the shape of their operands.

    A kernel evaluates one pair at a time. So the formulas have to be the same for a row of pairs
    and for a matrix of pairs with axes of another length, where numbers are scalars.
    """
    shape = {NUMBER: (), TABLE: (_AXIS, _AXIS), ATOM: (_AXIS, 1), OTHER: (_AXIS,)}
    shapes = {slot: shape[kind] for slot, kind in kinds.items() if kind != FUNCTION}
    row, _ = trace(formulas, list(kinds), dtype, lengths)
    matrix, _ = trace(formulas, list(kinds), dtype, lengths, shapes=shapes)
    tables = [k for k, slot in enumerate(kinds) if slot in lengths]
    if print_on_vectors(row, dtype, tables=tables) != print_on_vectors(
        matrix, dtype, tables=tables
    ):
        raise UnprintableError("its formulas depend on the shape of their operands")
    return row


def trace(
    formulas: Sequence[Formula],
    slots: Sequence[Slot],
    dtype: torch.dtype,
    lengths: Mapping[Slot, int],
    *,
    differentiated: Formula | None = None,
    wanted: Sequence[Slot] = (),
    shapes: Mapping[Slot, tuple[int, ...]] | None = None,
) -> tuple[GraphModule, list[int]]:
    """Trace formulas, and the derivatives of one of them with respect to the operands wanted.

    The derivative with respect to a number of each atom is the sum over both: that of the second
    has the two exchanged. That with respect to a function is zero here, and is followed, after all
    derivatives, by each place at which the function is read and the derivative there. Without
    ``shapes`` of operands of a matrix of pairs there is one row of pairs.

    Args:
        lengths: the number of coefficients of each function.

    Returns:
        The trace, and for each place of functions the number of the function among those wanted.
    """
    places = list[int]()

    def leaves_of(values: Mapping[Slot, Tensor]) -> dict[Slot, Any]:
        return {
            key: partial(lookup, x) if key in lengths else x.detach().requires_grad_()
            for key, x in values.items()
        }

    def slopes(s: Tensor, leaves: Mapping[Slot, Any], of: Callable[[], list[Tensor]]) -> Any:
        assert differentiated is not None
        with torch.enable_grad():
            total = differentiated(s, leaves).sum()
        zeros = [torch.zeros_like(s) for _ in of()]
        if not total.requires_grad:
            return zeros
        found = torch.autograd.grad(total, of(), allow_unused=True)
        return [
            zero if x is None else x.expand(s.shape) for zero, x in zip(zeros, found, strict=True)
        ]

    def derivative(s: Tensor, values: Mapping[Slot, Tensor], slot: Slot) -> Tensor:
        leaves = leaves_of(values)
        (found,) = slopes(s, leaves, lambda: [leaves[slot]])
        return found

    def at_places(s: Tensor, values: Mapping[Slot, Tensor], slot: Slot) -> list[Tensor]:
        read: list[tuple[Tensor, Tensor]] = []

        def recorded(place: Tensor) -> Tensor:
            with torch.no_grad():
                place = place.expand(s.shape)
                leaf = lookup(values[slot], place)
            read.append((place, leaf.requires_grad_()))
            return read[-1][1]

        found = slopes(s, {**leaves_of(values), slot: recorded}, lambda: [x for _, x in read])
        return [x for (place, _), slope in zip(read, found, strict=True) for x in (place, slope)]

    def outputs(s: Tensor, *operands: Tensor) -> list[Tensor]:
        values, last = dict(zip(slots, operands, strict=True)), list[Tensor]()
        plain = {key: partial(lookup, x) if key in lengths else x for key, x in values.items()}
        places.clear()
        with torch.no_grad():
            found = [formula(s, plain) for formula in formulas]
            for number, slot in enumerate(wanted):
                if slot in lengths:
                    found.append(torch.zeros_like(s))
                    last += at_places(s, values, slot)
                    places.extend([number] * (len(last) // 2 - len(places)))
                    continue
                grad, second = derivative(s, values, slot), (slot[0], 1)
                if second in values:
                    exchanged = {
                        key: values.get((key[0], 1 - key[1]), x) for key, x in values.items()
                    }
                    grad = grad + derivative(s, exchanged, second)
                found.append(grad)
        found += last
        # Torch's function of this name imports SymPy.
        for x in found:
            if x.ndim > s.ndim or np.broadcast_shapes(x.shape, s.shape) != s.shape:
                raise UnprintableError("its formulas are not elementwise")
        return found

    # A kernel may be made while a step is traced, which must not see this trace.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        known = {slot: (length,) for slot, length in lengths.items()} | dict(shapes or {})
        sizes = [known.get(slot, (_ROW,)) for slot in slots]
        examples = [
            torch.full(shape, 1.1, dtype=dtype, device="cpu")
            for shape in ((_ROW,) if shapes is None else (_AXIS, _AXIS), *sizes)
        ]
        try:
            graph = graph_of(outputs, *examples, by_shape=False)
        except UnprintableError:
            raise
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UnprintableError(f"its formulas could not be traced: {reason}") from error
    graph.graph.eliminate_dead_code()
    # The derivative of abs is not finite at the distances of masked pairs.
    if any("sgn" in str(node.target) for node in graph.graph.nodes):
        raise UnprintableError("its formulas have derivatives of abs")
    return graph, places
