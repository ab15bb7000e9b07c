"""The reversible adjoint, which undoes steps by the inverses of their flows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from adjsim.adjoints.base import Adjoint, ReconstructionError, Result
from adjsim.adjoints.sweep.backward import run_swept
from adjsim.adjoints.sweep.error_budget import ErrorBudget
from adjsim.adjoints.sweep.exact_inversion import Fingerprints
from adjsim.adjoints.sweep.history import (
    History,
    Rewind,
    rounding_tolerance,
    state_entries,
    states_of,
)
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.arguments import as_number, as_whole
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, detached, magnitudes, select
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.moves import Reflection, Scale, Shear
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.clock import Clock, VaryingClock
from adjsim.solvers.run import Run


class ReversibleAdjoint(Adjoint):
    """The exact gradient of the discrete steps, in memory independent of their number.

    The backward sweep undoes each step by its inverse flow, and takes the step's vector-Jacobian
    product at the recovered state. Rounding makes the recovered states differ from those of the
    run. The difference grows as exp(lambda t) in a chaotic system, and as exp(friction t) under
    friction, or at the rate of the coupling of :class:`~adjsim.Coupled`. It is
    measured wherever the true state is known: at the start, at frames that save
    complete states, and at checkpoints. From there the sweep continues with the true state. After
    backward ``trajectory.stats["reconstruction_error"]`` is the largest difference in a field
    divided by the field's largest entry. With ``exact=True`` in the solver the recovered states
    equal those of the run bit for bit, in chaos and under friction, at any length. Information
    buffers keep the bits that friction removes. A fingerprint of the state and the buffers
    proves the equality at the start and at save times.

    Args:
        checkpoint_every: number of steps between stored states, over which the error can grow.
            None: without friction no states are stored; with friction the number is chosen to keep
            the error due to friction well under ``tol``, and is given in
            ``trajectory.stats["checkpoint_every"]``. Friction with a surface varies along the run,
            so there the distances follow the load, and the smallest one is given.
            ``trajectory.stats["checkpoints"]`` is the number of stored states. In float32 rounding
            alone comes near the default ``tol``, so give a larger ``tol``. An exact run needs no
            checkpoints; it takes a fingerprint every ``checkpoint_every`` steps, so that a force
            that is not reproducible is found sooner.
        tol: the error above which backward raises instead of returning a wrong gradient.
    """

    accepts = (SteppingSolver,)

    def __init__(self, *, checkpoint_every: int | None = None, tol: float = 1e-6) -> None:
        checkpoint_every = (
            None if checkpoint_every is None else as_whole("checkpoint_every", checkpoint_every)
        )
        tol = as_number("tol", tol)
        if checkpoint_every is not None and checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step; got {checkpoint_every}.")
        if not tol > 0:
            raise ValueError(f"tol must be positive; got {tol}.")
        self.checkpoint_every, self.tol = checkpoint_every, tol

    def check(self, run: Run[State]) -> None:
        for stage, move in run.plan.moves:
            if not move.invertible:
                why = "" if move.irreversible is None else f" ({move.irreversible.reason})"
                raise TypeError(
                    f"term {stage.letter!r} of {type(run.dynamics).__name__} has no inverse"
                    f"{why}, so its steps cannot be undone: use CheckpointAdjoint() or "
                    "DirectAdjoint()."
                )

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        def history(stepper: Stepper) -> History:
            every, exact, budget = self.checkpoint_every, run.solver.exact, None
            if every is None and not exact:
                budget = _error_budget(run, stepper.clock, self.tol)
                every = None if budget is not None else _spacing(run, self.tol)
            report.checkpoint_every, report.checkpoints = every, 0
            if exact:
                return Fingerprints(stepper, every, run)
            return Resets(stepper, every, self.tol, report, budget)

        return run_swept(run, report, history)


def _spacing(run: Run[State], tol: float) -> int | None:
    """Choose the number of steps between checkpoints under friction; None without friction.

    Over n steps rounding accumulates to about eps sqrt(n), and friction amplifies the earliest of
    these errors by exp(friction dt n). Amplification by friction may use a third of the digits
    between eps and tol; the others are reserved for chaos of the potential.
    """
    budget, by_rounding = _budget(run, tol)
    by_friction = run.solver.steps_within(run.dynamics, run.state, budget)
    return None if by_friction is None else max(1, int(min(by_friction, by_rounding)))


def _error_budget(run: Run[State], clock: Clock | VaryingClock, tol: float) -> ErrorBudget | None:
    """Make the budget of errors, where their growth varies along the run; else None."""
    with torch.no_grad():
        if run.dynamics.error_growth(float(run.times[0]), run.state) is None:
            return None
    budget, by_rounding = _budget(run, tol)
    assert isinstance(clock, Clock)
    constant = run.solver.damping(run.dynamics, run.state) * clock.dt
    return ErrorBudget(run.dynamics, clock, constant + budget / by_rounding, budget)


def _budget(run: Run[State], tol: float) -> tuple[float, float]:
    """Return the growth allowed between stored states, and the steps that rounding allows."""
    # A tolerance above one only switches the comparison off: no digit is left beyond that.
    digits = min(tol, 1.0) / torch.finfo(run.state[0].dtype).eps
    return math.log(max(digits, 1.0)) / 3, (digits / 4) ** 2


class Resets(History):
    """The states from which a reversed run continues: the start, saved frames and checkpoints.

    Args:
        stepper: the steps of the run.
        every: steps between checkpoints; None: no checkpoints.
        tol: relative error above which the sweep raises.
        report: receives the error, and what is stored.
        error_budget: it determines the checkpoints instead of ``every``.
    """

    def __init__(
        self,
        stepper: Stepper,
        every: int | None,
        tol: float,
        report: RunReport,
        error_budget: ErrorBudget | None = None,
    ) -> None:
        self.stepper, self.every, self.tol, self.report = stepper, every, tol, report
        self.error_budget = error_budget
        self.checkpoints: dict[int, AnyState] = {}
        # The largest entry of each field at checkpoints and save times; errors are relative to it.
        self.scale: list[torch.Tensor] = []

    def stops(self, stepper: Stepper) -> Iterable[int]:
        regular = () if self.every is None else range(0, stepper.clock.last, self.every)
        return {*stepper.clock.saves, *regular}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        last = self.stepper.clock.last
        checkpoint = step == 0 or (step < last and self._is_due(step))
        # The last state of the dynamics lacks the second copy of the state.
        if checkpoint or (step == last and self.stepper.plan.copies is not None):
            self.checkpoints[step] = detached(state)
            self.report.checkpoints = len(self.checkpoints)
        if checkpoint or step in self.stepper.clock.saves:
            sizes = magnitudes(state)
            self.scale = (
                [torch.maximum(a, b) for a, b in zip(self.scale, sizes, strict=True)]
                if self.scale
                else sizes
            )

    def _is_due(self, step: int) -> bool:
        if self.error_budget is None:
            return self.every is not None and step % self.every == 0
        if not self.error_budget.due:
            return False
        self.error_budget.restart()
        known, apart = self.report.checkpoint_every, step - max(self.checkpoints)
        self.report.checkpoint_every = apart if known is None else min(known, apart)
        return True

    def state(self) -> dict[str, Any]:
        every = self.report.checkpoint_every
        return {"checkpoints": state_entries(self.checkpoints), "scale": self.scale, "every": every}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.checkpoints, self.scale = states_of(state["checkpoints"], self.stepper), state["scale"]
        self.report.checkpoints, self.report.checkpoint_every = (
            len(self.checkpoints),
            state["every"],
        )

    def rewind(
        self, inputs: Inputs, forces: ForceEvaluator, frames: AnyState | None, final: AnyState
    ) -> Rewind:
        clock, copies = self.stepper.clock, self.stepper.plan.copies
        if copies is not None:
            return FloatInversion(self, self.checkpoints, self.checkpoints[clock.last])
        saves = clock.saves
        known = {} if frames is None else {step: select(frames, i) for i, step in enumerate(saves)}
        return FloatInversion(self, {**known, **self.checkpoints}, final)


class FloatInversion(Rewind):
    """Earlier states, recovered by inverting the moves in floating point, and their error.

    Args:
        history: the stored states of the run.
        known: the true states, by step.
        final: the last state.
    """

    def __init__(self, history: Resets, known: Mapping[int, AnyState], final: AnyState) -> None:
        self.history, self.known, self._final, self.error = history, known, final, 0.0
        # The relative error of a function of the state may exceed that of the state by this factor.
        self.tolerance = max(rounding_tolerance(final[0].dtype), 1e3 * history.tol)

    def final(self) -> AnyState:
        return self._final

    def restore(self, step: int, state: AnyState) -> AnyState:
        true = self.known.get(step)
        if true is None:
            return state
        error = max(
            float((found - x).abs().amax().double() / torch.where(size > 0, size, 1.0))
            for found, x, size in zip(state, true, self.history.scale, strict=True)
        )
        assert self.error is not None
        self.history.report.reconstruction_error = self.error = (
            max(self.error, error) if error == error else error
        )
        if not error <= self.history.tol:
            single = (
                "; float64 reaches much further than float32"
                if state[0].dtype == torch.float32
                else ""
            )
            distance = (
                "not finite"
                if error != error
                else f"{error:.1e} off the state of the run (tol = {self.history.tol:g})"
            )
            raise ReconstructionError(
                f"reversing the steps lost the trajectory: at step {step} the recovered state is "
                f"{distance}, so the gradient would be wrong. {self._ways_out()}{single}. If the "
                "force is random, or reads a value that has changed since the run, make it "
                "reproducible."
            )
        return true

    def _ways_out(self) -> str:
        """Write what may be used instead, of which exact steps are not for all dynamics."""
        history = self.history
        moves = [move for _, move in history.stepper.plan.moves]
        exact = all(isinstance(move, Shear | Scale | Reflection) for move in moves)
        # Checkpoints may be planned further apart than the run is long.
        every = None if history.every is None else min(history.every, history.stepper.clock.last)
        fewer = "" if every is None else f" below {every}"
        return (
            f"{'Give the solver exact=True, pass' if exact else 'Pass'} checkpoint_every="
            f"{fewer} to ReversibleAdjoint, or use CheckpointAdjoint()"
        )
