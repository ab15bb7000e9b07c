"""The base of steps whose size is one number, chosen by an error, or given step by step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState
from adjsim.core.trajectory import RunEnd
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.clock import Clock, VaryingClock, check_dt
from adjsim.solvers.runge_kutta.adaptive_steps import Adaptive, RecordedTimes, StepTimes


class VaryingSteps(SteppingSolver):
    """The base class of solvers whose ``dt`` is a number, :class:`Adaptive` or :class:`StepTimes`.

    ``steps`` is that dt.
    """

    steps: float | Adaptive | StepTimes

    def __init__(self, dt: float | int | Adaptive | StepTimes) -> None:
        self.steps = dt if isinstance(dt, Adaptive | StepTimes) else check_dt(dt)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dt={self.steps!r})"

    @property
    def one_size(self) -> bool:
        return isinstance(self.steps, float)

    @property
    def dt(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size of all steps; a TypeError where steps differ in size."""
        if not isinstance(self.steps, float):
            raise TypeError(
                f"steps of one size are needed here, and those of {self!r} differ: give "
                f"{type(self).__name__} a number as dt."
            )
        return self.steps

    def clock(self, times: Tensor, end: RunEnd | None = None) -> Clock | VaryingClock:
        if isinstance(self.steps, StepTimes) and end is None:
            return self.steps.clock(times)
        return super().clock(times, end)

    def report_choices(self, report: RunReport) -> None:
        if isinstance(self.steps, RecordedTimes):
            report.rejected = self.steps.rejected
            report.energy_evaluations += self.steps.evaluations

    def supports_compiling(
        self, dynamics: Dynamics[Any], state: AnyState | None = None, *, undone: bool = False
    ) -> Refusal | None:
        return None if self.one_size else Refusal("its steps differ in size")
