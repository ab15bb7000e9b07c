"""The statements of a graph: the order of its stored values, and the loops that they share.

A value is computed as soon as its stored operands are. Sums over matrices of pairs are postponed
until nothing else is ready, so that as many as possible share one loop over pairs.

The statements are then in groups: a call, or loops that could run in any order. A value that reads
what an earlier loop has just computed, element by element, is computed in that loop too, where
these numbers are at hand. A stored value that is read by one loop, element by element, is computed
in that loop alone, so that it is neither written nor read. A loop that fills matrices takes the
sums of their rows too. Other loops that sum read stored values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

from adjsim.compiler.calls import Call, Called
from adjsim.compiler.graph import Lowering
from adjsim.compiler.halves import nest_of
from adjsim.compiler.nests import PARALLEL_WORK, Nest, Space, Task, matrices
from adjsim.compiler.values import (
    Buffer,
    Index,
    Joined,
    Lazy,
    Reduced,
    Reinterpreted,
    StoredExpression,
    Value,
)


class FunctionPrinter:
    """The C++ statements of a lowered graph, whose first output the function returns.

    Attributes:
        outputs: fill the buffers of its other outputs.
        rows: from the names of the buffers that the caller reads to those of its memory for them.
        scratch: the buffers that stored values share, which the caller allocates.
        parallel: whether it has a loop, or a call, that threads share.
        aliases: from the names of all other buffers to those whose memory they share.
    """

    def __init__(
        self,
        lowering: Lowering,
        outputs: list[Task],
        threads: int,
        first_function: int,
        rows: Mapping[str, str],
    ) -> None:
        self.large, self.rows = lowering.large, rows
        numbers = count(first_function)
        self.functions: dict[Call, list[str]] = {
            call: [f"functions[{next(numbers)}]" for _ in call.addresses] for call in lowering.calls
        }
        tasks: dict[Value, list[Task]] = {value: _tasks(value) for value in lowering.stored}
        groups = self._order(tasks, outputs, lowering.outputs[0])
        buffers = [value.buffer for value in tasks]
        own = [b for b in buffers if b and not b.variable and b.name not in rows]
        self.scratch, shared = _share([group.touched for group in groups], own)
        self.aliases = {**shared, **rows}
        nests = [nest for group in groups for nest in group.nests.values()]
        large = any(nest.divisible and nest.work >= PARALLEL_WORK for nest in nests)
        shared = threads if large else 1
        self.parallel = shared > 1 or any(call.parallel for call in lowering.calls)
        self.lines = [line for group in groups for line in group.lines(shared)]

    def _order(
        self, tasks: dict[Value, list[Task]], outputs: list[Task], result: Value
    ) -> list[NestGroup]:
        needs = {value: _stored_operands(value, below=True) & tasks.keys() for value in tasks}
        wanted: set[Value] = set()
        todo = [value for value in tasks if value.buffer and value.buffer.name in self.rows]
        todo += [value for call in self.functions if call.checks for value in call.outputs]
        for root in (result, *(task.value for task in outputs)):
            todo += _stored_operands(root) & tasks.keys()
        while todo:
            value = todo.pop()
            if value not in wanted:
                wanted.add(value)
                todo.extend(needs[value])
                if isinstance(value, Called) and value.call:
                    # A call writes all of its outputs.
                    todo.extend(value.call.outputs)
        # The order of the graph makes the generated source reproducible.
        remaining, done = [value for value in tasks if value in wanted], set[Value]()
        others = [need for x in remaining if isinstance(x, Called) for need in needs[x]]
        others += _stored_operands(result)
        needed = self.rows.keys() | {value.buffer.name for value in others if value.buffer}
        groups: list[NestGroup] = []
        while remaining:
            ready = [value for value in remaining if needs[value] & wanted <= done]
            called = next((x.call for x in ready if isinstance(x, Called) and x.call), None)
            if called is not None:
                read = [x for value in called.inputs for x in _stored_operands(value)]
                groups.append(
                    NestGroup(
                        called.lines(self.functions[called]),
                        [x.buffer for x in called.outputs if x.buffer],
                        [x.buffer for x in read if x.buffer],
                    )
                )
                chosen: Sequence[Value] = called.outputs
            else:
                chosen = self._next(ready, tasks)
                together = (task for value in chosen for task in tasks[value])
                groups.append(group_of(together))
            done.update(chosen)
            remaining = [value for value in remaining if value not in done]
        groups.append(group_of(outputs))
        return fuse(join(groups), needed)

    def _next(self, ready: list[Value], tasks: dict[Value, list[Task]]) -> list[Value]:
        """Select the values that are computed next: scalars, small ones, or sums in one loop."""
        # Loops over half of a matrix wait for each other, and then read its pairs once.
        ready = [x for x in ready if not any(y.halved for y in tasks[x])] or ready
        small = [x for x in ready if all(y.value.numel <= self.large for y in tasks[x])]
        # Scalars first, so that a loop that needs one can join the loop before it.
        scalars = [value for value in small if value.numel == value.work == 1]
        if small:
            return scalars or small
        # Matrices with the sums that may share their loops.
        space = matrices(tasks[ready[0]][0].space)
        return [value for value in ready if matrices(tasks[value][0].space) == space]


def _tasks(value: Value) -> list[Task]:
    assert value.buffer is not None
    if isinstance(value, Called):
        return []
    if isinstance(value, Reduced):
        (x,) = value.operands
        return [Task(value.buffer, x, value.axes, (), value.run, value.origin, value.halved)]
    if isinstance(value, Joined):
        tasks, at = [], 0
        for part in value.operands:
            begin = [Index()] * len(value.shape)
            begin[value.axis] = Index(at)
            tasks.append(Task(value.buffer, part, begin=tuple(begin), origin=value.origin))
            at += part.shape[value.axis]
        return tasks
    assert isinstance(value, Lazy)
    return [Task(value.buffer, StoredExpression(value), origin=value.origin)]


def _stored_operands(value: Value, below: bool = False) -> set[Value]:
    """Collect the stored values from which an element is computed.

    With ``below``, start from the operands of a stored value instead of the value itself.
    """
    found: set[Value] = set()
    seen: set[Value] = set()
    todo = list(value.operands) if below else [value]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.buffer is not None:
            found.add(value)
        if value.buffer is None or isinstance(value, Reinterpreted):
            todo.extend(value.operands)
    return found


def _share(
    touched: Sequence[Sequence[Buffer]], buffers: Sequence[Buffer]
) -> tuple[list[Buffer], dict[str, str]]:
    """Let buffers that are not needed at the same time share memory, which then stays in caches.

    ``touched`` has the buffers that each group of statements reads or writes. Returned are the
    buffers that are left, and for the name of each other one that whose memory it has. One name for
    one memory keeps its pointer the only one to it, as ``__restrict`` promises.
    """
    known = {buffer.name: buffer for buffer in buffers}
    # In the order of the graph, so that a loop has one source in all processes.
    names_of = [{buffer.name for buffer in group} for group in touched]
    uses = [[name for name in known if name in names] for names in names_of]
    last = {name: at for at, names in enumerate(uses) for name in names}
    left: list[Buffer] = []
    free: list[Buffer] = []
    shared: dict[str, Buffer] = {}
    for at, names in enumerate(uses):
        for name in names:
            if name not in shared:
                buffer = known[name]
                fit = [x for x in free if x.dtype == buffer.dtype and x.size >= buffer.size]
                shared[name] = min(fit, key=lambda x: x.size, default=buffer)
                (free.remove if fit else left.append)(shared[name])
        free += [shared[name] for name in names if last[name] == at]
    return left, {name: x.name for name, x in shared.items() if name != x.name}


@dataclass(eq=False)
class NestGroup:
    """The statements of a call with the buffers that it fills and reads, or nests by spaces."""

    call: list[str] = field(default_factory=list)
    called: list[Buffer] = field(default_factory=list)
    read: list[Buffer] = field(default_factory=list)
    nests: dict[Space, Nest] = field(default_factory=dict)

    @property
    def touched(self) -> list[Buffer]:
        """The buffers that are read or written."""
        places = (buffer for nest in self.nests.values() for buffer, _ in nest.places)
        return [*self.called, *self.read, *places]

    def lines(self, threads: int) -> Iterator[str]:
        """Print the statements, whose large loops threads share."""
        yield from self.call
        for nest in self.nests.values():
            yield from nest.lines(threads)


def group_of(tasks: Iterable[Task]) -> NestGroup:
    """Make the group of tasks that do not depend on each other, one nest for each space."""
    groups: dict[Space, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.space, []).append(task)
    return NestGroup(nests={space: nest_of(group) for space, group in groups.items()})


def join(groups: Sequence[NestGroup]) -> list[NestGroup]:
    """Move each value into the earlier nest that computes the last of its operands.

    The groups are in the order in which they run. A nest that fills matrices also takes the sums of
    their rows, and other sums that read the same pairs in the same order.
    """
    joined: list[NestGroup] = []
    # The group that fills each buffer, and the space of the nest there that fills it by itself.
    made: dict[str, tuple[int, Space | None]] = {}
    for at, group in enumerate(groups):
        joined.append(replace(group, nests={}))
        made |= {buffer.name: (at, None) for buffer in group.called}
        placed: dict[tuple[int, Space], list[Task]] = {}
        for space, nest in group.nests.items():
            for task in nest.tasks:
                read = (x.buffer.name for x in _stored_operands(task.value) if x.buffer)
                found = [made[name] for name in read if name in made]
                last = max((i for i, _ in found), default=at)
                where = {where for i, where in found if i == last}
                rows = matrices(space)
                host = joined[last].nests.get(rows) if where == {rows} else None
                if task.halved:
                    placed.setdefault((at, space), []).append(task)
                elif host is not None and _computes_operands(host, task):
                    placed.setdefault((last, rows), []).append(task)
                elif rows in group.nests and _follows(group.nests[rows], task):
                    placed.setdefault((at, rows), []).append(task)
                else:
                    placed.setdefault((at, space), []).append(task)
        for (where, space), tasks in placed.items():
            host = joined[where].nests.get(space)
            if host is None or space.halved:
                together = [*(host.tasks if host else ()), *tasks]
                joined[where].nests[space] = nest_of(together)
            else:
                joined[where].nests[space] = host.with_tasks(tasks)
            for task in tasks:
                last, _ = made.get(task.buffer.name, (where, space))
                made[task.buffer.name] = max(last, where), None if task.begin else space
    return joined


def _computes_operands(nest: Nest, task: Task) -> bool:
    """Whether a task can join a nest of matrices that computes what the task reads.

    The task must read these values element by element, and the innermost loop must stay the same.
    """
    if not _follows(nest, task) or (nest.summed_loops and not task.summed):
        return False
    alone = task.alone
    read = {buffer.name for buffer, _ in alone.body.reads}
    own = [x for x in nest.tasks if x.buffer.name in read]
    return all(_reads_once(alone, x) for x in own)


def _follows(nest: Nest, task: Task) -> bool:
    """Whether a task has the loops of a nest of matrices, with the same innermost one."""
    if not task.kept or len(task.summed) > 1 or task.buffer.variable:
        return False
    name, limit = nest.innermost
    if task.summed and limit > nest.length[name]:
        # Compilers do not vectorise loops over padded rows that both write and sum.
        return False
    alone = task.alone
    loops = [*zip(nest.length, alone.length, strict=True)]
    return (name, alone.innermost[0]) in loops


def fuse(groups: Iterable[NestGroup], needed: Set[str]) -> list[NestGroup]:
    """Compute values in the one nest that reads them, without storing them.

    ``needed`` has the names of buffers that are read by more than nests.
    """
    groups = [replace(group, nests=dict(group.nests)) for group in groups]
    fused: dict[Task, Lazy] = {}
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
                nest = groups[reader[0]].nests[reader[1]]
                apart = reader != (at, space) and nest.summed_loops
                if reader[1] == space and not apart and _reads_once(nest, task):
                    assert isinstance(task.value, StoredExpression)
                    fused[task] = task.value.value
                    changed |= {reader, (at, space)}
        for where, space in changed:
            known = groups[where].nests
            tasks = [task for task in known[space].tasks if task not in fused]
            if tasks:
                known[space] = nest_of(tasks, {*fused.values()})
            else:
                del known[space]
        for where, space in {*changed, *((at, space) for space in groups[at].nests)}:
            if space in groups[where].nests:
                for buffer, _ in groups[where].nests[space].body.reads:
                    readers.setdefault(buffer.name, set()).add((where, space))
    return groups


def _reads_once(nest: Nest, task: Task) -> bool:
    """Whether a nest reads each element of a value of floating point once."""
    if not isinstance(task.value, StoredExpression) or task.buffer.variable:
        return False
    place = task.target(nest.index(task))
    return task.buffer.dtype.is_floating_point and all(
        buffer is task.buffer and at == place
        for buffer, at in nest.body.reads
        if buffer.name == task.buffer.name
    )
