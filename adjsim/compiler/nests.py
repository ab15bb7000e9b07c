"""Loop nests that fill buffers.

The innermost loop runs along the axis with contiguous memory accesses, and is vectorised: over the
lanes of a row sum, or over neighbouring elements.

A sum along a row has LANES partial sums: number l adds the terms l, l + LANES, ... in order, and a
binary tree adds the partial sums. A sum for neighbouring elements adds its terms in order. Which of
them is faster depends on the other tensors of the loop. So the partial sums of an exact run do not
depend on them, by which a sum has the same bits in every program. A sum of many rows has LANES
partial sums, each of rows that follow each other (sums.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adjsim.compiler.stages import WAITING, StagedBody
from adjsim.compiler.sums import Sum, element, parts, steps, tree
from adjsim.compiler.teams import pragma
from adjsim.compiler.values import (
    LANES,
    LONG,
    TYPES,
    Buffer,
    Index,
    Indices,
    Lazy,
    StoredExpression,
    Value,
)

# The least work of a loop that threads share: its elements times their operations. An element of
# few operations counts as eight, the time of its reads.
PARALLEL_WORK, LEAST = 1 << 20, 8
# The same, of a loop that threads share where another one keeps them awake.
SHARED_WORK = 1 << 16
# Threads share the innermost loop where the outermost one has fewer than FEW iterations. Its PARTS
# are multiples of VECTORS, and do not depend on the threads, so that bits do not depend on them.
FEW, PARTS, VECTORS = 16, 8, 2 * LANES
# Numbers of neighbouring sums that are accumulated together: BLOCK, or ROW where sums read rows of
# a matrix; MOST for all sums of a loop that read rows and have partial sums.
BLOCK, ROW, MOST = 16, 512, 4096
# The number of operations from which on a term is computed in stages.
LONG_CHAIN = 48


class Space(NamedTuple):
    """The lengths of the loops over kept axes and over summed axes.

    ``halved`` is whether the loops are over the elements of a square matrix above its diagonal.
    """

    kept: tuple[int, ...]
    summed: tuple[int, ...]
    halved: bool = False


@dataclass(eq=False)
class Task:
    """The computation of a buffer, or of one part of a concatenated buffer.

    Attributes:
        value: the value whose elements are written to the buffer, or summed into it.
        begin: the index in the buffer at which a part of a concatenated buffer begins.
        run: how many terms in a row a partial sum takes (sums.py); None: the nest chooses it.
        halved: whether its loops are over half of a square matrix (halves.py).
        origin: the traced operation whose value the buffer has, and its line of code.
    """

    buffer: Buffer
    value: Value
    axes: tuple[int, ...] = ()
    begin: Indices = ()
    run: int | None = None
    origin: str = ""
    halved: bool = False

    @cached_property
    def kept(self) -> list[int]:
        """The axes of the value longer than one and not summed, outermost in memory first."""
        dropped = self.axes if len(self.buffer.shape) < len(self.value.shape) else ()
        strides = iter(self.buffer.strides)
        step = [0 if a in dropped else next(strides) for a in range(len(self.value.shape))]
        return sorted((a for a in self._loop_axes if a not in self.axes), key=lambda a: -step[a])

    @cached_property
    def summed(self) -> list[int]:
        """The axes of the value longer than one and summed."""
        return [a for a in self._loop_axes if a in self.axes]

    @property
    def space(self) -> Space:
        """The lengths of the loops over kept axes and over summed axes."""
        kept, summed = (tuple(self.value.shape[a] for a in x) for x in (self.kept, self.summed))
        return Space(kept, summed, self.halved)

    @property
    def _loop_axes(self) -> list[int]:
        return [a for a, n in enumerate(self.value.shape) if n > 1]

    @cached_property
    def alone(self) -> Nest:
        """The nest of this task alone."""
        return Nest([self])

    def index(self, kept: Sequence[str], summed: Sequence[str]) -> Indices:
        """Build the index of the value from the names of the loop variables."""
        names = dict(zip([*self.kept, *self.summed], [*kept, *summed], strict=True))
        return tuple(
            Index.of(names[a]) if a in names else Index() for a in range(len(self.value.shape))
        )

    def target(self, index: Indices) -> Index:
        """Return the offset in the buffer for an index of the value."""
        if len(self.buffer.shape) != len(index):
            index = tuple(i for a, i in enumerate(index) if a not in self.axes)
        else:
            index = tuple(Index() if a in self.axes else i for a, i in enumerate(index))
        begin = self.begin or tuple(Index() for _ in index)
        return self.buffer.at(tuple(i + b for i, b in zip(index, begin, strict=True)))


def matrices(space: Space) -> Space:
    """Return the space of the matrices whose rows are summed."""
    return Space((*space.kept, *space.summed), (), space.halved)


class Nest:
    """A loop nest over kept and summed axes that several tasks share.

    A nest that sums may also write elements of matrices, such as those that it sums. The ``fused``
    values have buffers, but are computed where the nest reads them.

    Attributes:
        kept_loops, summed_loops: the variables of the loops over the kept and the summed axes. Any
            of them may be the innermost.
        length: the lengths of these loops.
        body: the statements that compute the elements.
        results: for each task, the expression of an element and its offset in the buffer.
    """

    def __init__(self, tasks: Sequence[Task], fused: Set[Lazy] = frozenset()) -> None:
        self.tasks: list[Task] = []
        kept, summed, _ = next((x for x in tasks if x.summed), tasks[0]).space
        self.kept_loops = [f"i{n}" for n in range(len(kept))]
        self.summed_loops = [f"j{n}" for n in range(len(summed))]
        loops = [*self.kept_loops, *self.summed_loops]
        self.length = dict(zip(loops, [*kept, *summed], strict=True))
        self.body = StagedBody(fused)
        self.results: list[tuple[Task, str, Index]] = []
        self._add(tasks)

    def with_tasks(self, tasks: Sequence[Task]) -> Nest:
        """Return a nest that has these tasks too, which may read values of its own tasks."""
        if self.length and not self.summed_loops and any(task.summed for task in tasks):
            return Nest([*self.tasks, *tasks], self.body.fused)
        # Its own tasks need not be printed again.
        found = copy(self)
        found.__dict__.pop("innermost", None)
        found.body, found.results, found.tasks = self.body.copy(), [*self.results], [*self.tasks]
        found._add(tasks)
        return found

    def _add(self, tasks: Sequence[Task]) -> None:
        self.tasks += tasks
        stored = {task.value.value for task in tasks if isinstance(task.value, StoredExpression)}
        self.body.own |= stored
        for task in tasks:
            index = self.index(task)
            self.results.append((task, task.value.load(self.body, index), task.target(index)))

    def index(self, task: Task) -> Indices:
        """Return the index of the value of a task in the loops."""
        if task.summed:
            return task.index(self.kept_loops, self.summed_loops)
        return task.index([*self.kept_loops, *self.summed_loops], [])

    def lines(self, threads: int = 1) -> list[str]:
        """Print the nest, which threads share if it is large."""
        threads = threads if self.shared(threads) else 1
        if not self.length:
            lines = self.body.lines + [
                f"{element(task.buffer, at)} = {text};" for task, text, at in self.results
            ]
        else:
            name, limit = self.innermost
            if name in self.summed_loops:
                lines = self._rows(name, limit, threads)
            elif self.summed_loops:
                lines = self._blocks(name, limit, threads)
            else:
                lines = self._elements(name, limit, threads)
        variables = [t.buffer for t in self.tasks if t.buffer.variable]
        # A block of its own, since variables of other bodies have the same names.
        declared = (f"{TYPES[b.dtype]} {b.name};" for b in variables)
        return [*self.origins, *declared, "{", *lines, "}"]

    @property
    def origins(self) -> list[str]:
        """Print the origins of the values, as comments."""
        found = (f"// {task.buffer.name}: {task.origin}" for task in self.tasks if task.origin)
        return [*dict.fromkeys(found)]

    @cached_property
    def innermost(self) -> tuple[str, int]:
        """The loop variable with the most contiguous accesses, and where its loop ends."""
        names, places = list(self.length), [at for _, at in self.places]

        def score(name: str) -> tuple[int, int]:
            factors = [abs(at.factor(name)) for at in places]
            contiguous = sum(f == 1 for f in factors) - 2 * sum(f > 1 for f in factors)
            return contiguous, names.index(name)

        name = max((name for name in names if self.length[name] > 1), key=score)
        return name, self._limit(name)

    @property
    def places(self) -> list[tuple[Buffer, Index]]:
        """The buffers and offsets that are read and written."""
        written = [(t.buffer, at) for t, _, at in self.results if not t.buffer.variable]
        return [*self.body.reads, *written]

    def _limit(self, name: str) -> int:
        """Return the end of the innermost loop, padded if all accesses are to padded rows."""
        n = self.length[name]
        row = -(-n // LANES) * LANES
        touched = [(buffer, at) for buffer, at in self.places if at.factor(name)]
        filled = all(
            b.row == row and at.factor(name) == 1 and at.const % row == 0 for b, at in touched
        )
        # Padding of one part of a concatenated row would overwrite the next part.
        filled &= all(t.buffer.inner == n for t, _, at in self.results if at.factor(name))
        # The padding holds arbitrary numbers, which must not be reported as errors.
        return row if filled and not self.body.refuses else n

    def _head(self, name: str, limit: int | None = None) -> str:
        return f"for (int64_t {name} = 0; {name} < {limit or self.length[name]}; ++{name}) {{"

    @property
    def _outer(self) -> list[str]:
        """The variables of the loops over kept axes around the innermost loop."""
        return [name for name in self.kept_loops if name != self.innermost[0]]

    @property
    def work(self) -> int:
        """The number of its operations."""
        return math.prod(self.length.values()) * max(LEAST, len(self.body.lines))

    @property
    def divisible(self) -> bool:
        """Whether it has a loop whose iterations threads can share."""
        return bool(self.length) and (bool(self._outer) or self.part > 0)

    def shared(self, threads: int) -> bool:
        """Whether threads, which another loop keeps awake, share this one."""
        return threads > 1 and self.divisible and self.work >= SHARED_WORK

    @property
    def part(self) -> int:
        """The elements of a part of the innermost loop; 0: threads share the outermost loop."""
        name, limit = self.innermost
        few = not self._outer or self.length[self._outer[0]] < FEW
        split = few and limit >= PARTS * VECTORS and self.work >= SHARED_WORK
        return VECTORS * -(-limit // (PARTS * VECTORS)) if split and name in self.kept_loops else 0

    def _heads(self, threads: int) -> list[str]:
        """Print the heads of outer loops, of which threads share the first."""
        return [*(pragma(threads) if self._outer else []), *map(self._head, self._outer)]

    def _elements(self, innermost: str, limit: int, threads: int) -> list[str]:
        heads = self._heads(1 if self.part else threads)
        if self.part:
            heads = [*pragma(threads), *parts(limit, self.part), *heads]
            last = f"for (int64_t {innermost} = b; {innermost} < b + width; ++{innermost}) {{"
        else:
            last = self._head(innermost, limit)
        end = ["}"] * (len(self._outer) + 1 + bool(self.part))
        return [*heads, "#pragma omp simd", last, *self.body.lines, *self._stores(), *end]

    def _rows(self, innermost: str, limit: int, threads: int) -> list[str]:
        """Print sums along rows, a vector of terms at a time."""
        length = self.length[innermost]
        sums, lines = self._sums(1 if length > LANES else length, length), self._heads(threads)
        if length > LANES:
            # Behind the terms of a step are zeros, which take the place of those added before.
            lines += [f"alignas(64) {s.kind} {s.name}t[{2 * LANES}] = {{}};" for s in sums]
        lines += [f"{s.variable} {s.name} = {{}};" for s in sums]
        if length <= LANES:
            lines += [self._head(innermost), *self.body.lines, *self._stores()]
            lines += [f"{s.name} += {s.term};" for s in sums]
        else:
            lines += self._vectors(innermost, limit)
            for s in sums:
                inside = f"({innermost} < {length} ? {s.term} : ({s.kind})0)"
                lines.append(f"{s.name}t[l] = {inside if limit > length else s.term};")
            lines.append("}")
            # A sum that starts at zero is never -0, and adding zero does not change it.
            lines += [
                f"{s.name} += *(const terms<{s.kind}>*)({s.name}t + again);"
                if s.run == 1
                else f"for (int64_t l = again; l < {LANES}; ++l) {s.at('b + l')} += {s.name}t[l];"
                for s in sums
            ]
        lines += ["}"] * (2 if length > LANES and self._in_stages(limit) else 1)
        lines += [f"{s.target} = {s.total};" for s in sums]
        return lines + ["}"] * len(self.kept_loops)

    def _in_stages(self, limit: int) -> bool:
        """Whether the elements of a row are computed in stages."""
        return limit > WAITING and len(self.body.lines) >= LONG_CHAIN and not self.body.refuses

    def _vectors(self, innermost: str, limit: int) -> list[str]:
        """Print the loop over the vectors of a row, in stages if their chains are long."""
        simd = [
            "#pragma omp simd",
            f"for (int64_t l = 0; l < {LANES}; ++l) {{",
            f"const int64_t {innermost} = b + l;",
        ]
        if not self._in_stages(limit):
            return [*steps(limit, LANES), *simd, *self.body.lines, *self._stores()]
        arrays, (*before, last) = self.body.stages([text for _, text, _ in self.results], WAITING)
        head = [
            f"for (int64_t step = block; step < end; step += {LANES}) {{",
            f"const int64_t b = step < {limit - LANES} ? step : {limit - LANES};",
            "const int64_t again = step - b, at = step - block;",
        ]
        return [
            f"for (int64_t block = 0; block < {limit}; block += {WAITING}) {{",
            f"const int64_t end = block < {limit - WAITING} ? block + {WAITING} : {limit};",
            *arrays,
            *(x for stage in before for x in [*head, *simd, *stage, "}", "}"]),
            *[*head, *simd, *last, *self._stores()],
        ]

    def _blocks(self, innermost: str, limit: int, threads: int) -> list[str]:
        """Print sums for neighbouring elements, a block of elements at a time."""
        (summed,) = self.summed_loops
        length = self.length[summed]
        sums = self._sums(length, length)
        reads_rows = limit > LONG and any(
            at.factor(innermost) and at.factor(summed) for _, at in self.places
        )
        # One partial sum after the other, unless sums take their terms in another order.
        apart = sums[0].lanes > 1 and all(s.run == sums[0].run for s in sums)
        # Parts of rows that are far apart in memory take longer to read than whole rows.
        whole = reads_rows and (apart or all(s.lanes == 1 for s in sums))
        row = min(ROW, MOST // len(sums)) if apart else ROW
        block = width = min(max(row, BLOCK) if whole else BLOCK, limit)
        by_lanes = apart and whole and self.part > 0
        loops = [*self._heads(1 if self.part else threads), *steps(limit, block)]
        if self.part and not by_lanes:
            block = min(block, self.part)
            loops = [*pragma(threads), *steps(limit, block), *self._heads(1)]
            if whole:
                loops, width = [*pragma(threads), *parts(limit, block), *self._heads(1)], "width"
        head = f"for (int64_t l = 0; l < {width}; ++l) {{ const int64_t {innermost} = b + l;"
        lines = [
            *loops,
            *(f"alignas(64) {s.kind} {s.name}[{s.lanes * block}] = {{}};" for s in sums),
        ]
        if apart:
            lines += [
                *pragma(threads if by_lanes else 1),
                f"for (int64_t lane = 0; lane < {LANES}; ++lane) {{",
                *(f"alignas(64) {s.kind} {s.name}p[{block}] = {{}};" for s in sums),
                sums[0].head(summed),
            ]
        else:
            lines.append(self._head(summed))
        lines += ["#pragma omp simd", head, *self.body.lines, *self._stores()]
        for s in sums:
            at = "p[l]" if apart else f"[({s.lane(summed)}) * {block} + l]"
            lines.append(f"{s.name}{at} += {s.term};")
        lines += ["}", "}"]
        if apart:
            lines.append(f"for (int64_t l = 0; l < {width}; ++l) {{")
            lines += [f"{s.name}[lane * {block} + l] = {s.name}p[l];" for s in sums]
            lines += ["}", "}"]
        lines.append(head)
        for s in sums:
            terms = (f"{s.name}[{n * block} + l]" for n in range(s.lanes))
            lines.append(f"{s.target} = {tree([*terms])};")
        return lines + ["}"] * (len(self._outer) + 2)

    def _sums(self, run: int, length: int) -> list[Sum]:
        """Return the sums of so many terms, with runs of ``run`` where a sum may have any."""
        summed = (result for result in self.results if result[0].summed)
        return [
            Sum(f"s{n}", TYPES[t.buffer.dtype], t.run or run, length, term, element(t.buffer, at))
            for n, (t, term, at) in enumerate(summed)
        ]

    def _stores(self) -> list[str]:
        """Print the assignments of elements that are not summed."""
        return [f"{t.buffer.name}[{at}] = {term};" for t, term, at in self.results if not t.summed]
