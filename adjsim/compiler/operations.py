"""The C++ expressions of the elementwise operations of a traced graph.

The tables at the end have a line for each operation. Operations with options (``rounding_mode``, a
bound that may be absent) are in :mod:`adjsim.compiler.pointwise`, and those that a trace replaces
by others in :mod:`adjsim.compiler.decompositions`.

Arithmetic follows IEEE 754 in the order of the traced operations, so results agree bit for bit.
The exceptions are the order of sums, the last bits of functions such as exp and of higher powers,
and ``addcmul`` and similar operations, which torch's own kernels fuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from adjsim.compiler.mathematics import FUNCTIONS, FUNCTIONS_OF_TWO
from adjsim.compiler.values import TYPES, UnprintableError

Printer = Callable[..., str]

# The largest integer power that is printed as a product. The relative error of a product is at most
# one rounding for each factor.
LARGEST_PRODUCT = 16


def literal(x: Any, dtype: torch.dtype) -> str:
    """Print a Python number as a C++ constant."""
    if dtype == torch.bool:
        return "true" if x else "false"
    if dtype == torch.int64:
        if isinstance(x, float) and not x.is_integer():
            raise UnprintableError(f"the fraction {x} in an integer operation")
        return f"INT64_C({int(x)})" if int(x) >= 0 else f"(INT64_C({int(x) + 1}) - 1)"
    x = float(x)
    if math.isnan(x):
        return f"({TYPES[dtype]})NAN"
    if math.isinf(x):
        return f"({TYPES[dtype]})({'-' if x < 0 else ''}INFINITY)"
    text = f"{x!r}" if dtype == torch.float64 else f"(float){x!r}"
    return f"({text})" if math.copysign(1, x) < 0 or dtype == torch.float32 else text


def scaled(number: Any, dtype: torch.dtype, x: str) -> str:
    """Print a multiple of an expression."""
    return x if number == 1 else f"{literal(number, dtype)} * {x}"


def power(x: str, exponent: float) -> str:
    """Print a power as a root, as a product (small integers) or as pow().

    Torch computes the powers 2 and 3 as products too.
    """
    if exponent in (0.5, -0.5):
        root = f"math::sqrt({x})"
        return root if exponent > 0 else f"1 / {root}"
    if exponent == 0:
        return "1"
    if not float(exponent).is_integer() or abs(exponent) > LARGEST_PRODUCT:
        return f"math::pow({x}, {literal(exponent, torch.float64)})"
    product = _product(x, abs(int(exponent)))
    return product if exponent > 0 else f"1 / ({product})"


def _product(x: str, exponent: int) -> str:
    """Print a product of equal factors, by repeated squaring."""
    if exponent == 1:
        return x
    half = _product(x, exponent // 2)
    square = f"({half}) * ({half})" if exponent > 3 else f"{half} * {half}"
    return square if exponent % 2 == 0 else f"{square} * {x}"


# Each printer takes the expressions of the operands, names of variables or literals, which need no
# parentheses. Its result is converted to the dtype of the operation.
#
# Operations that IEEE 754 defines to the last bit, or that choose between their operands. They are
# computed in the dtype of their result.
EXACT: dict[str, Printer] = {
    "mul": lambda x, y: f"{x} * {y}",
    "div": lambda x, y: f"{x} / {y}",
    "square": lambda x: f"{x} * {x}",
    "neg": lambda x: f"-{x}",
    "reciprocal": lambda x: f"1 / {x}",
    "where": lambda c, x, y: f"{c} ? {x} : {y}",
    "masked_fill": lambda x, c, y: f"{c} ? {y} : {x}",
    "abs": lambda x: f"absolute({x})",
    "sqrt": lambda x: f"math::sqrt({x})",
    "rsqrt": lambda x: f"1 / math::sqrt({x})",
    "floor": lambda x: f"math::floor({x})",
    "ceil": lambda x: f"math::ceil({x})",
    "trunc": lambda x: f"math::trunc({x})",
    "round": lambda x: f"math::nearbyint({x})",
    "maximum": lambda x, y: f"({x} > {y} || {x} != {x}) ? {x} : {y}",
    "minimum": lambda x, y: f"({x} < {y} || {x} != {x}) ? {x} : {y}",
    "sign": lambda x: f"({x} > 0) - ({x} < 0)",
    "sgn": lambda x: f"({x} > 0) - ({x} < 0)",
    "relu": lambda x: f"{x} < 0 ? 0 : {x}",
    "sigmoid_backward": lambda g, y: f"{g} * (1 - {y}) * {y}",
}
# The same with a factor of an operand, which the first argument prints.
SCALED: dict[str, Printer] = {
    "add": lambda scale, x, y: f"{x} + {scale(y)}",
    "sub": lambda scale, x, y: f"{x} - {scale(y)}",
    "rsub": lambda scale, x, y: f"{y} - {scale(x)}",
    "addcmul": lambda scale, x, y, z: f"{x} + {scale(y)} * {z}",
    "addcdiv": lambda scale, x, y, z: f"{x} + {scale(y)} / {z}",
}
# Operations that are computed in the common dtype of their operands, and whose result is bool.
LOGICAL: dict[str, Printer] = {
    "eq": lambda x, y: f"{x} == {y}",
    "ne": lambda x, y: f"{x} != {y}",
    "lt": lambda x, y: f"{x} < {y}",
    "le": lambda x, y: f"{x} <= {y}",
    "gt": lambda x, y: f"{x} > {y}",
    "ge": lambda x, y: f"{x} >= {y}",
    "logical_and": lambda x, y: f"{x} && {y}",
    "logical_or": lambda x, y: f"{x} || {y}",
    "logical_not": lambda x: f"!{x}",
}
# Operations of integers and of bool.
BITWISE: dict[str, Printer] = {
    "bitwise_and": lambda x, y: f"{x} & {y}",
    "bitwise_or": lambda x, y: f"{x} | {y}",
    "bitwise_xor": lambda x, y: f"{x} ^ {y}",
    "bitwise_not": lambda x: f"inverted({x})",
}
# Operations that call functions whose last bits may differ from those of torch.
TRANSCENDENTAL: dict[str, Printer] = {
    **{name: (lambda x, function=name: f"math::{function}({x})") for name in FUNCTIONS},
    "sigmoid": lambda x: f"1 / (1 + math::exp(-{x}))",
    **{
        name: (lambda x, y, function=name: f"math::{function}({x}, {y})")
        for name in FUNCTIONS_OF_TWO
    },
}
