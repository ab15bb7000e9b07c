"""The C++ expressions of the operations of a traced graph.

Arithmetic follows IEEE 754 in the order of the traced operations, so results agree bit for bit.
The exceptions are the order of sums, the last bit of functions such as exp, and ``addcmul`` and
similar operations, which torch's own kernels fuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from adjsim._cpp.values import TYPES, UnprintableError

Printer = Callable[..., str]


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


def power(x: str, exponent: float) -> str | None:
    """Print a power as torch computes it without pow(); None for other exponents."""
    if exponent in (1, 2, 3):
        return " * ".join([x] * int(exponent))
    return {
        0: "1",
        -1: f"1 / {x}",
        -2: f"1 / ({x} * {x})",
        0.5: f"std::sqrt({x})",
        -0.5: f"1 / std::sqrt({x})",
    }.get(exponent)


# From printed operands to a printed result of the common type.
EXACT: dict[str, Printer] = {
    "mul": lambda x, y: f"{x} * {y}",
    "neg": lambda x: f"-{x}",
    "reciprocal": lambda x: f"1 / {x}",
    "where": lambda c, x, y: f"{c} ? {x} : {y}",
    "abs": lambda x: f"absolute({x})",
    "sqrt": lambda x: f"std::sqrt({x})",
    "rsqrt": lambda x: f"1 / std::sqrt({x})",
    "floor": lambda x: f"std::floor({x})",
    "ceil": lambda x: f"std::ceil({x})",
    "trunc": lambda x: f"std::trunc({x})",
    "round": lambda x: f"std::nearbyint({x})",
    "maximum": lambda x, y: f"({x} > {y} || {x} != {x}) ? {x} : {y}",
    "minimum": lambda x, y: f"({x} < {y} || {x} != {x}) ? {x} : {y}",
    "sign": lambda x: f"({x} > 0) - ({x} < 0)",
    "relu": lambda x: f"{x} < 0 ? 0 : {x}",
}
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
BITWISE: dict[str, Printer] = {
    "bitwise_and": lambda x, y: f"{x} & {y}",
    "bitwise_or": lambda x, y: f"{x} | {y}",
    "bitwise_xor": lambda x, y: f"{x} ^ {y}",
    "bitwise_not": lambda x: f"inverted({x})",
}
# The last bits of these functions differ between libraries, and between torch's scalar and vector
# versions.
FUNCTIONS = [
    "exp",
    "log",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sinh",
    "cosh",
    "expm1",
    "log1p",
    "erf",
    "erfc",
    "atan",
    "asin",
    "acos",
]
INEXACT: dict[str, Printer] = {
    **{name: (lambda x, function=name: f"std::{function}({x})") for name in FUNCTIONS},
    "sigmoid": lambda x: f"1 / (1 + std::exp(-{x}))",
    "atan2": lambda x, y: f"std::atan2({x}, {y})",
}

PRELUDE = """#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
namespace {
template <class T> inline T absolute(T x) { return std::fabs(x); }
template <> inline int64_t absolute(int64_t x) { return x < 0 ? -x : x; }
inline bool inverted(bool x) { return !x; }
inline int64_t inverted(int64_t x) { return ~x; }
// Torch converts a number outside of the range of int64 to its minimum. The barrier keeps compilers
// from replacing a conversion to an integer and back by a truncation, which would preserve NaN and
// the sign of zero.
template <class T> inline int64_t integer(T x) {
  int64_t i = x >= (T)-0x1p63 && x < (T)0x1p63 ? (int64_t)x : INT64_MIN;
  asm("" : "+r"(i));
  return i;
}
// Quotients rounded down or toward zero, and remainders, as torch computes them. Integer division
// by zero and indices out of range set *refused and return 0; division by -1 negates, and wraps.
inline int64_t trunc_quotient(int64_t a, int64_t b, int* refused) {
  if (b == 0) *refused = 2;
  return b == 0 ? 0 : b == -1 ? -a : a / b;
}
inline int64_t floor_rest(int64_t a, int64_t b, int* refused) {
  if (b == 0) *refused = 2;
  int64_t r = b == 0 || b == -1 ? 0 : a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
inline int64_t floor_quotient(int64_t a, int64_t b, int* refused) {
  int64_t q = trunc_quotient(a, b, refused);
  return q - (b != 0 && q * b != a && (a < 0) != (b < 0));
}
inline int64_t in_range(int64_t i, int64_t least, int64_t length, int* refused) {
  if (i < least || i >= length) *refused = 3;
  return i < least || i >= length ? 0 : i < 0 ? i + length : i;
}
template <class T> inline T floor_quotient(T a, T b) {
  if (b == 0) return a / b;
  T rest = std::fmod(a, b), q = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) q -= 1;
  if (q == 0) return std::copysign((T)0, a / b);
  T down = std::floor(q);
  return q - down > (T)0.5 ? down + 1 : down;
}
template <class T> inline T trunc_quotient(T a, T b) { return std::trunc(a / b); }
template <class T> inline T floor_rest(T a, T b) {
  T r = std::fmod(a, b);
  return r != 0 && (b < 0) != (r < 0) ? r + b : r;
}
}
"""
