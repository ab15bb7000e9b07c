"""Steps in compiled loops.

A loop is many steps forward, or the way back over them with the cotangents, as one function of tensors. Its step is traced
once, by running the moves and products that run otherwise on tensors that record their operations, and compiled by torch's
Inductor, the loop around it included. Whatever may differ from run to run is an input (:class:`LoopConstants`): the number of
steps, the state, the time, coefficients, noise, every parameter and buffer of the dynamics, the spacings of a lattice. So no
number of steps, seed, value of a parameter or save time compiles again; another shape, dtype, scheme or record does.

On the way back an iteration begins where the position has just been changed: it finishes one step and begins the one before
it. All that asks for the force at one position is then in one iteration, so that the force and its product with the cotangents
share their loop over pairs. What comes before the first iteration and after the last is compiled with the loop.

Anything not passed as an input is baked in, and is part of the key by which a loop is looked up
(:mod:`adjsim.adjoints.settings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adjsim._layout import VECTOR, packed, unpacked
from adjsim._module import ModuleCache
from adjsim._progress import shown
from adjsim._state import State
from adjsim.adjoints.history import Rewind
from adjsim.adjoints.loops import CompileError, Constant, LoopSpec, NoCapture, clone, compile_loop
from adjsim.adjoints.recorder import Recorder, Recording, RecordSweep, sum_dtype
from adjsim.adjoints.settings import UnseenError, settings
from adjsim.adjoints.stepper import Inputs, Stepper
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.base import Problem

# Numbers of noise that are handed to a loop at once: four megabytes of float64.
DRAWN = 2**19
# Steps between finiteness checks.
FINITE_EVERY = 1024


class LoopConstants(NamedTuple):
    """What does not change in a loop: the number of its steps and of the first one, the time of step 0, the coefficients, all
    tensors of the dynamics, the spacings of a lattice, the noise of its steps if there is any, and on the way back the
    cotangent of a time average at each step if there is one."""

    steps: Tensor
    first: Tensor
    begin: Tensor
    coefficients: dict[str, dict[str, Tensor]]
    parameters: tuple[Tensor, ...]
    spacings: dict[str, Tensor]
    noise: tuple[Tensor, ...] = ()
    average: tuple[Tensor, ...] = ()


class ForwardCarry(NamedTuple):
    """What forward steps carry: the sum of a time average and the force at the position, where there are any, and the state."""

    total: tuple[Tensor, ...]
    force: tuple[Tensor, ...]
    state: tuple[Tensor, ...]


class BackwardCarry(NamedTuple):
    """What the way back carries: the sums of the cotangents of coefficients and parameters, the cotangents of the fields, and
    the state."""

    coefficients: dict[tuple[str, str], Tensor]
    parameters: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    state: tuple[Tensor, ...]


@dataclass
class Loop:
    """A compiled loop, the passes over the energy that it makes (around its iterations, and in each), and what it has read
    without being given it."""

    function: Callable[[LoopConstants, Any], Any] | None = None
    once: int = 0
    each: int = 0
    constants: list[Constant] = field(default_factory=list)


# Compiled loops by dynamics and key, as many as may be kept for one dynamics.
cache: ModuleCache[Loop] = ModuleCache(32)


class CompiledDriver:
    """The steps of a run in compiled loops, forward and backward.

    Args:
        stepper: the steps.
        inputs: what the run reads.
        problem: the run.
    """

    def __init__(self, stepper: Stepper, inputs: Inputs, problem: Problem) -> None:
        self.stepper, self.problem, self.program, self.clock = stepper, problem, stepper.program, stepper.clock
        self.dynamics, self.tensors = problem.dynamics, problem.tensors
        self.recorder = Recorder(problem.record, stepper.clock)
        position = problem.state.position
        self.batch, self.device = position.shape[:-2], position.device
        drawn = self.program.draws * position.numel()
        self.length = max(1, min(FINITE_EVERY, DRAWN // drawn)) if drawn else self.clock.last
        # The last move of a step that writes the position.
        self.turn = max(i for i, (_, move) in enumerate(self.program.moves) if "position" in move.writes)
        coefficients = inputs.coefficients
        self.wanted = [(a, n) for a, group in coefficients.items() for n, c in group.items() if c.requires_grad]
        lattice = self.program.lattice
        self.fixed = LoopConstants(
            torch.zeros((), dtype=torch.int64, device=self.device),
            torch.zeros((), dtype=torch.int64, device=self.device),
            torch.tensor(self.clock.begin, dtype=torch.float64, device=self.device),
            {letter: {name: clone(c) for name, c in group.items()} for letter, group in coefficients.items()},
            tuple(clone(x) for x in inputs.parameters),
            {} if lattice is None else {name: clone(x) for name, x in lattice.spacings().items()},
        )
        self.settings = self._settings()
        self.stops: list[int] = []
        self._kept: tuple[int, int, Tensor] | None = None
        problem.stats.setdefault("compile_seconds", 0.0)

    def forward(self, recording: Recording) -> ForwardLoops:
        """Steps forward, with the time average that they gather."""
        return ForwardLoops(self, recording)

    def backward(self, forces: ForceEvaluator) -> BackwardLoops:
        """The way back, with the forces of what is not compiled."""
        return BackwardLoops(self, forces)

    def boundaries(self, wanted: set[int]) -> list[int]:
        """The steps after which loops have to end: those wanted, the first (which is not compiled), the one before the first
        of a time average, those at which the buffers of an exact run or finiteness are checked."""
        last, growth = self.clock.last, self.stepper.growth
        found = {*wanted, 1, last, *range(FINITE_EVERY, last, FINITE_EVERY)}
        if self.recorder.average is not None:
            found.add(self.recorder.first - 1)
        if growth is not None:
            found |= set(range(growth.check_every, last, growth.check_every))
        self.stops = sorted(step for step in found if 0 < step <= last)
        return self.stops

    def averages(self, step: int) -> bool:
        """Whether the end of a step counts for a time average."""
        return self.recorder.average is not None and step >= self.recorder.first

    def run(
        self, back: bool, averaging: bool, kind: type, first: int, count: int, carry: Any, average: Sequence[Tensor] = ()
    ) -> Any:
        """Carry out a loop."""
        numbers = [torch.tensor(x, device=self.device) for x in (count, first)]
        noise = self._noise(first, count)
        constants = self.fixed._replace(steps=numbers[0], first=numbers[1], noise=noise, average=tuple(map(clone, average)))
        loop = self._look_up(back, averaging, kind, constants, carry)
        self.problem.stats["energy_evaluations"] += loop.once + (count - 1 if back else count) * loop.each
        assert loop.function is not None
        return loop.function(constants, carry)

    def pack(self, x: Tensor) -> Tensor:
        """A field as it lies in memory inside a loop."""
        return clone(packed(x, self.batch))

    def unpack(self, x: Tensor) -> Tensor:
        """The field of the packed one."""
        return unpacked(x, self.batch)

    # How loops are traced.

    def time(self, given: LoopConstants, k: Tensor) -> Tensor:
        """The time at which step number ``k`` of the loop begins."""
        return given.begin + (given.first + k).to(torch.float64) * self.clock.dt

    def seen(self, given: LoopConstants, k: Tensor) -> list[Tensor] | None:
        """The noise that step number ``k`` of the loop sees."""
        if not given.noise:
            return None
        steps = [given.noise[0].index_select(0, (k + i).reshape(1)).squeeze(0) for i in range(self.program.sees)]
        return [self.unpack(draw) for step in steps for draw in step.unbind(0)]

    @contextmanager
    def _within(self, back: bool, loop: Loop, given: LoopConstants) -> Iterator[LoopConstants]:
        """Run the dynamics with the tensors of a trace, those as leaves that a gradient is wanted by."""
        if back:
            leaves = [x.detach().requires_grad_(i in self.tensors.wanted) for i, x in enumerate(given.parameters)]
            coefficients = {
                letter: {name: x.detach().requires_grad_((letter, name) in self.wanted) for name, x in group.items()}
                for letter, group in given.coefficients.items()
            }
            given = given._replace(parameters=tuple(leaves), coefficients=coefficients)
        with self.tensors.bound(given.parameters), torch.no_grad(), NoCapture(self.tensors.tensors, loop.constants):
            yield given

    def _look_up(self, back: bool, averaging: bool, kind: type, constants: LoopConstants, carry: Any) -> Loop:
        leaves = tree_leaves((constants, carry))
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in leaves)
        gradient = (tuple(self.tensors.wanted), tuple(self.wanted)) if back else ()
        solver, threads = self.problem.solver, torch.get_num_threads()
        key = (back, averaging, repr(solver), solver.dt, kind, shapes, gradient, self.settings, threads)
        loop = cache.get(self.dynamics, key)
        for constant in loop.constants if loop is not None else ():
            constant.check()
        if loop is None or any(constant.changed() for constant in loop.constants):
            if self._settings() != self.settings:
                raise RuntimeError(
                    f"something that {type(self.dynamics).__name__}, its potential or the record reads (a plain attribute, a "
                    "mode, a "
                    "global) has changed since the run, and its way back had not been compiled yet. Call backward before the "
                    "change."
                )
            begun = time.perf_counter()
            loop = self._compile(back, averaging, kind, constants, carry)
            cache.put(self.dynamics, key, loop)
            self.problem.stats["compile_seconds"] += time.perf_counter() - begun
        return loop

    def _compile(self, back: bool, averaging: bool, kind: type, constants: LoopConstants, carry: Any) -> Loop:
        loop = Loop()
        spec: LoopSpec[Any, Any] = (BackwardLoops if back else ForwardLoops).spec(self, averaging, kind, loop)
        # Where less than a vector lies side by side, plain numbers are faster, and compile in half the time.
        short = max(self.problem.state.position.shape[-2], self.batch.numel()) < VECTOR
        what = f"a step of {type(self.dynamics).__name__}"
        loop.function = compile_loop(spec, partial(self._within, back, loop), constants, carry, short, what)
        return loop

    def _settings(self) -> Any:
        average = self.recorder.average
        try:
            return settings(self.dynamics, None if average is None else average.function)
        except UnseenError as unseen:
            raise CompileError(f"compile=True: {unseen}") from unseen

    def _noise(self, first: int, count: int) -> tuple[Tensor, ...]:
        """That of the steps of a loop, as many as a loop may have; or none."""
        if self.stepper.noise is None:
            return ()
        if self._kept is not None and self._kept[:2] == (first, count):
            return (self._kept[2],)
        seen = count + self.program.sees - 1
        drawn = packed(self.stepper.noise.of_steps(first, seen), self.batch, leading=2)
        whole = drawn.new_empty((self.length + self.program.sees - 1, *drawn.shape[1:]))
        whole[:seen] = drawn
        # The way back begins with what the way forward ended with.
        self._kept = (first, count, whole)
        return (whole,)


class ForwardLoops:
    """Steps forward in compiled loops, but for the first: it is carried out as it is written, and tells whether a step leaves
    behind the force that the next one begins with."""

    def __init__(self, driver: CompiledDriver, recording: Recording) -> None:
        self.driver, self.recording = driver, recording
        self.forces = driver.program.forces(driver.dynamics.potential, stats=driver.problem.stats)
        self.force: Tensor | None = None

    def stops(self, wanted: set[int]) -> Sequence[int]:
        return self.driver.boundaries(wanted)

    def advance(self, state: State, start: int, stop: int) -> State:
        driver, recording = self.driver, self.recording
        if start == 0:
            inputs = Inputs(state, driver.fixed.coefficients, driver.fixed.parameters)
            with torch.no_grad():
                state = driver.stepper.step(0, state, inputs, self.forces)
            self.force, start = self.forces.kept(state.position), 1
        while start < stop:
            count = min(driver.length, stop - start)
            averaging = driver.averages(start + 1)
            carry = ForwardCarry(
                (clone(self._total(state)),) if averaging else (),
                () if self.force is None else (driver.pack(self.force),),
                tuple(map(driver.pack, state)),
            )
            carry = driver.run(False, averaging, type(state), start, count, carry)
            if averaging:
                recording.total, recording.come_to = carry.total[0], start + count
            self.force = driver.unpack(carry.force[0]) if carry.force else None
            state = type(state)(*map(driver.unpack, carry.state))
            start += count
        return state

    def _total(self, state: State) -> Tensor:
        """The sum of the time average so far."""
        recording = self.recording
        if recording.total is None:
            with torch.no_grad():
                value = self.driver.recorder.value(self.driver.stepper.from_lattice(state))
            recording.add(torch.zeros_like(value), recording.come_to)
        assert recording.total is not None
        return recording.total

    @staticmethod
    def spec(driver: CompiledDriver, averaging: bool, kind: type, loop: Loop) -> LoopSpec[LoopConstants, ForwardCarry]:
        """One step an iteration."""

        def start(given: LoopConstants, carry: ForwardCarry) -> tuple[Tensor, ForwardCarry]:
            return torch.zeros_like(given.steps), carry

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k < count

        def body(given: LoopConstants, k: Tensor, carry: ForwardCarry) -> tuple[Tensor, ForwardCarry]:
            stats, t = {"energy_evaluations": 0}, driver.time(given, k)
            state = kind(*map(driver.unpack, carry.state))
            known = (state.position, driver.unpack(carry.force[0])) if carry.force else None
            program = driver.program.with_spacings(given.spacings)
            forces = program.forces(driver.dynamics.potential, known=known, stats=stats)
            state = program.step(t, state, given.coefficients, driver.seen(given, k), forces)
            total = carry.total
            if averaging:
                value = driver.recorder.value(driver.stepper.from_lattice(state))
                total = (clone(total[0] + value.to(sum_dtype(value))),)
            force = (driver.pack(forces.force(state.position, t)),) if carry.force else ()
            loop.each = stats["energy_evaluations"]
            return k + 1, ForwardCarry(total, force, tuple(map(driver.pack, state)))

        def finish(given: LoopConstants, carry: ForwardCarry) -> ForwardCarry:
            return carry

        return LoopSpec(start, more, body, finish)


class BackwardLoops:
    """The way back in compiled loops."""

    def __init__(self, driver: CompiledDriver, forces: ForceEvaluator) -> None:
        self.driver, self.forces = driver, forces

    def sweep(self, state: State, cotangents: Cotangents, saved: RecordSweep, rewind: Rewind, progress: bool) -> State:
        """Take the cotangents from the last state back to the start, which is returned."""
        pairs = list(pairwise([0, *self.driver.stops]))[::-1]
        for start, stop in shown(pairs, "backward", len(pairs), progress):
            if self.driver.recorder.average is None:
                saved.accumulate(stop, self.driver.stepper.from_lattice(state), cotangents, self.forces)
            state = self._over(state, stop, start, cotangents, saved.of_average)
            state = rewind.restore(start, state)
        return state

    def _over(self, state: State, stop: int, start: int, cotangents: Cotangents, average: Tensor | None) -> State:
        """From the state after ``stop`` steps back to that after ``start``, with the cotangents taken along."""
        driver, fields = self.driver, cotangents.fields
        coefficients, sums = driver.fixed.coefficients, cotangents.coefficient_sums
        carry = BackwardCarry(
            {(a, n): _sum(sums.get((a, n)), coefficients[a][n]) for a, n in driver.wanted},
            {name: _sum(cotangents.parameter_sums.get(name), p) for name, p in cotangents.parameters.items()},
            {name: driver.pack(cotangents[name]) for name in fields},
            tuple(map(driver.pack, state)),
        )
        while stop > start:
            count = min(driver.length, stop - start)
            averaging = average is not None and driver.averages(stop)
            given = [average] if averaging and average is not None else []
            carry = driver.run(True, averaging, type(state), stop - count, count, carry, given)
            stop -= count
        for name, cotangent in carry.cotangents.items():
            cotangents[name] = driver.unpack(cotangent)
        cotangents.coefficient_sums.update(carry.coefficients)
        cotangents.parameter_sums.update(carry.parameters)
        return type(state)(*map(driver.unpack, carry.state))

    @staticmethod
    def spec(driver: CompiledDriver, averaging: bool, kind: type, loop: Loop) -> LoopSpec[LoopConstants, BackwardCarry]:
        """The end of one step and the beginning of the one before it an iteration."""
        late, early = slice(driver.turn, None), slice(0, driver.turn)

        class Sweep:
            """The way back inside a trace, from what is carried."""

            def __init__(self, given: LoopConstants, carry: BackwardCarry) -> None:
                self.given, self.stats = given, {"energy_evaluations": 0}
                self.state = kind(*map(driver.unpack, carry.state))
                trainable = driver.tensors.trainable(given.parameters)
                fields = {name: driver.unpack(x) for name, x in carry.cotangents.items()}
                self.sums = Cotangents(fields, trainable, carry.coefficients, carry.parameters)
                self.program = driver.program.with_spacings(given.spacings)
                self.forces = self.program.forces(driver.dynamics.potential, parameters=trainable, stats=self.stats)

            def over(self, part: slice, k: Tensor) -> None:
                """Go back over a part of step number k."""
                t, seen = driver.time(self.given, k), driver.seen(self.given, k)
                coefficients = self.given.coefficients
                self.state = self.program.backward(t, self.state, coefficients, seen, self.forces, self.sums, None, part)

            def look(self) -> None:
                """Add what a time average says of the state."""
                if averaging:
                    (cotangent,), state = self.given.average, driver.stepper.from_lattice(self.state)
                    RecordSweep(driver.recorder, (), None, 0.0).add_function(state, cotangent, self.sums, self.forces)

            def carry(self) -> BackwardCarry:
                self.sums.complete()
                return BackwardCarry(
                    {key: clone(self.sums.coefficient_sums[key]) for key in driver.wanted},
                    {name: clone(self.sums.parameter_sums[name]) for name in self.sums.parameters},
                    {name: driver.pack(self.sums[name]) for name in self.sums.fields},
                    tuple(map(driver.pack, self.state)),
                )

        def start(given: LoopConstants, carry: BackwardCarry) -> tuple[Tensor, BackwardCarry]:
            sweep = Sweep(given, carry)
            sweep.look()
            sweep.over(late, given.steps - 1)
            found = sweep.carry()
            loop.once += sweep.stats["energy_evaluations"]
            return given.steps - 1, found

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k > 0

        def body(given: LoopConstants, k: Tensor, carry: BackwardCarry) -> tuple[Tensor, BackwardCarry]:
            sweep = Sweep(given, carry)
            sweep.over(early, k)
            sweep.look()
            sweep.over(late, k - 1)
            found = sweep.carry()
            loop.each = sweep.stats["energy_evaluations"]
            return k - 1, found

        def finish(given: LoopConstants, carry: BackwardCarry) -> BackwardCarry:
            sweep = Sweep(given, carry)
            sweep.over(early, torch.zeros_like(given.steps))
            found = sweep.carry()
            loop.once += sweep.stats["energy_evaluations"]
            return found

        return LoopSpec(start, more, body, finish)


def _sum(known: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(clone(like)) if known is None else clone(known)
