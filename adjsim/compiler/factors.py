"""Determinants, inverses and solutions of small dense systems, by one factorisation of each matrix.

A trace replaces torch's operations by operators of :math:`P A = L U` with row pivots, of which a
printed loop has functions. Their last bits are not those of LAPACK, so exact loops call torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.compiler.calls import Call, Operators, in_order, pointer_to
from adjsim.compiler.torch_calls import SINGULAR
from adjsim.compiler.values import TYPES, Store, Value
from adjsim.core.operators import operator, shapes_of

# Rows of the largest matrices. Torch's calls of LAPACK take longer than loops up to this size.
LARGEST = 16

DECLARATIONS = """
namespace { namespace factors {
// L below the diagonal and U above, the row that was exchanged with each (from 1 on), and the first
// column without a pivot (from 1 on; 0: the matrix is not singular).
template <class T, int N>
void factor(int64_t count, const T* matrices, T* lu, int64_t* pivots, int64_t* info) {
  memcpy(lu, matrices, count * N * N * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    T (*m)[N] = (T(*)[N])(lu + i * N * N);
    info[i] = 0;
    for (int k = 0; k < N; ++k) {
      int pivot = k;
      for (int r = k + 1; r < N; ++r)
        if (absolute(m[r][k]) > absolute(m[pivot][k])) pivot = r;
      pivots[i * N + k] = pivot + 1;
      if (m[pivot][k] == 0) {
        if (!info[i]) info[i] = k + 1;
        continue;
      }
      if (pivot != k)
        for (int c = 0; c < N; ++c) exchange(m[k][c], m[pivot][c]);
      for (int r = k + 1; r < N; ++r) {
        const T factor = m[r][k] /= m[k][k];
        for (int c = k + 1; c < N; ++c) m[r][c] -= factor * m[k][c];
      }
    }
  }
}
// Systems of C right sides, of the matrices or (A) of their transposes.
template <class T, int N, int64_t C, bool A>
void solve(int64_t count, const T* lu, const int64_t* pivots, const T* right, T* solution) {
  memcpy(solution, right, count * N * C * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const T (*m)[N] = (const T(*)[N])(lu + i * N * N);
    const int64_t* p = pivots + i * N;
    T (*x)[C] = (T(*)[C])(solution + i * N * C);
    if (!A)
      for (int k = 0; k < N; ++k)
        if (p[k] != k + 1)
          for (int64_t c = 0; c < C; ++c) exchange(x[k][c], x[p[k] - 1][c]);
    for (int k = 0; k < N; ++k) {
      for (int j = 0; j < k; ++j)
        for (int64_t c = 0; c < C; ++c) x[k][c] -= (A ? m[j][k] : m[k][j]) * x[j][c];
      if (A)
        for (int64_t c = 0; c < C; ++c) x[k][c] /= m[k][k];
    }
    for (int k = N - 1; k >= 0; --k) {
      for (int j = k + 1; j < N; ++j)
        for (int64_t c = 0; c < C; ++c) x[k][c] -= (A ? m[j][k] : m[k][j]) * x[j][c];
      if (!A)
        for (int64_t c = 0; c < C; ++c) x[k][c] /= m[k][k];
    }
    if (A)
      for (int k = N - 1; k >= 0; --k)
        if (p[k] != k + 1)
          for (int64_t c = 0; c < C; ++c) exchange(x[k][c], x[p[k] - 1][c]);
  }
}
} }
"""


@operator("lu_factor")
def factor_operator(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor ``(*batch, n, n)``: L and U, pivots ``(*batch, n)`` and the first without one."""
    factors, pivots, info = torch.linalg.lu_factor_ex(matrix)
    return factors.contiguous(), pivots.to(torch.int64), info.to(torch.int64)


@shapes_of(factor_operator)
def _(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = matrix.shape
    pivots = matrix.new_empty(shape[:-1], dtype=torch.int64)
    return matrix.new_empty(shape), pivots, pivots.new_empty(shape[:-2])


@operator("lu_solve")
def solve_operator(factors: Tensor, pivots: Tensor, right: Tensor, adjoint: bool) -> Tensor:
    """Solve systems ``(*batch, n, m)`` of factored matrices or of their transposes."""
    solution = torch.linalg.lu_solve(factors, pivots.to(torch.int32), right, adjoint=adjoint)
    return solution.contiguous()


@shapes_of(solve_operator)
def _(factors: Tensor, pivots: Tensor, right: Tensor, adjoint: bool) -> Tensor:
    return right.new_empty(right.shape)


@operator("check_factors")
def check_operator(info: Tensor) -> None:
    """Raise an error if a matrix is singular."""
    torch.ops.aten._linalg_check_errors(info.to(torch.int32), "torch.linalg", is_matrix=False)


@shapes_of(check_operator)
def _(info: Tensor) -> None:
    pass


def _check(info: Tensor, name: str, *, is_matrix: bool) -> Any:
    return check_operator(info) if info.dtype == torch.int64 else NotImplemented


def _is_small(matrix: Tensor) -> bool:
    size = matrix.shape[-1]
    known = matrix.dtype in (torch.float64, torch.float32) and matrix.device.type == "cpu"
    return known and 0 < size <= LARGEST and matrix.numel() > 0


def _factored(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factor for a determinant, whose derivative reads the transpose of a contiguous matrix."""
    factors, pivots, _ = factor_operator(matrix.mT if matrix.is_contiguous() else matrix)
    return factors, pivots


def _solved(factors: Tensor, pivots: Tensor, right: Tensor, adjoint: bool) -> Tensor:
    batch = np.broadcast_shapes(factors.shape[:-2], right.shape[:-2])
    return solve_operator(
        factors.expand(*batch, *factors.shape[-2:]),
        pivots.expand(*batch, pivots.shape[-1]),
        right.expand(*batch, *right.shape[-2:]),
        adjoint,
    )


def _lu_solve(
    factors: Tensor, pivots: Tensor, right: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    if pivots.dtype != torch.int64:
        return NotImplemented
    if left:
        return _solved(factors, pivots, right, adjoint)
    return _solved(factors, pivots, right.mT, not adjoint).mT.contiguous()


def _solve_ex(
    matrix: Tensor, right: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if check_errors or not _is_small(matrix) or matrix.dtype != right.dtype:
        return NotImplemented
    is_vector = right.ndim == 1 or right.shape == matrix.shape[:-1]
    factors, pivots, info = factor_operator(matrix)
    columns = right.unsqueeze(-1) if is_vector else right
    found = _lu_solve(factors, pivots, columns, left=left or is_vector, adjoint=False)
    return found.squeeze(-1) if is_vector else found, factors, pivots, info


def _inverse_ex(matrix: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    if check_errors or not _is_small(matrix):
        return NotImplemented
    factors, pivots, info = factor_operator(matrix)
    return _solved(factors, pivots, torch.eye(matrix.shape[-1], dtype=matrix.dtype), False), info


def _parity(pivots: Tensor) -> tuple[Tensor, ...]:
    places = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return torch.where(pivots == places, 1, -1).unbind(-1)


def _det(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_small(matrix):
        return NotImplemented
    factors, pivots = _factored(matrix)
    diagonal = factors.diagonal(0, -2, -1).unbind(-1)
    return reduce(mul, diagonal) * reduce(mul, _parity(pivots)), factors, pivots


def _slogdet(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _is_small(matrix):
        return NotImplemented
    factors, pivots = _factored(matrix)
    diagonal = factors.diagonal(0, -2, -1)
    sign = reduce(mul, diagonal.sign().unbind(-1)) * reduce(mul, _parity(pivots))
    return sign, diagonal.abs().log().sum(-1), factors, pivots


class _FactorCall(Call):
    """The factors of the matrices of a batch."""

    declarations = DECLARATIONS

    def __init__(self, values: Sequence[Any], outputs: Sequence[Tensor], store: Store) -> None:
        matrix: Value = values[0]
        self.inputs = (in_order(matrix, store),)
        self.outputs = tuple(map(self.output, outputs))
        size = matrix.shape[-1]
        self.template = f"{TYPES[matrix.dtype]}, {size}"
        self.count = matrix.numel // (size * size)

    def lines(self, functions: Sequence[str]) -> list[str]:
        places = ", ".join(map(pointer_to, (*self.inputs, *self.outputs)))
        return [f"factors::factor<{self.template}>({self.count}, {places});"]


class _SolveCall(Call):
    """The solutions of factored systems."""

    declarations = DECLARATIONS

    def __init__(self, values: Sequence[Any], outputs: Sequence[Tensor], store: Store) -> None:
        *given, adjoint = values
        (output,) = outputs
        self.inputs = tuple(in_order(value, store) for value in given)
        self.outputs = (self.output(output),)
        size, columns = output.shape[-2:]
        self.template = f"{TYPES[output.dtype]}, {size}, {columns}, {str(adjoint).lower()}"
        self.count = output.numel() // (size * columns)

    def lines(self, functions: Sequence[str]) -> list[str]:
        places = ", ".join(map(pointer_to, (*self.inputs, *self.outputs)))
        return [f"factors::solve<{self.template}>({self.count}, {places});"]


class _CheckCall(Call):
    """The refusal of singular matrices, where torch raises an error."""

    declarations = ""
    checks = True

    def __init__(self, values: Sequence[Any], output: Any, store: Store) -> None:
        self.inputs = (in_order(values[0], store),)
        self.outputs = (self.output(torch.empty(1, dtype=torch.int64, device="meta")),)

    def lines(self, functions: Sequence[str]) -> list[str]:
        info, token = map(pointer_to, (*self.inputs, *self.outputs))
        count = self.inputs[0].numel
        return [
            f"*{token} = 0;",
            f"for (int64_t i = 0; i < {count}; ++i) "
            f"if ({info}[i] && !*refused) *refused = {SINGULAR};",
        ]


_ATEN: Any = torch.ops.aten
FACTOR_OPERATORS = Operators(
    {
        factor_operator: _FactorCall,
        solve_operator: _SolveCall,
        check_operator: _CheckCall,
    }
)
FACTOR_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ATEN._linalg_check_errors.default: _check,
    _ATEN._linalg_det.default: _det,
    _ATEN._linalg_slogdet.default: _slogdet,
    _ATEN._linalg_solve_ex.default: _solve_ex,
    _ATEN.linalg_inv_ex.default: _inverse_ex,
    _ATEN.linalg_lu_solve.default: _lu_solve,
}
