"""The compiled loops of one run: their inputs, their cache and their tracing."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.loops.check import LoopCheck, is_due, one_step_uncompiled
from adjsim.adjoints.loops.compilation import (
    CompileError,
    NoCapture,
    clone,
    compile_loop,
    leaves,
)
from adjsim.adjoints.loops.loop import Loop, LoopConstants, LoopKind, MakeSpec
from adjsim.adjoints.loops.noise import LoopNoise
from adjsim.adjoints.loops.saved_tensors import MOST_STEPS
from adjsim.adjoints.sweep.recorder import Recorder
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.cache_key import CacheKey, UninspectableError, cache_key, object_key
from adjsim.core.layout import VECTOR, packed, unpacked
from adjsim.core.module_cache import ModuleCache
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.base import StepContext, TimeInStep
from adjsim.solvers.clock import Clock
from adjsim.solvers.run import Run, bound_record
from adjsim.solvers.stochastic.drift_move import DriftMove

# Largest number of noise entries passed to a loop at once: four megabytes of float64.
NOISE_PER_LOOP = 2**19
# Largest number of entries of states that a loop stores: four megabytes of float64.
STATES_PER_LOOP = 2**19
# Steps between finiteness checks.
FINITE_EVERY = 1024


# Compiled loops by dynamics and key, up to this number for one dynamics.
cache: ModuleCache[Loop] = ModuleCache(32)


class LoopRunner:
    """Runs the loops of one run, and compiles each when it is first used.

    Args:
        stepper: the steps.
        inputs: the inputs of the run.
        run: what is computed.
        report: receives what it costs.
        block_length: the number of steps before which states are stored at a time; 0: backward
            loops invert the steps.
    """

    def __init__(
        self,
        stepper: Stepper,
        inputs: Inputs,
        run: Run[State],
        report: RunReport,
        block_length: int = 0,
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
        drawn = (
            0
            if stepper.noise is None
            else self.plan.draws * self.batch.numel() * stepper.noise.shape.numel()
        )
        self.length = (
            max(1, min(FINITE_EVERY, NOISE_PER_LOOP // drawn)) if drawn else self.clock.last
        )
        self.keeps_states = block_length > 0
        self.saves_tensors = 0 < block_length <= MOST_STEPS and any(
            isinstance(move, DriftMove) for _, move in self.plan.moves
        )
        most = MOST_STEPS if self.saves_tensors else FINITE_EVERY
        self.capacity = max(1, min(most, STATES_PER_LOOP // state[0].numel()))
        if self.keeps_states:
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
        self.fixed = LoopConstants(
            torch.zeros((), dtype=torch.int64, device=self.device),
            torch.zeros((), dtype=torch.int64, device=self.device),
            torch.tensor(self.clock.begin, dtype=torch.float64, device=self.device),
            {
                letter: {name: clone(c) for name, c in group.items()}
                for letter, group in coefficients.items()
            },
            tuple(clone(x) for x in inputs.parameters),
            {} if lattice is None else {name: clone(x) for name, x in lattice.spacings().items()},
        )
        self.cache_key = self._cache_key() if run.key is None else run.key
        self.solver_key = self._solver_key()
        self.stops: list[int] = []
        # The loops that this run has called.
        self.used: set[Loop] = set()
        self.noise = LoopNoise(stepper, self.batch, self.length)
        report.compile_seconds = 0.0
        report.compiled_forward = report.compiled_backward = None

    def boundaries(self, wanted: set[int]) -> list[int]:
        """Choose the steps after which loops have to end.

        These are the wanted steps, the step before the first of a time average, and the steps after
        which finiteness or the buffers of an exact run are checked.
        """
        last, growth = self.clock.last, self.stepper.buffer_growth
        found = {*wanted, last, *range(FINITE_EVERY, last, FINITE_EVERY)}
        if self.recorder.average is not None:
            found.add(self.recorder.first - 1)
        if growth is not None:
            every = growth.check_every
            found |= set(range(every - self.clock.before % every, last, every))
        self.stops = sorted(step for step in found if 0 < step <= last)
        return list(self.stops)

    def averages(self, step: int) -> bool:
        """Return whether the end of a step counts for a time average."""
        return self.recorder.average is not None and step >= self.recorder.first

    def run_loop(
        self,
        spec: MakeSpec,
        averaging: bool,
        state_class: type[AnyState],
        first: int,
        count: int,
        carry: Any,
        average: Sequence[Tensor] = (),
        states: tuple[Tensor, ...] = (),
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Run a loop, and return the final carry and the stored states before its steps.

        Args:
            spec: makes the specification of the loop.
            averaging: whether its steps count for a time average.
            state_class: the class of the states.
            first, count: the number of its first step, and the number of steps.
            carry: the initial carry.
            average: in the backward pass, the cotangent of the averaged function at each step.
            states: in the backward pass, the stored states before its steps.
        """
        began = time.perf_counter()
        numbers = [torch.tensor(x, device=self.device) for x in (count, self.clock.before + first)]
        noise, average = self.noise.of(first, count), tuple(map(clone, average))
        constants = self.fixed._replace(
            steps=numbers[0], first=numbers[1], noise=noise, average=average, states=states
        )
        which = LoopKind(spec, averaging, state_class)
        loop = self._look_up(which, constants, carry)
        if loop not in self.used and (self.cache_key.opaque or is_due(loop)):
            loop = self._check(loop, which, constants, carry)
            began = time.perf_counter()
        self.used.add(loop)
        assert loop.function is not None
        if spec.backward:
            self.report.compiled_backward = loop.path
        else:
            self.report.compiled_forward = loop.path
        self._check_retraced(loop)
        carry, rows = loop.function(constants, carry)
        loop.seconds += time.perf_counter() - began
        iterations = count if spec.iterations is None else spec.iterations(carry)
        self.report.energy_evaluations += (
            loop.fixed_evaluations + iterations * loop.evaluations_per_step
        )
        return carry, tuple(rows)

    def _check_retraced(self, loop: Loop) -> None:
        """Refuse a loop whose bits differ from those of the forward loop that it has to retrace."""
        # None where an earlier process ran the forward loops.
        forward = self.report.compiled_forward or loop.path
        if self.exact and not self.keeps_states and forward.split()[0] != loop.path.split()[0]:
            raise CompileError(
                "exact=True with compile=True needs forward and backward loops of one compiler, "
                "whose results have the same bits; the forward loop was compiled by "
                f"{forward}, the backward loop by {loop.path}. Write the operation by others, or "
                "leave compile=True out."
            )

    def pack(self, x: Tensor) -> Tensor:
        """Copy a field to its layout inside a loop."""
        return clone(packed(x, self.batch))

    def unpack(self, x: Tensor) -> Tensor:
        """Return the field of a packed tensor."""
        return unpacked(x, self.batch)

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
        steps = [
            constants.noise[0].index_select(0, (k + i).reshape(1)).squeeze(0)
            for i in range(self.plan.noise_steps)
        ]
        return [self.unpack(draw) for step in steps for draw in step.unbind(0)]

    def context(self, constants: LoopConstants, k: Tensor, forces: ForceEvaluator) -> StepContext:
        """Return the context of step number ``k`` of the loop."""
        t, noise = self.time(constants, k), self.noise_of(constants, k)
        return StepContext(t, constants.coefficients, noise, forces)

    def state_before(self, constants: LoopConstants, k: Tensor, state_class: type[State]) -> State:
        """Return the stored state before step number ``k`` of the loop."""
        rows = constants.states[: _width(state_class)]
        return state_class._make(self.unpack(_row(x, k)) for x in rows)

    def saved_by(
        self, constants: LoopConstants, k: Tensor, state_class: type[AnyState]
    ) -> list[Tensor]:
        """Return what step number ``k`` of the loop has saved besides the state before it."""
        return [_row(x, k) for x in constants.states[_width(state_class) :]]

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
        """Make a context that runs the dynamics of a trace with other tensors.

        Where autograd runs in the loop, tensors that need a gradient are leaves.

        Args:
            differentiates: whether autograd runs in the loop.
            capture: a context inside which the dynamics run.
            constants: the other tensors.
        """
        if differentiates:
            leaves = [
                x.detach().requires_grad_(i in self.reading.wanted)
                for i, x in enumerate(constants.parameters)
            ]
            coefficients = {
                letter: {
                    name: x.detach().requires_grad_((letter, name) in self.wanted)
                    for name, x in group.items()
                }
                for letter, group in constants.coefficients.items()
            }
            constants = constants._replace(parameters=tuple(leaves), coefficients=coefficients)
        self.reading.put(constants.parameters, self.dynamics)
        tensors = constants.parameters
        record = bound_record(self.run.record, self.reading, self.dynamics, tensors)
        self.recorder = Recorder(record, self.clock)
        with torch.no_grad(), capture:
            yield constants

    def _look_up(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        key = self._key(kind, constants, carry)
        loop = cache.get(self.reading.source, key)
        for constant in loop.constants if loop is not None else ():
            constant.check()
        if loop is None or any(constant.changed() for constant in loop.constants):
            if self._cache_key() != self.cache_key or any(used.stale for used in self.used):
                raise RuntimeError(
                    f"a value that {type(self.dynamics).__name__}, its potential or the record "
                    "reads (a plain attribute, a mode, a global) has changed since the run, and "
                    "the backward pass had not been compiled yet. Call backward before the change."
                )
            loop = self._compile(kind, constants, carry)
            cache.put(self.reading.source, key, loop)
            # It needs no check in the run that compiles it.
            self.used.add(loop)
        return loop

    def _key(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Any:
        inputs = leaves((constants, carry))
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        wanted = (self.reading.wanted, tuple(self.wanted)) if kind.spec.differentiates else ()
        threads = torch.get_num_threads()
        return (kind, self.solver_key, self.reading.slots, shapes, wanted, self.cache_key, threads)

    def _check(self, loop: Loop, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        """Check a loop that an earlier run has compiled, and return it, or a new one.

        Raises:
            RuntimeError: a value has changed that the loop does not read anew, and this run has
                begun with its old value.
        """
        one = constants._replace(steps=torch.ones_like(constants.steps))
        # Of the stored rows, an uncompiled step reads the state alone.
        plain = one._replace(states=one.states[: _width(kind.state_class)])
        spec, traced = kind.spec, self._traced()
        make = spec.uncompiled or spec.make
        specification = make(traced, kind.averaging, kind.state_class, Loop())

        def uncompiled(carry: Any) -> list[Tensor]:
            within = traced._within(spec.differentiates, nullcontext(), plain)
            return one_step_uncompiled(specification, within, carry)

        check = LoopCheck(loop, one, carry, uncompiled)
        if check.agrees():
            return loop
        again = self._compile(kind, constants, carry)
        if check.agrees_with(again):
            check.learn(self._what)
            return loop
        for old in cache.drop(self.reading.source):
            old.stale = True
        if spec.backward or self.used:
            raise RuntimeError(
                f"a value that {type(self.dynamics).__name__}, its potential or the record reads "
                "has changed since this run was compiled, in a way that shows in its numbers "
                "alone (a patched function, a computed name, a number inside an object that "
                "cannot be inspected). Run it again, and call backward before the next change."
            )
        cache.put(self.reading.source, self._key(kind, constants, carry), again)
        LoopCheck(again, one, carry, uncompiled).learn(self._what)
        return again

    @property
    def _what(self) -> str:
        return f"a step of {type(self.dynamics).__name__}"

    def _compile(self, kind: LoopKind, constants: LoopConstants, carry: Any) -> Loop:
        started, loop = time.perf_counter(), Loop()
        traced = self._traced()
        specification = kind.spec.make(traced, kind.averaging, kind.state_class, loop)
        capture = NoCapture([*self.reading.tensors, *self.fixed.parameters], loop.constants)
        within = partial(traced._within, kind.spec.differentiates, capture)
        loop.function, loop.path = compile_loop(
            specification,
            within,
            constants,
            carry,
            exact=self.exact,
            # For these rows scalar code is faster, and compiles in half the time.
            short=self.row < VECTOR,
            what=self._what,
            capacity=self.capacity,
        )
        self.report.compile_seconds += time.perf_counter() - started
        return loop

    def _cache_key(self) -> CacheKey:
        record = self.run.record
        function = record.function if isinstance(record, TimeAverage) else None
        return cache_key(self.dynamics, function)

    def _solver_key(self) -> Any:
        try:
            return object_key(self.run.solver, "the solver")
        except UninspectableError as error:
            raise CompileError(f"compile=True: {error}") from error


def _row(rows: Tensor, k: Tensor) -> Tensor:
    return rows.index_select(0, k.reshape(1)).squeeze(0)


def _width(state_class: Any) -> int:
    """Return the number of fields of a class of states."""
    return len(state_class._fields)
