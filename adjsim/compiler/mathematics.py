"""The C++ functions that printed expressions call.

They are declared here one by one, as those of the C library are: the header ``<cmath>`` alone takes
longer to compile than the loop of a small system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Functions that IEEE 754 does not define to the last bit. Each has the same name in C and in
# ``torch.ops.aten``, and a vectorised version in the GNU C library (VECTORISED below). A name
# without such a version is an undefined symbol of the library of a loop.
FUNCTIONS = [
    "exp", "log", "sin", "cos", "tan", "tanh", "sinh", "cosh", "expm1", "log1p", "erf", "erfc",
    "atan", "asin", "acos", "asinh", "acosh", "atanh", "exp2", "log2", "log10",
]  # fmt: skip
# The same, of two numbers.
FUNCTIONS_OF_TWO = ["atan2", "hypot", "pow"]

# Functions that IEEE 754 defines to the last bit, and helpers.
HEADER = r"""#include <stdint.h>
extern "C" {
void* calloc(__SIZE_TYPE__, __SIZE_TYPE__) noexcept;
void free(void*) noexcept;
void* memcpy(void*, const void*, __SIZE_TYPE__) noexcept;
}
#define INFINITY __builtin_inf()
#define NAN __builtin_nan("")
namespace {
template <class T> struct vector_of {
  typedef T type __attribute__((vector_size(8 * sizeof(T))));
  typedef T anywhere __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));
};
template <class T> using partial_sums = typename vector_of<T>::type;
template <class T> using terms = typename vector_of<T>::anywhere;
// The terms from a number on, and zeros before.
template <class T> inline partial_sums<T> from(int64_t first, const T* x) {
  const partial_sums<T> lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return lane >= (T)first ? *(const partial_sums<T>*)x : partial_sums<T>{};
}
#define EXACT_FUNCTIONS \
  ONE(fabs) ONE(sqrt) ONE(floor) ONE(ceil) ONE(trunc) ONE(nearbyint) TWO(fmod) TWO(copysign)
namespace math {
#define ONE(x) \
  inline double x(double a) { return __builtin_##x(a); } \
  inline float x(float a) { return __builtin_##x##f(a); }
#define TWO(x) \
  inline double x(double a, double b) { return __builtin_##x(a, b); } \
  inline float x(float a, float b) { return __builtin_##x##f(a, b); }
EXACT_FUNCTIONS
#undef ONE
#undef TWO
}
template <class T> inline void exchange(T& a, T& b) {
  T c = a;
  a = b;
  b = c;
}
template <class T> inline T absolute(T x) { return math::fabs(x); }
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
  T rest = math::fmod(a, b), q = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) q -= 1;
  if (q == 0) return math::copysign((T)0, a / b);
  T down = math::floor(q);
  return q - down > (T)0.5 ? down + 1 : down;
}
template <class T> inline T trunc_quotient(T a, T b) { return math::trunc(a / b); }
template <class T> inline T floor_rest(T a, T b) {
  T r = math::fmod(a, b);
  return r != 0 && (b < 0) != (r < 0) ? r + b : r;
}
}
"""

# Pointers of a debug build: an index outside of its buffer is named, with the line of the source,
# and ends the process. The implicit conversion to Place finds the line.
CHECKED = r"""
extern "C" int dprintf(int, const char*, ...);
struct Place {
int64_t index;
int line;
const char* file;
Place(int64_t i, int l = __builtin_LINE(), const char* f = __builtin_FILE())
: index(i), line(l), file(f) {}
};
template <class T> struct Checked {
T* data;
int64_t size;
const char* name;
T& operator[](Place at) const {
if (at.index >= 0 && at.index < size) return data[at.index];
dprintf(2, "adjsim: %s:%d: index %ld of %s, which has %ld elements\n", at.file, at.line,
(long)at.index, name, (long)size);
__builtin_abort();
}
T* operator+(int64_t i) const { return data + i; }
};
template <class T> inline Checked<T> checked(T* data, int64_t size, const char* name) {
return {data, size, name};
}
"""

# For x >= 0, tanh(x) = e / (e + 2) with e = exp(2 x) - 1. With n the integer nearest to
# 2 x / log(2) and r = x - n log(2) / 2, e = 2^n p + (2^n - 1), where
# p = exp(2 r) - 1 = 2 r + r^2 q(r). The error of log(2) / 2, times n, is harmless: tanh depends on
# exp(2 x) the less, the larger n is. The polynomial q interpolates at the Chebyshev nodes of
# |r| <= log(2) / 4, and makes relative errors of p of 4e-17 for doubles and 2e-8 for floats.
# IEEE 754 defines all operations to the last bit, so vectorised and scalar loops agree. Relative
# errors of tanh are below 5e-16 and 2e-7.
TANH = {
    "double": [
        "0x1.0000000000001p+1", "0x1.5555555555556p+0", "0x1.5555555553d68p-1",
        "0x1.11111111109b5p-2", "0x1.6c16c17889f3cp-4", "0x1.a01a01a7c2f2cp-6",
        "0x1.a019b914881bap-8", "0x1.71de0db2eb873p-10", "0x1.28917c9f3a495p-12",
        "0x1.af389eea54156p-15",
    ],
    "float": ["0x1.0p+1", "0x1.5554dep+0", "0x1.55551ap-1", "0x1.120b62p-2", "0x1.6d10fcp-4"],
}  # fmt: skip


def _tanh(kind: str, integer: str, fraction: int, bias: int, largest: int) -> str:
    """Print the function of one type, and of the integer of the same size.

    The type has so many bits of its fraction, and a bias of its exponent. From the number
    ``largest`` on, tanh(x) is 1.
    """
    *lower, highest = TANH[kind]
    return f"""
__attribute__((always_inline)) inline {kind} tanh({kind} x) {{
  // Adding 1.5 * 2^{fraction} rounds a number to an integer, which is then in its last bits.
  const {kind} shift = 0x1.8p{fraction}, rate = {(2 / math.log(2)).hex()};
  const {kind} distance = {(math.log(2) / 2).hex()};
  const {kind} size = fabs(x), y = size > {largest} ? {largest} : size;
  const {kind} shifted = fused(y, rate, shift), n = shifted - shift;
  const {kind} r = fused(n, -distance, y);
  {kind} q = {highest};
{chr(10).join(f"  q = fused(q, r, ({kind}){coefficient});" for coefficient in reversed(lower))}
  const {kind} p = fused(r * r, q, r + r);
  {integer} bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + {bias}) << {fraction};
  {kind} power;
  memcpy(&power, &bits, sizeof bits);
  const {kind} e = fused(power, p, power - 1);
  return copysign(e / (e + 2), x);
}}"""


_TANH = f"""
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline double fused(double a, double b, double c) {{ return __builtin_fma(a, b, c); }}
inline float fused(float a, float b, float c) {{ return __builtin_fmaf(a, b, c); }}
#else
template <class T> inline T fused(T a, T b, T c) {{ return a * b + c; }}
#endif
{_tanh("double", "int64_t", 52, 1023, 20)}
{_tanh("float", "int32_t", 23, 127, 10)}
"""

# For x >= 0, erfc(x) = exp(-x^2) w Q(1 - w) with w = 7.5 / (x + 3.75), which is between 0 and 2.
# The polynomial Q of degree 22 is the Chebyshev series of erfc(x) exp(x^2) / w, computed with 60
# digits and written in powers. The rounding error of x^2 is given back as a factor. Relative errors
# are below 8e-16 for all x.
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
_ERFC = f"""
__attribute__((always_inline)) inline double erfc(double x) {{
  const double square = x * x, rounding = fused(x, x, -square);
  const double size = fabs(x), w = 7.5 / (size + 3.75), t = 1 - w;
  double q = {ERFC[-1]};
{chr(10).join(f"  q = fused(q, t, {coefficient});" for coefficient in reversed(ERFC[:-1]))}
  const double value = exp(-square) * (q * w);
  const double tail = value > 0 ? value - value * rounding : value;
  return x < 0 ? 2 - tail : tail;
}}
inline float erfc(float x) {{ return ::erfcf(x); }}
"""

_DECLARED = f"""
#ifndef VECTOR
#define VECTOR
#endif
#define ONE(x) VECTOR double x(double) noexcept; VECTOR float x##f(float) noexcept;
#define TWO(x) VECTOR double x(double, double) noexcept; VECTOR float x##f(float, float) noexcept;
extern "C" {{
{" ".join(f"ONE({name})" for name in FUNCTIONS)}
{" ".join(f"TWO({name})" for name in FUNCTIONS_OF_TWO)}
}}
#undef ONE
#undef TWO
#define ONE(x) \\
  inline double x(double a) {{ return ::x(a); }} \\
  inline float x(float a) {{ return ::x##f(a); }}
#define TWO(x) \\
  inline double x(double a, double b) {{ return ::x(a, b); }} \\
  inline float x(float a, float b) {{ return ::x##f(a, b); }}
"""


def _defined(without: Sequence[str]) -> str:
    """Define the functions of floats and doubles by those of C."""
    ones = (f"ONE({name})" for name in FUNCTIONS if name not in without)
    twos = (f"TWO({name})" for name in FUNCTIONS_OF_TWO if name not in without)
    # A literal exponent is a double.
    mixed = "inline double pow(float a, double b) { return ::pow(a, b); }"
    return "\n".join([" ".join(ones), " ".join(twos), mixed])


# The GNU C library has vectorised versions of these functions, with errors of up to 4 units in the
# last place. GCC calls them in vectorised loops if they are declared to it.
VECTORISED = f"""
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
#define VECTOR __attribute__((simd("notinbranch")))
#endif
#endif
{_DECLARED}
namespace {{ namespace math {{
{_defined(without=["tanh", "erfc"])}
{_TANH}
{_ERFC}
}} }}
"""


def _two_chains(coefficients: Sequence[float], square: str = "z") -> str:
    """Print ``even`` and ``odd``, polynomials in the square of the variable of a series.

    A processor computes the two chains at the same time.
    """
    lines: list[str] = []
    for name, chain in (("even", coefficients[::2]), ("odd", coefficients[1::2])):
        lines.append(f"  double {name} = {chain[-1]!r};")
        lines += [f"  {name} = fused({name}, {square}, {c!r});" for c in reversed(chain[:-1])]
    return "\n".join(lines)


# A vectorised function gives other last bits than the scalar one. Which of the two a compiler calls
# depends on the loop, and on the place of an element in it. So the functions of an exact run are
# scalar, or made of operations that IEEE 754 defines to the last bit.
#
# exp(x) = 2^n exp(r) with n the integer nearest to x / log(2), and r = x - n log(2). Here log(2) is
# the sum of two numbers, of which the first times n is exact. The Taylor series of exp(r) to the
# order of 13 leaves an error of 4e-18, since |r| < 0.347. Adding n to the exponent multiplies by
# 2^n. Where the result would be subnormal, 54 is added too, and a factor of 2^-54 then rounds it.
#
# log(x) = n log(2) + log(1 + f) with x = 2^n (1 + f) and 1 + f between sqrt(1/2) and sqrt(2). With
# s = f / (2 + f), log(1 + f) = f - f^2/2 + s (f^2/2 + R), where R is the series of 2 atanh(s) / s
# without its first term. It ends with 2 s^22 / 23, since s^2 < 0.0295. Subnormal numbers are
# multiplied by 2^54 first.
REPRODUCIBLE = f"""
{_DECLARED}
namespace {{ namespace math {{
{_defined(without=["exp", "log", "tanh", "erfc"])}
{_TANH}
// A function that is not inlined keeps its loop from being vectorised.
#define INLINE __attribute__((always_inline)) inline
INLINE double exp(double x) {{
  // Adding 1.5 * 2^52 rounds a number to an integer, which is then in the last bits of the sum.
  const double shift = 0x1.8p52;
  x = x < -746 ? -746 : x;
  const double shifted = fused(x, {(1 / math.log(2)).hex()}, shift), n = shifted - shift;
  const double r = fused(n, -0x1.473de6af278edp-34, fused(n, -0x1.62e42fefp-1, x)), z = r * r;
{_two_chains([1 / math.factorial(k) for k in range(2, 14)])}
  const double series = fused(odd, r, even), factor = 1 + fused(z, series, r);
  const bool small = x < -708;
  int64_t bits, exponent;
  memcpy(&exponent, &shifted, 8);
  memcpy(&bits, &factor, 8);
  bits += (exponent + (small ? 54 : 0)) << 52;
  double value;
  memcpy(&value, &bits, 8);
  value *= small ? 0x1p-54 : 1;
  return x <= 0x1.62e42fefa39efp+9 ? value : x * INFINITY;
}}
inline float exp(float x) {{ return ::expf(x); }}
{_ERFC}
INLINE double log(double x) {{
  const bool small = x < 0x1p-1022;
  const double normal = small ? x * 0x1p54 : x;
  int64_t bits, exponent, fraction;
  memcpy(&bits, &normal, 8);
  // The difference of the bits of 1 and sqrt(1/2) is added, and sqrt(1/2) is given back below.
  bits += INT64_C(0x3ff0000000000000) - INT64_C(0x3fe6a09e667f3bcd);
  fraction = (bits & INT64_C(0xfffffffffffff)) + INT64_C(0x3fe6a09e667f3bcd);
  // The bits of 2^52 plus an integer are the double of their sum.
  exponent = (bits >> 52) + INT64_C(0x4330000000000000);
  double n, f;
  memcpy(&n, &exponent, 8);
  memcpy(&f, &fraction, 8);
  n = (n - 0x1p52) - (small ? 1077.0 : 1023.0);
  f = f - 1;
  const double s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  const double fourth = z * z;
{_two_chains([2 / k for k in range(3, 24, 2)], "fourth")}
  const double series = fused(odd, z, even);
  const double rest = fused(s, fused(z, series, half), n * 0x1.473de6af278edp-34);
  const double value = fused(n, 0x1.62e42fefp-1, -((half - rest) - f));
  return x > 0 ? (x < INFINITY ? value : x) : x == 0 ? -INFINITY : NAN;
}}
inline float log(float x) {{ return ::logf(x); }}
}} }}
"""


def scalar_functions(exact: bool) -> str:
    """Define the functions of numbers; with ``exact`` those with the same bits in every loop."""
    return "\n".join([HEADER, REPRODUCIBLE if exact else VECTORISED])


# The functions of vectors ``V`` of ``W`` numbers ``REAL``, with conditions ``Mask``, by which the
# expressions of numbers are expressions of vectors too. They call the functions of numbers, which
# have to be declared before.
VECTOR_FUNCTIONS = f"""
#undef ONE
#undef TWO
#define ONE(x) \\
  inline V x(V a) {{ \\
    alignas(64) REAL p[W]; \\
    memcpy(p, &a, sizeof p); \\
    _Pragma("omp simd") for (int l = 0; l < W; ++l) p[l] = math::x(p[l]); \\
    memcpy(&a, p, sizeof p); \\
    return a; \\
  }}
#define TWO(x) \\
  inline V x(V a, V b) {{ \\
    alignas(64) REAL p[W], q[W]; \\
    memcpy(p, &a, sizeof p), memcpy(q, &b, sizeof q); \\
    _Pragma("omp simd") for (int l = 0; l < W; ++l) p[l] = math::x(p[l], q[l]); \\
    memcpy(&a, p, sizeof p); \\
    return a; \\
  }}
namespace {{ namespace math {{
EXACT_FUNCTIONS
{" ".join(f"ONE({name})" for name in FUNCTIONS)}
{" ".join(f"TWO({name})" for name in FUNCTIONS_OF_TWO)}
inline V pow(V a, REAL b) {{ return pow(a, V{{}} + b); }}
inline V lookup(const REAL* values, V place) {{
  V found;
  for (int l = 0; l < W; ++l) found[l] = values[(int64_t)place[l]];
  return found;
}}
}}
inline V absolute(V x) {{ return math::fabs(x); }}
inline Mask inverted(Mask x) {{ return ~x; }}
}}
"""
