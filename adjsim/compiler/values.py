"""The tensors of a traced graph as functions of an index.

A value is either lazy or stored. A lazy value is an expression of its operands, which is printed
wherever it is read. A stored value is in a buffer, or in a variable if it is a scalar. Views map
one index to another, so they cost nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
# Number of operations per element from which a value that is read more than once is stored.
CHEAP = 4
# Rows of more than LANES / 2 and fewer than LONG elements are padded to a multiple of LANES.
LANES, LONG = 8, 64
# Gives a value a buffer: :meth:`adjsim.compiler.graph.Lowering.store`.
Store = Callable[..., None]


class UnprintableError(Exception):
    """Raised for a graph that has an operation without a C++ translation."""


class UnprintableTypeError(UnprintableError):
    """Raised for a loop whose constants, carry or rows have a type that is not printed."""


class Index(NamedTuple):
    """An integer that is an affine function of loop variables."""

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(name: str) -> Index:
        """Return the value of a variable."""
        return Index(0, ((name, 1),))

    def __add__(self, other: Index | int) -> Index:  # pyright: ignore[reportIncompatibleMethodOverride]
        return offset((self, Index(other) if isinstance(other, int) else other), (1, 1))

    def __mul__(self, factor: int) -> Index:  # pyright: ignore[reportIncompatibleMethodOverride]
        return offset((self,), (factor,))

    def factor(self, name: str) -> int:
        """Return the factor of a variable, 0 if it does not occur."""
        return dict(self.terms).get(name, 0)

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor} * {name}" for name, factor in self.terms]
        return " + ".join([*parts, *([str(self.const)] if self.const or not parts else [])])


Indices = tuple[Index, ...]


@dataclass(eq=False)
class Buffer:
    """The memory of a value: a pointer, or a variable for a scalar.

    Attributes:
        row: the padded length of a row along the innermost axis; 0 without padding.
        constant, symmetric: whether a loop leaves it as it is, and whether it equals its transpose.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row: int = 0
    variable: bool = False
    constant: bool = False
    symmetric: bool = False

    @property
    def size(self) -> int:
        """The number of elements in memory, including padding."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return 1 + last + max(0, self.row - self.inner)

    @property
    def inner(self) -> int:
        """The length of the innermost axis."""
        return next((n for n, s in zip(self.shape, self.strides, strict=True) if s == 1 < n), 1)

    def at(self, index: Indices) -> Index:
        """Return the offset of an element."""
        return offset(index, self.strides)


def offset(index: Indices, strides: Sequence[int]) -> Index:
    """Return the offset of an element in memory of these strides."""
    const, terms = 0, dict[str, int]()
    for i, stride in zip(index, strides, strict=True):
        const += i.const * stride
        for name, factor in i.terms:
            terms[name] = terms.get(name, 0) + factor * stride
    return Index(const, tuple(sorted((n, f) for n, f in terms.items() if f)))


def make_buffer(
    name: str, dtype: torch.dtype, shape: Sequence[int], like: Sequence[int], fill: bool
) -> Buffer:
    """Make a dense buffer whose axes are in the order of the strides ``like``.

    With ``fill``, short rows are padded to whole vectors.
    """
    order = sorted(range(len(shape)), key=lambda axis: (like[axis], -axis))
    order = [axis for axis in order if shape[axis] > 1]
    strides, step, row = [0] * len(shape), 1, 0
    for axis in order:
        strides[axis] = step
        size = shape[axis]
        if fill and step == 1 and LANES // 2 < size < LONG and size % LANES:
            size = row = -(-size // LANES) * LANES
        step *= size
    return Buffer(name, dtype, tuple(shape), tuple(strides), row)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with its axes in order."""
    return torch.empty(tuple(shape), device="meta").stride()


@dataclass(eq=False)
class Value:
    """A tensor of the graph that lies in a buffer: an input, or a stored result.

    ``origin`` names the traced operation and the line of code that it comes from.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[Value, ...] = ()
    buffer: Buffer | None = None
    strides: tuple[int, ...] = ()
    origin: str = ""
    own_cost, slow = 1, 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def source(self) -> Value:
        """The value of which this is a view, or itself."""
        return self

    @cached_property
    def varies(self) -> tuple[bool, ...]:
        """For each axis, whether elements may differ along it."""
        return tuple(n > 1 for n in self.shape)

    @property
    def computed(self) -> bool:
        """Whether reading an element needs more than a memory access."""
        return self.buffer is None

    @property
    def work(self) -> int:
        """The number of elements that are computed for it."""
        return self.numel

    @property
    def cost(self) -> int:
        """The number of operations for an element, up to about :data:`CHEAP`."""
        if not self.computed:
            return 0
        total = self.own_cost
        for operand in self.operands:
            total += operand.cost
            if total >= CHEAP:
                break
        return total

    def load(self, body: Body, index: Indices) -> str:
        """Return an expression for an element, and print the statements that it needs."""
        assert self.buffer is not None
        return body.read(self.buffer, index)


@dataclass(eq=False)
class Lazy(Value, ABC):
    """A tensor whose elements are computed where they are read, unless it is given a buffer."""

    def load(self, body: Body, index: Indices) -> str:
        if self.buffer is None or self in body.fused:
            return body.compute(self, index)
        if self in body.own:
            body.reads.append((self.buffer, self.buffer.at(index)))
            return body.compute(self, index)
        return super().load(body, index)

    @abstractmethod
    def print(self, body: Body, index: Indices) -> str:
        """Return the expression of an element."""


class StoredExpression(Value):
    """The expression of a stored value, which is evaluated to fill its buffer."""

    def __init__(self, value: Lazy) -> None:
        super().__init__(
            value.shape, value.dtype, value.operands, strides=value.strides, origin=value.origin
        )
        self.value = value

    def load(self, body: Body, index: Indices) -> str:
        return body.compute(self.value, index)


@dataclass(eq=False)
class View(Value):
    """A view: the elements of an operand at other indices."""

    map: Callable[[Indices], Indices] = tuple

    @property
    def source(self) -> Value:
        return self.operands[0].source

    @cached_property
    def varies(self) -> tuple[bool, ...]:
        axes = [Index.of(f"i{a}") if n > 1 else Index() for a, n in enumerate(self.shape)]
        read = zip(self.map(tuple(axes)), self.operands[0].varies, strict=True)
        names = {name for index, varies in read if varies for name, _ in index.terms}
        return tuple(f"i{a}" in names for a in range(len(self.shape)))

    @property
    def computed(self) -> bool:
        return self.source.computed

    @property
    def cost(self) -> int:
        return self.operands[0].cost

    def load(self, body: Body, index: Indices) -> str:
        return self.operands[0].load(body, self.map(index))


@dataclass(eq=False)
class Pointwise(Lazy):
    """An elementwise expression of operands that broadcast, which may refuse their numbers."""

    expression: Callable[..., str] = str
    refuses: bool = False
    own_cost: int = 1
    slow: int = 0

    def print(self, body: Body, index: Indices) -> str:
        body.refuses |= self.refuses
        return self.expression(*(x.load(body, broadcast(index, x.shape)) for x in self.operands))


def dense_copy(value: Value, strides: Sequence[int]) -> Pointwise:
    """Make a copy of a value that is to be stored without padding, in the order of strides."""
    return Pointwise(value.shape, value.dtype, (value,), strides=tuple(strides))


@dataclass(eq=False)
class Literal(Value):
    """A constant: the same number for every element."""

    text: str = ""

    @cached_property
    def varies(self) -> tuple[bool, ...]:
        return (False,) * len(self.shape)

    @property
    def computed(self) -> bool:
        return False

    def load(self, body: Body, index: Indices) -> str:
        return self.text


@dataclass(eq=False)
class Arange(Lazy):
    """The numbers begin, begin + step, ... along one axis."""

    begin: float = 0
    step: float = 1

    def print(self, body: Body, index: Indices) -> str:
        kind = TYPES[self.dtype]
        return f"({kind}){self.begin!r} + ({kind}){self.step!r} * ({kind})({index[0]})"


@dataclass(eq=False)
class Gathered(Lazy):
    """Elements of the first operand, selected by index tensors along adjacent axes.

    The other operands are the index tensors, already checked to be in range.
    """

    axis: int = 0

    def print(self, body: Body, index: Indices) -> str:
        x, *numbers = self.operands
        width = max(len(number.shape) for number in numbers)
        where = index[self.axis : self.axis + width]
        found = (Index.of(n.load(body, broadcast(where, n.shape))) for n in numbers)
        return x.load(body, (*index[: self.axis], *found, *index[self.axis + width :]))


@dataclass(eq=False)
class Reduced(Value):
    """A sum over axes, which are kept with length one or dropped; always stored.

    Its partial sums take ``run`` terms in a row, or any number (sums.py), and it takes half of a
    matrix if ``halved`` (halves.py).
    """

    axes: tuple[int, ...] = ()
    run: int | None = None
    halved: bool = False

    @property
    def work(self) -> int:
        return max([self.numel, *(x.numel for x in self.operands)])


@dataclass(eq=False)
class Joined(Value):
    """The concatenation of operands along an axis; always stored."""

    axis: int = 0


@dataclass(eq=False)
class Reinterpreted(Value):
    """The memory of its operand, reinterpreted with other axes; always stored."""


def broadcast(index: Indices, shape: tuple[int, ...]) -> Indices:
    """Return the index of an operand of the given shape that broadcasts."""
    own = index[len(index) - len(shape) :]
    return tuple(Index() if n == 1 else i for i, n in zip(own, shape, strict=True))


@dataclass
class Body:
    """The statements of an innermost loop body; common subexpressions are computed once.

    Attributes:
        name: the prefix of its variables.
        own: the stored values that this loop itself computes, at the places where it reads them.
        fused: values with a buffer that is not used, computed where they are read.
        refuses: whether a statement may refuse its numbers, and end the run.
    """

    name: str
    own: set[Lazy] = field(default_factory=set)
    fused: Set[Lazy] = frozenset()
    lines: list[str] = field(default_factory=list)
    reads: list[tuple[Buffer, Index]] = field(default_factory=list)
    refuses: bool = False
    _known: dict[tuple[Value, Indices], str] = field(default_factory=dict)
    _expressions: dict[tuple[str, str], str] = field(default_factory=dict)

    def read(self, buffer: Buffer, index: Indices) -> str:
        """Return the variable that holds an element of a buffer."""
        if buffer.variable:
            return buffer.name
        self.reads.append((buffer, at := buffer.at(index)))
        return self.define(buffer.dtype, f"{buffer.name}[{at}]")

    def compute(self, value: Lazy, index: Indices) -> str:
        """Return the variable that holds an element of a lazy value."""
        key = (value, index)
        if key not in self._known:
            self._known[key] = self.define(value.dtype, value.print(self, index), value.origin)
        return self._known[key]

    def define(self, dtype: torch.dtype, expression: str, origin: str = "") -> str:
        """Return the variable that holds an expression."""
        key = TYPES[dtype], expression
        if key not in self._expressions:
            name = self._expressions[key] = f"{self.name}{len(self._expressions)}"
            comment = f"  // {origin}" if origin else ""
            self.lines.append(f"const {TYPES[dtype]} {name} = {expression};{comment}")
        return self._expressions[key]
