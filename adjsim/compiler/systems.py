"""Small dense linear systems in compiled loops: their solution, and the signs of eigenvalues.

A traced step contains operators of torch, which a printed loop calls by functions of its own.
Anywhere else torch's own functions are called. Printed, systems are eliminated one by one with row
pivots, in arrays of a size that the compiler knows. Eigenvalues are those of LAPACK, which SciPy
provides, except for matrices of two rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.calls import Call, Operators, in_order, pointer_to
from adjsim.compiler.values import TYPES, Store, UnprintableError, Value
from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of

# Rows of the largest matrices, of which a system needs two on the stack: 64 kilobytes of float64.
LARGEST_SYSTEM = 64

DECLARATIONS = """
namespace { namespace systems {
// Solve a system in place by elimination with row pivots; false: its matrix is singular.
template <class T, int N>
inline bool eliminate(T (&m)[N][N], T (&x)[N]) {
  for (int k = 0; k < N; ++k) {
    int pivot = k;
    for (int r = k + 1; r < N; ++r)
      if (absolute(m[r][k]) > absolute(m[pivot][k])) pivot = r;
    if (!(absolute(m[pivot][k]) > 0)) return false;
    if (pivot != k) {
      for (int c = k; c < N; ++c) exchange(m[k][c], m[pivot][c]);
      exchange(x[k], x[pivot]);
    }
    const T scale = 1 / m[k][k];
    for (int r = k + 1; r < N; ++r) {
      const T factor = m[r][k] * scale;
      for (int c = k + 1; c < N; ++c) m[r][c] -= factor * m[k][c];
      x[r] -= factor * x[k];
    }
  }
  for (int k = N - 1; k >= 0; --k) {
    for (int c = k + 1; c < N; ++c) x[k] -= m[k][c] * x[c];
    x[k] /= m[k][k];
  }
  return true;
}
template <class T, int N>
bool solve(int64_t count, const T* matrices, const T* right, T* solution) {
  bool singular = false;
  for (int64_t i = 0; i < count; ++i) {
    T m[N][N], x[N];
    memcpy(m, matrices + i * N * N, sizeof m);
    memcpy(x, right + i * N, sizeof x);
    if (!eliminate<T, N>(m, x)) {
      singular = true;
      for (int r = 0; r < N; ++r) x[r] = NAN;
    }
    memcpy(solution + i * N, x, sizeof x);
  }
  return singular;
}
template <class T>
using Eigenvalues = void (*)(const char*, const char*, const int*, T*, const int*, T*, T*, T*,
                             const int*, T*, const int*, T*, const int*, int*);
// Whether a number is negative, and real to the square root of rounding. `square` is the square of
// its imaginary part, times -1.
template <class T, class U>
inline bool is_negative(U real, U square) {
  const U epsilon = sizeof(T) == 8 ? U(2.220446049250313e-16) : U(1.1920929e-7);
  return real < 0 && -square <= epsilon * (real * real - square);
}
template <class T, int N>
bool has_negative_eigenvalue(int64_t count, const T* matrices, Eigenvalues<T> eigenvalues) {
  for (int64_t i = 0; i < count; ++i) {
    T m[N][N], real[N], imaginary[N], work[8 * N], none[1];
    memcpy(m, matrices + i * N * N, sizeof m);
    bool positive = true;
    for (int r = 0; r < N; ++r) {
      T radius = 0;
      for (int c = 0; c < N; ++c) radius += c == r ? 0 : absolute(m[r][c]);
      positive = positive && m[r][r] - radius > 0;
    }
    if (positive) continue;
    if constexpr (N == 1) return m[0][0] < 0;
    if constexpr (N == 2) {
      // The exponents of a long double hold all products of two numbers.
      typedef long double Long;
      const Long a = m[0][0], b = m[0][1], c = m[1][0], d = m[1][1];
      const Long half = (a + d) / 2, part = (a - d) / 2, square = part * part + b * c;
      // Of two real eigenvalues one is negative, or both are, or they are a pair, nearly real.
      if (a * d < b * c || (half < 0 && square >= 0)) return true;
      if (square < 0 && is_negative<T, Long>(half, square)) return true;
      continue;
    }
    const int n = N, one = 1, size = 8 * N;
    int info = 0;
    eigenvalues("N", "N", &n, &m[0][0], &n, real, imaginary, none, &one, none, &one, work, &size,
                &info);
    if (info) return true;
    for (int r = 0; r < N; ++r) {
      const long double part = imaginary[r];
      if (is_negative<T, long double>(real[r], -part * part)) return true;
    }
  }
  return false;
}
} }
"""


def solve(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Solve ``matrix x = right`` for each system of ``(*batch, n, n)`` and ``(*batch, n)``.

    Returns:
        x, ``(*batch, n)``, which is NaN for a singular matrix, and whether there is one, a scalar.
    """
    if is_tracing():
        return solve_operator(matrix, right)
    solution, failed = torch.linalg.solve_ex(matrix, right.unsqueeze(-1))
    singular = failed > 0
    x = torch.where(singular.unsqueeze(-1), torch.nan, solution.squeeze(-1))
    return x, singular.any()


@operator("solve")
def solve_operator(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Solve linear systems; see :func:`solve`."""
    return solve(matrix, right)


@shapes_of(solve_operator)
def _(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(right.shape).to(right), right.new_empty((), dtype=torch.bool)


def has_negative_eigenvalue(matrix: Tensor) -> Tensor:
    """Return whether a matrix of a batch ``(*batch, n, n)`` has a real negative eigenvalue."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    # The left ends of Gershgorin's discs. Where all are positive, eigenvalues are not needed.
    lowest = diagonal + diagonal.abs() - matrix.abs().sum(-1)
    if bool((lowest > 0).all()):
        return torch.zeros((), dtype=torch.bool, device=matrix.device)
    values = torch.linalg.eigvals(matrix)
    is_real = values.imag.abs() <= torch.finfo(matrix.dtype).eps ** 0.5 * values.abs()
    return (is_real & (values.real < 0)).any()


@operator("has_negative_eigenvalue")
def has_negative_eigenvalue_if(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Return :func:`has_negative_eigenvalue` if it is wanted, and False otherwise."""
    return has_negative_eigenvalue(matrix) if bool(wanted) else torch.zeros_like(wanted)


@shapes_of(has_negative_eigenvalue_if)
def _(matrix: Tensor, wanted: Tensor) -> Tensor:
    return torch.empty_like(wanted)


class SystemsCall(Call):
    """A call for the systems of a batch, of which the matrices are ``values[0]``."""

    declarations = DECLARATIONS

    def __init__(self, values: Sequence[Value], outputs: Sequence[Tensor], store: Store) -> None:
        matrix = values[0]
        self.dtype, self.rows = matrix.dtype, matrix.shape[-1]
        self.systems = torch.Size(matrix.shape[:-2]).numel()
        if not self.dtype.is_floating_point or self.rows > LARGEST_SYSTEM:
            raise UnprintableError(f"systems of {matrix.shape} {self.dtype}")
        self.inputs = tuple(in_order(value, store) for value in values)
        self.outputs = tuple(map(self.output, outputs))

    @property
    def template(self) -> str:
        """The arguments of the templates."""
        return f"<{TYPES[self.dtype]}, {self.rows}>"


class SolveCall(SystemsCall):
    """The solution of linear systems."""

    def lines(self, functions: Sequence[str]) -> list[str]:
        matrix, right, solution, singular = map(pointer_to, (*self.inputs, *self.outputs))
        call = f"systems::solve{self.template}({self.systems}, {matrix}, {right}, {solution})"
        return [f"*{singular} = {call};"]


class NegativeEigenvalueCall(SystemsCall):
    """The test for negative eigenvalues."""

    def __init__(self, values: Sequence[Value], outputs: Sequence[Tensor], store: Store) -> None:
        super().__init__(values, outputs, store)
        self.addresses = (_lapack("dgeev" if self.dtype == torch.float64 else "sgeev"),)

    def lines(self, functions: Sequence[str]) -> list[str]:
        matrix, wanted, found = map(pointer_to, (*self.inputs, *self.outputs))
        eigenvalues = f"(systems::Eigenvalues<{TYPES[self.dtype]}>){functions[0]}"
        call = f"has_negative_eigenvalue{self.template}({self.systems}, {matrix}, {eigenvalues})"
        return [f"*{found} = *{wanted} && systems::{call};"]


def _lapack(name: str) -> int:
    """Return the address of a function of SciPy's LAPACK."""
    api: Any = ctypes.pythonapi
    import scipy.linalg.cython_lapack

    capsule = scipy.linalg.cython_lapack.__pyx_capi__[name]
    name_of, pointer_of = api.PyCapsule_GetName, api.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer_of(capsule, name_of(capsule)))


SYSTEM_OPERATORS = Operators(
    {
        solve_operator: SolveCall,
        has_negative_eigenvalue_if: NegativeEigenvalueCall,
    }
)
