"""The C++ functions that printed expressions call.

They are declared here one by one, as those of the C library are: the header ``<cmath>`` alone takes
longer to compile than the loop of a small system.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adjsim.compiler.reproducible import (
    DOUBLE,
    FLOAT,
    FUSED,
    FUSED_VECTORS,
    VECTOR,
    atan2,
    erfc,
    exp,
    log,
    sin_and_cos,
    tanh,
)

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

# Functions that every loop has, and those by the exponential of the loop.
_OWN = f"{FUSED}{tanh(DOUBLE)}{tanh(FLOAT)}"
_BY_EXP = f"{erfc(DOUBLE)}\ninline float erfc(float x) {{ return ::erfcf(x); }}"

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
{_OWN}
{_BY_EXP}
}} }}
"""


# Functions of doubles with the same bits in every loop, of which floats have those of C.
OF_C = ("exp", "log", "sin", "cos")
# The functions of an exact run are scalar, or have the same bits in every loop.
REPRODUCIBLE = f"""
{_DECLARED}
namespace {{ namespace math {{
{_defined(without=["exp", "log", "tanh", "erfc", "sin", "cos", "atan2"])}
{_OWN}
{exp(DOUBLE)}
{log(DOUBLE)}
{sin_and_cos(DOUBLE)}
{atan2(DOUBLE)}
{" ".join(f"inline float {name}(float x) {{ return ::{name}f(x); }}" for name in OF_C)}
inline float atan2(float y, float x) {{ return ::atan2f(y, x); }}
{_BY_EXP}
}} }}
"""


def scalar_functions(exact: bool) -> str:
    """Define the functions of numbers; with ``exact`` those with the same bits in every loop."""
    return "\n".join([HEADER, REPRODUCIBLE if exact else VECTORISED])


def vector_functions(dtype: torch.dtype) -> str:
    """Define the functions of vectors ``V`` of ``W`` numbers ``REAL``, with conditions ``Mask``.

    By them the expressions of numbers are expressions of vectors too. They call the functions of
    numbers, which have to be declared before, but for those of doubles that are inlined.
    """
    inlined = (tanh, exp, log, erfc) if dtype == torch.float64 else ()
    names = [name for name in FUNCTIONS if name not in [x.__name__ for x in inlined]]
    return f"""
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
{" ".join(f"ONE({name})" for name in names)}
{" ".join(f"TWO({name})" for name in FUNCTIONS_OF_TWO)}
{FUSED_VECTORS if inlined else ""}
{chr(10).join(function(VECTOR) for function in inlined)}
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
