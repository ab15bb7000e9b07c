r"""Adaptive steps of many initial value problems at once, with one step size for each column.

The states ``(n, batch)`` have a time and a step size ``(batch,)`` of their own. An attempt takes
one step of every column. In the norm of SciPy's solvers, a column's error relative to its
tolerance is

.. math:: e = \left[\frac{1}{n} \sum_i \left(\frac{\delta_i}{a_i + r \max(|y_i|, |y'_i|)}\right)^2
   \right]^{1/2}

with the error estimate :math:`\delta`, the tolerances a and r, and the states y before and y' after
the step. Where :math:`e < 1`, the column advances. Otherwise it stays, and its next attempt is
shorter. SciPy's rules for the first step size and for the growth of steps apply, so that with the
same method every column takes SciPy's steps, up to rounding. A column that has reached its end
takes part in further attempts with a step of size zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from adjsim.core.step_control import GROW, first_size, next_factor, relative

# The rates (n, batch) at times (batch,) and states (n, batch), in double precision.
Rate = Callable[[Tensor, Tensor], Tensor]
# For each column the number of a time (batch,), and whether this time is read (batch,).
Row = tuple[Tensor, Tensor]
# The times and states before a step, its sizes, the times up to which it counts, and a function
# that returns the coefficients of its interpolant.
InterpolatedStep = tuple[Tensor, Tensor, Tensor, Tensor, Callable[[], Sequence[Tensor]]]


class Step(ABC):
    """One step of size h ``(batch,)`` of every column by a one-step method; h may be zero.

    A step is a differentiable function of the states at its start and of the tensors that the rate
    reads. Its size is a constant. ``first`` are the rates at the states y, as :meth:`next_rate` of
    the step before returned them; None: they are evaluated where they are needed.
    """

    #: The name of the method.
    name: ClassVar[str]
    #: Order of the error estimate in the step size.
    error_order: ClassVar[int]
    #: The states at the end of the step ``(n, batch)``.
    end: Tensor

    @abstractmethod
    def __init__(
        self, rate: Rate, t: Tensor, h: Tensor, y: Tensor, first: Tensor | None,
        mass: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take the step; ``mass`` is a mass matrix, which an explicit method does not take."""

    @abstractmethod
    def error(self) -> Tensor:
        """Return the estimate of the error ``(n, batch)``."""

    def next_rate(self) -> Tensor | None:
        """Return the rates at the end of the step, if the next step begins with them."""
        return None

    @abstractmethod
    def polynomial(self) -> list[Tensor]:
        """Return the coefficients of :math:`x, x^2, ...` in y(t + x h) - y(t)."""


class EventState(NamedTuple):
    """What the events of the next attempt depend on.

    Attributes:
        values: of the events ``(events, batch)``, of the sign of the side on which a piece starts.
        left: how often each event may still happen ``(events, batch)``.
        last: the times at which they last happened, NaN before ``(events, batch)``.
        piece: the times of the last resets ``(batch,)``, or the start.
        close: how many resets followed upon each other at once ``(batch,)``.
        ended: the columns that a terminal event has ended ``(batch,)``.
        hits: the number of events so far, of all columns.
    """

    values: Tensor
    left: Tensor
    last: Tensor
    piece: Tensor
    close: Tensor
    ended: Tensor
    hits: int


class Attempt(NamedTuple):
    """An attempt: times and states before, step sizes, times and states after, and its events."""

    t: Tensor
    y: Tensor
    h: Tensor
    end: Tensor
    state: Tensor
    crossing: Any = None


class ColumnState(NamedTuple):
    """Everything that the next attempt depends on.

    Attributes:
        rate: the right-hand side at the states, if the method needs it.
        size: the step sizes that are tried next ``(batch,)``, positive.
        retry: the columns whose last attempt was rejected ``(batch,)``.
        events: None without events.
        came: the attempt that led here; None at the start.
    """

    t: Tensor
    y: Tensor
    rate: Tensor | None
    size: Tensor
    retry: Tensor
    events: EventState | None = None
    came: Attempt | None = None


class MassMatrix(Protocol):
    """The mass matrix of an equation; see :mod:`adjsim.ivp.mass`."""

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the right-hand side."""
        ...

    def constant(self) -> Tensor:
        """Return the matrices ``(n, n, columns)``."""
        ...

    def refuse_inconsistent(
        self, t: Tensor, y: Tensor, marked: Tensor, tolerance: Callable[[Tensor], Tensor]
    ) -> None:
        """Refuse states of ``marked`` columns that are off the algebraic equations."""
        ...


class EventSearch(Protocol):
    """The search for events in steps; see :mod:`adjsim.ivp.column_events`."""

    def start(self, t: Tensor, y: Tensor) -> EventState:
        """Return the state of the events at the start."""
        ...

    def cross(
        self, stepper: ColumnStepper, before: ColumnState, after: ColumnState, step: Step, h: Tensor
    ) -> tuple[ColumnState, Any]:
        """Return the state after the events of a step, and these events, if any."""
        ...


@dataclass
class ColumnStepper:
    """Attempts of steps, as functions of :class:`ColumnState`.

    Columns end at the times ``end``. Their ``direction`` is 1 forward in time, -1 backward; atol is
    a number or ``(n, 1)``.
    """

    rate: Rate
    method: type[Step]
    end: Tensor
    direction: Tensor
    rtol: float
    atol: Tensor
    max_step: float
    events: EventSearch | None = None
    mass: MassMatrix | None = None

    @property
    def field(self) -> Rate:
        """The right-hand side, which is the rate without a mass matrix."""
        return self.rate if self.mass is None else self.mass.field

    def tolerance(self, y: Tensor) -> Tensor:
        """Return the tolerated errors of states."""
        return self.atol + self.rtol * y.abs()

    def step(self, t: Tensor, h: Tensor, y: Tensor, first: Tensor | None) -> Step:
        """Take one step."""
        if self.mass is None:
            return self.method(self.rate, t, h, y, first)
        return self.method(self.field, t, h, y, first, self.mass.constant())

    def start(self, t: Tensor, y: Tensor, first_step: float | None) -> ColumnState:
        """Make the state before the first attempt; ``first_step`` None: SciPy's choice."""
        rate = self.rate(t, y)
        wrong = (~rate.isfinite()).any(0)
        if wrong.any():
            column = first_of(wrong)
            raise ValueError(
                f"fun is not finite in column {column} at its start, t = {float(t[column]):.9g}; "
                f"{int(wrong.sum())} of {len(t)} columns start so."
            )
        size = (
            self.first_size(t, y, rate)
            if first_step is None
            else torch.full_like(t, first_step).minimum((self.end - t).abs())
        )
        events = None if self.events is None else self.events.start(t, y)
        known = rate if self.mass is None else None
        return ColumnState(t, y, known, size, torch.zeros_like(t, dtype=torch.bool), events)

    def active(self, state: ColumnState) -> Tensor:
        """Tell which columns have not reached their ends."""
        before = self.direction * (self.end - state.t) > 0
        return before if state.events is None else before & ~state.events.ended

    def advance(self, state: ColumnState) -> tuple[ColumnState, Step]:
        """Attempt one step of every column that has not reached its end."""
        active = self.active(state)
        shortest = 10 * (torch.nextafter(state.t, self.direction * torch.inf) - state.t).abs()
        self._refuse_too_short(state, active & state.retry & (state.size < shortest))
        free = state.size.clamp(max=self.max_step).maximum(shortest)
        t = state.t + self.direction * torch.where(state.retry, state.size, free)
        t = torch.where(self.direction * (t - self.end) > 0, self.end, t)
        t = torch.where(active, t, state.t)
        step = self.step(state.t, t - state.t, state.y, state.rate)
        error = self._norm(step.error(), state.y, step.end)
        accepted = (error < 1) & active
        most = torch.where(state.retry, 1.0, GROW)
        size = (t - state.t).abs() * next_factor(error, self.method.error_order + 1, most)
        rate = step.next_rate()
        found = ColumnState(
            torch.where(accepted, t, state.t),
            torch.where(accepted, step.end, state.y),
            None if rate is None or state.rate is None else rate.where(accepted, state.rate),
            torch.where(active, size, state.size),
            active & ~accepted,
        )
        crossing = None
        h = torch.where(accepted, t - state.t, 0.0)
        if self.events is not None:
            found, crossing = self.events.cross(self, state, found, step, h)
        came = Attempt(state.t, state.y, h, found.t, found.y, crossing)
        return found._replace(came=came), step

    def _norm(self, x: Tensor, *states: Tensor) -> Tensor:
        return relative(x, states, self.rtol, self.atol).square().mean(0).sqrt()

    def first_size(self, t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        """Choose the first step sizes from states with known rates."""

        def change(trial: Tensor) -> Tensor:
            moved = self.direction * trial
            return self._norm(self.rate(t + moved, y + moved * rate) - rate, y)

        length, order = (self.end - t).abs(), self.method.error_order + 1
        return first_size(self._norm(y, y), self._norm(rate, y), length, order, change)

    def _refuse_too_short(self, state: ColumnState, wrong: Tensor) -> None:
        if wrong.any():
            column = first_of(wrong)
            raise RuntimeError(
                f"{self.method.name} failed in column {column} at t = "
                f"{float(state.t[column]):.9g}: the required step size is less than the spacing "
                "between numbers. Either the solution of this column blows up or fun is not finite "
                "there. End its time span before."
            )


def combine(start: Tensor, weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """Return ``start + sum_i weights[i] * terms[i]``."""
    for weight, term in zip(weights, terms, strict=False):
        if weight:
            start = start.add(term, alpha=weight)
    return start


def interpolate(y: Tensor, coefficients: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the states at fractions x ``(batch,)`` of a step from y, by its polynomial."""
    change = torch.zeros_like(y)
    for coefficient in reversed(coefficients):
        change = x * (coefficient + change)
    return y + change


def first_of(marked: Tensor) -> int:
    """Return the number of the first of some ``marked`` columns."""
    return int(marked.nonzero()[0, 0])


class ColumnReads:
    """The times ``(times, batch)`` at which a solution in columns is read.

    They are sorted in the ``direction`` of each column, 1 forward in time or -1 backward.
    """

    def __init__(self, times: Tensor, direction: Tensor) -> None:
        self.times, self.direction = times, direction
        self._sorted = (direction * times).T.contiguous()
        self._columns = torch.arange(times.shape[1], device=times.device)

    def between(self, begin: Tensor, end: Tensor) -> list[Row]:
        """Return the rows of times after ``begin`` and up to ``end``, both ``(batch,)``."""
        first, last = self._passed(begin), self._passed(end)
        numbers = (first + k for k in range(int((last - first).max())))
        return [(number.clamp(max=len(self.times) - 1), number < last) for number in numbers]

    def _passed(self, t: Tensor) -> Tensor:
        return torch.searchsorted(self._sorted, (self.direction * t)[:, None], right=True)[:, 0]

    def write(self, states: Tensor, step: InterpolatedStep) -> None:
        """Write the states of one step into the states at all times ``(n, times, batch)``."""
        begin, y, h, end, polynomial = step
        rows = self.between(begin, end)
        coefficients = polynomial() if rows else ()
        for number, due in rows:
            x = self._fraction(number, due, begin, h)
            found = interpolate(y, coefficients, x)
            states[:, number[due], self._columns[due]] = found[:, due]

    def cotangents(
        self, cotangents: Tensor, rows: Sequence[Row], t: Tensor, h: Tensor, degree: int
    ) -> list[Tensor]:
        """Return the cotangents of the start of a step, and of the coefficients of its interpolant.

        ``cotangents`` are those of the states at all times ``(n, times, batch)``. ``rows`` lie in
        the step of size h from t, whose interpolant has ``degree`` coefficients.
        """
        n, _, batch = cotangents.shape
        found = [cotangents.new_zeros(n, batch) for _ in range(degree + 1)]
        for number, due in rows:
            x = self._fraction(number, due, t, h)
            power = torch.where(due, cotangents[:, number, self._columns], 0.0)
            for total in found:
                total += power
                power = power * x
        return found

    def _fraction(self, number: Tensor, due: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return torch.where(due, (self.times[number, self._columns] - t) / h, 0.0)
