"""Steps of an SDE that differ in size, on one Brownian path."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.brownian_path import BrownianPath, PathNoise
from adjsim.core.state import AnyState, State, detached, in_transform
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.sources import Coefficients
from adjsim.solvers.base import LETTER, MeasureGrowth, StepPlan
from adjsim.solvers.clock import VaryingClock
from adjsim.solvers.runge_kutta.adaptive_steps import Adaptive, RecordedTimes, StepTimes, error_norm
from adjsim.solvers.stochastic.drift_move import drift_plan
from adjsim.solvers.varying_steps import VaryingSteps

# A step with an error below this part of the tolerances is followed by one of twice its size, whose
# error is larger by 2^(3/2) at strong order one.
SMALL = 0.25


@dataclass(frozen=True)
class StepSize:
    """The size h of a step, as the only coefficient that differs from step to step."""

    def coefficients(self, h: float) -> dict[str, Coefficients]:
        # A number for Python, so it stays on the CPU.
        return {LETTER: {"h": torch.tensor(h, dtype=torch.float64)}}

    def buffer_growth(self, plan: StepPlan, clock: VaryingClock) -> None:
        """No buffer grows: the steps have no inverse."""


class PathSteps(VaryingSteps):
    """The base class of steps of an SDE, of one size or of sizes chosen along a Brownian path.

    With ``Adaptive`` a step of size h is compared with two steps of h/2 on the same path. With a
    difference within the tolerances the two are taken; otherwise h is halved. Steps have 2^n ticks
    of the path and begin at multiples of 2^n ticks, so no increment that a rejected attempt has
    read is skipped, and a rejection adds no bias (Gaines and Lyons, SIAM J. Appl. Math. 57, 1455
    (1997); Foster and Jelincic 2023, arXiv:2311.14201).
    """

    order: ClassVar[int]
    evaluations: ClassVar[int]
    loses: ClassVar[str]

    @abstractmethod
    def equation(self, dynamics: Dynamics[Any]) -> SDE:
        """Return the dynamics, or raise if it is no SDE that the steps are for."""

    @abstractmethod
    def step(self, sde: SDE, h: float, t: Any, at: Any, dW: Tensor) -> tuple[Tensor, ...]:
        """Return the fields after a step of size h."""

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        sde, steps = self.equation(dynamics), self.steps
        if isinstance(steps, Adaptive):
            raise TypeError(f"{self!r} has no steps before a run: see resolved().")
        varying = isinstance(steps, StepTimes)

        def step(h: float, t: Tensor, at: AnyState, dW: Tensor) -> tuple[Tensor, ...]:
            return self.step(sde, h, t, at, dW)

        return drift_plan(
            step,
            state,
            fmean(steps.sizes.tolist()) if varying else steps,
            self.order,
            noisy=True,
            varying=varying,
            evaluations=self.evaluations,
            loses=self.loses,
        )

    def varying(self, state: AnyState) -> StepSize | None:
        return None if self.one_size else StepSize()

    def resolved(
        self,
        dynamics: Dynamics[State],
        state: State,
        times: Tensor,
        path: BrownianPath | None = None,
        measure: MeasureGrowth | None = None,
    ) -> PathSteps:
        if self.one_size:
            return self
        sde = self.equation(dynamics)
        if path is None:
            raise TypeError(
                f"the noise of a seed belongs to steps of one size, and those of {self!r} differ: "
                "give generator=BrownianPath(seed, tol)."
            )
        if not isinstance(self.steps, Adaptive):
            return self
        if in_transform():
            raise RuntimeError(
                "Adaptive reads the numbers of the start, which torch.func transforms (grad, vmap, "
                "jvp) hide: give a number or StepTimes as dt."
            )
        return type(self)(self._record(sde, state, times.tolist(), path, self.steps))

    def on_path(
        self, path: BrownianPath, dynamics: Dynamics[State], state: State, t: float
    ) -> PathNoise | None:
        if not isinstance(self.steps, StepTimes):
            return super().on_path(path, dynamics, state, t)
        times = self.steps.times.tolist()
        ticks = [path.ticks(f"times[{i}]", x) for i, x in enumerate(times)]
        (first,) = self.steps.numbers(torch.tensor([t], dtype=torch.float64)).tolist()
        return path.steps_between(ticks[first:])

    @torch.no_grad()
    def _record(
        self, sde: SDE, state: Any, ends: list[float], path: BrownianPath, adaptive: Adaptive
    ) -> RecordedTimes:
        """Choose steps by their errors, and return their times."""
        ticks = {path.ticks(f"ts[{i}]", t): t for i, t in enumerate(ends)}
        at, *saves = ticks
        y, passed, tries, rejected = detached(state), [at], 0, 0
        increment = _Increments(path, sde, ends[0], y)
        largest = (saves[-1] - at).bit_length()
        level = largest
        if adaptive.first is not None:
            level = max(1, int(adaptive.first / path.tol).bit_length() - 1)
        while at < saves[-1]:
            end = saves[bisect_right(saves, at)]
            aligned = (at & -at).bit_length() - 1 if at else largest
            level = min(level, aligned, (end - at).bit_length() - 1)
            t, half = at * path.tol, 2 ** (level - 1) if level else 0
            if level:
                middle, after = at + half, at + 2 * half
                h, first, last = half * path.tol, increment(at, middle), increment(middle, after)
                whole = type(y)._make(self.step(sde, 2 * h, t, y, first + last))
                inner = type(y)._make(self.step(sde, h, t, y, first))
                fine = type(y)._make(self.step(sde, h, t + h, inner, last))
                gaps = [a - b for a, b in zip(whole, fine, strict=True)]
                error, tries = float(error_norm(sde, adaptive, gaps, y, fine)), tries + 1
                if error <= 1:
                    passed += [middle, after]
                    at, y, level = after, fine, level + (error < SMALL)
                    continue
                rejected += 1
            if level < 2:
                raise FloatingPointError(
                    f"a step at t = {sde.shown_time(t):g} would be shorter than two "
                    f"ticks of the path, tol = {path.tol:g}: give BrownianPath a smaller tol, with "
                    "all save times at even multiples of it, or Adaptive larger tolerances."
                )
            level -= 1
        times = torch.tensor([ticks.get(x, x * path.tol) for x in passed], dtype=torch.float64)
        return RecordedTimes(times, rejected, 3 * tries * self.evaluations)


class _Increments:
    """The increments of a path between ticks, in the layout of a state's noise."""

    def __init__(self, path: BrownianPath, sde: SDE, t: float, state: AnyState) -> None:
        self._shape = (*sde.batch_shape(state), *sde.draw_shape(t, state))
        self._read, self._like = path.reader(torch.Size(self._shape).numel()), state[0]

    def __call__(self, begin: int, end: int) -> Tensor:
        return self._read(begin, end).to(self._like).reshape(self._shape)
