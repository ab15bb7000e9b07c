"""Steps of varying size: given by their times, or chosen by the error of an embedded pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor
from adjsim.core.state import AnyState, State, detached
from adjsim.core.step_control import GROW, first_size, next_factor, relative
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.clock import VaryingClock
from adjsim.solvers.reversible.increment import added, system_squares
from adjsim.solvers.runge_kutta.runge_kutta import combined, stage_rates

# A step that would end this close before a save time, as a multiple of its size, ends at it.
REACH = 1.01

# Takes the number of a step, its beginning and end, the state, and the plain step of its error
# estimate. Returns the state after the step.
TakeStep = Callable[[int, float, float, Any, AnyState], Any]


@dataclass(frozen=True)
class Adaptive:
    """Choose the size of each step by an estimate of its error::

        e = max over systems of [mean_i (delta_i / (atol + rtol max(|y_i|, |y'_i|)))^2]^(1/2)
        h' = h min(10, max(0.2, 0.9 e^(-1/(q + 1))))

    with the difference delta, of order q + 1, between the method and its embedded method, and the
    mean over all entries of one system. A step with e above 1 is repeated with the size h', which
    is also the size of the next step. This is the controller of SciPy's solvers. A batch shares its
    steps, so its most demanding system sets them. Steps end exactly at the save times.

    On a :class:`~adjsim.BrownianPath` (:class:`~adjsim.StochasticHeun`, :class:`~adjsim.Milstein`)
    the difference is that from two steps of half the size, and sizes are halved or doubled.

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
        numbers = self.numbers(saves)
        first, steps = int(numbers[0]), (numbers - numbers[0]).tolist()
        return VaryingClock(self.times[first : first + steps[-1] + 1], tuple(steps))

    def numbers(self, saves: Tensor) -> Tensor:
        """Return the number of steps before each of these times, ends of steps."""
        numbers = torch.searchsorted(self.times, saves).clamp(max=len(self.times) - 1)
        away = (self.times[numbers] != saves).nonzero()
        if len(away):
            i, n = int(away[0]), int(numbers[away[0]])
            raise ValueError(
                f"ts[{i}] = {float(saves[i]):.17g} is not the end of a step; the nearest in the "
                f"given step times are {float(self.times[max(n - 1, 0)]):.17g} and "
                f"{float(self.times[n]):.17g}. Give save times that are among them."
            )
        return numbers


@dataclass(frozen=True, eq=False, repr=False)
class RecordedTimes(StepTimes):
    """The times that a run chose, with its rejected attempts and evaluations of the drift."""

    rejected: int
    evaluations: int


class AdaptiveSteps:
    """Steps of a dynamics whose sizes follow from the error of an embedded pair, with counts."""

    def __init__(self, dynamics: Dynamics[Any], tableau: Tableau, adaptive: Adaptive) -> None:
        self.dynamics, self.tableau, self.adaptive = dynamics, tableau, adaptive
        self.rejected, self.evaluations = 0, 0
        self._order = tableau.error_order + 1

    @torch.no_grad()
    def run(
        self,
        state: Any,
        ends: Sequence[float],
        take: TakeStep,
        plain: Callable[[Any], AnyState] = lambda state: state,
        most: float = math.inf,
    ) -> list[float]:
        """Run steps, at most so many, and return the times of all steps.

        ``ends`` are the time of the start, and the times at which a step has to end. ``plain``
        converts a state of the steps to that from which the error is estimated.
        """
        t, times = ends[0], [ends[0]]
        size = self.adaptive.first or self._first_size(plain(state), t, ends[-1])
        for end in ends[1:]:
            while t < end and len(times) <= most:
                after, size, y = self._attempt(plain(state), t, size, end, len(times))
                state, t = take(len(times) - 1, t, after, state, y), after
                times.append(t)
        return times

    def _attempt(
        self, y: AnyState, t: float, size: float, end: float, number: int
    ) -> tuple[float, float, AnyState]:
        """Attempt a step until its error is small; return its end, the next size, and the state."""
        shortest, retried = 10 * math.ulp(t), False
        size = max(size, shortest)
        while True:
            after = _reached(t, size, end)
            state, error = self._try(y, t, after - t)
            following = (after - t) * next_factor(error, self._order, 1.0 if retried else GROW)
            if error <= 1:
                # A step that a save time made shorter says little about longer steps.
                cut = after - t < size
                return after, max(following, size) if cut else following, state
            self.rejected, retried, size = self.rejected + 1, True, following
            if size < shortest:
                shown = self.dynamics.shown_time(t)
                raise FloatingPointError(
                    f"the error of step {number} (t = {shown:g}) is {error:.1g} of the tolerances "
                    f"at the smallest size, {after - t:.1g}: the solution blows up, or the rates "
                    "are not finite or jump there. End the run before this time, or change the "
                    "equation."
                )

    def _try(self, y: Any, t: float, h: float) -> tuple[AnyState, float]:
        """Return the state after a plain step, and its error as a share of the tolerances."""
        tableau, weights = self.tableau, self.tableau.error
        assert weights is not None
        rates = stage_rates(self.dynamics, tableau, t, h, y)
        after = added(y, combined(h, tableau.b, rates))
        if len(weights) > len(rates):
            rates.append(tuple(self.dynamics.drift(t + h, after)))
        self.evaluations += len(rates)
        error = combined(h, weights, rates)
        return after, float(self._norm(error, y, after))

    def _norm(self, parts: Sequence[Tensor], *states: AnyState) -> Tensor:
        return error_norm(self.dynamics, self.adaptive, parts, *states)

    def _first_size(self, y: Any, t: float, end: float) -> float:
        """Estimate the size of the first step from the rates at the start and near it."""
        self.evaluations += 2
        rates = self.dynamics.drift(t, y)

        def change(trial: Tensor) -> Tensor:
            h = float(trial)
            near = self.dynamics.drift(t + h, added(y, tuple(h * k for k in rates)))
            return self._norm([b - a for a, b in zip(rates, near, strict=True)], y)

        length = torch.tensor(end - t, dtype=torch.float64)
        return float(
            first_size(self._norm(y, y), self._norm(rates, y), length, self._order, change)
        )


def error_norm(
    dynamics: Dynamics[Any], adaptive: Adaptive, parts: Sequence[Tensor], *states: AnyState
) -> Tensor:
    """Return the norm of the controller, the largest over the batch."""
    rtol, atol = adaptive.rtol, adaptive.atol
    shares = [relative(x, ys, rtol, atol) for x, *ys in zip(parts, *states, strict=True)]
    squares = system_squares(dynamics, states[0], shares)
    entries = sum(x.numel() for x in states[0]) / squares.numel()
    return (squares / entries).amax().sqrt().double().cpu()


def _reached(t: float, size: float, end: float) -> float:
    """Return the end of a step of a size, where a step has to end at ``end``."""
    left = end - t
    if left <= REACH * size:
        return end
    # Two steps of half the time that is left, instead of one and a very short one.
    return t + left / 2 if left < 2 * size else t + size


@torch.no_grad()
def look_ahead(
    dynamics: Dynamics[State],
    tableau: Tableau,
    adaptive: Adaptive,
    state: State,
    ends: Sequence[float],
    count: int,
) -> list[float]:
    """Return the sizes of the next plain steps, one to ``count``, up to the last of ``ends``."""
    steps, sizes = AdaptiveSteps(dynamics, tableau, adaptive), list[float]()

    def take(number: int, begin: float, after: float, before: Any, y: AnyState) -> AnyState:
        sizes.append(after - begin)
        return y

    try:
        steps.run(detached(state), ends, take, most=count)
    except FloatingPointError:
        # The run itself stops there, with the number of its step.
        if not sizes:
            raise
    return sizes
