"""Elementwise operations of a traced graph: their operands and C++ expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from adjsim.compiler.operations import (
    BITWISE,
    EXACT,
    LOGICAL,
    SCALED,
    TRANSCENDENTAL,
    Printer,
    literal,
    power,
    scaled,
)
from adjsim.compiler.values import UnprintableError, Value

# Functions for quotients rounded down, and for their remainders.
QUOTIENTS = {"floor_divide": "floor_quotient", "remainder": "floor_rest"}
# Operations that are not printed for integers.
OF_FRACTIONS = ("reciprocal", "sqrt", "rsqrt", "floor", "ceil", "trunc")


def pointwise(
    base: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[list[Value], Printer]:
    """Return the operands of an elementwise operation, and the printer of its expression.

    ``base`` is its name without the overload. It is computed in the type ``dtype``.

    Raises:
        UnprintableError: the operation is not supported.
    """

    def printed(function: Printer, *arguments: Any) -> tuple[list[Value], Printer]:
        operands = [x for x in arguments if isinstance(x, Value)]

        def expression(*texts: str) -> str:
            rest = iter(texts)
            return function(
                *(next(rest) if isinstance(x, Value) else literal(x, dtype) for x in arguments)
            )

        return operands, expression

    integral = dtype == torch.int64
    if base in SCALED:
        count = 3 if base in ("addcmul", "addcdiv") else 2
        factor = args[count] if len(args) > count else kwargs.get("alpha", kwargs.get("value", 1))
        scale = partial(scaled, factor, dtype)
        return printed(partial(SCALED[base], scale), *args[:count])
    mode = kwargs.get("rounding_mode")
    quotient = f"{mode}_quotient" if base == "div" and mode else QUOTIENTS.get(base)
    if quotient is not None:
        # Torch raises an error for integer division by zero, which would end the process in C++.
        refused = ", refused" if integral else ""
        return printed(lambda x, y: f"{quotient}({x}, {y}{refused})", *args[:2])
    if base == "pow" and not isinstance(args[1], Value) and isinstance(args[0], Value):
        exponent = args[1]
        if integral and exponent not in (1, 2, 3):
            raise UnprintableError(name)
        return printed(lambda x: power(x, exponent), args[0])
    if base in ("clamp", "clamp_min", "clamp_max"):
        low = args[1] if len(args) > 1 and base != "clamp_max" else kwargs.get("min")
        high = args[1] if base == "clamp_max" else args[2] if len(args) > 2 else kwargs.get("max")
        bounds = [x for x in (low, high) if x is not None]

        def clamp(x: str, *limits: str) -> str:
            rest = iter(limits)
            if low is not None:
                least = next(rest)
                x = f"({x} < {least} || {least} != {least} ? {least} : {x})"
            if high is not None:
                most = next(rest)
                x = f"({x} > {most} || {most} != {most} ? {most} : {x})"
            return x

        return printed(clamp, args[0], *bounds)
    if base == "round" and not integral and len(args) == 1 and not kwargs.get("decimals"):
        return printed(EXACT["round"], args[0])
    table = next((table for table in (LOGICAL, BITWISE, TRANSCENDENTAL) if base in table), EXACT)
    if base not in table or base == "round" or (integral and base in OF_FRACTIONS):
        raise UnprintableError(name)
    return printed(table[base], *args)
