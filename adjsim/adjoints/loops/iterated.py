"""Forward steps in compiled loops whose iterations are those of Newton's method.

A step takes several iterations (:mod:`adjsim.solvers.implicit.field`). A loop ends early
at a step that its iterations do not solve. This step is run without compilation, which raises the
reason, or finds a solution from which the loop goes on.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.loops.compilation import LoopSpec, clone
from adjsim.adjoints.loops.loop import Loop, LoopConstants, LoopKind
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.stepper import naming
from adjsim.core.state import AnyState
from adjsim.solvers.base import StepContext
from adjsim.solvers.implicit.field import ImplicitField, Newton, first_iteration, iterate


class IteratedCarry(NamedTuple):
    """The carry of iterations.

    These are the sum of a time average (empty without one), the state before the step, the
    iteration of the step, and the numbers of completed steps and of iterations of the loop.
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
    """Run ``count`` steps from number ``start``.

    ``total`` is the sum of a time average, empty without one. Returned are this sum, the last
    state, and the states before the steps if they are stored.
    """
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


def _specify(
    stores: bool, runner: LoopRunner, loop: Loop
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

    return LoopSpec(start, more, body)


ITERATING = LoopKind(partial(_specify, False))
ITERATING_AND_STORING = LoopKind(partial(_specify, True))
