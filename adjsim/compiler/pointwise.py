"""Elementwise operations of a traced graph: their operands and C++ expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from adjsim.compiler.operations import (
    BITWISE,
    EXACT,
    LOGICAL,
    TRANSCENDENTAL,
    Printer,
    literal,
    power,
    scaled,
)
from adjsim.compiler.values import UnprintableError, Value


def pointwise(
    base: str,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[list[Value], Printer]:
    """Return the operands of an elementwise operation, and the printer of its expression.

    Args:
        base, name: the operation without its overload, and with it.
        args, kwargs: its arguments, with tensors as values.
        dtype: the dtype in which it is computed.

    Raises:
        UnprintableError: the operation is not supported.
    """

    def printed(
        function: Callable[..., str], *arguments: Any
    ) -> tuple[list[Value], Callable[..., str]]:
        operands = [x for x in arguments if isinstance(x, Value)]

        def expression(*texts: str) -> str:
            rest = iter(texts)
            return function(
                *(next(rest) if isinstance(x, Value) else literal(x, dtype) for x in arguments)
            )

        return operands, expression

    integral = dtype == torch.int64
    # Torch raises an error for integer division by zero, which would end the process in C++.
    status_argument = ", refused" if integral else ""
    alpha = kwargs.get("alpha", 1)
    if base == "add":
        alpha = args[2] if len(args) > 2 else alpha
        return printed(lambda x, y: f"{x} + {scaled(alpha, dtype, y)}", *args[:2])
    if base == "sub":
        alpha = args[2] if len(args) > 2 else alpha
        return printed(lambda x, y: f"{x} - {scaled(alpha, dtype, y)}", *args[:2])
    if base == "rsub":
        alpha = args[2] if len(args) > 2 else alpha
        return printed(lambda x, y: f"{y} - {scaled(alpha, dtype, x)}", *args[:2])
    if base == "addcmul":
        value = kwargs.get("value", 1)
        return printed(lambda x, y, z: f"{x} + {scaled(value, dtype, y)} * {z}", *args[:3])
    if base == "addcdiv":
        value = kwargs.get("value", 1)
        return printed(lambda x, y, z: f"{x} + {scaled(value, dtype, y)} / {z}", *args[:3])
    if base == "div":
        mode = kwargs.get("rounding_mode")
        if mode is None:
            return printed(lambda x, y: f"{x} / {y}", *args[:2])
        return printed(lambda x, y: f"{mode}_quotient({x}, {y}{status_argument})", *args[:2])
    if base == "floor_divide":
        return printed(lambda x, y: f"floor_quotient({x}, {y}{status_argument})", *args[:2])
    if base == "remainder":
        return printed(lambda x, y: f"floor_rest({x}, {y}{status_argument})", *args[:2])
    if base == "pow" and not isinstance(args[1], Value) and isinstance(args[0], Value):
        exponent = args[1]
        if integral and exponent not in (1, 2, 3):
            raise UnprintableError(name)
        return printed(lambda x: power(x, exponent), args[0])
    if base == "square":
        return printed(lambda x: f"{x} * {x}", args[0])
    if base == "clamp" or base in ("clamp_min", "clamp_max"):
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
    table = (
        LOGICAL
        if base in LOGICAL
        else BITWISE
        if base in BITWISE
        else TRANSCENDENTAL
        if base in TRANSCENDENTAL
        else EXACT
    )
    if (
        base not in table
        or base == "round"
        or (integral and base in ("reciprocal", "sqrt", "rsqrt", "floor", "ceil", "trunc"))
    ):
        raise UnprintableError(name)
    return printed(table[base], *args)
