"""The steps of a run, and the loop over stops that runs them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from adjsim.adjoints.durable.saves import Saves
from adjsim.core.noise import Noise
from adjsim.core.progress import with_progress
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, detached, in_transform
from adjsim.core.transforms import with_tangent
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import BufferGrowth, Spill
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.masses import HeatLimit
from adjsim.dynamics.sources import Coefficients
from adjsim.dynamics.starts import describe_force_not_finite, describe_time
from adjsim.solvers.base import ByStepSize, StepContext, SteppingSolver, StepPlan
from adjsim.solvers.clock import Clock, VaryingClock
from adjsim.solvers.implicit.newton import UnsolvedStepError
from adjsim.solvers.run import Run

# Steps between finiteness checks.
FINITE_EVERY = 64


class Inputs(NamedTuple):
    """The start of a run, the coefficients of its terms, and the tensors of its reading."""

    state: AnyState
    coefficients: Mapping[str, Coefficients]
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class StepNoise:
    """The noise of a run's steps.

    Attributes:
        shape: the shape of one draw for one system, such as ``(atoms, dim)``.
        end: the number of steps whose draws the run uses.
    """

    noise: Noise
    plan: StepPlan
    batch: torch.Size
    shape: torch.Size
    like: Tensor
    end: int

    def of_step(self, step: int) -> tuple[Tensor, ...]:
        """Return the noise that step number ``step`` uses, the same in every call."""
        steps = range(step, step + self.plan.noise_steps)
        return tuple(draw for k in steps for draw in self._drawn(k))

    def of_steps(self, step: int, count: int) -> list[Tensor]:
        """Return the draws of ``count`` steps from number ``step``, in parts of several steps.

        The shape of a part is ``(steps, draws, *batch, *shape)``.
        """
        shape, axis = (*self.batch, self.plan.draws, *self.shape), 1 + len(self.batch)
        parts = self.noise.span(step, count, self._rows, self.like, self.end)
        return [rows.reshape(len(rows), *shape).movedim(axis, 1) for rows in parts]

    def drawn_by_host(self, count: int) -> bool:
        """Return whether the host draws the noise of so many steps on any device."""
        return self.noise.drawn_by_host(self._rows, count)

    def _drawn(self, step: int) -> Sequence[Tensor]:
        drawn = self.noise(step, self._rows, self.like)
        if self.plan.draws == 1:
            return (drawn.reshape(*self.batch, *self.shape),)
        return drawn.reshape(*self.batch, self.plan.draws, *self.shape).unbind(len(self.batch))

    @property
    def _rows(self) -> tuple[int, int]:
        return self.batch.numel(), self.plan.draws * self.shape.numel()


@dataclass(frozen=True)
class TangentNoise(StepNoise):
    """The noise of steps that are differentiated forward in time, with tangents of zeros."""

    def of_step(self, step: int) -> tuple[Tensor, ...]:
        return tuple(map(with_tangent, super().of_step(step)))


class Observer(Protocol):
    """Observes the states of a run."""

    @abstractmethod
    def stops(self, stepper: Stepper) -> Iterable[int]:
        """Return the numbers of steps after which it observes the state."""

    @abstractmethod
    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        """Observe the state, on the lattice if there is one, and the spills of its buffers."""


class Driver(Protocol):
    """Runs steps: one by one, or in compiled loops."""

    def stops(self, wanted: set[int]) -> Sequence[int]:
        """Return, in order, the steps after which it stops; they include the wanted steps."""
        ...

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        """Run from ``start`` steps up to ``stop`` or fewer; return the state and their number."""
        ...


@dataclass(frozen=True)
class Stepper:
    """The steps of one run: immutable, functions of a state and of the run's inputs.

    Attributes:
        kind: the class of the states of the dynamics.
        buffer_growth: how the buffers of an exact run fill; None for any other run.
        varying: what depends on the size of a step; None if all steps have one size.
        buffers: the buffers at the start of a run that goes on from another.
    """

    plan: StepPlan
    clock: Clock | VaryingClock
    kind: type[Any]
    noise: StepNoise | None = None
    buffer_growth: BufferGrowth | None = None
    varying: ByStepSize | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def to_lattice(self, state: AnyState) -> AnyState:
        """Convert the start to one of the steps: with copies, or on a lattice with buffers."""
        plan = self.plan
        state = state if plan.copies is None else plan.copies.add(state)
        state = state if plan.lattice is None else plan.lattice.to_lattice(state)
        return state._replace(**self.buffers)

    def from_lattice(self, state: AnyState) -> AnyState:
        """Convert a state of the steps back to a state of the dynamics."""
        plan = self.plan
        state = state if plan.lattice is None else plan.lattice.from_lattice(state)
        return state if plan.copies is None else plan.copies.remove(state)

    def steps(
        self, start: int, stop: int, state: State, inputs: Inputs, forces: ForceEvaluator
    ) -> State:
        """Run the steps from number ``start`` up to ``stop``, which is not run.

        The error of a step without a solution names its number.
        """
        step = self.plan.step
        with naming(start + 1) as name:
            for number in range(start, stop):
                name.step = number + 1
                state = step(state, self.context(number, inputs, forces))
        return state

    def step(self, number: int, state: State, inputs: Inputs, forces: ForceEvaluator) -> State:
        """Run a step."""
        return self.steps(number, number + 1, state, inputs, forces)

    def looks(self, last: int) -> set[int]:
        """Return the numbers of steps after which buffers spill, or states are checked."""
        growth, before = self.buffer_growth, self.clock.before
        found = set(range(FINITE_EVERY, last, FINITE_EVERY))
        if growth is not None:
            found.update(range(-before % growth.check_every, last, growth.check_every))
        return found - {0}

    def context(self, number: int, inputs: Inputs, forces: ForceEvaluator) -> StepContext:
        """Return the context of a step."""
        coefficients = inputs.coefficients
        if self.varying is not None:
            assert isinstance(self.clock, VaryingClock)
            coefficients = self.varying.coefficients(self.clock.size(number))
        noise = None if self.noise is None else self.noise.of_step(number)
        return StepContext(self.clock.time_in_step(number), coefficients, noise, forces)

    def spill(self, step: int, state: State) -> tuple[State, list[Spill]]:
        """Spill the full buffers of an exact run, as a function of step and state alone."""
        lattice, growth = self.plan.lattice, self.buffer_growth
        if lattice is None or growth is None or (self.clock.before + step) % growth.check_every:
            return state, []
        return lattice.spill(state, growth.limit)

    def run(
        self,
        start: AnyState,
        inputs: Inputs,
        driver: Driver,
        observers: Sequence[Observer],
        run: Run[State],
        report: RunReport,
        saves: Saves | None = None,
    ) -> AnyState:
        """Run all steps from a start on the lattice, call the observers, and return the last state.

        With saves, the run goes on from the last one. The messages of errors name the step.
        """
        last, lattice = self.clock.last, self.plan.lattice
        observed = {k for observer in observers for k in observer.stops(self) if 0 < k <= last}
        stops = driver.stops({last, *observed})
        state, k, spilled = (start, 0, 0) if saves is None else saves.begin(start, 0)
        heat = run.dynamics.heat_limit(self.from_lattice(start)) if not in_transform() else None
        checks = _StateChecks(self, inputs, run.dynamics, heat, detached(state), k)
        if k == 0:
            for observer in observers:
                observer.visit(0, start, ())
        stops = [stop for stop in stops if stop > k]
        for stop in with_progress(stops, "forward", len(stops), run.progress):
            while k < stop:
                until = stop if saves is None else saves.next_stop(k, stop)
                state, k = driver.advance(state, k, until)
                state, entries = self.spill(k, state)
                spilled += sum(entry.bits for entry in entries)
                checks.check(state, k)
                for observer in observers:
                    observer.visit(k, state, entries)
                if saves is not None:
                    saves.after(k, state, spilled)
        if lattice is not None:
            bits = spilled + lattice.buffered_bits(state) - lattice.buffered_bits(start)
            report.buffer_bits = bits / (last * state[0].numel()) if last else 0.0
        return state


@dataclass
class _StateChecks:
    """The checks of a run's states, and the last sound one, ``good``, after ``step`` steps."""

    stepper: Stepper
    inputs: Inputs
    dynamics: Dynamics[Any]
    heat: HeatLimit | None
    good: AnyState
    step: int

    def check(self, state: AnyState, step: int) -> None:
        """Refuse a state that the dynamics excludes, and now and then one that is not sound."""
        if self.dynamics.limit is not None and not in_transform():
            reason = self._refusal(state, step)
            if reason is not None:
                self._raise_refusal(reason, step)
        if step - self.step >= FINITE_EVERY or step == self.stepper.clock.last:
            if not self._is_sound(state):
                self._raise_unsound(step)
            self.good, self.step = detached(state), step
            t = self.stepper.clock.time(step)
            try:
                self.dynamics.check_noise(t, self.stepper.from_lattice(self.good))
            except ValueError as reason:
                text = f"{reason} This was found after step {step} ({self._time(step)})."
                raise ValueError(text) from reason

    def _time(self, step: int) -> str:
        t = self.dynamics.shown_time(self.stepper.clock.time(step))
        return describe_time(self.dynamics.potential, t)

    @torch.no_grad()
    def _refusal(self, state: AnyState, step: int) -> ValueError | None:
        limit = self.dynamics.limit
        assert limit is not None
        try:
            limit.refuse(detached(self.stepper.from_lattice(state)), self.stepper.clock.time(step))
        except ValueError as reason:
            return reason
        return None

    def _is_sound(self, state: AnyState) -> bool:
        """Return whether a state is valid, and no hotter than bath and potential allow."""
        valid, heat = self.stepper.plan.is_valid(state), self.heat
        if heat is None or not valid:
            return valid
        return not bool(heat.exceeded(self.stepper.from_lattice(detached(state))).any())

    @torch.no_grad()
    def _first(self, is_wrong: Callable[[AnyState, int], bool], stop: int) -> tuple[AnyState, int]:
        """Run again from the good state to the first wrong one, or to ``stop``."""
        state, k, stepper = self.good, self.step, self.stepper
        forces = stepper.plan.forces(self.dynamics.potential)
        while k < stop and not is_wrong(state, k):
            state, _ = stepper.spill(k + 1, stepper.step(k, state, self.inputs, forces))
            k += 1
        return state, k

    def _raise_refusal(self, reason: ValueError, step: int) -> NoReturn:
        state, first = self._first(lambda x, k: self._refusal(x, k) is not None, step - 1)
        earlier = self._refusal(state, first)
        first, reason = (step, reason) if earlier is None else (first, earlier)
        text = f"{reason} This happened in step {first} ({self._time(first)})."
        raise ValueError(text) from reason

    @torch.no_grad()
    def _raise_unsound(self, stop: int) -> NoReturn:
        stepper, clock = self.stepper, self.stepper.clock
        state, k = self._first(lambda x, _: not self._is_sound(x), stop)
        where = f"in step {k} ({self._time(k)})"
        if self.heat is not None and stepper.plan.is_valid(state):
            text = self.heat.describe(stepper.from_lattice(state), where, clock.smaller)
            raise FloatingPointError(text)
        reason = None
        if k == 1:
            point = self.dynamics.force_point(stepper.from_lattice(detached(self.good)))
            reason = describe_force_not_finite(self.dynamics.potential, point, clock.time(0))
        raise stepper.plan.failure(
            state, self.good, clock.time(self.step), where, clock.smaller, self.dynamics, reason
        )


class naming:
    """A context that adds the number of a step to the message that it has no solution."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __enter__(self) -> naming:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UnsolvedStepError):
            raise UnsolvedStepError(f"{error} This happened in step {self.step}.") from error


def prepare(
    run: Run[State], report: RunReport, connected: Run[State] | None = None
) -> tuple[Stepper, Inputs]:
    """Prepare the steps of a run, and its inputs with their graph.

    The inputs are made of the values of ``connected``, the same run on other values.
    """
    connected = run if connected is None else connected
    solver, dynamics, state = run.solver, run.dynamics, run.state
    assert isinstance(solver, SteppingSolver)
    end, varying = run.continues, solver.varying(state)
    clock, plan = solver.clock(run.times, end), run.plan
    coefficients = solver.coefficients(connected.dynamics, state)
    lattice, buffer_growth = plan.lattice, None
    report.steps, report.order = clock.last, plan.order
    solver.report_choices(report)
    if varying is not None:
        assert isinstance(clock, VaryingClock)
        buffer_growth = varying.buffer_growth(plan, clock)
        report.step_times = clock.ends
    elif lattice is not None:
        coefficients = lattice.rationals(coefficients)
        moves = [(stage.letter, move) for stage, move in plan.moves]
        buffer_growth = lattice.buffer_growth(coefficients, moves)
    if buffer_growth is not None:
        report.buffer_bits, report.buffer_bound = None, buffer_growth.mean(state)
    noise = None
    if plan.draws:
        assert run.noise is not None
        end_of_draws = clock.last + plan.noise_steps - 1
        batch, shape = dynamics.batch_shape(state), dynamics.draw_shape(float(run.times[0]), state)
        noise = StepNoise(run.noise, plan, batch, shape, state[0].detach(), end_of_draws)
    check_every = None if buffer_growth is None else buffer_growth.check_every
    if end is not None and end.check_every != check_every:
        raise ValueError(
            "continues=: the friction or the coefficients have changed since the run, and the "
            "buffers of an exact run belong to those that it had. Start a new run at "
            "trajectory.final."
        )
    buffers = {} if end is None else end.fields
    stepper = Stepper(plan, clock, type(state), noise, buffer_growth, varying, buffers)
    return stepper, Inputs(state, coefficients, connected.tensors)
