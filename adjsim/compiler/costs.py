"""The work of computing a value of a graph."""

from __future__ import annotations

from adjsim.compiler.values import Reduced, Value, View

# Number of operations per element from which a value that is read more than once is stored.
CHEAP = 4


def work_size(value: Value) -> int:
    """Count the elements that are computed for a value."""
    return (
        max([value.numel, *(x.numel for x in value.operands)])
        if isinstance(value, Reduced)
        else value.numel
    )


def cost(value: Value) -> int:
    """Count the operations for an element, up to about :data:`CHEAP`."""
    if isinstance(value, View):
        return cost(value.operands[0])
    if not value.computed:
        return 0
    total = 1
    for operand in value.operands:
        total += cost(operand)
        if total >= CHEAP:
            break
    return total
