"""A compiled loop, its inputs, and its check against the same step taken without compilation.

A loop is found again by everything that its step is seen to read (:mod:`adjsim.core.cache_key`). A
value that is read in another way, such as ``globals()[name]`` with a computed name, a patched
function, or a number inside an object that cannot be inspected, may have changed since the loop was
compiled. So one step is taken from the start of the loop, compiled and without compilation, and the
results have to agree.

The check is made at the first call of a loop for each dynamics, and then at the first call in each
run, or so rarely that it takes at most a fortieth of the time of the loop's calls. A step that
reads an object that cannot be inspected is checked in every run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import Tensor, nn

from adjsim.compiler import Constant, LoopSpec, leaves, mapped
from adjsim.core.agreement import difference, epsilon, perturbed, rounding, size

# Time of the calls of a loop for each second of its checks.
SHARE = 40
# Frames in the states that a loop stores, from which it is faster to store all states than to stop.
STORED = 4
# Relative size of a change of the carry whose effect is still taken for rounding where a step may
# compute in a coarser dtype than that of the state.
COARSE = 1e-5
# Factor by which rounding may exceed what was measured once.
MARGIN = 16.0


def row(rows: Tensor, k: Tensor) -> Tensor:
    """Return the row of step number ``k``."""
    return rows.index_select(0, k.reshape(1)).squeeze(0)


def lengthened(rows: Tensor, length: int) -> Tensor:
    """Return rows of one length, of which the last are empty."""
    if len(rows) == length:
        return rows
    found = rows.new_empty((length, *rows.shape[1:]))
    found[: len(rows)] = rows
    return found


def are_dense(saves: Sequence[int], capacity: int) -> bool:
    """Return whether loops that store ``capacity`` states need not stop for saved frames."""
    inside = len(set(saves) - {0, saves[-1]})
    return inside > 0 and STORED * saves[-1] <= capacity * (inside + 1)


class FrameCotangent(NamedTuple):
    """For each step of a loop, the cotangent of a field of the frame that is saved after it.

    ``size`` is the norm of the cotangent. Both are zero where no frame is saved.
    """

    value: Tensor
    size: Tensor


class LoopConstants(NamedTuple):
    """The inputs that do not change in a loop.

    Attributes:
        steps, first: the number of steps of the loop, and the number of the first.
        begin: the time of step 0.
        coefficients: the coefficients, by letter and name.
        parameters: all tensors of the dynamics.
        noise: the noise of its steps; empty without noise.
        check_every: in a loop that ends where a buffer of an exact run is full, the number of steps
            between looks at the buffers; else empty.
        average: in a backward loop, the cotangent of a time average at each step; else empty.
        frames: in a backward loop that does not stop for saved frames, their cotangents by field;
            else empty.
        states: in a backward loop that reads stored states, the fields of the states before its
            steps, and what these steps have saved; else empty.
    """

    steps: Tensor
    first: Tensor
    begin: Tensor
    coefficients: dict[str, dict[str, Tensor]]
    parameters: tuple[Tensor, ...]
    spacings: dict[str, Tensor]
    frames: dict[str, FrameCotangent]
    noise: tuple[Tensor, ...] = ()
    check_every: tuple[Tensor, ...] = ()
    average: tuple[Tensor, ...] = ()
    states: tuple[Tensor, ...] = ()


@dataclass(eq=False)
class Loop:
    """A compiled loop.

    Attributes:
        function: the compiled function of constants and carry, and on a GPU of functions that the
            host calls while the GPU works.
        path: how it was compiled.
        source: the file of its C++ source, if it was compiled from one.
        fixed_evaluations: energy evaluations outside of its iterations.
        evaluations_per_step: energy evaluations in each iteration.
        constants: the tensors that it has captured.
        seconds: the time of its calls since the last check; infinite before the first.
        check_seconds: the shortest time of a check; 0 before the first.
        rounding: the largest difference that rounding is known to make in one step, for each tensor
            of the carry; empty where none is known.
        stale: whether a value that it does not read anew has been found to have changed.
        sources: the dynamics of the user for which it was compiled or has been checked.
    """

    function: Callable[..., tuple[Any, list[Tensor]]] | None = None
    path: str = ""
    source: Path | None = None
    fixed_evaluations: int = 0
    evaluations_per_step: int = 0
    constants: list[Constant] = field(default_factory=list)
    seconds: float = math.inf
    check_seconds: float = 0.0
    rounding: list[float] = field(default_factory=list)
    stale: bool = False
    sources: WeakSet[nn.Module] = field(default_factory=WeakSet)


# Specifies a loop of a runner, and counts the energy evaluations of the compiled loop.
Specify = Callable[[Any, Loop], LoopSpec[Any, Any]]


@dataclass(frozen=True)
class LoopKind:
    """A kind of loops, such as forward steps that store their states.

    Attributes:
        differentiates: whether autograd runs in it, so that parameters and coefficients are leaves.
        stores: whether it fills a row of tensors in each step, for a number of steps.
        uncompiled: specifies the same steps without compilation; None: ``specify``.
        optional: whether a run has another way if the loop cannot be compiled.
        iterations: returns their number, for the last carry and the number of steps.
    """

    specify: Specify
    differentiates: bool = False
    stores: bool = False
    backward: bool = False
    uncompiled: Specify | None = None
    optional: bool = False
    iterations: Callable[[Any, int], int] = lambda _, steps: steps


@dataclass(frozen=True)
class LoopCheck:
    """The check of a loop at one carry, with the constants of one step.

    ``uncompiled`` takes the step without compilation, from a carry, and returns the next carry.
    """

    loop: Loop
    constants: LoopConstants
    carry: Any
    uncompiled: Callable[[Any], list[Tensor]]

    @cached_property
    def expected(self) -> list[Tensor]:
        """The next carry without compilation."""
        return self.uncompiled(self.carry)

    def agrees(self) -> bool:
        """Take the step in both ways, and return whether they agree to rounding."""
        began = time.perf_counter()
        found = self._agree(self._compiled(self.loop), self.expected)
        taken, known = time.perf_counter() - began, self.loop.check_seconds
        self.loop.check_seconds, self.loop.seconds = min(known or taken, taken), 0.0
        return found

    def agrees_with(self, other: Loop) -> bool:
        """Return whether another loop gives the same step."""
        return self._agree(self._compiled(other), self._compiled(self.loop))

    def learn(self, what: str) -> None:
        """Take the difference of the two ways for rounding; refuse one that is too large."""
        found = _differences(self._compiled(self.loop), self.expected)
        # A gradient that is zero by symmetry is what rounding leaves of larger numbers.
        rest = max(epsilon(x) * size(x) for x in (*leaves(self.carry), *self.expected))
        small = [x + rest for x in _rounding(self.carry, self.expected)]
        if _exceed(found, small):
            # A state that is moved may be off the constraints of its dynamics, which refuse it.
            near = mapped(lambda x: perturbed(x, COARSE), self.carry)
            noise = _differences(self.uncompiled(near), self.expected)
            small = list(map(add, small, noise))
        if _exceed(found, small):
            source = f" with its C++ source, {self.loop.source}" if self.loop.source else ""
            raise RuntimeError(
                f"compile=True: {what} differs by {max(found):.1e} from the same step without "
                "compilation. The potential, the dynamics or the record computes something else "
                "while it is traced, such as a branch on torch.compiler.is_compiling() or on the "
                "class of a tensor. Make it a function of its arguments, or leave compile=True "
                "out. If it is a function of its arguments, adjsim compiles one of its operations "
                f"wrongly; please report it{source}."
            )
        self.loop.rounding = [MARGIN * x for x in found]

    def _compiled(self, loop: Loop) -> list[Tensor]:
        assert loop.function is not None
        return leaves(loop.function(self.constants, self.carry)[0])

    def _agree(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        known = self.loop.rounding or [0.0] * len(found)
        allowed = list(map(max, known, _rounding(self.carry, expected)))
        differences = _differences(found, expected)
        if all(x <= y for x, y in zip(differences, allowed, strict=True)):
            return True
        each = zip(differences, allowed, self._sensitivity, strict=True)
        return all(x <= max(y, MARGIN * z) for x, y, z in each)

    @cached_property
    def _sensitivity(self) -> list[float]:
        """How far rounding of the carry moves each tensor of the next one.

        A sum whose terms cancel, such as a cotangent along a constraint, is of this size alone.
        Where rounding leads over a jump or to NaN, it says nothing: half of the digits are right.
        """
        near = mapped(lambda x: perturbed(x, 0.0), self.carry)
        found = _differences(self.uncompiled(near), self.expected)
        largest = max(map(size, (*leaves(self.carry), *self.expected)))
        return [
            min(x, epsilon(y) ** 0.5 * largest) for x, y in zip(found, self.expected, strict=True)
        ]


def _exceed(found: Sequence[float], allowed: Sequence[float]) -> bool:
    return any(x > MARGIN * y for x, y in zip(found, allowed, strict=True))


def _differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return list(map(difference, found, expected))


def _rounding(carry: Any, after: Sequence[Tensor]) -> list[float]:
    return list(map(rounding, leaves(carry), after))
