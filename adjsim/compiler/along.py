"""Scans, sorts and extremes along an axis, as calls in a printed loop.

They have torch's bits: a scan adds, or multiplies, in float64 one number after the other, and an
extreme is the first of equal ones, or NaN. A sort keeps the order of equal numbers, and puts NaN
last. Torch's own sort may exchange equal numbers, so exact loops call torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.calls import Call, Operators, stored_address
from adjsim.compiler.scatters import element, head, stored
from adjsim.compiler.values import TYPES, Store, UnprintableError, Value

# Longest axes of sorts, in memory of the stack, and of extremes. Torch's vectors are faster on
# longer ones.
LONGEST_SORT, LONGEST_EXTREME = 256, 1024

DECLARATIONS = """
namespace { namespace along {
template <class T> struct Wide { typedef double Type; };
template <> struct Wide<int64_t> { typedef int64_t Type; };
template <class T, int64_t N>
inline void cumsum(const T* x, int64_t step, T* y, int64_t to) {
  typename Wide<T>::Type sum = 0;
  for (int64_t i = 0; i < N; ++i) sum += x[i * step], y[i * to] = (T)sum;
}
template <class T, int64_t N>
inline void cumprod(const T* x, int64_t step, T* y, int64_t to) {
  typename Wide<T>::Type product = 1;
  for (int64_t i = 0; i < N; ++i) product *= x[i * step], y[i * to] = (T)product;
}
// Whether a number comes before another one; S = -1: in descending order.
template <class T, int S> inline bool precedes(T a, T b) {
  return S > 0 ? a < b || (b != b && a == a) : a > b || (a != a && b == b);
}
template <class T, int S, int64_t N>
inline void sort(const T* x, int64_t step, T* y, int64_t to, int64_t* places, int64_t next) {
  struct Entry { T number; int64_t place; } entries[N], others[N], *from = entries, *into = others;
  constexpr int64_t RUN = 8;
  for (int64_t i = 0; i < N; ++i) {
    const T number = x[i * step];
    int64_t k = i;
    for (; k > i - i % RUN && precedes<T, S>(number, entries[k - 1].number); --k)
      entries[k] = entries[k - 1];
    entries[k].number = number, entries[k].place = i;
  }
  for (int64_t run = RUN; run < N; run *= 2) {
    for (int64_t begin = 0; begin < N; begin += 2 * run) {
      const int64_t middle = begin + run < N ? begin + run : N;
      const int64_t end = begin + 2 * run < N ? begin + 2 * run : N;
      for (int64_t k = begin, a = begin, b = middle; k < end; ++k) {
        const bool second =
            b < end && (a >= middle || precedes<T, S>(from[b].number, from[a].number));
        into[k] = from[second ? b++ : a++];
      }
    }
    Entry* const sorted = into;
    into = from, from = sorted;
  }
  for (int64_t i = 0; i < N; ++i) y[i * to] = from[i].number, places[i * next] = from[i].place;
}
template <class T, int S, int64_t N>
inline void extreme(const T* x, int64_t step, T* y, int64_t, int64_t* place, int64_t) {
  T found = x[0];
  int64_t at = 0;
  for (int64_t i = 1; i < N && found == found; ++i) {
    const T number = x[i * step];
    if (!(S > 0 ? number <= found : number >= found)) found = number, at = i;
  }
  *y = found, *place = at;
}
} }
"""


class AlongAxis(Call):
    """A function of each row of numbers along an axis, with the results in rows or in numbers."""

    declarations = DECLARATIONS

    def __init__(
        self, name: str, values: Sequence[Any], outputs: Sequence[Tensor], store: Store
    ) -> None:
        x: Value = values[0]
        if not x.shape or not x.numel or x.dtype != outputs[0].dtype:
            raise UnprintableError(f"{name} of {x.shape} {x.dtype}")
        self.axis, self.shape = (values[1] if values[1:] else -1) % len(x.shape), x.shape
        kind, length = TYPES[x.dtype], x.shape[self.axis]
        longest = {"sort": LONGEST_SORT, "max": LONGEST_EXTREME, "min": LONGEST_EXTREME}
        if length > longest.get(name, length):
            raise UnprintableError(f"{name} of {length} numbers")
        signs = {"max": 1, "min": -1, "sort": -1 if any(values[2:]) else 1}
        sign = signs.get(name, 0)
        function = "extreme" if name in ("max", "min") else name
        arguments = [kind, *([str(sign)] if sign else []), str(length)]
        self.function = f"along::{function}<{', '.join(arguments)}>"
        self.inputs = (stored(x, store),)
        self.outputs = tuple(map(self.output, outputs))

    def lines(self, functions: Sequence[str]) -> list[str]:
        names = [f"i{axis}" for axis in range(len(self.shape))]
        others = [axis for axis in range(len(names)) if axis != self.axis]
        arguments: list[str] = []
        for value in (*self.inputs, *self.outputs):
            address = stored_address(value)
            kept = len(value.shape) == len(self.shape)
            step = address.strides[self.axis] if kept else 0
            at = [names[axis] if axis != self.axis else "0" for axis in range(len(names))]
            place = element(address, at if kept else [names[axis] for axis in others])
            arguments += [f"&{place}", str(step)]
        return [
            *(head(names[axis], self.shape[axis]) for axis in others),
            f"{self.function}({', '.join(arguments)});",
            *["}"] * len(others),
        ]


_ATEN: Any = torch.ops.aten
SCAN_OPERATORS = Operators(
    {
        _ATEN.cumsum.default: partial(AlongAxis, "cumsum"),
        _ATEN.cumprod.default: partial(AlongAxis, "cumprod"),
        _ATEN.max.dim: partial(AlongAxis, "max"),
        _ATEN.min.dim: partial(AlongAxis, "min"),
    }
)
SORT_OPERATORS = Operators({_ATEN.sort.default: partial(AlongAxis, "sort")})
