"""Forward steps in compiled loops whose iterations are those of Newton's method.

A step takes several iterations (:mod:`adjsim.solvers.implicit.newton_iteration`). A loop ends early
at a step that its iterations do not solve. This step is run without compilation, which raises the
reason, or finds a solution from which the loop goes on.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.loops.compilation import LoopSpec, clone
from adjsim.adjoints.loops.loop import Loop, LoopConstants, MakeSpec
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.stepper import naming
from adjsim.core.state import AnyState
from adjsim.core.trajectory import sum_dtype
from adjsim.solvers.base import StepContext
from adjsim.solvers.implicit.field import ImplicitField
from adjsim.solvers.implicit.newton_iteration import Newton, first_iteration, iterate


class IteratedCarry(NamedTuple):
    """The carry of iterations.

    Attributes:
        total: the sum of a time average; empty without one.
        state: the fields of the state before the step.
        newton: the iteration of the step.
        completed: the number of completed steps of the loop.
        iterations: the number of iterations of the loop.
    """

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
    """Run ``count`` steps.

    Args:
        runner: runs the loops.
        total: the sum of a time average; empty without one.
        state: the state after ``start`` steps.
        start, count: the number of the first step, and the number of steps.
        stores: whether the states before the steps are stored.

    Returns:
        the sum of the time average, the last state, and the stored states.
    """
    spec = ITERATING_AND_STORING if stores else ITERATING
    move, zero = iterated_move(runner), torch.zeros((), dtype=torch.int64, device=runner.device)
    assert move is not None
    done, rows = 0, tuple[Tensor, ...]()
    while done < count:
        newton = Newton(*map(clone, first_iteration(move, state)))
        packed = tuple(map(runner.pack, state))
        carry = IteratedCarry(total, packed, newton, zero, zero.clone())
        first = start + done
        carry, part = runner.run_loop(spec, bool(total), type(state), first, count - done, carry)
        end = done + int(carry.completed)
        rows = rows or part
        for row, x in zip(rows, part, strict=True):
            if row is not x:
                row[done:end] = x[: end - done]
        total, done = carry.total, end
        state = type(state)._make(map(runner.unpack, carry.state))
        if done < count:
            for row, x in zip(rows, state, strict=False):
                row[done] = runner.pack(x)
            state = _step(runner, state, start + done)
            if total:
                value = runner.recorder.value(runner.stepper.from_lattice(state))
                total = (total[0] + value.to(sum_dtype(value)),)
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


def _spec(
    stores: bool, runner: LoopRunner, averaging: bool, state_class: type[AnyState], loop: Loop
) -> LoopSpec[LoopConstants, IteratedCarry]:
    """Specify an iteration: one of Newton's method."""
    move = iterated_move(runner)
    assert move is not None

    def start(constants: LoopConstants, carry: IteratedCarry) -> tuple[Tensor, IteratedCarry]:
        return torch.zeros_like(constants.steps), carry

    def more(k: Tensor, count: Tensor) -> Tensor:
        return k < count

    def body(
        constants: LoopConstants, k: Tensor, carry: IteratedCarry
    ) -> tuple[Tensor, IteratedCarry, tuple[Tensor, ...]]:
        state = state_class._make(map(runner.unpack, carry.state))
        now, later = runner.time(constants, k), runner.time(constants, k + 1)
        found = iterate(move, now, later, state, carry.newton)
        loop.evaluations_per_step = 1 + carry.newton.x.shape[-1]
        total = carry.total
        if averaging:
            value = runner.recorder.value(runner.stepper.from_lattice(found.state))
            total = (
                clone(torch.where(found.done, total[0] + value.to(sum_dtype(value)), total[0])),
            )
        completed = k + found.done.to(torch.int64)
        new = IteratedCarry(
            total,
            tuple(map(runner.pack, found.state)),
            Newton(*map(clone, found.newton)),
            clone(completed),
            clone(carry.iterations + 1),
        )
        k = torch.where(found.failed, constants.steps, completed)
        return k, new, carry.state if stores else ()

    return LoopSpec(start, more, body)


def _iterations(carry: Any) -> int:
    return int(carry.iterations)


ITERATING = MakeSpec(partial(_spec, False), iterations=_iterations)
ITERATING_AND_STORING = MakeSpec(partial(_spec, True), iterations=_iterations)
