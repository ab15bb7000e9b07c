"""Groups of loop nests, and values that need no memory because one loop alone reads them.

A group is a call, or loops that could run in any order. A value that reads what an earlier loop has
just computed, element by element, is computed in that loop too, where these numbers are at hand.
A stored value that is read by one loop, element by element, is computed in that loop alone, so that
it is neither written nor read. Loops that sum read stored values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from adjsim.compiler.nests import Nest, Task
from adjsim.compiler.values import Buffer, StoredExpression, Value

# The lengths of the loops over kept axes and over summed axes.
Space = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(eq=False)
class NestGroup:
    """The statements of a call and the buffers that it fills, or loop nests by their spaces."""

    call: list[str] = field(default_factory=list)
    called: list[Buffer] = field(default_factory=list)
    nests: dict[Space, Nest] = field(default_factory=dict)

    @property
    def lines(self) -> Iterator[str]:
        """The statements."""
        yield from self.call
        for nest in self.nests.values():
            yield from nest.lines()


def group_of(tasks: Iterable[Task], threads: int) -> NestGroup:
    """Make the group of tasks that do not depend on each other, one nest for each space."""
    groups: dict[Space, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.space, []).append(task)
    return NestGroup(nests={space: Nest(*space, group, threads) for space, group in groups.items()})


def join(
    groups: list[NestGroup], operands: Callable[[Value], Iterable[Buffer]], threads: int
) -> None:
    """Move each value into the earlier nest that computes the last of its operands.

    The groups, in the order in which they run, are changed in place. ``operands`` returns the
    buffers from which a value is computed.
    """
    # The group that fills each buffer, and the space of the nest there that fills it by itself.
    made: dict[str, tuple[int, Space | None]] = {}
    for at, group in enumerate(groups):
        made |= {buffer.name: (at, None) for buffer in group.called}
        placed: dict[tuple[int, Space], list[Task]] = {}
        for space, nest in group.nests.items():
            for task in nest.tasks:
                found = [made[x.name] for x in operands(task.value) if x.name in made]
                last = max((i for i, _ in found), default=at)
                alone = {where for i, where in found if i == last} == {space}
                host = groups[last].nests.get(space) if alone else None
                joins = host is not None and _computes_operands(host, task)
                placed.setdefault((last if joins else at, space), []).append(task)
        group.nests.clear()
        for (where, space), tasks in placed.items():
            host = groups[where].nests.get(space)
            joined = [*(host.tasks if host else ()), *tasks]
            groups[where].nests[space] = Nest(*space, joined, threads)
            for task in tasks:
                last, _ = made.get(task.buffer.name, (where, space))
                made[task.buffer.name] = max(last, where), None if task.begin else space


def _computes_operands(nest: Nest, task: Task) -> bool:
    """Whether a task can join a nest without sums that computes what the task reads.

    The task must read these values element by element, and the innermost loop must stay the same.
    """
    if nest.summed_loops or not nest.kept_loops or task.buffer.variable:
        return False
    alone = Nest(*task.space, [task], nest.threads)
    read = {buffer.name for buffer, _ in alone.body.reads}
    own = [x for x in nest.tasks if x.buffer.name in read]
    return alone.innermost == nest.innermost and all(_reads_once(alone, x) for x in own)


def fuse(groups: list[NestGroup], needed: set[str]) -> None:
    """Compute values in the one nest that reads them, and change the groups in place.

    ``needed`` has the names of buffers that are read by more than nests.
    """
    readers: dict[str, set[tuple[int, Space]]] = {}
    for at in reversed(range(len(groups))):
        changed: set[tuple[int, Space]] = set()
        for space, nest in groups[at].nests.items():
            own = {task.buffer.name for task in nest.tasks}
            for name in {buffer.name for buffer, _ in nest.body.reads} & own:
                readers.setdefault(name, set()).add((at, space))
            for task in nest.tasks:
                found = readers.get(task.buffer.name, set())
                if len(found) != 1 or task.buffer.name in needed:
                    continue
                (reader,) = found
                if reader[1] == space and _reads_once(groups[reader[0]].nests[space], task):
                    assert isinstance(task.value, StoredExpression)
                    task.value.value.buffer = None
                    changed |= {reader, (at, space)}
        for where, space in changed:
            known = groups[where].nests
            tasks = [task for task in known[space].tasks if not _fused(task)]
            if tasks:
                known[space] = Nest(*space, tasks, known[space].threads)
            else:
                del known[space]
        for where, space in {*changed, *((at, space) for space in groups[at].nests)}:
            if space in groups[where].nests:
                for buffer, _ in groups[where].nests[space].body.reads:
                    readers.setdefault(buffer.name, set()).add((where, space))


def _fused(task: Task) -> bool:
    return isinstance(task.value, StoredExpression) and task.value.value.buffer is None


def _reads_once(nest: Nest, task: Task) -> bool:
    """Whether a nest without sums reads each element of a value of floating point once."""
    if not isinstance(task.value, StoredExpression) or task.buffer.variable or nest.summed_loops:
        return False
    place = task.target(task.index(nest.kept_loops, nest.summed_loops))
    return task.buffer.dtype.is_floating_point and all(
        buffer is task.buffer and at == place
        for buffer, at in nest.body.reads
        if buffer.name == task.buffer.name
    )
