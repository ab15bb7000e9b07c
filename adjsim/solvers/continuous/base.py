"""The base of solvers from other libraries, which take the summed drift and diffusion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeAlias

import torch
from torch import Tensor

from adjsim.core.brownian_path import BrownianPath, PathNoise
from adjsim.core.parameters import refuse_unknown
from adjsim.core.rows import has_rows
from adjsim.core.run_report import RunReport
from adjsim.core.state import State, is_finite
from adjsim.core.trajectory import (
    TimeAverage,
    averaged_steps,
    check_shape,
    floating,
    step_numbers,
    sum_dtype,
)
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.forces import count_backward
from adjsim.solvers.run import Run

Fields: TypeAlias = tuple[Tensor, ...]


class ContinuousSolver(ABC):
    """The base class of solvers that return the states at given times.

    ``dt`` is the step, or None if the solver chooses its steps. A time average is the integral of
    its function, solved as an additional component of the equation. Stages of a step with noise
    have other moments than the state, so there (``averages_ends``) the average is the mean over
    the ends of steps.
    """

    dt: float | None
    # Whether the method solves the equation of Ito, where it differs from that of Stratonovich.
    of_ito: bool = False
    averages_ends: ClassVar[bool] = False

    @abstractmethod
    def check(self, run: Run[State], backsolve: dict[str, Any] | None) -> None:
        """Refuse, before any work, a run that this solver or adjoint cannot take."""

    def on_path(
        self, path: BrownianPath, dynamics: Dynamics[State], state: State, t: float
    ) -> PathNoise | None:
        """Return the noise of a run on a Brownian path; None if the solver takes no noise."""
        return None

    @abstractmethod
    def integrate(self, field: VectorField[State], start: Fields, times: Tensor) -> Fields:
        """Solve, and return the fields at the times, along a new leading axis."""

    def solve(
        self, run: Run[State], report: RunReport, backsolve: dict[str, Any] | None
    ) -> tuple[State | None, Tensor | None, State]:
        """Return frames, record and final state."""
        record = run.bound_record
        average = record if isinstance(record, TimeAverage) else None
        times, saves = self.times(run)
        integrated = None if self.averages_ends else average
        field = VectorField(run, report, integrated, self.dt, backsolve)
        start = tuple(run.state)
        if integrated is not None:
            value = floating(integrated.function(run.state), run.state)
            start = (*start, torch.zeros_like(value))
        frames = self.integrate(field, start, times)
        # As with other solvers, numbers that torch.func.vmap hides are not looked at.
        if not any(map(has_rows, frames)) and not all(map(is_finite, frames)):
            for t, save in zip(run.times.tolist(), saves, strict=True):
                if not all(is_finite(x[save]) for x in frames):
                    shown = run.dynamics.shown_time(t)
                    raise FloatingPointError(
                        f"the solution is not finite at t = {shown:g}; shorten dt or tighten the "
                        "tolerances."
                    )
        kind, count = type(run.state), len(run.state)
        report.steps = None if self.dt is None else round(float(times[-1]))
        if record is None:
            # A copy, so that the final state does not change with the frames.
            return kind._make(frames), None, kind._make(x[-1].clone() for x in frames)
        frame = [kind._make(x[i] for x in frames[:count]) for i in range(len(times))]
        states = [frame[i] for i in saves]
        if integrated is not None:
            integral = frames[-1]
            first = int((times - times[0] - self._in_units(integrated.burn_in)).abs().argmin())
            span = float(run.times[-1] - run.times[0]) - integrated.burn_in
            return None, (integral[-1] - integral[first]) / span, states[-1]
        if average is not None:
            assert self.dt is not None
            first = averaged_steps(average.burn_in, self.dt, round(float(times[-1])))[0]
            ends = {round(t): x for t, x in zip(times.tolist(), frame, strict=True) if t >= first}
            return None, _mean(average, ends), states[-1]
        assert not isinstance(record, TimeAverage)
        values = [record(state) for state in states]
        for t, value in zip(run.times.tolist(), values, strict=True):
            check_shape(value, values[0].shape, f"at t = {run.dynamics.shown_time(t):g}")
        return None, torch.stack(values), states[-1]

    def times(self, run: Run[State]) -> tuple[Tensor, list[int]]:
        """Return the times to solve for, in steps if these are fixed, and which are save times."""
        times, record = run.times, run.record
        if self.dt is not None:
            times = torch.tensor(step_numbers(times, self.dt), dtype=torch.float64)
        if not isinstance(record, TimeAverage):
            return times, list(range(len(times)))
        record.refuse_stride(type(self).__name__)
        if self.averages_ends:
            assert self.dt is not None
            last = round(float(times[-1]))
            more = map(float, averaged_steps(record.burn_in, self.dt, last))
        else:
            more = [self._burnt_in(record.burn_in, times)]
        all_times = sorted({*times.tolist(), *more})
        number = {t: i for i, t in enumerate(all_times)}
        return torch.tensor(all_times, dtype=torch.float64), [number[t] for t in times.tolist()]

    def _burnt_in(self, burn_in: float, times: Tensor) -> float:
        """Return the time from which a function is integrated, in the units of the times."""
        begin = float(times[0]) + self._in_units(burn_in)
        if begin >= float(times[-1]):
            raise ValueError(f"burn_in = {burn_in:g} leaves nothing of the run to average.")
        if self.dt is None:
            return begin
        if abs(begin - round(begin)) > 1e-3:
            raise ValueError(
                f"burn_in = {burn_in:g} is not an integer number of steps of dt = {self.dt:g}."
            )
        return float(round(begin))

    def _in_units(self, time: float) -> float:
        return time / self.dt if self.dt is not None else time


class VectorField(Generic[State]):
    """The drift of a run on tuples of fields, and with it the function of a time average.

    Time is in units of the step ``unit``, if it has one. A continuous adjoint, of the options
    ``backsolve``, differentiates with respect to the values of the run, so autograd passes one
    accumulated gradient to the user's parameters, and their hooks run once.
    """

    def __init__(
        self,
        run: Run[State],
        report: RunReport,
        average: TimeAverage | None,
        unit: float | None,
        backsolve: dict[str, Any] | None,
    ) -> None:
        self.run, self.drift, self.kind = run, run.dynamics.drift, type(run.state)
        self.report, self.average, self.unit = report, average, unit
        self.backsolve, self.count = backsolve, len(run.state)

    @cached_property
    def trainable(self) -> tuple[Tensor, ...]:
        """The values of the parameters that require grad."""
        return tuple(self.run.reading.trainable(self.run.tensors).values())

    def at_leaves(self) -> VectorField[State]:
        """Return the same field of values that are leaves of their own graph."""
        run = self.run
        tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in run.tensors)
        run = run.with_dynamics(run.reading.bound(tensors), tensors)
        average = None if self.average is None else run.bound_record
        assert isinstance(average, TimeAverage | None)
        return VectorField(run, self.report, average, self.unit, self.backsolve)

    def state(self, fields: Fields) -> State:
        return self.kind._make(fields[: self.count])

    def time(self, t: Tensor) -> Any:
        return t if self.unit is None else self.run.times[0] + t * self.unit

    def __call__(self, t: Tensor, y: Fields | Tensor) -> Any:
        """Return the rates at a time, one tensor if y is one."""
        fields = (y,) if isinstance(y, Tensor) else y
        state = self.state(fields)
        rates: Any = self.drift(self.time(t), state)
        if self.average is not None:
            value = self.average.function(state)
            shown = self.run.dynamics.shown_time(self.time(t.detach()))
            check_shape(value, fields[-1].shape, f"at t = {shown:g}")
            rates = (*rates, value.to(fields[-1].dtype))
        self.report.energy_evaluations += 1
        if self.backsolve is None:
            count_backward(self.report, rates)
        elif torch.is_grad_enabled():
            # A continuous adjoint takes one product at each evaluation of its way back.
            self.report.energy_evaluations += 1
            known = [*fields, t, *self.trainable]
            what = "the drift, or the averaged function,"
            for rate in rates:
                refuse_unknown(rate, self.run.dynamics, known, what)
        rates = rates if self.unit is None else tuple(rate * self.unit for rate in rates)
        return rates[0] if isinstance(y, Tensor) else rates


def _mean(average: TimeAverage, ends: dict[int, Any]) -> Tensor:
    """Compute the mean of an averaged function over the states after steps."""
    values = {step: floating(average.function(state), state) for step, state in ends.items()}
    first = next(iter(values.values()))
    total = torch.zeros_like(first, dtype=sum_dtype(first))
    for step, value in values.items():
        check_shape(value, total.shape, f"after step {step}")
        total = total + value.to(total.dtype)
    return (total / len(ends)).to(first.dtype)
