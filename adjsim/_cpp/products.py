"""Matrix products in a printed loop.

A product ``C = A B`` is printed as a call of a C++ template, which keeps a tile of C in registers
while it runs over k. Each element is a sum over k in order, and GCC contracts each of its terms
into a fused multiply-add. So its bits do not depend on the shape of the tiles or on the layout of
A, B and C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adjsim._cpp.calls import Address, Call, Called, address_of, dense_copy
from adjsim._cpp.values import TYPES, UnprintableError, Value, make_buffer

# Products of more multiplications are left to torch, whose libraries divide them into blocks for
# the caches and share them among threads.
LARGEST = 2**24
# Bytes of the vectors of the template on any machine.
VECTOR_BYTES = 64

DECLARATIONS = """
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
namespace { namespace products {
#ifdef __AVX512F__
constexpr int BYTES = 64, COLUMNS = 4;
#else
constexpr int BYTES = 32, COLUMNS = 2;
#endif
template <class T> struct Vectors {
  typedef T Vector __attribute__((vector_size(BYTES)));
  static constexpr int64_t lanes = BYTES / sizeof(T);
};
// R rows of V vectors of C.
template <class T, int R, int V>
inline void tile(int64_t K, const T* a, int64_t am, int64_t ak, const T* b, int64_t bk, T* c,
                 int64_t cm, int64_t cn, int64_t columns) {
  typedef typename Vectors<T>::Vector Vector;
  constexpr int64_t W = Vectors<T>::lanes;
  Vector sum[R][V] = {};
  for (int64_t k = 0; k < K; ++k) {
    Vector row[V];
    for (int v = 0; v < V; ++v) memcpy(&row[v], b + k * bk + v * W, BYTES);
    for (int r = 0; r < R; ++r) {
      const T x = a[r * am + k * ak];
      for (int v = 0; v < V; ++v) sum[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < R; ++r) {
    if (cn == 1 && columns == V * W) memcpy(c + r * cm, sum[r], sizeof sum[r]);
    else for (int64_t n = 0; n < columns; ++n) c[r * cm + n * cn] = ((const T*)sum[r])[n];
  }
}
template <class T, int V>
inline void columns_of(int64_t M, int64_t K, const T* a, int64_t am, int64_t ak, const T* b,
                       int64_t bk, T* c, int64_t cm, int64_t cn, int64_t columns) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6)
    tile<T, 6, V>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, cn, columns);
  for (; m + 2 <= M; m += 2)
    tile<T, 2, V>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, cn, columns);
  for (; m < M; ++m) tile<T, 1, V>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, cn, columns);
}
// C = A B with element strides. Unless rows of B are whole vectors, they are copied to `padded`.
template <class T>
void product(int64_t M, int64_t N, int64_t K, const T* a, int64_t am, int64_t ak, const T* b,
             int64_t bk, int64_t bn, T* c, int64_t cm, int64_t cn, T* padded, int64_t row) {
  constexpr int64_t W = Vectors<T>::lanes;
  if (padded) {
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) padded[k * row + n] = b[k * bk + n * bn];
    b = padded, bk = row;
  }
  for (int64_t n = 0; n < N;) {
    const int64_t left = N - n, vectors = (left + W - 1) / W;
    const int64_t taken = vectors >= COLUMNS ? COLUMNS : vectors >= 2 ? 2 : 1;
    const int64_t columns = left < taken * W ? left : taken * W;
    T* out = c + n * cn;
    if (taken == COLUMNS) columns_of<T, COLUMNS>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else if (taken == 2) columns_of<T, 2>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    else columns_of<T, 1>(M, K, a, am, ak, b + n, bk, out, cm, cn, columns);
    n += columns;
  }
}
} }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
"""


class MatrixProduct(Call):
    """The product of two matrices.

    Args:
        left, right: the matrices, as values.
        example: an example of the product.
        store: stores a value.

    Raises:
        UnprintableError: a product of integers, or a large one.
    """

    addresses = ()
    declarations = DECLARATIONS  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self, left: Value, right: Value, example: torch.Tensor, store: Callable[..., None]
    ) -> None:
        (self.rows, self.inner), self.columns = left.shape, right.shape[1]
        self.dtype = example.dtype
        if not self.dtype.is_floating_point:
            raise UnprintableError(f"a matrix product of {self.dtype}")
        if self.rows * self.inner * self.columns > LARGEST:
            raise UnprintableError(f"a product of {left.shape} and {right.shape} matrices")
        self.inputs = (_stored(left, store), _stored(right, store))
        per_vector = VECTOR_BYTES // self.dtype.itemsize
        self.row = -(-self.columns // per_vector) * per_vector
        in_place = _address(self.inputs[1]).strides[1] == 1 and self.row == self.columns
        shapes = [(self.rows, self.columns), *([] if in_place else [(self.inner, self.row)])]
        self.outputs = tuple(map(self._output, shapes))

    def lines(self, functions: Sequence[str]) -> list[str]:
        left, right, out, *padded = map(_address, (*self.inputs, *self.outputs))
        sizes = f"{self.rows}, {self.columns}, {self.inner}"
        matrices = ", ".join(
            f"{x.pointer}, {x.strides[0]}, {x.strides[1]}" for x in (left, right, out)
        )
        copy = padded[0].pointer if padded else "nullptr"
        kind = TYPES[self.dtype]
        return [f"products::product<{kind}>({sizes}, {matrices}, {copy}, {self.row});"]

    def _output(self, shape: tuple[int, ...]) -> Called:
        strides = (shape[1], 1)
        buffer = make_buffer("", self.dtype, shape, strides, fill=False)
        return Called(shape, self.dtype, self.inputs, buffer, strides, call=self)


def _stored(value: Value, store: Callable[..., None]) -> Value:
    if address_of(value) is None:
        store(value)
    if address_of(value) is None:
        value = dense_copy(value, value.strides)
        store(value, fill=False)
    return value


def _address(value: Value) -> Address:
    address = address_of(value)
    assert address is not None
    return address
