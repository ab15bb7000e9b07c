"""Forward steps in compiled loops, whose iterations are steps or, in implicit steps, Newton's.

An implicit step takes several iterations (:mod:`adjsim.solvers.implicit.field`). A loop
ends early at a step that its iterations do not solve. This step is run without compilation, which
raises the reason, or finds a solution from which the loop goes on.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.loops.frames import LoopRecording
from adjsim.adjoints.loops.full_buffers import ends_full
from adjsim.adjoints.loops.loop import Loop, LoopConstants, LoopKind
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.loops.saved_tensors import saving_step
from adjsim.adjoints.sweep.history import ErrorBudget, StateRows, growth_in_step
from adjsim.adjoints.sweep.stepper import naming
from adjsim.compiler import LoopSpec, clone
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, point_of
from adjsim.solvers.base import StepContext
from adjsim.solvers.implicit.field import ImplicitField, Newton, first_iteration, iterate


class ForwardCarry(NamedTuple):
    """The carry of forward steps, of which parts that a run lacks are empty.

    Attributes:
        total: the sum of a time average.
        force: the forces that the next step begins with, if steps share forces.
        error_growth: the growth of rounding errors, where it varies.
        completed: the number of steps, where a loop ends at a full buffer.
        margin: the smallest distances to states that the dynamics refuses.
    """

    total: tuple[Tensor, ...]
    force: tuple[Tensor, ...]
    error_growth: tuple[Tensor, ...]
    margin: tuple[Tensor, ...]
    completed: tuple[Tensor, ...]
    state: tuple[Tensor, ...]


class ForwardLoops:
    """Run forward steps in compiled loops.

    A loop that shares forces between steps begins with a force that is given. An exact run
    evaluates this force again in the loop: functions such as exp may have other last bits in torch
    than in the loops that reverse the run.
    """

    def __init__(
        self,
        runner: LoopRunner,
        recording: LoopRecording | None,
        error_budget: ErrorBudget | None = None,
        state_rows: StateRows | None = None,
    ) -> None:
        self.runner, self.recording, self.error_budget = runner, recording, error_budget
        self.state_rows = state_rows
        self.saves_frames = recording is not None and runner.saves_frames
        # The growth in a step, as far as it is known.
        self.pace = 0.0
        # The force with which the next step begins; None where it is evaluated again.
        self.force: tuple[Tensor, ...] | None = None

    def stops(self, wanted: set[int]) -> Sequence[int]:
        return self.runner.boundaries(wanted)

    @property
    def divisible(self) -> bool:
        return self.error_budget is None and self.state_rows is None

    def state(self) -> dict[str, Any]:
        return {"force": self.force, "pace": self.pace, "stops": self.runner.stops}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.force, self.pace, self.runner.stops = state["force"], state["pace"], state["stops"]

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        runner, budget = self.runner, self.error_budget
        if start == 0 and self.force is None and runner.plan.shares_force:
            self.force = self._first_force(state)
        while start < stop:
            wanted = min(runner.length, stop - start)
            carry, rows, count = self._run_sound(state, start, wanted)
            if self.state_rows is not None:
                # A short loop leaves most of its rows empty, which would be kept with the others.
                self.state_rows[start] = tuple(
                    x if len(x) == count else x[:count].clone() for x in rows
                )
            if self.saves_frames:
                assert self.recording is not None
                self.recording.take(start, rows, count)
            start += count
            if carry.total:
                assert self.recording is not None
                self.recording.total, self.recording.last_step = carry.total[0], start
            self.force = tuple(map(runner.unpack, carry.force)) or None
            state = runner.unpack_state(carry.state)
            if budget is not None:
                # Half of the budget is left for the next loop.
                budget.add(carry.error_growth[0], start, budget.allowed / 2)
            ended = budget is not None or ends_full(
                runner.stepper, runner.fixed.check_every, state, start
            )
            if ended:
                # The sweep stops here too, at a checkpoint or to put back what has spilled.
                at = bisect_left(runner.stops, start)
                if at == len(runner.stops) or runner.stops[at] != start:
                    runner.stops.insert(at, start)
            if ended or count < wanted:
                break
        return state, start

    def _first_force(self, state: AnyState) -> tuple[Tensor, ...] | None:
        """Return the force at the start; None where it changes while the position stays."""
        runner, point = self.runner, point_of(state)
        forces = runner.plan.forces(runner.dynamics.potential, report=runner.report)
        if not forces.caches:
            return None
        if runner.exact:
            # A loop of exact steps evaluates the force with which it begins itself.
            return tuple(map(torch.zeros_like, point))
        with torch.no_grad():
            return forces.values(point, runner.clock.time(0))

    def _run_sound(
        self, state: AnyState, start: int, count: int
    ) -> tuple[ForwardCarry, tuple[Tensor, ...], int]:
        """Run up to ``count`` steps, fewer where a state is refused or errors exceed their budget.

        A loop that was too long is run again with fewer steps, at least one.
        """
        budget = self.error_budget
        if budget is not None and self.pace > 0:
            count = max(1, min(count, int(budget.left / self.pace)))
        while True:
            carry, rows = self._run(state, start, count)
            count = _iterations(carry, count)
            # A distance that is not a number comes from a state that was beyond the limit before.
            refused = any(not bool((x >= 0).all()) for x in carry.margin)
            allowed = count // 2 if refused else count
            if budget is not None:
                found = budget.largest(carry.error_growth[0], count)
                self.pace = found / count
                if found > budget.left:
                    allowed = min(count // 2, int(budget.left / self.pace))
            if allowed == count or count == 1:
                return carry, rows, count
            count = max(1, allowed)

    def _run(
        self, state: AnyState, start: int, count: int
    ) -> tuple[ForwardCarry, tuple[Tensor, ...]]:
        """Run a loop of ``count`` steps, and return the final carry and the stored rows."""
        runner = self.runner
        averaged = self.recording if runner.averages(start + 1) else None
        total = () if averaged is None else (clone(self._total(averaged, state)),)
        stores = self.state_rows is not None or self.saves_frames
        if iterated_move(runner) is not None:
            total, state, rows = run_iterated(runner, total, state, start, count, stores)
            return ForwardCarry(total, (), (), (), (), runner.pack_state(state)), rows
        force = () if self.force is None else tuple(map(runner.pack, self.force))
        t, growth = runner.clock.time(start), tuple[Tensor, ...]()
        with torch.no_grad():
            least = _margin(runner, t, state)
            if self.error_budget is not None:
                like = growth_in_step(runner.dynamics, runner.clock.dt, t, state)
                growth = (torch.zeros_like(clone(like)),)
        margin = () if least is None else (torch.full_like(clone(least), torch.inf),)
        completed = tuple(map(torch.zeros_like, runner.fixed.check_every))
        carry = ForwardCarry(total, force, growth, margin, completed, runner.pack_state(state))
        saves = self.state_rows is not None and runner.saves_tensors
        kind = SAVING if saves else STORING if stores else FORWARD
        return runner.run_loop(kind, start, count, carry)

    def _total(self, recording: LoopRecording, state: AnyState) -> Tensor:
        """Return the sum of the time average so far."""
        if recording.total is None:
            with torch.no_grad():
                value = self.runner.recorder.value(self.runner.stepper.from_lattice(state))
            recording.add(torch.zeros_like(value), recording.last_step)
        assert recording.total is not None
        return recording.total


def _specify(
    stores: bool, saves: bool, runner: LoopRunner, loop: Loop
) -> LoopSpec[LoopConstants, ForwardCarry]:
    """Specify an iteration: one step.

    Its rows are the state before it (``stores``), and tensors of autograd (``saves``).
    """

    def start(constants: LoopConstants, carry: ForwardCarry) -> tuple[Tensor, ForwardCarry]:
        k = torch.zeros_like(constants.steps)
        if runner.exact and carry.force:
            report, point = RunReport(), point_of(runner.unpack_state(carry.state))
            plan = runner.plan.with_spacings(constants.spacings)
            forces = plan.forces(runner.dynamics.potential, report=report)
            force = forces.values(point, runner.time(constants, k)(0.0))
            carry = carry._replace(force=tuple(map(runner.pack, force)))
            loop.fixed_evaluations += report.energy_evaluations
        return k, carry

    def body(
        constants: LoopConstants, k: Tensor, carry: ForwardCarry
    ) -> tuple[Tensor, ForwardCarry, Sequence[Tensor]]:
        report, t = RunReport(), runner.time(constants, k)
        state = runner.unpack_state(carry.state)
        known = (point_of(state), tuple(map(runner.unpack, carry.force))) if carry.force else None
        plan = runner.plan.with_spacings(constants.spacings)
        forces = plan.forces(runner.dynamics.potential, known=known, report=report)
        context = runner.context(constants, k, forces)
        state, saved = (
            saving_step(plan, state, context) if saves else (plan.step(state, context), ())
        )
        total = tuple(map(clone, runner.added(carry.total, state)))
        last = forces.values(point_of(state), t(1.0)) if carry.force else ()
        force = tuple(map(runner.pack, last))
        loop.evaluations_per_step = report.energy_evaluations
        growth = tuple(
            clone(x + growth_in_step(runner.dynamics, runner.clock.dt, t(1.0), state))
            for x in carry.error_growth
        )
        margin = carry.margin
        if margin and (found := _margin(runner, t(1.0), state)) is not None:
            margin = (clone(torch.minimum(margin[0], found)),)
        following, completed = k + 1, tuple[Tensor, ...]()
        if carry.completed:
            assert plan.lattice is not None
            completed = (clone(following),)
            looks = (constants.first + following) % constants.check_every[0] == 0
            full = looks & plan.lattice.is_full(state)
            following = torch.where(full, constants.steps, following)
        after = ForwardCarry(total, force, growth, margin, completed, runner.pack_state(state))
        return following, after, (*carry.state, *saved) if stores else ()

    known = None if runner.fixed.check_every else lambda steps: steps
    return LoopSpec(start, operator.lt, body, iterations=known)


def _margin(runner: LoopRunner, t: Any, state: AnyState) -> Tensor | None:
    limit = runner.dynamics.limit
    return None if limit is None else limit.margin(runner.stepper.from_lattice(state), t)


def _iterations(carry: ForwardCarry, count: int) -> int:
    return int(carry.completed[0]) if carry.completed else count


FORWARD = LoopKind(partial(_specify, False, False), iterations=_iterations)
STORING = LoopKind(partial(_specify, True, False), stores=True, iterations=_iterations)
SAVING = LoopKind(
    partial(_specify, True, True),
    differentiates=True,
    stores=True,
    uncompiled=partial(_specify, False, False),
    iterations=_iterations,
)


class IteratedCarry(NamedTuple):
    """The carry of iterations; ``total`` is the sum of a time average, empty without one."""

    total: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    newton: Newton
    completed: Tensor
    iterations: Tensor


def iterated_move(runner: LoopRunner) -> ImplicitField | None:
    """Return the move of an implicit step, which is a whole step; None for other steps."""
    _, move = runner.plan.moves[0]
    return move if isinstance(move, ImplicitField) else None


def run_iterated(
    runner: LoopRunner,
    total: tuple[Tensor, ...],
    state: AnyState,
    start: int,
    count: int,
    stores: bool,
) -> tuple[tuple[Tensor, ...], AnyState, tuple[Tensor, ...]]:
    """Run steps; return the sum of a time average, the last state and the stored states."""
    kind = ITERATING_AND_STORING if stores else ITERATING
    move, zero = iterated_move(runner), torch.zeros((), dtype=torch.int64, device=runner.device)
    assert move is not None
    done, rows = 0, tuple[Tensor, ...]()
    while done < count:
        newton = Newton(*map(clone, first_iteration(move, state)))
        carry = IteratedCarry(total, runner.pack_state(state), newton, zero, zero.clone())
        carry, part = runner.run_loop(kind, start + done, count - done, carry)
        end = done + int(carry.completed)
        rows = rows or part
        for row, x in zip(rows, part, strict=True):
            if row is not x:
                row[done:end] = x[: end - done]
        total, state, done = carry.total, runner.unpack_state(carry.state), end
        if done < count:
            for row, x in zip(rows, state, strict=False):
                row[done] = runner.pack(x)
            state = _step(runner, state, start + done)
            total = runner.added(total, state)
            done += 1
    return total, state, rows


@torch.no_grad()
def _step(runner: LoopRunner, state: AnyState, number: int) -> AnyState:
    """Run a step without compilation."""
    forces = runner.plan.forces(runner.dynamics.potential, report=runner.report)
    stage, move = runner.plan.moves[0]
    time = runner.clock.time_in_step(number)
    context = StepContext(time, runner.fixed.coefficients, None, forces).of(stage)
    assert isinstance(move, ImplicitField)
    with naming(number + 1):
        after = move.flow(state, context)
    move.check(state, after, context)
    return after


def _specify_iteration(
    stores: bool, runner: LoopRunner, loop: Loop
) -> LoopSpec[LoopConstants, IteratedCarry]:
    """Specify an iteration: one of Newton's method."""
    move = iterated_move(runner)
    assert move is not None

    def start(constants: LoopConstants, carry: IteratedCarry) -> tuple[Tensor, IteratedCarry]:
        return torch.zeros_like(constants.steps), carry

    def body(
        constants: LoopConstants, k: Tensor, carry: IteratedCarry
    ) -> tuple[Tensor, IteratedCarry, tuple[Tensor, ...]]:
        state = runner.unpack_state(carry.state)
        now, later = runner.time(constants, k), runner.time(constants, k + 1)
        found = iterate(move, now, later, state, carry.newton)
        loop.evaluations_per_step = 1 + carry.newton.x.shape[-1]
        added = zip(runner.added(carry.total, found.state), carry.total, strict=True)
        total = tuple(clone(torch.where(found.done, new, old)) for new, old in added)
        completed = k + found.done.to(torch.int64)
        new = IteratedCarry(
            total,
            runner.pack_state(found.state),
            Newton(*map(clone, found.newton)),
            clone(completed),
            clone(carry.iterations + 1),
        )
        k = torch.where(found.failed, constants.steps, completed)
        return k, new, carry.state if stores else ()

    return LoopSpec(start, operator.lt, body)


def _iterations_of_newton(carry: IteratedCarry, _: int) -> int:
    return int(carry.iterations)


ITERATING = LoopKind(partial(_specify_iteration, False), iterations=_iterations_of_newton)
ITERATING_AND_STORING = LoopKind(
    partial(_specify_iteration, True), stores=True, iterations=_iterations_of_newton
)
