"""Algebraically reversible Runge-Kutta steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_flag, as_number
from adjsim.core.brownian_path import BrownianPath
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, detached, in_transform
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import simple_fraction
from adjsim.dynamics.copies import Copies
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Coefficient, Coefficients
from adjsim.solvers.base import (
    LETTER,
    MeasureGrowth,
    Stage,
    StepContext,
    StepPlan,
    lattice_of,
    refuse_no_equation,
)
from adjsim.solvers.clock import SMALLER
from adjsim.solvers.reversible.increment import AHEAD, Increment, reversed_growth
from adjsim.solvers.reversible.varying_coupling import VaryingCoupling, steps_within
from adjsim.solvers.runge_kutta.adaptive_steps import (
    Adaptive,
    AdaptiveSteps,
    RecordedTimes,
    StepTimes,
    look_ahead,
)
from adjsim.solvers.runge_kutta.runge_kutta import find_tableau
from adjsim.solvers.varying_steps import VaryingSteps

# The estimated rate over the strongest contraction.
MARGIN = 1.5
# The smallest estimated rate times dt: the coupling 0.999 of McCallum and Foster.
SMALLEST = 1e-3
# The relative error of 1 - c that makes its fraction simple.
SIMPLE = 0.01
# Passes after which the lattice of an adaptive run has to be that of its step times. The second
# pass is rare, and its times differ from those of the first by rounding.
PASSES = 4


class Coupled(VaryingSteps):
    """Take Runge-Kutta steps in a form that can be undone::

        y' = c y + (1 - c) z + step_h(z)        z' = z - step_{-h}(y')        c = exp(-rate h)

    Here z is a second copy of the state, equal to y at the start, and step_h is the increment of
    the method (McCallum and Foster 2024, arXiv:2410.11648). The result is y. A step has an inverse,
    so it goes with :class:`~adjsim.ReversibleAdjoint`. The order is that of the method, and a step
    costs two of the method (for a state of k fields 2 k).

    The distance between the copies grows as exp((g - rate) t), with g the strongest contraction of
    the flow. ``rate`` must exceed g, and 2 g keeps the relative precision of a solution that decays
    at the rate g. A run whose copies move apart by a tenth of their size stops, and names a rate.
    The coupling c is the simplest fraction n/d with 1 - c within one per cent of 1 - exp(-rate dt).

    In floating point an undone step amplifies rounding by exp((rate + a) t), where a is the largest
    exponent of the flow, so ``ReversibleAdjoint`` stores checkpoints. With ``exact=True`` the steps
    run on a lattice (:mod:`adjsim.dynamics.lattice`) and are undone bit for bit, in chaos and under
    contraction, at any length. This takes rate/ln 2 bits per entry and unit of time, and float64.

    With ``dt=Adaptive(rtol, atol)`` the error of the increment at z chooses the sizes. A pass of
    the same steps without a gradient records their times, 8 bytes a step, and costs about 1.5 times
    a run. Run and backward sweep then use the recorded sizes h, with the coupling n/4096 next below
    exp(-rate h). The gradient is the exact one of these steps at fixed sizes: it has no term for
    the dependence of the sizes on start and parameters. ``trajectory.stats`` has ``step_times``,
    ``steps`` (those accepted) and ``rejected``. :class:`StepTimes` repeats recorded steps. Steps of
    varying size are not compiled.

    Steps are stable for dt times the fastest decay up to about rate dt, which is below the limit of
    the method itself: for stiff equations use implicit steps.

    Args:
        method: a name or a :class:`~adjsim.Tableau`, as for ``RungeKutta``.
        dt: the step, time; or :class:`Adaptive`, or :class:`StepTimes`.
        rate: the rate of the coupling, 1/time. None: 1.5 times the strongest contraction along the
            first 256 steps of the run, rounded up to two digits. It is in
            ``trajectory.stats["rate"]``. The estimate takes as long as these steps and their
            gradient.
        exact: run the steps on a lattice.

    Raises:
        ValueError: an unknown method, a rate that is too small or large for dt, an adaptive method
            without an error estimate, a save time that is not among ``StepTimes``; with ``exact``,
            a state that is not float64.
        TypeError: dynamics with noise, or with a term that is not an equation (when a run begins).
        FloatingPointError: the copies moved apart, or the error of an adaptive step is too large at
            every size.
    """

    def __init__(
        self,
        method: str | Tableau,
        dt: float | int | Adaptive | StepTimes,
        *,
        rate: float | int | None = None,
        exact: bool = False,
    ) -> None:
        self.method, self.tableau = method, find_tableau(method)
        super().__init__(dt)
        self.rate = None if rate is None else as_number("rate", rate)
        self.exact = as_flag("exact", exact)
        if isinstance(dt, Adaptive) and self.tableau.error is None:
            raise ValueError(
                f"{method!r} has no error estimate from which Adaptive could choose steps: use a "
                "method with an error estimate, 'bogacki-shampine', 'dormand-prince' or a Tableau "
                "with error=."
            )
        if self.rate is not None:
            if not 0 < self.rate < math.inf:
                raise ValueError(f"rate must be positive; got {rate}.")
            if isinstance(self.steps, float):
                self.coupling = coupling(self.rate, self.steps)

    @property
    def order(self) -> int:
        return self.tableau.order

    def report_choices(self, report: RunReport) -> None:
        super().report_choices(report)
        if self.rate is not None:
            report.rate = self.rate

    def resolved(
        self,
        dynamics: Dynamics[State],
        state: State,
        times: Tensor,
        path: BrownianPath | None = None,
        measure: MeasureGrowth | None = None,
    ) -> Coupled:
        """Return these steps with a rate and the times of adaptive steps."""
        if self.rate is not None and not isinstance(self.steps, Adaptive):
            return self
        refuse_no_equation(self, dynamics)
        if in_transform():
            raise RuntimeError(
                "rate=None and Adaptive read the numbers of the start, which torch.func "
                "transforms (grad, vmap, jvp) hide: give Coupled a rate, and a number or StepTimes "
                "as dt."
            )
        sizes = self._ahead(dynamics, state, times.tolist())
        if isinstance(self.steps, float):
            sizes = sizes[: max(1, round(float(times[-1] - times[0]) / self.steps))]
        rate = self.rate
        if rate is None:
            rate = self._suggest(dynamics, state, float(times[0]), sizes, measure)
        solver = Coupled(self.method, self.steps, rate=rate, exact=self.exact)
        if isinstance(self.steps, Adaptive):
            return solver._record(dynamics, state, times.tolist(), fmean(sizes))
        return solver

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        steps = self.steps
        if isinstance(steps, Adaptive) or self.rate is None:
            raise TypeError(f"{self!r} has no steps before a run: see resolved().")
        typical = fmean(steps.following(t, AHEAD)) if isinstance(steps, StepTimes) else steps
        return self._plan(dynamics, state, t, typical, math.inf)

    def _plan(
        self, dynamics: Dynamics[State], state: State, t: float, typical: float, end: float
    ) -> StepPlan:
        """List the moves of a step, for a run with a start, a typical step size and an end."""
        refuse_no_equation(self, dynamics)
        assert self.rate is not None
        h = self.steps if isinstance(self.steps, float) else None
        copies = Copies(dynamics, t, state, typical, partial(self._remedy, dynamics, end))
        names, copied = state._fields, copies.names
        increment = partial(Increment, dynamics, self.tableau, h, type(state))
        forward, backward = list[Move](), list[Move]()
        for i, (name, copy) in enumerate(zip(names, copied, strict=True)):
            added = Shear(name, increment(copied, i, weight="1-c"))
            forward += [Scale(name, Coefficient("c")), added]
            backward.append(Shear(copy, increment(names, i, direction=-1, sign=-1)))
        stages = (Stage(LETTER, tuple(forward), 0.0), Stage(LETTER, tuple(backward), 1.0))
        return StepPlan(stages, typical, self.order, copies=copies)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        if not isinstance(self.steps, float):
            # They depend on the step.
            return {LETTER: {}}
        values = {"c": self.coupling, "1-c": 1 - self.coupling}
        options: dict[str, Any] = {"dtype": state[0].dtype, "device": state[0].device}
        return {LETTER: {name: torch.tensor(float(x), **options) for name, x in values.items()}}

    def varying(self, state: AnyState) -> VaryingCoupling | None:
        if isinstance(self.steps, float):
            return None
        assert self.rate is not None
        return VaryingCoupling(self.rate, state[0].detach(), self.exact)

    def damping(self, dynamics: Dynamics[State], state: State) -> float:
        return (self.rate or 0.0) + dynamics.damping(state)

    def steps_within(self, dynamics: Dynamics[State], state: State, growth: float) -> float | None:
        if not isinstance(self.steps, StepTimes):
            return super().steps_within(dynamics, state, growth)
        assert self.rate is not None
        sizes = self.steps.sizes.numpy()
        return float(steps_within(self.rate, sizes, dynamics.damping(state) * sizes, growth))

    def _ahead(
        self, dynamics: Dynamics[State], state: State, ends: Sequence[float]
    ) -> Sequence[float]:
        """Return the sizes of the next steps, from the first of ``ends`` to the last at most."""
        if isinstance(self.steps, Adaptive):
            return look_ahead(dynamics, self.tableau, self.steps, state, ends, AHEAD)
        if isinstance(self.steps, StepTimes):
            return self.steps.following(ends[0], AHEAD)
        return [self.steps] * AHEAD

    def _suggest(
        self,
        dynamics: Dynamics[State],
        state: State,
        t: float,
        sizes: Sequence[float],
        measure: MeasureGrowth | None = None,
    ) -> float:
        """Choose a rate by the contraction along the next steps."""
        growth = (measure or reversed_growth)(dynamics, self.tableau, sizes, state, t)
        rate = max(MARGIN * growth, SMALLEST * len(sizes) / math.fsum(sizes))
        # Rounded up to two digits, so that nearby starts and parameters have the same rate.
        unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
        return math.ceil(rate / unit - 1e-9) * unit

    @torch.no_grad()
    def _record(
        self, dynamics: Dynamics[State], state: State, ends: Sequence[float], typical: float
    ) -> Coupled:
        """Run adaptive steps, and return those of their times.

        The lattice of an exact run follows from these times, so a pass on another one is repeated.
        """
        start, evaluations = detached(state), 0
        plan = self._plan(dynamics, start, ends[0], typical, ends[-1])
        if self.exact:
            plan = replace(plan, lattice=lattice_of(plan, dynamics, start, ends[0]))
        for _ in range(PASSES):
            times = self._pass(dynamics, start, ends, plan)
            evaluations += times.evaluations
            times = replace(times, evaluations=evaluations)
            found = Coupled(self.method, times, rate=self.rate, exact=self.exact)
            repeated = found.plan(dynamics, start, ends[0])
            if plan.lattice is None or repeated.lattice is None:
                return found
            spacings = repeated.lattice.spacings()
            if all(torch.equal(x, spacings[name]) for name, x in plan.lattice.spacings().items()):
                return found
            plan = repeated
        raise FloatingPointError(
            "the sizes of the steps change with the lattice of the exact run, and the lattice with "
            f"them, in each of {PASSES} passes. Use other tolerances in Adaptive, or StepTimes."
        )

    def _pass(
        self, dynamics: Dynamics[State], start: State, ends: Sequence[float], plan: StepPlan
    ) -> RecordedTimes:
        """Run adaptive steps once and return their times."""
        assert isinstance(self.steps, Adaptive)
        varying = self.varying(start)
        assert varying is not None
        lattice, copies, limit = plan.lattice, plan.copies, varying.limit(plan)
        assert copies is not None
        forces = plan.forces(dynamics.potential)

        def take(number: int, t: float, after: float, before: Any, y: AnyState) -> AnyState:
            """Take the step of the run itself, so that the run repeats it bit for bit."""
            times, coefficients = (t, after), varying.coefficients(after - t)
            context = StepContext(lambda share: times[int(share)], coefficients, None, forces)
            step = plan.step(before, context)
            if lattice is not None:
                step, _ = lattice.spill(step, limit)
            if not plan.is_valid(step):
                where = f"in step {number + 1} (t = {dynamics.shown_time(after):g})"
                raise plan.failure(step, before, t, where, SMALLER, dynamics)
            return step

        def plain(both: Any) -> Any:
            # The step of y is that of its copy z.
            return type(start)._make(getattr(both, name) for name in copies.names)

        first: Any = copies.add(start)
        steps = AdaptiveSteps(dynamics, self.tableau, self.steps)
        times = steps.run(
            first if lattice is None else lattice.to_lattice(first), ends, take, plain
        )
        evaluations = steps.evaluations + forces.report.energy_evaluations
        found = torch.tensor(times, dtype=torch.float64)
        return RecordedTimes(found, steps.rejected, evaluations)

    def _remedy(
        self, dynamics: Dynamics[State], end: float, state: State, t: float, smaller: str
    ) -> str:
        """Say why the copies of a state move apart, and the way out."""
        assert self.rate is not None
        rate = self._suggest(dynamics, state, t, self._ahead(dynamics, state, (t, end)))
        flow = "for the contraction of the flow"
        why = f"large enough {flow}, so the steps are too coarse. Use {smaller}"
        if rate > self.rate:
            why = f"too small {flow}. Use rate={rate:.3g}, or a larger one"
        return f"the rate {self.rate:.4g} of the coupling is {why}."

    def __repr__(self) -> str:
        size = f"{self.steps:g}" if isinstance(self.steps, float) else repr(self.steps)
        rate = "" if self.rate is None else f", rate={self.rate:g}"
        exact = ", exact=True" if self.exact else ""
        return f"Coupled({self.method!r}, dt={size}{rate}{exact})"


def coupling(rate: float, dt: float) -> Fraction:
    """Find the simplest fraction c with 1 - c within one per cent of 1 - exp(-rate dt)."""
    gap = -math.expm1(-rate * dt)
    near = simple_fraction(gap, SIMPLE * gap)
    if near is not None:
        return 1 - near
    if gap == 1.0:
        raise ValueError(
            f"rate = {rate:g} is too large for dt = {dt:g}: the coupling exp(-rate dt) is below "
            "rounding, and no step could be undone. Use a smaller rate or a smaller dt."
        )
    raise ValueError(
        f"rate = {rate:g} is too small for dt = {dt:g}: the coupling exp(-rate dt) is within "
        f"{gap:.1g} of 1. Use a larger rate."
    )
