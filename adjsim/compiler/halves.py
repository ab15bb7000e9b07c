"""Sums over the rows of a matrix whose element (j, i) costs little beside the element (i, j).

In a sum over pairs of points, the terms of a pair in both orders have most operations in common. So
a loop over the elements on and above the diagonal computes both terms, and adds one to the sum of
the row and the other to the sum of the column: half the work.

:class:`Elements` finds what two elements have in common. Two values are the same if their
operations are, up to the order of the operands of sums and products, which does not change a bit;
and two values are the same but for their sign if a difference has its operands exchanged. A
rounding to multiples of a spacing, ``(x + c) - c``, keeps the sign of x (to nearest, ties to even).

The order of the terms depends on the number of points alone, so that exact runs have the same sums
in every program, for any number of threads: number i adds the vectors of its row from the diagonal
on as a sum along a row does, and then its terms of the rows before, in order, part by part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from typing import Any

from adjsim.compiler.nests import PARTS, Nest, Task
from adjsim.compiler.operations import literal
from adjsim.compiler.stages import WAITING, StagedBody
from adjsim.compiler.sums import MANY_ROWS, tree
from adjsim.compiler.teams import pragma
from adjsim.compiler.values import (
    LANES,
    TYPES,
    Arange,
    Index,
    Indices,
    Lazy,
    Literal,
    Pointwise,
    Reduced,
    StoredExpression,
    Value,
    View,
    broadcast,
)

# The least and the largest number of points: that of a few vectors, and that of the columns' sums
# on the stack.
FEWEST, MOST = 4 * LANES, 1024
# The largest number of operations for the terms of both orders, over that for one.
MORE = 1.2
# The printed operations of one number that change its sign with that of the number: products and
# quotients with a literal, third powers, and the reciprocal.
ODD = re.compile(r"x0 [*/] -?[\d.][\w.+-]*|x0 \* x0 \* x0|1 / \(?x0\)?")
# The number of a value with the same operations, and its sign.
Number = tuple[int, int]


class Elements:
    """Numbers of elements: equal ones for the same operations, with a sign.

    Attributes:
        reads_matrices: whether an element is that of a matrix that need not be symmetric.
    """

    def __init__(self) -> None:
        self.reads_matrices = False
        self._numbers: dict[Any, int] = {}
        self._known: dict[tuple[Value, Indices], Number] = {}
        # The operands of operations, and those of sums with their signs.
        self._operands: dict[int, set[int]] = {}
        self._terms: dict[int, dict[int, int]] = {}
        self._zeros: set[int] = set()

    def number(self, value: Value, index: Indices) -> Number:
        """Return the number of an element, and its sign."""
        key = value, index
        if key not in self._known:
            self._known[key] = self._find(value, index)
        return self._known[key]

    def operations(self, *numbers: int) -> int:
        """Count the operations for some elements."""
        seen, todo = set[int](), list(numbers)
        while todo:
            number = todo.pop()
            if number not in seen and number in self._operands:
                seen.add(number)
                todo += self._operands[number]
        return len(seen)

    def _find(self, value: Value, index: Indices) -> Number:
        if isinstance(value, View):
            return self.number(value.operands[0], value.map(index))
        if isinstance(value, StoredExpression):
            return self.number(value.value, index)
        if isinstance(value, Literal):
            number = self._named(("literal", value.text, value.dtype))
            if value.text == literal(0, value.dtype):
                self._zeros.add(number)
            return number, 1
        # The elements of a stored vector are read.
        matrix = sum(bool(i.terms) for i in index) > 1
        if isinstance(value, Pointwise) and (value.buffer is None or matrix):
            operands = [(x, broadcast(index, x.shape)) for x in value.operands]
            return self._of_operation(value, [self.number(*x) for x in operands])
        if isinstance(value, Arange) and not value.buffer:
            return self._named(("arange", value.begin, value.step, value.dtype, index)), 1
        if value.buffer and value.buffer.symmetric:
            index = tuple(sorted(index, key=str))
        elif matrix:
            self.reads_matrices = True
        return self._named((id(value), index)), 1

    def _of_operation(self, value: Pointwise, operands: list[Number]) -> Number:
        text = value.expression(*(f"x{k}" for k in range(len(operands))))
        numbers, signs = [x for x, _ in operands], [sign for _, sign in operands]
        sign, even = 1, text in ("absolute(x0)", "x0 * x0")
        zeroed = f"x0 ? x1 : {literal(0, value.dtype)}"
        if text in ("x0", "-x0"):
            return numbers[0], signs[0] if text == "x0" else -signs[0]
        if text in ("x0 + x1", "x0 - x1"):
            return self._of_sum(value, numbers, [signs[0], signs[1] if "+" in text else -signs[1]])
        if text == "x0 * x1":
            numbers, sign = sorted(numbers), signs[0] * signs[1]
        elif text == "x0 / x1" or (len(numbers) == 1 and not even and ODD.fullmatch(text)):
            sign = math.prod(signs)
        elif text == zeroed or (text == "x0 ? x1 : x2" and numbers[2] in self._zeros):
            text, numbers, sign = zeroed, numbers[:2], signs[1]
        elif text in ("x0 == x1", "x0 != x1") and signs == [1, 1]:
            numbers = sorted(numbers)
        elif not even:
            text += str(signs)
        return self._named((text, value.dtype, *numbers), numbers), sign

    def _of_sum(self, value: Value, numbers: list[int], signs: list[int]) -> Number:
        if (
            signs[1] == -1
            and (rounded := self._rounded(numbers[0], numbers[1], signs[0])) is not None
        ):
            return rounded
        (a, b), sign = numbers, signs[0]
        first, second = sorted(numbers)
        if signs[0] == signs[1]:
            found = self._named(("+", value.dtype, first, second), numbers)
        else:
            found = self._named(("-", value.dtype, first, second), numbers)
            sign = sign if a == first else -sign
        self._terms[found] = {a: sign * signs[0], b: sign * signs[1]}
        return found, sign

    def _rounded(self, total: int, shift: int, sign: int) -> Number | None:
        """Return the number of ``(x + c) - c``, of a sum and of c; None for other differences."""
        terms = {number: sign * other for number, other in self._terms.get(total, {}).items()}
        if terms.pop(shift, 0) != 1 or len(terms) != 1:
            return None
        ((x, sign),) = terms.items()
        return self._named(("round", x, shift), [x, shift]), sign

    def _named(self, key: Any, operands: Sequence[int] = ()) -> int:
        if key not in self._numbers:
            self._numbers[key] = number = len(self._numbers)
            if operands:
                self._operands[number] = {*operands}
        return self._numbers[key]


class PairBody(StagedBody):
    """Statements for the elements of a pair in both orders, with common ones computed once."""

    def __init__(self, fused: Set[Lazy]) -> None:
        super().__init__(fused)
        self._elements, self._names = Elements(), dict[int, tuple[str, int]]()

    def computed(self, value: Lazy, index: Indices) -> str:
        number, sign = self._elements.number(value, index)
        if number not in self._names:
            # Operands may have the same number: that of a negated value.
            self._names.setdefault(number, (super().computed(value, index), sign))
        name, known = self._names[number]
        return name if sign == known else self.defined(value.dtype, f"-{name}", [name])


def is_halved(value: Reduced) -> bool:
    """Whether a sum is over the rows of a matrix whose elements (j, i) cost little more."""
    (x,), axes = value.operands, value.axes
    if (
        len(axes) != 1
        or not value.dtype.is_floating_point
        or not FEWEST <= x.shape[axes[0]] <= MOST
    ):
        return False
    column, row = axes[0], _row_axis(x, axes[0])
    if row is None:
        return False
    names = [Index.of(f"i{a}") if n > 1 else Index() for a, n in enumerate(x.shape)]
    swapped = list(names)
    swapped[row], swapped[column] = names[column], names[row]
    elements = Elements()
    one, other = elements.number(x, tuple(names))[0], elements.number(x, tuple(swapped))[0]
    if elements.reads_matrices:
        return False
    return elements.operations(one, other) <= MORE * elements.operations(one)


def _row_axis(x: Value, column: int) -> int | None:
    """Return the other axis of a square matrix; None for other values."""
    long = [a for a, n in enumerate(x.shape) if n > 1]
    if len(long) != 2 or x.shape[long[0]] != x.shape[long[1]] or not all(x.varies[a] for a in long):
        return None
    return next(a for a in long if a != column)


class HalfNest(Nest):
    """A loop over the elements of a square matrix on and above its diagonal, for sums of rows."""

    def __init__(self, tasks: Sequence[Task], fused: Set[Lazy] = frozenset()) -> None:
        super().__init__(tasks, fused)
        (self.row,), (self.column,) = self.kept_loops, self.summed_loops
        self.body = PairBody(fused)
        self.pairs: list[tuple[str, str]] = []
        for task, _, _ in self.results:
            names = task.index([self.row], [self.column]), task.index([self.column], [self.row])
            one, other = (task.value.load(self.body, index) for index in names)
            self.pairs.append((one, other))

    @property
    def parts(self) -> int:
        """The number of parts of the matrix, of which each has every eighth row.

        It does not depend on the threads, which share the parts.
        """
        return PARTS if max(self.length.values()) >= MANY_ROWS else 1

    @property
    def divisible(self) -> bool:
        return self.parts > 1

    def lines(self, threads: int = 1) -> list[str]:
        """Print the nest."""
        # The row is the outer loop if elements of a row are side by side in memory.
        inner = self.innermost[0]
        outer, n = self.row if inner == self.column else self.column, self.length[inner]
        # An odd number of vectors: sums 4,096 bytes apart would wait for each other.
        size = LANES * (-(-n // LANES) | 1)
        sums = [(f"s{k}", TYPES[t.buffer.dtype], t) for k, (t, _, _) in enumerate(self.results)]
        lines = [*self.origins, "{"]
        lines += [
            f"alignas(64) {kind} {name}p[{self.parts * size}] = {{}};" for name, kind, _ in sums
        ]
        lines += pragma(threads if self.shared(threads) else 1)
        lines.append(f"for (int64_t part = 0; part < {self.parts}; ++part) {{")
        lines += [f"{kind}* {name}c = {name}p + {size} * part;" for name, kind, _ in sums]
        lines.append(f"for (int64_t {outer} = part; {outer} < {n}; {outer} += {self.parts}) {{")
        lines += [f"partial_sums<{kind}> {name} = {{}};" for name, kind, _ in sums]
        arrays, stages = self.body.stages([x for pair in self.pairs for x in pair], WAITING)
        first = f"{outer} / {LANES} * {LANES}"
        lines += [
            f"for (int64_t block = {first}; block < {n}; block += {WAITING}) {{",
            f"const int64_t end = block < {n - WAITING} ? block + {WAITING} : {n};",
            *arrays,
        ]
        head = [
            f"for (int64_t step = block; step < end; step += {LANES}) {{",
            # The last vector begins early, and its first numbers have been added before.
            f"const int64_t b = step < {n - LANES} ? step : {n - LANES}, at = step - block;",
        ]
        simd = [
            "#pragma omp simd",
            f"for (int64_t l = 0; l < {LANES}; ++l) {{",
            f"const int64_t {inner} = b + l;",
        ]
        for stage in stages[:-1]:
            lines += [*head, *simd, *stage, "}", "}"]
        lines += [
            *head,
            f"const int64_t first = (step < {outer} ? {outer} : step) - b;",
            f"const int64_t above = (step > {outer} ? step : {outer} + 1) - b;",
        ]
        lines += [
            f"alignas(64) {kind} {name}t[{LANES}], {name}u[{LANES}];" for name, kind, _ in sums
        ]
        lines += [*simd, *stages[-1]]
        for (name, _, _), pair in zip(sums, self.pairs, strict=True):
            along, across = pair if inner == self.column else pair[::-1]
            lines.append(f"{name}t[l] = {along}, {name}u[l] = {across};")
        lines.append("}")
        # Conditions inside of the loop would keep it from being vectorised.
        for name, kind, _ in sums:
            lines += [
                f"{name} += from<{kind}>(first, {name}t);",
                f"*(terms<{kind}>*)({name}c + b) += from<{kind}>(above, {name}u);",
            ]
        lines += ["}", "}"]
        for name, _, task in sums:
            at = task.target(task.index([outer], [inner]))
            lanes = tree([f"{name}[{lane}]" for lane in range(LANES)])
            lines.append(f"{task.buffer.name}[{at}] = {lanes};")
        lines += ["}", "}", f"for (int64_t part = 0; part < {self.parts}; ++part)"]
        lines.append(self._head(inner))
        for name, _, task in sums:
            at = task.target(task.index([inner], [outer]))
            lines.append(f"{task.buffer.name}[{at}] += {name}p[{size} * part + {inner}];")
        return [*lines, "}", "}"]


def nest_of(tasks: Sequence[Task], fused: Set[Lazy] = frozenset()) -> Nest:
    """Make the nest of tasks of one space."""
    return (HalfNest if tasks[0].halved else Nest)(tasks, fused)
