"""Elementwise operations of a traced graph: their operands and C++ expressions.

The tables have a line for each operation. Operations with options (``rounding_mode``, a bound that
may be absent) are in :func:`pointwise`, and those that a trace replaces by others in
:mod:`adjsim.compiler.decompositions`. Loops and formulas of vectors (:mod:`~.formulas`) read the
same tables, since C++ chooses the functions by the types of their arguments. Another language
(:class:`Dialect`) has a table of the operations that it writes otherwise.

Arithmetic follows IEEE 754 in the order of the traced operations, so results agree bit for bit.
The exceptions are the order of sums, the last bits of functions such as exp and of higher powers,
and ``addcmul`` and similar operations, which torch's own kernels fuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.mathematics import FUNCTIONS, FUNCTIONS_OF_TWO
from adjsim.compiler.values import TYPES, UnprintableError, Value
from adjsim.core.operators import operator, shapes_of

Printer = Callable[..., str]
# Operands are values or expressions; other arguments are numbers.
_OPERAND = (Value, str)

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


@dataclass(frozen=True)
class Dialect:
    """A language of elementwise expressions.

    Attributes:
        functions: the names of functions such as exp begin so.
        literal: prints a Python number of a type.
        splat: prints such a number of every pair.
        statement: prints the definition of a variable, and whether it is a condition.
        lookup: prints the values of a table at places, of the number of values.
        printers: the printers of operations, where they are not those of the tables.
    """

    functions: str
    literal: Callable[[Any, torch.dtype], str]
    splat: Callable[[Any, torch.dtype], str]
    statement: Callable[[str, str, bool], str]
    lookup: Callable[[str, str, int], str]
    printers: Mapping[str, Printer]

    def printer(self, base: str) -> Printer | None:
        """Return the printer of an operation without options; None: it is not printed."""
        tables = self.printers, LOGICAL, BITWISE, SHIFTS, TRANSCENDENTAL, EXACT
        return next((table[base] for table in tables if base in table), None)


def _splat(x: Any, dtype: torch.dtype) -> str:
    x = float(x)
    return f"splat({x!r})" if math.isfinite(x) else f"splat({literal(x, torch.float64)})"


CPP = Dialect(
    "math::",
    literal,
    _splat,
    lambda name, text, condition: f"  const {'Mask' if condition else 'V'} {name} = {text};",
    lambda values, place, _: f"math::lookup({values}, {place})",
    {},
)


def scaled(number: Any, dtype: torch.dtype, dialect: Dialect, x: str) -> str:
    """Print a multiple of an expression."""
    return x if number == 1 else f"{dialect.literal(number, dtype)} * {x}"


def is_product_or_root(exponent: float) -> bool:
    """Whether a power is printed as a product or a root, whose last bits IEEE 754 defines."""
    whole = float(exponent).is_integer() and abs(exponent) <= LARGEST_PRODUCT
    return whole or exponent in (0.5, -0.5)


def power(x: str, exponent: float, dtype: torch.dtype, dialect: Dialect) -> str:
    """Print a power as a root, as a product (small integers) or as pow().

    Torch computes the powers 2 and 3 as products too.
    """
    if exponent in (0.5, -0.5):
        root = f"{dialect.functions}sqrt({x})"
        return root if exponent > 0 else f"1 / {root}"
    if exponent == 0:
        return "1"
    if not is_product_or_root(exponent):
        # C++ converts the exponent, and Triton has no power of numbers of two types.
        kind = torch.float64 if dialect is CPP else dtype
        return f"{dialect.functions}pow({x}, {dialect.literal(exponent, kind)})"
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
    "fmod": lambda x, y: f"math::fmod({x}, {y})",
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
# Shifts of integers, of which those out of range leave no bits but copies of the sign.
SHIFTS: dict[str, Printer] = {
    **dict.fromkeys(
        ("__rshift__", "bitwise_right_shift"),
        lambda x, y: f"{x} >> ({y} < 0 || {y} > 63 ? 63 : {y})",
    ),
    **dict.fromkeys(
        ("__lshift__", "bitwise_left_shift"),
        lambda x, y: f"{y} < 0 || {y} > 63 ? 0 : (int64_t)((uint64_t){x} << ({y} & 63))",
    ),
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
# Operations that return the numbers of their operand, perhaps in another type.
COPIES = (
    *("clone", "_to_copy", "alias", "detach"),
    *("contiguous", "lift_fresh", "lift_fresh_copy", "to"),
)
# Operations whose elements are one number, and that number.
FILLED = {
    **dict.fromkeys(("zeros_like", "zeros", "new_zeros"), 0),
    **dict.fromkeys(("empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided"), 0),
    **dict.fromkeys(("ones_like", "ones", "new_ones"), 1),
}
# The same for a number among their arguments, and its place there.
FILLED_WITH = {"scalar_tensor": 0, "full": 1, "full_like": 1, "fill": 1, "new_full": 2}
# Functions for quotients rounded down, and for their remainders.
QUOTIENTS = {"floor_divide": "floor_quotient", "remainder": "floor_rest"}
# Operations of IEEE 754 that take several times as long as a product. A value of one of them has
# the number 1 in ``slow``, that of a function such as exp 2, and any other 0.
SLOW = ("div", "reciprocal", "sqrt", "rsqrt")
# Operations that are not printed for integers.
OF_FRACTIONS = ("fmod", "reciprocal", "sqrt", "rsqrt", "floor", "ceil", "trunc")


def filling(base: str, args: Sequence[Any]) -> float | None:
    """Return the number that all elements of an operation are; None for other operations."""
    number = args[FILLED_WITH[base]] if base in FILLED_WITH else FILLED.get(base)
    return number if isinstance(number, (int, float)) else None


def quotient_of(base: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the function for a rounded quotient or its remainder; None for other operations."""
    mode = kwargs.get("rounding_mode")
    return f"{mode}_quotient" if base == "div" and mode else QUOTIENTS.get(base)


def refuses(base: str, kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether an operation may refuse its numbers: integers that are divided by zero."""
    return dtype == torch.int64 and quotient_of(base, kwargs) is not None


def is_inexact(base: str, args: Sequence[Any]) -> bool:
    """Whether IEEE 754 does not define the last bits of an operation."""
    if base == "pow" and isinstance(args[1], (int, float)):
        return not is_product_or_root(args[1])
    return base in TRANSCENDENTAL


def pointwise(
    base: str,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    dialect: Dialect = CPP,
) -> tuple[list[Any], Printer]:
    """Return the operands of an elementwise operation, and the printer of its expression.

    ``base`` is its name without the overload. It is computed in the type ``dtype``.
    """

    def printed(function: Printer, *arguments: Any) -> tuple[list[Any], Printer]:
        operands = [x for x in arguments if isinstance(x, _OPERAND)]

        def expression(*texts: str) -> str:
            rest = iter(texts)
            return function(
                *(
                    next(rest) if isinstance(x, _OPERAND) else dialect.literal(x, dtype)
                    for x in arguments
                )
            )

        return operands, expression

    integral = dtype == torch.int64
    if base in SCALED:
        count = 3 if base in ("addcmul", "addcdiv") else 2
        factor = args[count] if len(args) > count else kwargs.get("alpha", kwargs.get("value", 1))
        scale = partial(scaled, factor, dtype, dialect)
        return printed(partial(SCALED[base], scale), *args[:count])
    quotient = quotient_of(base, kwargs)
    if quotient is not None and dialect is CPP:
        # Torch raises an error for integer division by zero, which would end the process in C++.
        refused = ", refused" if refuses(base, kwargs, dtype) else ""
        return printed(lambda x, y: f"{quotient}({x}, {y}{refused})", *args[:2])
    if base == "pow" and isinstance(args[1], (int, float)):
        exponent = args[1]
        if integral and exponent not in (1, 2, 3):
            raise UnprintableError(name)
        return printed(lambda x: power(x, exponent, dtype, dialect), args[0])
    if base in ("clamp", "clamp_min", "clamp_max"):
        low = args[1] if len(args) > 1 and base != "clamp_max" else kwargs.get("min")
        high = args[1] if base == "clamp_max" else args[2] if len(args) > 2 else kwargs.get("max")
        bounds = [x for x in (low, high) if x is not None]
        choose = dialect.printer("where")
        assert choose is not None

        def clamp(x: str, *limits: str) -> str:
            rest = iter(limits)
            if low is not None:
                least = next(rest)
                x = f"({choose(f'({x} < {least}) | ({least} != {least})', least, x)})"
            if high is not None:
                most = next(rest)
                x = f"({choose(f'({x} > {most}) | ({most} != {most})', most, x)})"
            return x

        return printed(clamp, args[0], *bounds)
    printer = dialect.printer(base)
    if base == "round" and not integral and len(args) == 1 and not kwargs.get("decimals"):
        assert printer is not None
        return printed(printer, args[0])
    of_other_type = base in (OF_FRACTIONS if integral else SHIFTS)
    if printer is None or base == "round" or quotient is not None or of_other_type:
        raise UnprintableError(name)
    return printed(printer, *args)


@operator("lookup")
def lookup(values: Tensor, place: Tensor) -> Tensor:
    """Return the values at whole numbers, in a formula that is printed."""
    return torch.take(values, place.long())


@shapes_of(lookup)
def _(values: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(place)
