"""The times of the steps and saves of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from adjsim.core.arguments import as_number
from adjsim.core.trajectory import TimeAverage, averaged_steps

# What to use where steps of varying size are too long.
SMALLER = "smaller steps (a smaller rtol)"


class Saves:
    """The numbers of the steps after which a run saves its state; the first is 0."""

    saves: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of steps."""
        return self.saves[-1]


@dataclass(frozen=True)
class Clock(Saves):
    """The times of steps of size dt; a run that goes on has made ``before`` since ``begin``."""

    begin: float
    dt: float
    saves: tuple[int, ...]
    before: int = 0

    @property
    def smaller(self) -> str:
        """The advice of an error where steps are too long."""
        return f"a smaller dt (it is {self.dt:g})"

    def time(self, step: float) -> float:
        """Return the time after a number of steps."""
        return self.begin + (self.before + step) * self.dt

    def time_in_step(self, step: int) -> Callable[[float], float]:
        """Return the time in step number ``step`` as a function of the share that has passed."""
        begin, before, dt = self.begin, self.before, self.dt
        return lambda share: begin + (before + (step + share)) * dt

    def averaged(self, average: TimeAverage) -> range:
        """Return the steps whose ends enter a time average."""
        return averaged_steps(average.burn_in, self.dt, self.last, average.every)


@dataclass(frozen=True, eq=False)
class VaryingClock(Saves):
    """The times of a run whose steps differ in size: the start and all ends, float64."""

    ends: Tensor
    saves: tuple[int, ...]
    smaller = SMALLER
    before = 0

    @property
    def sizes(self) -> np.ndarray:
        """The sizes of all steps."""
        return np.diff(self.ends.numpy())

    def size(self, step: int) -> float:
        """Return the size of step number ``step``."""
        return self.time(step + 1) - self.time(step)

    def time(self, step: int) -> float:
        return float(self.ends.numpy()[step])

    def time_in_step(self, step: int) -> Callable[[float], float]:
        return lambda share: (
            self.time(step + 1) if share == 1 else self.time(step) + share * self.size(step)
        )

    def average_weights(self, burn_in: float) -> np.ndarray:
        """Return the weight in a time average of the state after each number of steps.

        They are those of the trapezoidal rule over the time after ``burn_in``, and their sum is
        one. In the step that ``burn_in`` divides, the averaged function is interpolated linearly.
        """
        ends, h = self.ends.numpy() - self.time(0), self.sizes
        total = ends[-1] - burn_in
        if not total > 0:
            raise ValueError(
                f"burn_in = {burn_in:g} leaves nothing of a run of {ends[-1]:g} to average."
            )
        share = np.clip((ends[1:] - burn_in) / h, 0.0, 1.0)
        weights = np.zeros_like(ends)
        weights[:-1] += share**2 * h / 2
        weights[1:] += share * (2 - share) * h / 2
        return weights / total


def check_dt(dt: Any) -> float:
    step = as_number("dt", dt)
    if not 0 < step < float("inf"):
        raise ValueError(f"dt must be a positive time; got {dt}.")
    return step
