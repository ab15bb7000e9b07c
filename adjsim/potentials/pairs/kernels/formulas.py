"""The formulas of a pair potential, traced to be printed as C++ on vectors of pairs.

A formula is elementwise in the squared distance and in the operands of a pair: numbers, entries of
tables by species, and numbers of either atom. It is traced on tensors with one element a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from adjsim.compiler import UnprintableError, graph_of, print_on_vectors
from adjsim.potentials.pairs.kernels.kernel import ATOM, NUMBER, TABLE

# The number of the second atom of a pair, where that of the first is of the kind ATOM.
OTHER = "OTHER"
# An operand of a pair: its name, and 1 for the number of the second atom, 0 for any other.
Slot = tuple[str, int]
Formula = Callable[[Tensor, Mapping[Slot, Tensor]], Tensor]
# The length of a row of pairs, and of the axes of a matrix of pairs.
_ROW, _AXIS = 8, 11


def trace_elementwise(
    formulas: Sequence[Formula], kinds: Mapping[Slot, str], dtype: torch.dtype
) -> GraphModule:
    """Trace formulas, and refuse those that depend on the shape of their operands.

    A kernel evaluates one pair at a time. So the formulas have to be the same for a row of pairs
    and for a matrix of pairs with axes of another length, where numbers are scalars.
    """
    shape = {NUMBER: (), TABLE: (_AXIS, _AXIS), ATOM: (_AXIS, 1), OTHER: (_AXIS,)}
    shapes = [(_AXIS, _AXIS), *(shape[kind] for kind in kinds.values())]
    row, matrix = (trace(formulas, list(kinds), dtype, shapes=x) for x in (None, shapes))
    if print_on_vectors(row, dtype) != print_on_vectors(matrix, dtype):
        raise UnprintableError("its formulas depend on the shape of their operands")
    return row


def trace(
    formulas: Sequence[Formula],
    slots: Sequence[Slot],
    dtype: torch.dtype,
    *,
    differentiated: Formula | None = None,
    wanted: Sequence[Slot] = (),
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> GraphModule:
    """Trace formulas, and the derivatives of one of them with respect to the operands wanted.

    The derivative with respect to a number of each atom is the sum over both: that of the second
    has the two exchanged. Without ``shapes`` of squared distances and operands there is one row of
    pairs.
    """

    def derivative(s: Tensor, values: dict[Slot, Tensor], slot: Slot) -> Tensor:
        assert differentiated is not None
        leaves = {key: x.detach().requires_grad_() for key, x in values.items()}
        with torch.enable_grad():
            total = differentiated(s, leaves).sum()
        if not total.requires_grad:
            return torch.zeros_like(s)
        (found,) = torch.autograd.grad(total, leaves[slot], allow_unused=True)
        return torch.zeros_like(s) if found is None else found.expand(s.shape)

    def outputs(s: Tensor, *operands: Tensor) -> list[Tensor]:
        values = dict(zip(slots, operands, strict=True))
        with torch.no_grad():
            found = [formula(s, values) for formula in formulas]
            for slot in wanted:
                grad, second = derivative(s, values, slot), (slot[0], 1)
                if second in values:
                    exchanged = {
                        key: values.get((key[0], 1 - key[1]), x) for key, x in values.items()
                    }
                    grad = grad + derivative(s, exchanged, second)
                found.append(grad)
        for x in found:
            if x.ndim > s.ndim or torch.broadcast_shapes(x.shape, s.shape) != s.shape:
                raise UnprintableError("its formulas are not elementwise")
        return found

    # A kernel may be made while a step is traced, which must not see this trace.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        examples = [
            torch.full(shape, 1.1, dtype=dtype, device="cpu")
            for shape in shapes or [(_ROW,)] * (1 + len(slots))
        ]
        try:
            graph = graph_of(outputs, *examples)
        except UnprintableError:
            raise
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UnprintableError(f"its formulas could not be traced: {reason}") from error
    graph.graph.eliminate_dead_code()
    # The derivative of abs is not finite at the distances of masked pairs.
    if any("sgn" in str(node.target) for node in graph.graph.nodes):
        raise UnprintableError("its formulas have derivatives of abs")
    return graph
