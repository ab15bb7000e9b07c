"""C++ functions made of operations that IEEE 754 defines to the last bit.

A vectorised function of the C library has other last bits than the scalar one. Which of the two a
compiler calls depends on the loop, and on the place of an element in it. These functions have the
same bits in every loop, and are printed for numbers and for vectors ``V`` of numbers alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A type of numbers, or of vectors of them, and that of integers of the same size.

    The type has so many bits of its fraction, and a bias of its exponent. From the number
    ``largest`` on, tanh(x) is 1.
    """

    name: str
    integer: str
    fraction: int = 52
    bias: int = 1023
    largest: int = 20

    def of(self, number: str | float) -> str:
        """Print a number as one of this type."""
        return f"({self.name}{{}} + {number})" if self.name == "V" else f"({self.name}){number}"


DOUBLE, FLOAT = Kind("double", "int64_t"), Kind("float", "int32_t", 23, 127, 10)
VECTOR = Kind("V", "Mask")

FUSED = """
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
template <class T> inline T fused(T a, T b, T c) { return a * b + c; }
#endif
"""
# GCC leaves a loop over the entries of a vector as it is, so it is given the instruction.
FUSED_VECTORS = """
__attribute__((always_inline)) inline V fused(V a, V b, V c) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_vfmaddpd512_mask(a, b, c, (unsigned char)-1, 4);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__clang__)
  return __builtin_ia32_vfmaddpd256(a, b, c);
#else
  for (int l = 0; l < W; ++l) c[l] = fused(a[l], b[l], c[l]);
  return c;
#endif
}
"""

# For x >= 0, tanh(x) = e / (e + 2) with e = exp(2 x) - 1. With n the integer nearest to
# 2 x / log(2) and r = x - n log(2) / 2, e = 2^n p + (2^n - 1), where
# p = exp(2 r) - 1 = 2 r + r^2 q(r). The error of log(2) / 2, times n, is harmless: tanh depends on
# exp(2 x) the less, the larger n is. The polynomial q interpolates at the Chebyshev nodes of
# |r| <= log(2) / 4, and makes relative errors of p of 4e-17 for doubles and 2e-8 for floats.
# Relative errors of tanh are below 5e-16 and 2e-7.
TANH = {
    "double": [
        "0x1.0000000000001p+1", "0x1.5555555555556p+0", "0x1.5555555553d68p-1",
        "0x1.11111111109b5p-2", "0x1.6c16c17889f3cp-4", "0x1.a01a01a7c2f2cp-6",
        "0x1.a019b914881bap-8", "0x1.71de0db2eb873p-10", "0x1.28917c9f3a495p-12",
        "0x1.af389eea54156p-15",
    ],
    "float": ["0x1.0p+1", "0x1.5554dep+0", "0x1.55551ap-1", "0x1.120b62p-2", "0x1.6d10fcp-4"],
}  # fmt: skip


def tanh(kind: Kind) -> str:
    """Print the hyperbolic tangent of a type."""
    *lower, highest = TANH["float" if kind is FLOAT else "double"]
    name, of = kind.name, kind.of
    return f"""
__attribute__((always_inline)) inline {name} tanh({name} x) {{
  // Adding 1.5 * 2^{kind.fraction} rounds a number to an integer, which is then in its last bits.
  const {name} shift = {of(f"0x1.8p{kind.fraction}")}, rate = {of((2 / math.log(2)).hex())};
  const {name} distance = {of((math.log(2) / 2).hex())};
  const {name} size = fabs(x), y = size > {kind.largest} ? {of(kind.largest)} : size;
  const {name} shifted = fused(y, rate, shift), n = shifted - shift;
  const {name} r = fused(n, -distance, y);
  {name} q = {of(highest)};
{chr(10).join(f"  q = fused(q, r, {of(coefficient)});" for coefficient in reversed(lower))}
  const {name} p = fused(r * r, q, r + r);
  {kind.integer} bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + {kind.bias}) << {kind.fraction};
  {name} power;
  memcpy(&power, &bits, sizeof bits);
  const {name} e = fused(power, p, power - 1);
  return copysign(e / (e + 2), x);
}}"""


# For x >= 0, erfc(x) = exp(-x^2) w Q(1 - w) with w = 7.5 / (x + 3.75), which is between 0 and 2.
# The polynomial Q of degree 22 is the Chebyshev series of erfc(x) exp(x^2) / w, computed with 60
# digits and written in powers. The rounding error of x^2 is given back as a factor. Relative errors
# are below 8e-16 for all x; without instructions that multiply and add at once, which give this
# error, they grow to 1.1e-16 x^2.
ERFC = [
    "0x1.2a2af19c1492fp-3", "-0x1.05cce4d22cfa4p-3", "0x1.9220d8dc4611dp-4",
    "-0x1.0bdcb780d91acp-4", "0x1.30cf6791b9bddp-5", "-0x1.2042cf15e886dp-6",
    "0x1.ad34d90991dbfp-8", "-0x1.b629280e4795cp-10", "0x1.13ccd419ce4d6p-13",
    "0x1.bc7f5febd39e4p-14", "-0x1.85f46c5c3fee4p-15", "0x1.7b1ad513d4424p-20",
    "0x1.4f49a0f350eeap-18", "-0x1.3e8131b098c8fp-20", "-0x1.d6cf66774ead6p-22",
    "0x1.d7bbe8078096dp-23", "0x1.3f272956cfaabp-25", "-0x1.2350e19fb4c2ap-25",
    "-0x1.db0a875bfbce2p-29", "0x1.3664bf43affdcp-28", "0x1.96cbe7caa428cp-32",
    "-0x1.9fc7cb38c87dbp-32", "-0x1.0da4983fac942p-35",
]  # fmt: skip


def erfc(kind: Kind) -> str:
    """Print the complementary error function of a type, by the function ``exp`` of this type."""
    name = kind.name
    return f"""
__attribute__((always_inline)) inline {name} erfc({name} x) {{
  const {name} square = x * x, rounding = fused(x, x, -square);
  const {name} size = x < 0 ? -x : x, w = 7.5 / (size + 3.75), t = 1 - w, z = t * t;
{_two_chains(kind, ERFC)}
  const {name} value = exp(-square) * (fused(odd, t, even) * w);
  const {name} tail = value > 0 ? value - value * rounding : value;
  return x < 0 ? 2 - tail : tail;
}}"""


def exp(kind: Kind) -> str:
    """Print the exponential of a type.

    exp(x) = 2^n exp(r) with n the integer nearest to x / log(2), and r = x - n log(2). Here log(2)
    is the sum of two numbers, of which the first times n is exact. The Taylor series of exp(r) to
    the order of 13 leaves an error of 4e-18, since |r| < 0.347. Adding n to the exponent multiplies
    by 2^n. Where the result would be subnormal, 54 is added too, and a factor of 2^-54 then rounds
    it.
    """
    (name, integer, *_), of = kind, kind.of
    return f"""
__attribute__((always_inline)) inline {name} exp({name} x) {{
  // Adding 1.5 * 2^52 rounds a number to an integer, which is then in the last bits of the sum.
  const {name} shift = {of("0x1.8p52")};
  x = x < -746 ? {of("-746")} : x;
  const {name} shifted = fused(x, {of((1 / math.log(2)).hex())}, shift), n = shifted - shift;
  const {name} rest = fused(n, {of("-0x1.62e42fefp-1")}, x);
  const {name} r = fused(n, {of("-0x1.473de6af278edp-34")}, rest), z = r * r;
{_two_chains(kind, [repr(1 / math.factorial(k)) for k in range(2, 14)])}
  const {name} series = fused(odd, r, even), factor = 1 + fused(z, series, r);
  const auto small = x < -708;
  {integer} bits, exponent;
  memcpy(&exponent, &shifted, sizeof bits);
  memcpy(&bits, &factor, sizeof bits);
  bits += (exponent + (small ? {integer}{{}} + 54 : {integer}{{}})) << 52;
  {name} value;
  memcpy(&value, &bits, sizeof bits);
  value *= small ? {of("0x1p-54")} : {of("1")};
  return x <= 0x1.62e42fefa39efp+9 ? value : x * INFINITY;
}}"""


# 2 atanh(s) = 2 s + s^3 L(s^2) for |s| <= (sqrt(2) - 1) / (sqrt(2) + 1). The polynomial
# interpolates at the Chebyshev nodes, with 120 digits. Written as doubles it makes a relative error
# of 6e-19.
LOG = [
    "0x1.5555555555555p-1", "0x1.9999999999a38p-2", "0x1.2492492476cccp-2",
    "0x1.c71c720159178p-3", "0x1.745cf9048dd74p-3", "0x1.3b1c355a8feb6p-3",
    "0x1.0fbe95d70a28fp-3", "0x1.0c039c4a14838p-3",
]  # fmt: skip


def log(kind: Kind) -> str:
    """Print the natural logarithm of a type.

    log(x) = n log(2) + log(1 + f) with x = 2^n (1 + f) and 1 + f between sqrt(1/2) and sqrt(2).
    With s = f / (2 + f), log(1 + f) = f - f^2/2 + s (f^2/2 + R), where R is 2 atanh(s) / s - 2.
    Subnormal numbers are multiplied by 2^54 first.
    """
    (name, integer, *_), of = kind, kind.of
    return f"""
__attribute__((always_inline)) inline {name} log({name} x) {{
  const auto small = x < 0x1p-1022;
  const {name} normal = small ? x * 0x1p54 : x;
  {integer} bits, exponent, fraction;
  memcpy(&bits, &normal, sizeof bits);
  // The difference of the bits of 1 and sqrt(1/2) is added, and sqrt(1/2) is given back below.
  bits += INT64_C(0x3ff0000000000000) - INT64_C(0x3fe6a09e667f3bcd);
  fraction = (bits & INT64_C(0xfffffffffffff)) + INT64_C(0x3fe6a09e667f3bcd);
  // The bits of 2^52 plus an integer are the double of their sum.
  exponent = (bits >> 52) + INT64_C(0x4330000000000000);
  {name} n, f;
  memcpy(&n, &exponent, sizeof bits);
  memcpy(&f, &fraction, sizeof bits);
  n = (n - 0x1p52) - (small ? {of("1077.0")} : {of("1023.0")});
  f = f - 1;
  const {name} s = f / (2 + f), square = s * s, half = 0.5 * f * f, z = square * square;
{_two_chains(kind, LOG)}
  const {name} series = fused(odd, square, even);
  const {name} rest = fused(s, fused(square, series, half), n * 0x1.473de6af278edp-34);
  const {name} value = fused(n, {of("0x1.62e42fefp-1")}, -((half - rest) - f));
  const {name} special = x == 0 ? {of("-INFINITY")} : {of("NAN")};
  return x > 0 ? (x < INFINITY ? value : x) : special;
}}"""


# sin(r) = r + r^3 S(r^2) and cos(r) = 1 - r^2/2 + r^4 C(r^2) for |r| <= pi/4, and
# atan(r) = r + r^3 A(r^2) for |r| <= tan(pi/8). The polynomials interpolate at the Chebyshev nodes,
# with 120 digits. Written as doubles they make relative errors of 6e-18, 1e-18 and 3e-18.
SINE = [
    "-0x1.5555555555555p-3", "0x1.1111111111110p-7", "-0x1.a01a01a019938p-13",
    "0x1.71de3a546095bp-19", "-0x1.ae645412c560ap-26", "0x1.61217f0b7ff4ap-33",
    "-0x1.ab17d404cfcadp-41",
]  # fmt: skip
COSINE = [
    "0x1.5555555555555p-5", "-0x1.6c16c16c16967p-10", "0x1.a01a019f4eb01p-16",
    "-0x1.27e4fa17da09dp-22", "0x1.1eeb68e93b525p-29", "-0x1.907da3679638ep-37",
]  # fmt: skip
ARC_TANGENT = [
    "-0x1.5555555555555p-2", "0x1.9999999999953p-3", "-0x1.249249248d7eep-3",
    "0x1.c71c71c304b68p-4", "-0x1.745d165df3f93p-4", "0x1.3b1392d9e7829p-4",
    "-0x1.110e880a7a199p-4", "0x1.e19a13b9f75a1p-5", "-0x1.ac7a938b44639p-5",
    "0x1.74ddd40810b58p-5", "-0x1.1b33b921f3dd2p-5", "0x1.0ad36a419047ep-6",
]  # fmt: skip


def sin_and_cos(kind: Kind) -> str:
    """Print the sine and the cosine of a type.

    With n the integer nearest to 2 x / pi, r = x - n pi/2, and the sine is that of r, its cosine,
    or minus one of them. Here pi/2 is the sum of three numbers. The first times n differs from x by
    a number with no rounding error, the second times n is a sum of two, and r is one too. Errors
    are below one unit in the last place. Without instructions that multiply and add at once they
    grow to 1.1e-16 n. Beyond 2^50, where neighbouring doubles are a quarter apart or more and no
    angle is meant, the result is NaN.
    """
    (name, integer, *_), of = kind, kind.of
    return f"""
__attribute__((always_inline)) inline {name} sine_from({name} x, int quarters) {{
  // Adding 1.5 * 2^52 rounds a number to an integer, which is then in the last bits of the sum.
  const {name} shift = {of("0x1.8p52")};
  const {name} shifted = fused(x, {of("0x1.45f306dc9c883p-1")}, shift), n = shifted - shift;
  {integer} quadrant;
  memcpy(&quadrant, &shifted, sizeof quadrant);
  quadrant += quarters;
  const {name} first = fused(n, {of("-0x1.921fb54442d18p+0")}, x);
  const {name} second = {of("0x1.1a62633145c07p-54")}, product = n * second;
  const {name} rounding = fused(n, second, -product), r = first - product, moved = r - first;
  const {name} lost = (first - (r - moved)) - (product + moved) - rounding;
  const {name} low = fused(n, {of("0x1.f1976b7ed8fbcp-110")}, lost);
  const {name} square = r * r, z = square * square, half = 0.5 * square;
  {name} sine, cosine;
  {{
{_two_chains(kind, SINE)}
    sine = r + fused(square * r, fused(odd, square, even), fused(-half, low, low));
  }}
  {{
{_two_chains(kind, COSINE)}
    const {name} near = 1 - half, rest = (1 - near) - half;
    cosine = near + (rest + fused(z, fused(odd, square, even), -(r * low)));
  }}
  const {name} size = (quadrant & 1) != 0 ? cosine : sine;
  const {name} value = (quadrant & 2) != 0 ? -size : size;
  return fabs(x) <= 0x1p50 ? value : {of("NAN")};
}}
// The reduction loses the sign of zero.
inline {name} sin({name} x) {{ return x == 0 ? x : sine_from(x, 0); }}
inline {name} cos({name} x) {{ return sine_from(x, 1); }}"""


def atan2(kind: Kind) -> str:
    """Print the angle of the vector (x, y) of a type.

    With a <= b the sizes of x and y, atan(a / b) is atan(t) + pi/4 with t = (a - b) / (a + b) where
    a > b tan(pi/8). The angle is s atan(t) + k pi/4, with a sign s and an integer k that depend on
    which of the sizes is larger and on the sign of x. Errors are below three units in the last
    place. They are largest where pi/4 cancels half of the result, since a - b and a + b are
    rounded.
    """
    (name, *_), of = kind, kind.of
    return f"""
__attribute__((always_inline)) inline {name} atan2({name} y, {name} x) {{
  const {name} one = {of("1")}, zero = {of("0")}, width = fabs(x), height = fabs(y);
  const auto steep = height > width;
  // The sum of the two must not overflow.
  const {name} factor = (steep ? height : width) > 0x1p1022 ? {of("0.25")} : one;
  const {name} a = (steep ? width : height) * factor, b = (steep ? height : width) * factor;
  // Two infinities are equal. Two zeros have the angle of (1, 0).
  const auto far = (a > b * {of("0x1.a827999fcef32p-2")}) | (a == {of("INFINITY")});
  const {name} difference = a == b ? zero : a - b;
  const {name} above = far ? difference : a, below = far ? a + b : b;
  const {name} r = above / (below == 0 ? one : below), square = r * r, z = square * square;
{_two_chains(kind, ARC_TANGENT)}
  const {name} angle = fused(square * r, fused(odd, square, even), r);
  const {name} near = far ? one : zero, turned = steep ? 2 - near : near;
  const {name} sign = steep ? -one : one;
  const auto left = copysign(one, x) < 0;
  const {name} k = left ? 4 - turned : turned, s = left ? -sign : sign;
  const {name} low = fused(k, {of("0x1.1a62633145c07p-55")}, s * angle);
  return copysign(fused(k, {of("0x1.921fb54442d18p-1")}, low), y);
}}"""


def _two_chains(kind: Kind, coefficients: Sequence[str]) -> str:
    """Print ``even`` and ``odd``, polynomials in ``z``, the square of the variable of a series.

    A processor computes the two chains at the same time.
    """
    lines: list[str] = []
    for name, chain in (("even", coefficients[::2]), ("odd", coefficients[1::2])):
        lines.append(f"  {kind.name} {name} = {kind.of(chain[-1])};")
        lines += [f"  {name} = fused({name}, z, {kind.of(c)});" for c in reversed(chain[:-1])]
    return "\n".join(lines)
