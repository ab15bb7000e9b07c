"""The times of the steps and saves of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from adjsim.core.arguments import as_number
from adjsim.core.trajectory import first_averaged_step

# What to use where steps of varying size are too long.
SMALLER = "smaller steps (a smaller rtol)"


@dataclass(frozen=True)
class Clock:
    """The times of a run on a grid of steps.

    Attributes:
        begin: the time of the start.
        dt: the step size.
        saves: the numbers of the steps after which the state is saved; the first is 0.
        before: the number of steps between ``begin`` and step 0, in a run that is continued.
    """

    begin: float
    dt: float
    saves: tuple[int, ...]
    before: int = 0

    @property
    def last(self) -> int:
        """The number of steps."""
        return self.saves[-1]

    @property
    def smaller(self) -> str:
        """What to use where steps are too long, for error messages."""
        return f"a smaller dt (it is {self.dt:g})"

    def time(self, step: float) -> float:
        """Return the time after a number of steps."""
        return self.begin + (self.before + step) * self.dt

    def time_in_step(self, step: int) -> Callable[[float], float]:
        """Return a function that gives the time in step number ``step``.

        Its argument is the share of the step that has passed, from 0 to 1.
        """
        return lambda share: self.time(step + share)

    def first_averaged(self, burn_in: float) -> int:
        """Return the first step whose end enters a time average."""
        return first_averaged_step(burn_in, self.dt, self.last)


@dataclass(frozen=True, eq=False)
class VaryingClock:
    """The times of a run whose steps differ in size.

    Attributes:
        ends: the time of the start and the times at the ends of all steps, float64.
        saves: the numbers of the steps after which the state is saved; the first is 0.
    """

    ends: Tensor
    saves: tuple[int, ...]
    smaller = SMALLER
    before = 0

    @property
    def last(self) -> int:
        """The number of steps."""
        return self.saves[-1]

    @property
    def sizes(self) -> np.ndarray:
        """The sizes of all steps."""
        return np.diff(self.ends.numpy())

    def size(self, step: int) -> float:
        """Return the size of step number ``step``."""
        return self.time(step + 1) - self.time(step)

    def time(self, step: int) -> float:
        """Return the time after a number of steps."""
        return float(self.ends.numpy()[step])

    def time_in_step(self, step: int) -> Callable[[float], float]:
        """Return a function that gives the time in step number ``step``.

        Its argument is the share of the step that has passed, from 0 to 1.
        """
        return lambda share: (
            self.time(step + 1) if share == 1 else self.time(step) + share * self.size(step)
        )

    def average_weights(self, burn_in: float) -> np.ndarray:
        """Return the weight in a time average of the state after each number of steps.

        They are those of the trapezoidal rule over the time after ``burn_in``, and their sum is
        one. In the step that ``burn_in`` divides, the averaged function is interpolated linearly.

        Raises:
            ValueError: nothing of the run is left.
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
