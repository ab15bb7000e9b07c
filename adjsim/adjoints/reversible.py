"""The reversible adjoint, which undoes steps by the inverses of their flows.

Plain runs are undone in floating point, from :class:`Resets`. Exact runs are undone bit for bit,
which :class:`Fingerprints` verify.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adjsim.adjoints.base import Adjoint, ReconstructionError, Result
from adjsim.adjoints.sweep.history import ErrorBudget, History, Rewind, SweepStart
from adjsim.adjoints.sweep.passes import run_swept
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.arguments import as_positive, as_whole
from adjsim.core.derived import has_values
from adjsim.core.durable.stateful import Entries
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, magnitudes, select
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics.buffer import Spill, fingerprint
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.clock import Clock, VaryingClock
from adjsim.solvers.run import Run


class ReversibleAdjoint(Adjoint):
    """The exact gradient of the discrete steps, in memory independent of their number.

    The backward sweep undoes each step by its inverse flow, and takes the step's vector-Jacobian
    product at the recovered state. Rounding makes the recovered states differ from those of the
    run. The difference grows as exp(lambda t) in a chaotic system, and as exp(friction t) under
    friction, or at the rate of the coupling of :class:`~adjsim.Coupled`. It is measured wherever
    the true state is known: at the start, at frames that save complete states, and at checkpoints.
    From there the sweep continues with the true state. Compiled loops of float64 or exact steps do
    not stop at all frames, and measure the error at frames at least 100 steps apart. After backward
    ``trajectory.stats["reconstruction_error"]`` is the largest difference in a field divided by
    the field's largest entry. With ``exact=True`` in the solver the recovered states equal those
    of the run bit for bit, in chaos and under friction, at any length. Information buffers keep
    the bits that friction removes. A fingerprint of the state and the buffers proves the equality
    at the start and at save times.

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
        if checkpoint_every is not None:
            checkpoint_every = as_whole("checkpoint_every", checkpoint_every, least=1)
        self.checkpoint_every, self.tol = checkpoint_every, as_positive("tol", tol)

    def check(self, run: Run[State]) -> None:
        for stage, move in run.plan.moves:
            if not move.invertible:
                why = "" if move.irreversible is None else f" ({move.irreversible.reason})"
                raise TypeError(
                    f"term {stage.letter!r} of {type(run.dynamics).__name__} has no inverse"
                    f"{why}, so its steps cannot be undone: use CheckpointAdjoint() or "
                    "DirectAdjoint()."
                )
        if run.needs_gradient and not run.solver.exact and has_values():
            self._check_start(run)

    @torch.no_grad()
    def _check_start(self, run: Run[State]) -> None:
        """Refuse a start that undone steps do not come back to."""
        state = run.state
        found = run.dynamics.returned_to(state)
        if found is state:
            return
        error = relative_difference(found, state, magnitudes(state))
        if error > self.tol:
            raise ValueError(
                f"the start is off its constraints by {error:.2g} of its largest entries, and "
                f"undone steps would come back to them: more than tol={self.tol:g}. Make the start "
                "by init, or use CheckpointAdjoint()."
            )

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        def history(stepper: Stepper) -> History:
            every, exact, budget = self.checkpoint_every, run.solver.exact, None
            if every is None and not exact:
                every, budget = _spacing(run, stepper.clock, self.tol)
            report.checkpoint_every, report.checkpoints = every, 0
            # In float32 a few steps may take all digits, and of a time average no frames are known.
            precise = exact or run.state[0].dtype == torch.float64
            known = not isinstance(run.record, TimeAverage)
            stops = not (run.compile and precise and known)
            if exact:
                return Fingerprints(stepper, every, run, stops)
            return Resets(stepper, every, self.tol, report, budget, stops)

        return run_swept(run, report, history)


def _spacing(
    run: Run[State], clock: Clock | VaryingClock, tol: float
) -> tuple[int | None, ErrorBudget | None]:
    """Choose the number of steps between checkpoints, or their budget where errors grow unevenly.

    Without friction both are None. Over n steps rounding accumulates to about eps sqrt(n), and
    friction amplifies the earliest of these errors by exp(friction dt n). Amplification by friction
    may use a third of the digits between eps and tol; the others are reserved for chaos of the
    potential.
    """
    # A tolerance above one only switches the comparison off: no digit is left beyond that.
    digits = min(tol, 1.0) / torch.finfo(run.state[0].dtype).eps
    growth, by_rounding = math.log(max(digits, 1.0)) / 3, (digits / 4) ** 2
    with torch.no_grad():
        varies = run.dynamics.error_growth(float(run.times[0]), run.state) is not None
    if varies:
        if not isinstance(clock, Clock):
            raise TypeError(
                f"the errors of {type(run.dynamics).__name__} grow unevenly along a run, by "
                "friction with a surface, and ReversibleAdjoint cannot place checkpoints for this "
                "among steps of different sizes. Use CheckpointAdjoint(), or steps of one size."
            )
        constant = run.solver.damping(run.dynamics, run.state) * clock.dt
        return None, ErrorBudget(run.dynamics, clock, constant + growth / by_rounding, growth)
    by_friction = run.solver.steps_within(run.dynamics, run.state, growth)
    return None if by_friction is None else max(1, int(min(by_friction, by_rounding))), None


class Resets(History):
    """The states from which a reversed run continues: the start, saved frames and checkpoints.

    An error budget, if there is one, determines the checkpoints instead of ``every``.
    """

    def __init__(
        self,
        stepper: Stepper,
        every: int | None,
        tol: float,
        report: RunReport,
        error_budget: ErrorBudget | None,
        stops_at_frames: bool,
    ) -> None:
        super().__init__(stepper, every, stops_at_frames)
        self.tol, self.report, self.error_budget = tol, report, error_budget
        # The largest entry of each field at checkpoints and the save times at which a run stops.
        self.scale: list[torch.Tensor] = []

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        last = self.stepper.clock.last
        checkpoint = step == 0 or (step < last and self._is_due(step))
        # The last state of the dynamics lacks the second copy of the state.
        if checkpoint or (step == last and self.stepper.plan.copies is not None):
            self.store(step, state)
            self.report.checkpoints = len(self.checkpoints)
        if checkpoint or step in self.stepper.clock.saves:
            sizes = magnitudes(state)
            self.scale = list(map(torch.maximum, self.scale or sizes, sizes))

    def _is_due(self, step: int) -> bool:
        if self.error_budget is None:
            return self.is_regular(step)
        if not self.error_budget.due:
            return False
        self.error_budget.since = None
        known, apart = self.report.checkpoint_every, step - max(self.checkpoints)
        self.report.checkpoint_every = apart if known is None else min(known, apart)
        return True

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scale": self.scale, "every": self.report.checkpoint_every}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.scale, self.report.checkpoint_every = state["scale"], state["every"]
        self.report.checkpoints = len(self.checkpoints)

    def rewind(self, given: SweepStart) -> Rewind:
        clock, frames = self.stepper.clock, given.frames
        scale = self.scale
        if frames is not None:
            # Compiled loops do not stop at all of them; a second copy of the state is as large.
            sizes = magnitudes(frames)
            scale = list(map(torch.maximum, scale, sizes * (len(scale) // len(sizes))))
        if self.stepper.plan.copies is not None:
            return FloatInversion(self, self.checkpoints, self.checkpoints[clock.last], scale)
        saves = enumerate(clock.saves)
        known = {} if frames is None else {step: select(frames, i) for i, step in saves}
        return FloatInversion(self, {**known, **self.checkpoints}, given.final, scale)


def relative_difference(found: AnyState, true: AnyState, sizes: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a field over its size."""
    return max(
        float((x - y).abs().amax().double() / torch.where(size > 0, size, 1.0))
        for x, y, size in zip(found, true, sizes, strict=True)
    )


class FloatInversion(Rewind):
    """Earlier states by inversion in floating point, compared with the ``known`` states by step.

    Errors are relative to ``scale``, the largest entry of each field in the states of the run.
    """

    def __init__(
        self,
        history: Resets,
        known: Mapping[int, AnyState],
        final: AnyState,
        scale: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(final)
        self.history, self.known, self.scale, self.error = history, known, scale, 0.0
        # The relative error of a function of the state may exceed that of the state by this factor.
        self.tolerance = max(self.tolerance, 1e3 * history.tol)

    def restore(self, step: int, state: AnyState) -> AnyState:
        true = self.known.get(step)
        if true is None:
            return state
        error = relative_difference(state, true, self.scale)
        assert self.error is not None
        self.error = max(self.error, error) if error == error else error
        self.history.report.reconstruction_error = self.error
        if not error <= self.history.tol:
            raise ReconstructionError(self._describe(step, error, state[0].dtype))
        return true

    def _describe(self, step: int, error: float, dtype: torch.dtype) -> str:
        """Write the error, and what may be used instead; not all dynamics have exact steps."""
        history = self.history
        moves = [move for _, move in history.stepper.plan.moves]
        exact = all(move.has_lattice_form for move in moves)
        # Checkpoints may be planned further apart than the run is long.
        every = None if history.every is None else min(history.every, history.stepper.clock.last)
        fewer = "" if every is None else f" below {every}"
        single = "; float64 reaches much further than float32" if dtype == torch.float32 else ""
        distance = (
            f"{error:.1e} off the state of the run (tol = {history.tol:g})"
            if error == error
            else "not finite"
        )
        return (
            f"reversing the steps lost the trajectory: at step {step} the recovered state is "
            f"{distance}, so the gradient would be wrong. "
            f"{'Give the solver exact=True, pass' if exact else 'Pass'} checkpoint_every={fewer} "
            f"to ReversibleAdjoint, or use CheckpointAdjoint(){single}. If the force is random, or "
            "reads a value that has changed since the run, make it reproducible."
        )


class Fingerprints(History):
    """The stored data of a run on a lattice, with fingerprints that verify its reversal.

    Fingerprints (128 bits) are of state and information buffers. The buffers are empty at the
    start, so the fingerprint of the start also verifies that they are empty again.
    """

    def __init__(
        self, stepper: Stepper, every: int | None, run: Run[State], stops_at_frames: bool = True
    ) -> None:
        super().__init__(stepper, every, stops_at_frames)
        self.run = run
        self.spills: dict[int, Sequence[Spill]] = {}
        self.fingerprints: dict[int, bytes] = {}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if spills:
            self.spills[step] = spills
        if step in self.stepper.clock.saves or self.is_regular(step):
            self.fingerprints[step] = fingerprint(state)
        if step == self.stepper.clock.last:
            self.store(step, state)

    def state(self) -> dict[str, Any]:
        spills = [
            [step, [list(vars(x).values()) for x in found]] for step, found in self.spills.items()
        ]
        fingerprints = Entries(list(self.fingerprints.items()))
        return {**super().state(), "spills": Entries(spills), "fingerprints": fingerprints}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.spills = {step: [Spill(*x) for x in found] for step, found in state["spills"]}
        self.fingerprints = dict(state["fingerprints"])

    def rewind(self, given: SweepStart) -> Rewind:
        return ExactInversion(self)


class ExactInversion(Rewind):
    """Earlier states of a run on a lattice, recovered by inverting its moves exactly."""

    error = 0.0

    def __init__(self, history: Fingerprints) -> None:
        self.history, last = history, history.stepper.clock.last
        super().__init__(self._before_spill(last, history.checkpoints[last]))

    def restore(self, step: int, state: AnyState) -> AnyState:
        known = self.history.fingerprints.get(step)
        if known is not None and fingerprint(state) != known:
            raise ReconstructionError(
                f"reversing an exact run did not recover the state of step {step}, so the gradient "
                f"would be wrong. {self._cause(step, state)}"
            )
        return self._before_spill(step, state)

    def _before_spill(self, step: int, state: AnyState) -> AnyState:
        lattice = self.history.stepper.plan.lattice
        assert lattice is not None
        return lattice.refill(state, self.history.spills.get(step, ()))

    def _cause(self, step: int, state: AnyState) -> str:
        """Say what had other bits in the backward pass, after computing the drift here twice."""
        history = self.history
        run, t = history.run, history.stepper.clock.time(step)
        here: Any = history.stepper.from_lattice(state)
        with torch.no_grad():
            drifts = [fingerprint(run.dynamics.drift(t, here)) for _ in range(2)]
        if drifts[0] != drifts[1]:
            return (
                "The force is random or comes from nondeterministic kernels: computed twice at one "
                "position it has different bits. Make it reproducible (see "
                "torch.use_deterministic_algorithms), or use CheckpointAdjoint() with exact=False."
            )
        if run.compile:
            return (
                "The force is reproducible without compile=True. So the compiled loops of both "
                "passes differ in the last bits of a result, or a value that the force reads has "
                "changed since the run. Leave compile=True out, or use CheckpointAdjoint() with "
                "exact=False."
            )
        return (
            "The force is not random, so it depends on a value that has changed since the run (a "
            "plain attribute, a mode, the number of threads). Keep the value until the backward "
            "pass, or use CheckpointAdjoint() with exact=False."
        )
