"""Matrix products in a printed loop.

A product ``C = A B`` is printed as a call of a C++ template, which keeps a tile of C in registers
while it runs over k. Each element is a sum over k in order, and GCC contracts each of its terms
into a fused multiply-add. So its bits do not depend on the shape of the tiles or on the layout of
A, B and C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from adjsim.compiler.calls import Call, address_of, in_place, stored_address
from adjsim.compiler.mathematics import FUNCTIONS
from adjsim.compiler.values import (
    TYPES,
    Pointwise,
    Store,
    UnprintableError,
    Value,
    View,
    dense_copy,
)
from adjsim.compiler.views import slicing

MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_FUNCTIONS = {getattr(torch.ops.aten, name).default for name in (*FUNCTIONS, "sigmoid")}
# Products of more multiplications are left to torch, whose libraries divide them into blocks for
# the caches and share them among threads.
LARGEST = 2**24
# Products with at most this inner length are computed where they are read.
FEW = 4
# Bytes of the vectors of the template on any machine.
VECTOR_BYTES = 64
# Bytes of shorter vectors, for products with few columns.
SHORT_VECTORS = (16, 32)

DECLARATIONS = """
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
namespace { namespace products {
#ifdef __AVX512F__
constexpr int BYTES = 64, COLUMNS = 4, ROWS = 6;
#else
constexpr int BYTES = 32, COLUMNS = 2, ROWS = 6;
#endif
template <class T, int B> struct Vectors {
  typedef T Vector __attribute__((vector_size(B)));
  typedef T Unaligned __attribute__((vector_size(B), aligned(alignof(T)), may_alias));
  static constexpr int64_t lanes = B / sizeof(T);
};
// R rows of V vectors of B bytes of C. Only constants index the sums, or they would not stay in
// registers.
template <class T, bool ADD, int R, int V, int B>
inline void tile(int64_t K, const T* a, int64_t am, int64_t ak, const T* b, int64_t bk, T* c,
                 int64_t cm, int64_t cn, int64_t columns) {
  typedef typename Vectors<T, B>::Vector Vector;
  typedef typename Vectors<T, B>::Unaligned Unaligned;
  constexpr int64_t W = Vectors<T, B>::lanes;
  Vector sum[R][V] = {};
  for (int64_t k = 0; k < K; ++k) {
    Vector row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = *(const Unaligned*)(b + k * bk + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const T x = a[r * am + k * ak];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += x * row[v];
    }
  }
  const bool whole = cn == 1 && columns == V * W;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    T copy[V * W];
    T* to = whole ? c + r * cm : copy;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if (ADD && whole) sum[r][v] += *(const Unaligned*)(to + v * W);
      *(Unaligned*)(to + v * W) = sum[r][v];
    }
    if (!whole)
      for (int64_t n = 0; n < columns; ++n)
        c[r * cm + n * cn] = ADD ? c[r * cm + n * cn] + copy[n] : copy[n];
  }
}
// The rows of V vectors of B bytes of C, in tiles of R rows, and of fewer at the end.
template <class T, bool ADD, int V, int R, int B = BYTES>
inline void columns_of(int64_t M, int64_t K, const T* a, int64_t am, int64_t ak, const T* b,
                       int64_t bk, T* c, int64_t cm, int64_t cn, int64_t columns) {
  int64_t m = 0;
  for (; m + R <= M; m += R)
    tile<T, ADD, R, V, B>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, cn, columns);
  if constexpr (R > 1)
    columns_of<T, ADD, V, R == 6 ? 4 : R / 2, B>(M - m, K, a + m * am, am, ak, b, bk, c + m * cm,
                                                 cm, cn, columns);
}
// Copy B in squares, whose rows and columns stay in the nearest cache.
template <class T>
inline void copy(int64_t K, int64_t N, const T* b, int64_t bk, int64_t bn, T* padded, int64_t row) {
  constexpr int64_t S = 16;
  for (int64_t k0 = 0; k0 < K; k0 += S)
    for (int64_t n0 = 0; n0 < N; n0 += S) {
      const int64_t k1 = k0 + S < K ? k0 + S : K, n1 = n0 + S < N ? n0 + S : N;
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t n = n0; n < n1; ++n) padded[k * row + n] = b[k * bk + n * bn];
    }
}
// C = A B, or C += A B, with element strides. Unless rows of B are whole vectors, they are copied
// to `padded`. A few columns are a shorter vector, of which a processor may multiply more at once.
template <class T, bool ADD = false>
void product(int64_t M, int64_t N, int64_t K, const T* a, int64_t am, int64_t ak, const T* b,
             int64_t bk, int64_t bn, T* c, int64_t cm, int64_t cn, T* padded, int64_t row) {
  constexpr int64_t W = Vectors<T, BYTES>::lanes;
  if (padded) {
    copy(K, N, b, bk, bn, padded, row);
    b = padded, bk = row;
  }
  for (int64_t n = 0; n < N;) {
    const int64_t left = N - n, vectors = (left + W - 1) / W;
    const int64_t taken = vectors >= COLUMNS ? COLUMNS : vectors >= 2 ? 2 : 1;
    const int64_t columns = left < taken * W ? left : taken * W;
    T* out = c + n * cn;
    if (taken == COLUMNS)
      columns_of<T, ADD, COLUMNS, ROWS>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else if (taken == 2) columns_of<T, ADD, 2, 8>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else if (columns <= Vectors<T, 16>::lanes)
      columns_of<T, ADD, 1, 8, 16>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else if (columns <= Vectors<T, 32>::lanes)
      columns_of<T, ADD, 1, 8, 32>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else columns_of<T, ADD, 1, 8>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    n += columns;
  }
}
} }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
"""


def multiplications(node: Node, function: int) -> int:
    """Count those of a matrix product that is not printed as sums, or of a function such as exp.

    ``function`` is the number of multiplications in the time of one value of a function.
    """
    if node.target in _FUNCTIONS:
        return function * node.meta["val"].numel()
    if node.target not in MATRIX_PRODUCTS:
        return 0
    left: Any = node.args[-2]
    inner = left.meta["val"].shape[-1]
    return inner * node.meta["val"].numel() if inner > FEW else 0


def sum_of_products(left: Value, right: Value, example: Tensor, store: Store) -> Pointwise:
    """Return a product of small inner length, each element by a sum that is not stored."""
    (rows, inner), columns = left.shape, right.shape[1]
    address = address_of(right)
    if address is None or address.strides[1] > 1:
        right = dense_copy(right, (columns, 1))
        store(right)
    factors = [View((rows, 1), left.dtype, (left,), map=slicing(1, k, 1)) for k in range(inner)]
    factors += [
        View((1, columns), right.dtype, (right,), map=slicing(0, k, 1)) for k in range(inner)
    ]

    def expression(*x: str) -> str:
        total = f"{x[0]} * {x[inner]}"
        for a, b in zip(x[1:inner], x[inner + 1 :], strict=True):
            total = f"math::fused({a}, {b}, {total})"
        return total

    return Pointwise(
        tuple(example.shape),
        example.dtype,
        tuple(factors),
        strides=example.stride(),
        expression=expression,
    )


class MatrixProduct(Call):
    """The product of two matrices of floating point, up to :data:`LARGEST`."""

    declarations = DECLARATIONS

    def __init__(self, left: Value, right: Value, example: Tensor, store: Store) -> None:
        (self.rows, self.inner), self.columns = left.shape, right.shape[1]
        self.dtype = example.dtype
        if not self.dtype.is_floating_point:
            raise UnprintableError(f"a matrix product of {self.dtype}")
        if self.rows * self.inner * self.columns > LARGEST:
            raise UnprintableError(f"a product of {left.shape} and {right.shape} matrices")
        self.inputs = (_stored(left, store), _stored(right, store))
        first, second = map(stored_address, self.inputs)
        fits = self._is_whole(self.columns, second.strides[1])
        # The transpose of C from those of A and B, whose rows need no copy, or are longer vectors.
        self.transposed = self._is_whole(self.rows, first.strides[0]) and not (
            fits and self.columns * self.dtype.itemsize >= VECTOR_BYTES
        )
        self.row = padded(self.rows if self.transposed else self.columns, self.dtype)
        shapes = [(self.rows, self.columns)]
        if not fits and not self.transposed:
            shapes.append((self.inner, self.row))
        examples = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        self.outputs = tuple(map(self.output, examples))

    def lines(self, functions: Sequence[str]) -> list[str]:
        left, right, out, *padded = map(stored_address, (*self.inputs, *self.outputs))
        rows, columns = self.rows, self.columns
        if self.transposed:
            left, right, out = right.mT, left.mT, out.mT
            rows, columns = columns, rows
        sizes = f"{rows}, {columns}, {self.inner}"
        matrices = ", ".join(
            f"{x.pointer}, {x.strides[0]}, {x.strides[1]}" for x in (left, right, out)
        )
        copy = padded[0].pointer if padded else "nullptr"
        kind = TYPES[self.dtype]
        return [f"products::product<{kind}>({sizes}, {matrices}, {copy}, {self.row});"]

    def _is_whole(self, length: int, stride: int) -> bool:
        """Return whether rows of this length and stride are whole vectors."""
        return stride == 1 and length == padded(length, self.dtype)


def padded(length: int, dtype: torch.dtype) -> int:
    """Round the length of a row up to whole vectors, or to a shorter one."""
    size = length * dtype.itemsize
    vector = next((x for x in SHORT_VECTORS if size <= x), VECTOR_BYTES)
    return -(-size // vector) * vector // dtype.itemsize


def _stored(value: Value, store: Store) -> Value:
    if address_of(value) is None and (part := in_place(value)) is not None:
        return part
    if address_of(value) is None:
        store(value)
    if address_of(value) is None:
        value = dense_copy(value, value.strides)
        store(value, fill=False)
    return value
