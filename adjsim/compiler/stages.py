"""The statements of a loop in stages, between which numbers wait in short arrays.

A term of a pair may be a chain of several hundred operations: a root, an exponential of it, a
quotient, another exponential. A processor looks ahead by about a hundred operations that still
wait. So it computes one vector of such terms at a time, and most of its units are idle. A stage
ends where slow operations do. Each stage takes the vectors of a block one after the other, so that
their short chains overlap. Operations and their order within a term are those of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from copy import copy
from dataclasses import dataclass

import torch

from adjsim.compiler.values import LANES, TYPES, Body, Buffer, Index, Indices, Lazy

# The numbers of a row that wait between stages: four vectors.
WAITING = 4 * LANES


@dataclass(frozen=True)
class Statement:
    """The definition of a variable.

    Attributes:
        line: its text, with the variables ``operands``.
        slow: that of its value: 1 for a root or a quotient, 2 for a function.
        repeated: whether stages repeat it: a read, or a condition, which arrays would widen.
    """

    kind: str
    line: str
    operands: tuple[str, ...]
    slow: int
    repeated: bool


class StagedBody(Body):
    """Statements that know which variables they read, so that they can be printed in stages."""

    def __init__(self, fused: Set[Lazy]) -> None:
        super().__init__("v", fused=fused)
        self._statements: dict[str, Statement] = {}
        # The variables in each of the expressions that are being printed.
        self._operands: list[list[str]] = [[]]

    def copy(self) -> StagedBody:
        """Return a copy to which statements can be added."""
        found = copy(self)
        vars(found).update({name: copy(part) for name, part in vars(self).items()})
        return found

    def read(self, buffer: Buffer, index: Indices) -> str:
        if buffer.variable:
            return buffer.name
        at = buffer.at(index)
        name = self.defined(buffer.dtype, f"{buffer.name}[{at}]", _names(at), repeated=True)
        self.reads.append((buffer, at))
        self._operands[-1].append(name)
        return name

    def compute(self, value: Lazy, index: Indices) -> str:
        name = self.computed(value, index)
        self._operands[-1].append(name)
        return name

    def computed(self, value: Lazy, index: Indices) -> str:
        """Return the variable of an element, without an expression that reads it."""
        self._operands.append([])
        key = (value, index)
        if key not in self._known:
            text = value.print(self, index)
            operands = self._operands[-1]
            self._known[key] = self.defined(
                value.dtype, text, operands, value.origin, slow=value.slow
            )
        self._operands.pop()
        return self._known[key]

    def defined(
        self,
        dtype: torch.dtype,
        expression: str,
        operands: Iterable[str],
        origin: str = "",
        *,
        slow: int = 0,
        repeated: bool = False,
    ) -> str:
        """Return the variable that holds an expression of other variables."""
        name = self.define(dtype, expression, origin)
        if name not in self._statements:
            known = tuple(x for x in dict.fromkeys(operands) if x in self._statements)
            repeated |= dtype == torch.bool
            self._statements[name] = Statement(TYPES[dtype], self.lines[-1], known, slow, repeated)
        return name

    def stages(self, results: Sequence[str], width: int) -> tuple[list[str], list[list[str]]]:
        """Print arrays of ``width`` numbers, and the statements of each stage.

        A statement reads or writes number ``at + l`` of an array. The last stage has the results.
        Without functions there is one stage, whose chains are short enough.
        """
        known, place = self._statements, dict[str, int]()
        staged = any(x.slow > 1 for x in known.values())
        for name, x in known.items():
            ready = (place[o] + (staged and known[o].slow > 0) for o in x.operands)
            place[name] = max(ready, default=0)
        count = 1 + max((place[x] for x in results if x in place), default=0)
        used = [self._used(place, k, results if k == count - 1 else ()) for k in range(count)]
        waiting = {x for k, names in enumerate(used) for x in names if self._waits(place, x, k)}
        arrays = [
            f"alignas(64) {self._statements[x].kind} {x}w[{width}];" for x in place if x in waiting
        ]
        printed: list[list[str]] = []
        for k, names in enumerate(used):
            lines: list[str] = []
            for name in (x for x in place if x in names):
                if self._waits(place, name, k):
                    lines.append(f"const {self._statements[name].kind} {name} = {name}w[at + l];")
                else:
                    lines.append(self._statements[name].line)
                    if name in waiting:
                        lines.append(f"{name}w[at + l] = {name};")
            printed.append(lines)
        return arrays, printed

    def _waits(self, place: dict[str, int], name: str, stage: int) -> bool:
        """Whether a stage reads a variable that an earlier one has computed."""
        return place[name] < stage and not self._statements[name].repeated

    def _used(self, place: dict[str, int], stage: int, results: Iterable[str]) -> set[str]:
        """Collect the variables of a stage: its own, and others that these read."""
        todo = [x for x in place if place[x] == stage and not self._statements[x].repeated]
        todo += (x for x in results if x in place)
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                if not self._waits(place, name, stage):
                    todo += self._statements[name].operands
        return found


def _names(at: Index) -> list[str]:
    return [name for name, _ in at.terms]
