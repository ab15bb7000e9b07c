"""The compiled loops of one run: their inputs, their cache and their tracing."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.loops.full_buffers import steps_between_looks
from adjsim.adjoints.loops.loop import (
    SHARE,
    Loop,
    LoopCheck,
    LoopConstants,
    LoopKind,
    are_dense,
    row,
)
from adjsim.adjoints.loops.loop_noise import LoopNoise
from adjsim.adjoints.loops.saved_tensors import MOST_STEPS, keeps_activations
from adjsim.adjoints.sweep.recorder import Recorder
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.compiler import CompileError, NoCapture, clone, compile_loop, leaves, mapped
from adjsim.core.cache_key import CacheKey, UninspectableError, cache_key, object_key
from adjsim.core.layout import VECTOR, packed, unpacked
from adjsim.core.recent_cache import RecentCache
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State
from adjsim.core.trajectory import TimeAverage, sum_dtype
from adjsim.dynamics.constraints.systems import CONSTRAINT_OPERATORS
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.potentials.pairs.kernels import PAIR_OPERATORS
from adjsim.solvers.base import StepContext, TimeInStep
from adjsim.solvers.clock import Clock
from adjsim.solvers.run import Run

# Largest number of noise entries passed to a loop at once, and of entries of states that a loop
# stores: four megabytes of float64, which a cache of the CPU holds, and a gigabyte on a GPU.
NUMBERS_PER_LOOP = 2**19
NUMBERS_PER_LOOP_OF_GPU = 2**27
# Steps between finiteness checks.
FINITE_EVERY = 1024


# Compiled loops by their keys, which begin with that of what their step reads.
cache: RecentCache[Loop] = RecentCache(256)
# Why optional loops could not be compiled, so that no later run tries again.
_refused: RecentCache[str] = RecentCache(256)


class LoopRunner:
    """Runs the loops of one run, and compiles each when it is first used.

    States are stored before ``block_length`` steps at a time; 0: backward loops invert the steps.
    ``stops_at_frames`` says that a loop ends at each saved frame.
    """

    def __init__(
        self,
        stepper: Stepper,
        inputs: Inputs,
        run: Run[State],
        report: RunReport,
        block_length: int = 0,
        stops_at_frames: bool = False,
    ) -> None:
        assert isinstance(stepper.clock, Clock)
        self.stepper, self.run, self.report = stepper, run, report
        self.plan, self.clock = stepper.plan, stepper.clock
        self.dynamics, self.reading = run.dynamics, run.reading
        self.recorder = Recorder(run.bound_record, stepper.clock)
        state, axes = run.state, run.dynamics.system_axes
        self.batch, self.device = run.dynamics.batch_shape(state), state[0].device
        # Numbers in a contiguous row: atoms or entries of one system, or systems.
        self.row = max(state[0].shape[-axes], self.batch.numel())
        numbers = NUMBERS_PER_LOOP if self.device.type == "cpu" else NUMBERS_PER_LOOP_OF_GPU
        # The largest number of steps of a loop.
        self.length = self.clock.last
        if stepper.noise is not None:
            drawn = self.plan.draws * self.batch.numel() * stepper.noise.shape.numel()
            self.length = max(1, min(FINITE_EVERY, numbers // drawn))
        self.keeps_states = block_length > 0
        self.saves_tensors = 0 < block_length <= MOST_STEPS and keeps_activations(self.plan)
        most = MOST_STEPS if self.saves_tensors else FINITE_EVERY
        self.capacity = max(1, min(most, numbers // state[0].numel()))
        # The sweep of a saved function reads the stored states.
        recorder, dense = self.recorder, are_dense(self.clock.saves, self.capacity)
        read = recorder.function is None or self.keeps_states or not run.needs_gradient
        self.saves_frames = dense and read and recorder.average is None and not stops_at_frames
        self.records_in_loops = self.saves_frames or recorder.in_loops
        if self.keeps_states or self.saves_frames:
            self.length = min(self.length, self.capacity)
        # The last move of a step that writes the position, or the first field of any other state.
        self.last_position_move = max(
            i for i, (_, move) in enumerate(self.plan.moves) if state._fields[0] in move.writes
        )
        coefficients = inputs.coefficients
        self.wanted = [
            (a, n) for a, group in coefficients.items() for n, c in group.items() if c.requires_grad
        ]
        lattice = self.plan.lattice
        self.exact = lattice is not None
        self.state_class = self.plan.kind(stepper.kind)
        self.width = len(self.state_class._fields)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        fixed = LoopConstants(
            zero,
            zero,
            torch.tensor(self.clock.begin, dtype=torch.float64, device=self.device),
            {letter: dict(group) for letter, group in coefficients.items()},
            inputs.parameters,
            {} if lattice is None else lattice.spacings(),
            {},
            check_every=steps_between_looks(stepper, self.device),
        )
        self.fixed: LoopConstants = mapped(clone, fixed)
        self.cache_key = self._cache_key() if run.key is None else run.key
        try:
            self.solver_key = object_key(run.solver, "the solver")
        except UninspectableError as error:
            raise CompileError(f"compile=True: {error}") from error
        self.what, self.stops = f"a step of {type(self.dynamics).__name__}", list[int]()
        # The loops that this run has called.
        self.used: set[Loop] = set()
        self.noise = None
        if stepper.noise is not None:
            # A step of some schemes reads the noise of the next one too.
            more = self.plan.noise_steps - 1
            self.noise = LoopNoise(stepper.noise, self.length, more, self.device)
        report.compile_seconds = 0.0
        report.compiled_forward = report.compiled_backward = None
        report.compiled_source = []

    def boundaries(self, wanted: set[int]) -> list[int]:
        """Choose the steps after which loops have to end, among them the wanted ones."""
        last, growth = self.clock.last, self.stepper.buffer_growth
        found = {*wanted, last, *range(FINITE_EVERY, last, FINITE_EVERY)}
        if self.recorder.in_loops:
            found.add(self.recorder.counted[0] - 1)
        if self.run.clip is not None:
            found |= set(range(self.run.clip.every, last, self.run.clip.every))
        if growth is not None and not self.fixed.check_every:
            every = growth.check_every
            found |= set(range(every - self.clock.before % every, last, every))
        self.stops = sorted(step for step in found if 0 < step <= last)
        return list(self.stops)

    def averages(self, step: int) -> bool:
        """Return whether the end of a step counts for a time average."""
        return self.recorder.in_loops and step in self.recorder.counted

    def run_loop(
        self,
        kind: LoopKind,
        first: int,
        count: int,
        carry: Any,
        given: LoopConstants | None = None,
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Run ``count`` steps from number ``first``; return the final carry and the stored rows.

        ``given`` are the inputs of a backward loop, apart from its steps and their noise.
        """
        began = time.perf_counter()
        constants = (given or self.fixed)._replace(
            steps=torch.tensor(count, device=self.device),
            first=torch.tensor(self.clock.before + first, device=self.device),
            noise=() if self.noise is None else (self.noise.of(first, count),),
        )
        loop = self._look_up(kind, constants, carry)
        source, cheap = self.reading.source, loop.seconds >= SHARE * loop.check_seconds
        if loop not in self.used and (cheap or source not in loop.sources or self.cache_key.opaque):
            loop = self._check(loop, kind, constants, carry)
            began = time.perf_counter()
        self.used.add(loop)
        loop.sources.add(source)
        assert loop.function is not None
        if loop.source is not None and str(loop.source) not in self.report.compiled_source:
            self.report.compiled_source.append(str(loop.source))
        if kind.backward:
            self.report.compiled_backward = loop.path
        else:
            self.report.compiled_forward = loop.path
        following = self._following(kind, first, count)
        if self.noise is not None and following is not None:
            self.noise.draw_ahead(*following)
        meanwhile = [] if self.noise is None else self.noise.meanwhile
        carry, rows = loop.function(constants, carry, *meanwhile)
        loop.seconds += time.perf_counter() - began
        iterations = kind.iterations(carry, count)
        self.report.energy_evaluations += (
            loop.fixed_evaluations + iterations * loop.evaluations_per_step
        )
        return carry, tuple(rows)

    def _following(self, kind: LoopKind, first: int, count: int) -> tuple[int, int] | None:
        """Return the first step and the number of steps of the loop that is expected next."""
        stops = self.stops
        if kind.backward:
            if first == 0:
                return None
            # The parts of a stretch begin where the stretch does.
            before = bisect_left(stops, first)
            start = stops[before - 1] if before else 0
            steps = (first - start - 1) % self.length + 1
            return first - steps, steps
        after = bisect_right(stops, first + count)
        if after == len(stops):
            return None
        return first + count, min(self.length, stops[after] - first - count)

    def pack(self, x: Tensor) -> Tensor:
        """Copy a field to its layout inside a loop."""
        return clone(packed(x, self.batch))

    def unpack(self, x: Tensor) -> Tensor:
        """Return the field of a packed tensor."""
        return unpacked(x, self.batch)

    def pack_state(self, state: AnyState) -> tuple[Tensor, ...]:
        return tuple(map(self.pack, state))

    def unpack_state(self, fields: Iterable[Tensor]) -> Any:
        return self.state_class._make(map(self.unpack, fields))

    def added(self, total: tuple[Tensor, ...], state: AnyState) -> tuple[Tensor, ...]:
        """Add the averaged function of a state to the sum of a time average, if there is one."""
        if not total:
            return ()
        value = self.recorder.value(self.stepper.from_lattice(state))
        return (total[0] + value.to(sum_dtype(value)),)

    # Used while loops are traced.

    def time(self, constants: LoopConstants, k: Tensor) -> TimeInStep:
        """Return a function that gives the time in step number ``k`` of the loop."""
        return lambda share: (
            constants.begin + ((constants.first + k).to(torch.float64) + share) * self.clock.dt
        )

    def noise_of(self, constants: LoopConstants, k: Tensor) -> list[Tensor] | None:
        """Return the noise that step number ``k`` of the loop reads."""
        if not constants.noise:
            return None
        steps = [row(constants.noise[0], k + i) for i in range(self.plan.noise_steps)]
        return [self.unpack(draw) for step in steps for draw in step.unbind(0)]

    def context(self, constants: LoopConstants, k: Tensor, forces: ForceEvaluator) -> StepContext:
        """Return the context of step number ``k`` of the loop."""
        t, noise = self.time(constants, k), self.noise_of(constants, k)
        return StepContext(t, constants.coefficients, noise, forces)

    def state_before(self, constants: LoopConstants, k: Tensor) -> Any:
        """Return the stored state before step number ``k`` of the loop."""
        return self.unpack_state(row(x, k) for x in constants.states[: self.width])

    def _traced(self) -> LoopRunner:
        """Return a runner for one trace, with a copy of the dynamics that only the trace uses."""
        found = copy(self)
        found.dynamics = self.reading.bound(self.fixed.parameters)
        found.run = self.run.with_dynamics(found.dynamics, self.fixed.parameters)
        found.plan = found.run.plan
        return found

    @contextmanager
    def _within(
        self, differentiates: bool, capture: AbstractContextManager[Any], constants: LoopConstants
    ) -> Generator[LoopConstants, None, None]:
        """Make a context that runs the dynamics of a trace with the tensors of ``constants``.

        Where autograd runs in the loop, tensors that need a gradient are leaves.
        """
        if differentiates:
            parameters = mapped(Tensor.detach, constants.parameters)
            coefficients = mapped(Tensor.detach, constants.coefficients)
            constants = constants._replace(parameters=parameters, coefficients=coefficients)
            for i in self.reading.wanted:
                constants.parameters[i].requires_grad_()
            for letter, name in self.wanted:
                constants.coefficients[letter][name].requires_grad_()
        self.reading.put(constants.parameters, self.dynamics)
        run = replace(self.run, tensors=constants.parameters)
        self.recorder = Recorder(run.bound_record, self.clock)
        with torch.no_grad(), capture:
            yield constants

    def _look_up(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        key = self._key(kind, constants, carry)
        loop = cache.get(key)
        if loop is None or any(constant.changed() for constant in loop.constants):
            changed = self._cache_key() != self.cache_key
            if changed and not self.used:
                raise CompileError(
                    f"compile=True: values that {type(self.dynamics).__name__}, its potential or "
                    "the record reads are made anew at each look, as those of scripted modules "
                    "are, so a change of them could not be seen. Leave compile=True out."
                )
            if changed or any(used.stale for used in self.used):
                raise RuntimeError(
                    f"a value that {type(self.dynamics).__name__}, its potential or the record "
                    "reads (a plain attribute, a mode, a global) has changed since the run, and "
                    "the backward pass had not been compiled yet. Call backward before the change."
                )
            if kind.optional and (reason := _refused.get(key)) is not None:
                raise CompileError(reason)
            try:
                loop = self._compile(kind, constants, carry)
            except CompileError as error:
                if kind.optional:
                    _refused.put(key, str(error))
                raise
            cache.put(key, loop)
            self.used.add(loop)
        return loop

    def _key(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Any:
        inputs = leaves((constants, carry))
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        # Several parts of constants and carry may be empty.
        sizes = tuple(len(x) for x in (*constants, *carry) if not isinstance(x, Tensor))
        wanted = (self.reading.wanted, tuple(self.wanted)) if kind.differentiates else ()
        # A run that saves tensors has shorter loops than one of the same steps that does not.
        rows = self.capacity if kind.stores else 0
        fixed = (self.cache_key, kind, self.state_class, self.solver_key, self.reading.slots)
        return (*fixed, shapes, sizes, rows, *constants.frames, wanted, torch.get_num_threads())

    def _check_of(
        self, loop: Loop, kind: LoopKind, constants: LoopConstants, carry: Any
    ) -> LoopCheck:
        """Return the check of a loop against the same step without compilation."""
        one, traced = constants._replace(steps=torch.ones_like(constants.steps)), self._traced()
        spec = (kind.uncompiled or kind.specify)(traced, Loop())

        def uncompiled(carry: Any) -> list[Tensor]:
            # Of the stored rows, an uncompiled step reads the state alone.
            plain = one._replace(states=one.states[: self.width])
            with traced._within(kind.differentiates, nullcontext(), plain) as given:
                k, after = spec.start(given, mapped(clone, carry))
                while bool(spec.more(k, given.steps)):
                    k, after, _ = spec.body(given, k, after)
                return leaves(after)

        return LoopCheck(loop, one, carry, uncompiled)

    def _check(self, loop: Loop, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        """Check a loop that an earlier run has compiled, and return it, or a new one."""
        check = self._check_of(loop, kind, constants, carry)
        if check.agrees():
            return loop
        again = self._compile(kind, constants, carry)
        if check.agrees_with(again):
            loop.rounding = again.rounding
            return loop
        for old in cache.drop(lambda key: key[0] == self.cache_key):
            old.stale = True
        if kind.backward or self.used:
            raise RuntimeError(
                f"a value that {type(self.dynamics).__name__}, its potential or the record reads "
                "has changed since this run was compiled, in a way that shows in its numbers "
                "alone (a patched function, a computed name, a number inside an object that "
                "cannot be inspected). Run it again, and call backward before the next change."
            )
        cache.put(self._key(kind, constants, carry), again)
        return again

    def _compile(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        """Compile a loop, and compare one step of it with the step without compilation."""
        started, loop, traced = time.perf_counter(), Loop(), self._traced()
        capture = NoCapture([*self.reading.tensors, *self.fixed.parameters], loop.constants)
        loop.function, loop.path, loop.source = compile_loop(
            kind.specify(traced, loop),
            partial(traced._within, kind.differentiates, capture),
            constants,
            carry,
            exact=self.exact,
            # For these rows scalar code is faster, and compiles in half the time.
            short=self.row < VECTOR,
            what=self.what,
            capacity=self.capacity,
            operators=[PAIR_OPERATORS, CONSTRAINT_OPERATORS],
        )
        self._check_of(loop, kind, constants, carry).learn(self.what)
        self.report.compile_seconds += time.perf_counter() - started
        return loop

    def _cache_key(self) -> CacheKey:
        record = self.run.record
        function = record.function if isinstance(record, TimeAverage) else None
        return cache_key(self.dynamics, function)
