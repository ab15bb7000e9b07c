"""The stages of a function, and values that need no memory because one loop alone reads them.

A stage is a call, or loops that could run in any order. A stored value that is read by one later
loop, element by element, is computed in that loop instead, so that it is neither written nor read.
Loops that sum keep their values, since the order of a sum depends on what is read beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from adjsim._cpp.nests import Nest, Task
from adjsim._cpp.values import Body, Indices, Lazy, Value

# The lengths of the loops over kept axes and over summed axes.
Space = tuple[tuple[int, ...], tuple[int, ...]]


class StoredExpression(Value):
    """The expression of a stored value, which is evaluated to fill its buffer."""

    def __init__(self, value: Lazy) -> None:
        super().__init__(value.shape, value.dtype, value.operands, strides=value.strides)
        self.value = value

    def load(self, body: Body, index: Indices) -> str:
        return self.value.print(body, index)


@dataclass(eq=False)
class Stage:
    """A call, or loop nests.

    Attributes:
        call: the statements of the call.
        nests: the nests by their spaces.
    """

    call: list[str] = field(default_factory=list)
    nests: dict[Space, Nest] = field(default_factory=dict)

    @property
    def lines(self) -> Iterator[str]:
        """The statements."""
        yield from self.call
        for nest in self.nests.values():
            yield from nest.lines()


def nests(tasks: Iterable[Task], threads: int) -> Stage:
    """Make the stage of tasks that do not depend on each other."""
    groups: dict[Space, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.space, []).append(task)
    return Stage(nests={space: Nest(*space, group, threads) for space, group in groups.items()})


def fuse(stages: list[Stage], needed: set[str]) -> None:
    """Compute values in the one nest that reads them.

    Args:
        stages: in the order in which they run; changed in place.
        needed: the names of buffers that are read by more than nests.
    """
    readers: dict[str, set[tuple[int, Space]]] = {}
    for at in reversed(range(len(stages))):
        changed: set[tuple[int, Space]] = set()
        for space, nest in stages[at].nests.items():
            for task in nest.tasks:
                found = readers.get(task.buffer.name, set())
                if len(found) != 1 or task.buffer.name in needed:
                    continue
                (reader,) = found
                if reader[1] == space and _reads_once(stages[reader[0]].nests[space], task):
                    assert isinstance(task.value, StoredExpression)
                    task.value.value.buffer = None
                    changed |= {reader, (at, space)}
        for where, space in changed:
            known = stages[where].nests
            tasks = [task for task in known[space].tasks if not _fused(task)]
            if tasks:
                known[space] = Nest(*space, tasks, known[space].threads)
            else:
                del known[space]
        for where, space in {*changed, *((at, space) for space in stages[at].nests)}:
            if space in stages[where].nests:
                for buffer, _ in stages[where].nests[space].body.reads:
                    readers.setdefault(buffer.name, set()).add((where, space))


def _fused(task: Task) -> bool:
    return isinstance(task.value, StoredExpression) and task.value.value.buffer is None


def _reads_once(nest: Nest, task: Task) -> bool:
    """Whether a nest without sums reads each element of a value of floating point once."""
    if not isinstance(task.value, StoredExpression) or task.buffer.variable or nest.inner:
        return False
    place = task.target(task.index(nest.outer, nest.inner))
    return task.buffer.dtype.is_floating_point and all(
        buffer is task.buffer and at == place
        for buffer, at in nest.body.reads
        if buffer.name == task.buffer.name
    )
