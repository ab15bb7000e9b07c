"""The statements of a graph: the order of its stored values, and the loops that they share.

A value is computed as soon as its stored operands are. Sums over matrices of pairs are postponed
until nothing else is ready, so that as many as possible share one loop over pairs. A value that
only one later loop reads, element by element, is then computed in that loop and not stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

from adjsim.compiler.calls import Call, Called
from adjsim.compiler.graph import Lowering
from adjsim.compiler.nest_groups import NestGroup, fuse, group_of, join
from adjsim.compiler.nests import Task
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

# The names of buffers in printed statements.
_NAME = re.compile(r"\b[br]\d+\b")


class FunctionPrinter:
    """The C++ statements of a lowered graph, whose first output the function returns.

    Attributes:
        outputs: fill the buffers of its other outputs.
        first_function: the number of the first function that is called.
        rows: the buffers of stored values that the caller reads.
        scratch: the buffers that stored values share, which the caller allocates.
    """

    def __init__(
        self,
        lowering: Lowering,
        outputs: list[Task],
        threads: int,
        first_function: int,
        rows: Sequence[Buffer],
    ) -> None:
        self.large, self.threads, self.rows = lowering.large, threads, rows
        numbers = count(first_function)
        self.functions: dict[Call, list[str]] = {
            call: [f"functions[{next(numbers)}]" for _ in call.addresses] for call in lowering.calls
        }
        tasks: dict[Value, list[Task]] = {value: _tasks(value) for value in lowering.stored}
        groups = self._order(tasks, outputs, lowering.outputs[0])
        buffers = [value.buffer for value in tasks]
        own = [b for b in buffers if b and not b.variable and b not in rows]
        self.scratch, self.lines = _share([list(group.lines) for group in groups], own)

    def _order(
        self, tasks: dict[Value, list[Task]], outputs: list[Task], result: Value
    ) -> list[NestGroup]:
        needs = {value: _stored_operands(value, below=True) & tasks.keys() for value in tasks}
        wanted: set[Value] = set()
        todo = [value for value in tasks if value.buffer in self.rows]
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
        for value in tasks.keys() - wanted:
            del tasks[value]
        # The order of the graph makes the generated source reproducible.
        remaining, done = list(tasks), set[Value]()
        groups: list[NestGroup] = []
        while remaining:
            ready = [value for value in remaining if needs[value] & wanted <= done]
            called = next((x.call for x in ready if isinstance(x, Called) and x.call), None)
            if called is not None:
                filled = [x.buffer for x in called.outputs if x.buffer]
                groups.append(NestGroup(called.lines(self.functions[called]), filled))
                chosen: Sequence[Value] = called.outputs
            else:
                chosen = self._next(ready, tasks)
                together = (task for value in chosen for task in tasks[value])
                groups.append(group_of(together, self.threads))
            done.update(chosen)
            remaining = [value for value in remaining if value not in done]
        groups.append(group_of(outputs, self.threads))
        others = [need for value in tasks if isinstance(value, Called) for need in needs[value]]
        others += _stored_operands(result)
        join(groups, lambda x: [y.buffer for y in _stored_operands(x) if y.buffer], self.threads)
        names = {value.buffer.name for value in others if value.buffer}
        fuse(groups, names | {buffer.name for buffer in self.rows})
        return groups

    def _next(self, ready: list[Value], tasks: dict[Value, list[Task]]) -> list[Value]:
        """Select the values that are computed next: scalars, small ones, or sums in one loop."""
        small = [value for value in ready if all(task.work <= self.large for task in tasks[value])]
        # Scalars first, so that a loop that needs one can join the loop before it.
        scalars = [value for value in small if value.numel == value.work == 1]
        if small:
            return scalars or small
        space = tasks[ready[0]][0].space
        return [value for value in ready if tasks[value][0].space == space]


def _tasks(value: Value) -> list[Task]:
    assert value.buffer is not None
    if isinstance(value, Called):
        return []
    if isinstance(value, Reduced):
        return [Task(value.buffer, value.operands[0], value.axes, lanes=value.lanes)]
    if isinstance(value, Joined):
        tasks, at = [], 0
        for part in value.operands:
            begin = [Index()] * len(value.shape)
            begin[value.axis] = Index(at)
            tasks.append(Task(value.buffer, part, begin=tuple(begin)))
            at += part.shape[value.axis]
        return tasks
    assert isinstance(value, Lazy)
    return [Task(value.buffer, StoredExpression(value))]


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
    groups: Sequence[Sequence[str]], buffers: Sequence[Buffer]
) -> tuple[list[Buffer], list[str]]:
    """Let buffers that are not needed at the same time share memory, which then stays in caches.

    Returned are the buffers that are left, and the statements of all groups with their names. One
    name for one memory keeps its pointer the only one to it, as ``__restrict`` promises.
    """
    known = {buffer.name: buffer for buffer in buffers}
    uses = [
        [x for x in dict.fromkeys(_NAME.findall("\n".join(lines))) if x in known]
        for lines in groups
    ]
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
    return left, [
        _NAME.sub(lambda x: shared[x[0]].name if x[0] in shared else x[0], line)
        for lines in groups
        for line in lines
    ]
