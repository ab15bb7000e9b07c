"""Steps of varying size: chosen by their error, or given by their times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor
from adjsim.solvers.clock import VaryingClock


@dataclass(frozen=True)
class Adaptive:
    """Choose the size of each step by an estimate of its error::

        e = max over systems of [mean_i (delta_i / (atol + rtol max(|y_i|, |y'_i|)))^2]^(1/2)
        h' = h min(10, max(0.2, 0.9 e^(-1/(q + 1))))

    with the difference delta, of order q + 1, between the method and its embedded method, and the
    mean over all entries of one system. A step with e above 1 is repeated with the size h', which
    is also the size of the next step. This is the controller of SciPy's solvers. A batch shares its
    steps, so its most demanding system sets them. Steps end exactly at the save times.

    Args:
        rtol, atol: relative and absolute tolerance of the error of one step. The error of the run
            is larger where errors grow.
        first: the size of the first step that is tried, time. None: from the rates at the start
            (Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, II.4).

    Raises:
        ValueError: a number that is not positive.
    """

    rtol: float | int = 1e-7
    atol: float | int = 1e-9
    first: float | int | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol") if self.first is None else ("rtol", "atol", "first"):
            number = as_number(name, getattr(self, name))
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be positive; got {number:g}.")
            object.__setattr__(self, name, number)


@dataclass(frozen=True, eq=False, repr=False)
class StepTimes:
    """Give the times of all steps, so that runs of nearby parameters share them.

    The gradient of an adaptive run holds the step times fixed. To check it by differences, or to
    compare runs without the noise of step-size control, repeat the steps of a run with
    ``StepTimes(run.stats["step_times"])`` and ``rate=run.stats["rate"]``, to the last bit.

    Args:
        times: the time of the start and of the end of each step, increasing. Save times must be
            among them. They take 8 bytes a step.

    Raises:
        ValueError: times that do not increase, or fewer than two.
    """

    times: Any

    def __post_init__(self) -> None:
        times = as_tensor("times", self.times).detach().to(device="cpu", dtype=torch.float64)
        if times.ndim != 1 or len(times) < 2:
            raise ValueError(
                "times must list the time of the start and of the end of at least one step; got "
                f"shape {tuple(times.shape)}."
            )
        sizes = times.diff()
        if not bool(torch.isfinite(times).all()) or not bool((sizes > 0).all()):
            raise ValueError(
                f"times must be finite and increase; the smallest step is {float(sizes.min()):g}."
            )
        object.__setattr__(self, "times", times)

    def __repr__(self) -> str:
        return f"StepTimes({len(self.times) - 1} steps)"

    @property
    def sizes(self) -> Tensor:
        return self.times.diff()

    def following(self, t: float, count: int) -> list[float]:
        """Return the sizes of the steps after a time, at most ``count``, at least one."""
        begin = int(torch.searchsorted(self.times[:-1], t))
        return self.sizes[min(begin, len(self.times) - 2) :][:count].tolist()

    def clock(self, saves: Tensor) -> VaryingClock:
        """Return the clock of a run with these save times."""
        numbers = torch.searchsorted(self.times, saves).clamp(max=len(self.times) - 1)
        away = (self.times[numbers] != saves).nonzero()
        if len(away):
            i, n = int(away[0]), int(numbers[away[0]])
            raise ValueError(
                f"ts[{i}] = {float(saves[i]):.17g} is not the end of a step; the nearest in the "
                f"given step times are {float(self.times[max(n - 1, 0)]):.17g} and "
                f"{float(self.times[n]):.17g}. Give save times that are among them."
            )
        first, steps = int(numbers[0]), (numbers - numbers[0]).tolist()
        return VaryingClock(self.times[first : first + steps[-1] + 1], tuple(steps))


@dataclass(frozen=True, eq=False, repr=False)
class RecordedTimes(StepTimes):
    """The times of the steps that a run has chosen.

    It repeated ``rejected`` attempts with a smaller size, and took ``evaluations`` of the drift.
    """

    rejected: int
    evaluations: int
