"""From stored values to loops: in which order, which of them share a loop, and how a loop is
printed.

A value is stored as soon as the values that it reads are. Sums over matrices of pairs wait until
nothing else can be done, so that those that can share one loop over pairs do. The innermost loop
runs along the axis along which memory is read in order, and consists of vectors: of the lanes of a
row that is summed, or of elements next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from adjsim._cpp.graph import Lowering
from adjsim._cpp.values import (
    LANES,
    TYPES,
    Body,
    Buffer,
    Index,
    Indices,
    Joined,
    Reduced,
    Seen,
    Value,
)

# Elements of a loop above which threads share it.
SHARED = 131_072
# Numbers of a vector's block of sums.
BLOCK = 16


@dataclass(eq=False)
class Task:
    """What writes a buffer: all of it, or the part of a joined one that begins at an index.

    Attributes:
        value: an element of which goes to, or is added to, each element of the buffer.
        axes: of the value, that are summed.
    """

    buffer: Buffer
    value: Value
    axes: tuple[int, ...] = ()
    begin: Indices = ()

    @cached_property
    def kept(self) -> list[int]:
        """The axes of the value that are looped over and kept, from the outermost in memory."""
        strides = self._strides
        return sorted((a for a in self._long if a not in self.axes), key=lambda a: -strides[a])

    @cached_property
    def summed(self) -> list[int]:
        return [a for a in self._long if a in self.axes]

    @property
    def space(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of the loops, of kept and of summed axes."""
        return tuple(self.value.shape[a] for a in self.kept), tuple(
            self.value.shape[a] for a in self.summed
        )

    @property
    def work(self) -> int:
        return self.value.numel

    @property
    def _long(self) -> list[int]:
        return [a for a, n in enumerate(self.value.shape) if n > 1]

    @property
    def _strides(self) -> list[int]:
        """Of the buffer, by the axes of the value."""
        if len(self.buffer.shape) == len(self.value.shape):
            return list(self.buffer.strides)
        rest = iter(self.buffer.strides)
        return [0 if a in self.axes else next(rest) for a in range(len(self.value.shape))]

    def index(self, kept: Sequence[str], summed: Sequence[str]) -> Indices:
        """The index of the value, with these variables."""
        names = dict(zip([*self.kept, *self.summed], [*kept, *summed], strict=True))
        return tuple(
            Index(0, ((names[a], 1),)) if a in names else Index()
            for a in range(len(self.value.shape))
        )

    def target(self, index: Indices) -> Index:
        """Where the element goes, for the index of the value."""
        if len(self.buffer.shape) != len(index):
            index = tuple(i for a, i in enumerate(index) if a not in self.axes)
        else:
            index = tuple(Index() if a in self.axes else i for a, i in enumerate(index))
        begin = self.begin or tuple(Index() for _ in index)
        return self.buffer.at(tuple(i + b for i, b in zip(index, begin, strict=True)))


@dataclass(frozen=True)
class Output:
    """Where an output of a graph goes."""

    value: Value
    buffer: Buffer


class Function:
    """The statements of a graph.

    Args:
        lowering: of the graph.
        outputs: where its outputs go.
        threads: that share large loops.
        result: a value that is needed in the end as well.
    """

    def __init__(
        self,
        lowering: Lowering,
        outputs: Sequence[Output],
        threads: int,
        result: Value | None = None,
    ) -> None:
        self.large, self.threads = lowering.large, threads
        self.lines: list[str] = []
        self.scratch: list[Buffer] = []
        tasks: dict[Value, list[Task]] = {value: _tasks(value) for value in lowering.stored}
        last = [Task(output.buffer, output.value) for output in outputs]
        self._order(tasks, last, [] if result is None else [result])

    def _order(self, tasks: dict[Value, list[Task]], last: list[Task], also: list[Value]) -> None:
        needs = {value: _reads(value, inside=True) & tasks.keys() for value in tasks}
        wanted: set[Value] = set()
        todo = [
            value
            for root in (*also, *(task.value for task in last))
            for value in _reads(root) & tasks.keys()
        ]
        while todo:
            value = todo.pop()
            if value not in wanted:
                wanted.add(value)
                todo.extend(needs[value])
        # In the order of the graph, so that the program is the same each time.
        left = [value for value in tasks if value in wanted]
        done: set[Value] = set()
        for value in left:
            assert value.buffer is not None
            if not value.buffer.variable:
                self.scratch.append(value.buffer)
        while left:
            ready = [value for value in left if needs[value] & wanted <= done]
            small = [
                value for value in ready if all(task.work <= self.large for task in tasks[value])
            ]
            chosen = small or self._together(ready, tasks)
            self._emit([task for value in chosen for task in tasks[value]])
            done.update(chosen)
            left = [value for value in left if value not in done]
        self._emit(last)

    def _together(self, ready: list[Value], tasks: dict[Value, list[Task]]) -> list[Value]:
        """Large sums of one loop."""
        space = tasks[ready[0]][0].space
        return [value for value in ready if tasks[value][0].space == space]

    def _emit(self, tasks: Iterable[Task]) -> None:
        nests: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Task]] = {}
        for task in tasks:
            nests.setdefault(task.space, []).append(task)
        for (kept, summed), group in nests.items():
            self.lines += Nest(kept, summed, group, self.threads).lines()


class Nest:
    """Loops over kept and summed axes that several tasks share."""

    def __init__(
        self, kept: tuple[int, ...], summed: tuple[int, ...], tasks: list[Task], threads: int
    ) -> None:
        self.tasks, self.threads = tasks, threads
        self.outer = [f"i{n}" for n in range(len(kept))]
        self.inner = [f"j{n}" for n in range(len(summed))]
        self.length = dict(zip([*self.outer, *self.inner], [*kept, *summed], strict=True))
        self.body = Body("v")
        self.results = []
        for task in tasks:
            index = task.index(self.outer, self.inner)
            self.results.append((task, task.value.load(self.body, index), task.target(index)))

    def lines(self) -> list[str]:
        if not self.length:
            return self._single()
        along = self._along()
        if along in self.inner:
            lines = self._rows(along)
        elif self.inner:
            lines = self._blocks(along)
        else:
            lines = self._elements(along)
        return (
            ["{", *lines, "}"] if not self._variables() else [*self._variables(), "{", *lines, "}"]
        )

    def _along(self) -> str:
        """The variable of the innermost loop: most reads and writes are next to each other along
        it.
        """
        places = [at for _, at in self.body.reads] + [
            at for task, _, at in self.results if not task.buffer.variable
        ]

        def score(name: str) -> tuple[int, int]:
            factors = [abs(at.factor(name)) for at in places]
            return sum(f == 1 for f in factors) - 2 * sum(f > 1 for f in factors), list(
                self.length
            ).index(name)

        return max((name for name in self.length if self.length[name] > 1), key=score)

    def _limit(self, name: str) -> int:
        """The end of the innermost loop: the row filled up to whole vectors, where nothing but
        filled rows is touched.
        """
        n = self.length[name]
        row = -(-n // LANES) * LANES
        places = [
            *self.body.reads,
            *((t.buffer, at) for t, _, at in self.results if not t.buffer.variable),
        ]
        touched = [(buffer, at) for buffer, at in places if at.factor(name)]
        filled = all(
            b.row == row and at.factor(name) == 1 and at.const % row == 0 for b, at in touched
        )
        # The end of one part of a joined row is the beginning of the next.
        filled &= all(
            t.buffer.inner == self.length[name] for t, _, at in self.results if at.factor(name)
        )
        # The filled end holds any numbers, which are not to be refused.
        refuses = any("refused" in line for line in self.body.lines)
        return row if filled and not refuses else n

    def _variables(self) -> list[str]:
        """Declarations of sums that are single numbers."""
        return [
            f"{TYPES[t.buffer.dtype]} {t.buffer.name};" for t in self.tasks if t.buffer.variable
        ]

    def _single(self) -> list[str]:
        """Single numbers, without a loop."""
        # Their names would clash with those of other bodies.
        lines, declared = [], [t for t in self.tasks if t.buffer.variable]
        lines += [f"{TYPES[t.buffer.dtype]} {t.buffer.name};" for t in declared]
        lines += ["{", *self.body.lines]
        for task, text, at in self.results:
            lines.append(
                f"{task.buffer.name} = {text};"
                if task.buffer.variable
                else f"{task.buffer.name}[{at}] = {text};"
            )
        return [*lines, "}"]

    def _head(self, name: str, limit: int | None = None) -> str:
        return f"for (int64_t {name} = 0; {name} < {limit or self.length[name]}; ++{name}) {{"

    def _shared(self, names: list[str]) -> list[str]:
        work = math.prod(self.length.values())
        if self.threads > 1 and names and work >= SHARED:
            return [f"#pragma omp parallel for schedule(static) num_threads({self.threads})"]
        return []

    def _elements(self, along: str) -> list[str]:
        others = [name for name in self.outer if name != along]
        lines = self._shared(others) + [self._head(name) for name in others]
        lines += ["#pragma omp simd", self._head(along, self._limit(along)), *self.body.lines]
        lines += [f"{task.buffer.name}[{at}] = {text};" for task, text, at in self.results]
        return lines + ["}"] * (len(others) + 1)

    def _rows(self, along: str) -> list[str]:
        """Sums along rows, in the lanes of a vector."""
        others, limit = [name for name in self.inner if name != along], self._limit(along)
        sums = [f"s{n}" for n in range(len(self.results))]
        lines = self._shared(self.outer) + [self._head(name) for name in self.outer]
        lines += [
            f"{TYPES[t.buffer.dtype]} {s} = 0;"
            for s, (t, _, _) in zip(sums, self.results, strict=True)
        ]
        lines += [self._head(name) for name in others]
        lines += [
            f"#pragma omp simd reduction(+:{','.join(sums)})",
            self._head(along, limit),
            *self.body.lines,
        ]
        for total, (task, text, _) in zip(sums, self.results, strict=True):
            counted = (
                text
                if limit == self.length[along]
                else f"{along} < {self.length[along]} ? {text} : ({TYPES[task.buffer.dtype]})0"
            )
            lines.append(f"{total} += {counted};")
        lines += ["}"] * (len(others) + 1)
        for total, (task, _, at) in zip(sums, self.results, strict=True):
            lines.append(
                f"{task.buffer.name} = {total};"
                if task.buffer.variable
                else f"{task.buffer.name}[{at}] = {total};"
            )
        return lines + ["}"] * len(self.outer)

    def _blocks(self, along: str) -> list[str]:
        """Sums of elements next to each other, a block of them at a time."""
        others = [name for name in self.outer if name != along]
        limit = self._limit(along)
        block = min(BLOCK, limit)
        sums = [f"s{k}" for k in range(len(self.results))]
        whole = limit % block == 0
        end = str(block) if whole else f"std::min<int64_t>({block}, {limit} - b)"
        lines = self._shared(others) + [self._head(name) for name in others]
        lines += [
            f"for (int64_t b = 0; b < {limit}; b += {block}) {{",
            f"const int64_t end = {end};",
        ]
        stop = str(block) if whole else "end"
        for total, (task, _, _) in zip(sums, self.results, strict=True):
            lines.append(f"alignas(64) {TYPES[task.buffer.dtype]} {total}[{block}] = {{}};")
        lines += [self._head(name) for name in self.inner]
        lines += [
            "#pragma omp simd",
            f"for (int64_t l = 0; l < {stop}; ++l) {{ const int64_t {along} = b + l;",
        ]
        lines += self.body.lines
        lines += [
            f"{total}[l] += {text};" for total, (_, text, _) in zip(sums, self.results, strict=True)
        ]
        lines += ["}"] * (len(self.inner) + 1)
        lines += [f"for (int64_t l = 0; l < {stop}; ++l) {{ const int64_t {along} = b + l;"]
        lines += [
            f"{t.buffer.name}[{at}] = {s}[l];"
            for s, (t, _, at) in zip(sums, self.results, strict=True)
        ]
        return lines + ["}"] * (len(others) + 2)


def _tasks(value: Value) -> list[Task]:
    assert value.buffer is not None
    if isinstance(value, Reduced):
        return [Task(value.buffer, value.operands[0], value.axes)]
    if isinstance(value, Joined):
        tasks, at = [], 0
        for part in value.operands:
            begin = tuple(
                Index(at) if axis == value.axis else Index() for axis in range(len(value.shape))
            )
            tasks.append(Task(value.buffer, part, begin=begin))
            at += part.shape[value.axis]
        return tasks
    return [Task(value.buffer, Unstored(value))]


class Unstored(Value):
    """A stored value as the expression that is stored."""

    def __init__(self, value: Value) -> None:
        super().__init__(value.shape, value.dtype, value.operands, strides=value.strides)
        self.value = value

    def load(self, body: Body, index: Indices) -> str:
        return self.value.print(body, index)


def _reads(value: Value, inside: bool = False) -> set[Value]:
    """The stored values that an element is computed from; with ``inside``, that a stored value is
    computed from.
    """
    found: set[Value] = set()
    seen: set[Value] = set()
    todo = list(value.operands) if inside else [value]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.buffer is not None:
            found.add(value)
        if value.buffer is None or isinstance(value, Seen):
            todo.extend(value.operands)
    return found
