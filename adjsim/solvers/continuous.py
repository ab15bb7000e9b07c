"""The base of solvers from other libraries, which take the summed drift and diffusion.

These libraries have both gradients: backpropagation through the solve, and the continuous adjoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic

import torch
from torch import Tensor

from adjsim._params import refuse_captured
from adjsim._state import State, stack
from adjsim._trajectory import TimeAverage, step_numbers
from adjsim.dynamics.forces import counted_backward
from adjsim.solvers.base import Problem


class ContinuousSolver(ABC):
    """The base class of solvers that return the states at given times.

    ``dt`` is the step, or None if the solver chooses its steps. A time average is the integral of
    its function, solved as an additional component of the equation.
    """

    dt: float | None

    @abstractmethod
    def check(self, problem: Problem[State], backsolve: dict[str, Any] | None) -> None:
        """Refuse, before any work, a problem that this solver or adjoint cannot take."""

    @abstractmethod
    def integrate(
        self,
        field: VectorField[State],
        start: tuple[Tensor, ...],
        times: Tensor,
        backsolve: dict[str, Any] | None,
    ) -> tuple[Tensor, ...]:
        """Solve, and return the fields at the times, along a new leading axis.

        ``backsolve`` has the options of the continuous adjoint, or is None.
        """

    def solve(
        self, problem: Problem[State], backsolve: dict[str, Any] | None
    ) -> tuple[State | None, Tensor | None, State]:
        """Return frames, record and final state."""
        record = problem.bound_record
        average = record if isinstance(record, TimeAverage) else None
        times, saves = self.times(problem)
        field = VectorField(problem, average, self.dt, backsolve is not None)
        start = tuple(problem.state)
        if average is not None:
            value = average.function(problem.state)
            dtype = (
                value.dtype
                if value.is_floating_point() or value.is_complex()
                else problem.state[0].dtype
            )
            start = (*start, torch.zeros_like(value, dtype=dtype))
        frames = self.integrate(field, start, times, backsolve)
        _check_finite(frames, problem, saves)
        kind, count = type(problem.state), len(problem.state)
        states = [kind._make(x[i] for x in frames[:count]) for i in saves]
        problem.stats["steps"] = None if self.dt is None else round(float(times[-1]))
        if average is not None:
            quadrature = frames[-1]
            first = int((times - times[0] - self._in_units(average.burn_in)).abs().argmin())
            span = float(problem.times[-1] - problem.times[0]) - average.burn_in
            return None, (quadrature[-1] - quadrature[first]) / span, states[-1]
        if record is not None and not isinstance(record, TimeAverage):
            return None, torch.stack([record(state) for state in states]), states[-1]
        return stack(states), None, states[-1]

    def times(self, problem: Problem[State]) -> tuple[Tensor, list[int]]:
        """Return the times to solve for, and which of them are save times.

        Where the step is fixed, times are in steps from the start.
        """
        times, record = problem.times, problem.record
        if self.dt is not None:
            times = torch.tensor(step_numbers(times, self.dt), dtype=torch.float64)
        saves = list(range(len(times)))
        if isinstance(record, TimeAverage) and record.burn_in > 0:
            begin = float(times[0]) + self._in_units(record.burn_in)
            if begin >= float(times[-1]):
                raise ValueError(
                    f"burn_in = {record.burn_in:g} leaves nothing of the run to average."
                )
            if self.dt is not None:
                if abs(begin - round(begin)) > 1e-3:
                    raise ValueError(
                        f"burn_in = {record.burn_in:g} is not an integer number of steps of dt = "
                        f"{self.dt:g}."
                    )
                begin = float(round(begin))
            all_times = sorted({*times.tolist(), begin})
            saves = [all_times.index(t) for t in times.tolist()]
            times = torch.tensor(all_times, dtype=torch.float64)
        return times, saves

    def _in_units(self, time: float) -> float:
        return time / self.dt if self.dt is not None else time


class VectorField(torch.nn.Module, Generic[State]):
    """The drift on tuples of fields, which counts passes over the energy.

    Time is in units of the step if the step is fixed. A continuous adjoint evaluates the drift
    again in the backward solve, and differentiates it with respect to its parameters at every
    evaluation. Those are the values of the run. So autograd passes one accumulated gradient to the
    user's parameters, and their hooks run once.

    Args:
        problem: the problem with the drift.
        average: a time average, which is integrated with the drift.
        unit: the step, if time is counted in steps.
        checked: whether the drift is refused if it depends on tensors that are not registered.
    """

    def __init__(
        self,
        problem: Problem[State],
        average: TimeAverage | None,
        unit: float | None,
        checked: bool,
    ) -> None:
        super().__init__()
        # In a list, so that the module does not register the dynamics.
        self._problem, self.average, self.unit = [problem], average, unit
        self.checked = checked

    @property
    def problem(self) -> Problem[State]:
        return self._problem[0]

    @property
    def parameters_of_adjoint(self) -> tuple[Tensor, ...]:
        """The values of the parameters that require grad."""
        return tuple(self.problem.reading.trainable(self.problem.tensors).values())

    def state(self, fields: tuple[Tensor, ...]) -> State:
        return type(self.problem.state)._make(fields[: len(self.problem.state)])

    def time(self, t: Tensor) -> Any:
        return t if self.unit is None else self.problem.times[0] + t * self.unit

    def diffusion(self, t: Tensor, state: State) -> State:
        """Compute the amplitudes of the noise."""
        return self.problem.dynamics.diffusion(self.time(t), state)

    def forward(self, t: Tensor, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state, stats = self.state(fields), self.problem.stats
        rates: tuple[Tensor, ...] = tuple(self.problem.dynamics.drift(self.time(t), state))
        if self.average is not None:
            rates = (*rates, self.average.function(state).to(fields[-1].dtype))
        if self.checked and torch.is_grad_enabled():
            known = [*fields, t, *self.parameters_of_adjoint]
            for rate in rates:
                refuse_captured(
                    rate, self.problem.dynamics, known, "the drift, or the averaged function,"
                )
        stats["energy_evaluations"] += 1
        tracked = next((rate for rate in rates if rate.requires_grad), None)
        if tracked is not None:
            # The vector-Jacobian product, taken when the cotangent arrives, is one more pass.
            tracked.register_hook(counted_backward(stats))
        return rates if self.unit is None else tuple(rate * self.unit for rate in rates)


def refuse_without_equation(solver: ContinuousSolver, problem: Problem[State]) -> None:
    """Refuse dynamics with a term that is a flow over a step and not a differential equation."""
    for letter, term in problem.dynamics.terms.items():
        if term.no_equation:
            raise TypeError(
                f"{type(solver).__name__} cannot take term {letter!r} of "
                f"{type(problem.dynamics).__name__}: {term.no_equation}. Use a splitting."
            )


def asks_gradient(problem: Problem[State]) -> bool:
    """Return whether a gradient of this run may be needed."""
    return torch.is_grad_enabled() and (
        bool(problem.reading.wanted) or any(x.requires_grad for x in problem.state)
    )


def _check_finite(frames: tuple[Tensor, ...], problem: Problem[State], saves: list[int]) -> None:
    for i, save in enumerate(saves):
        if not all(bool(torch.isfinite(x[save].detach()).all()) for x in frames):
            raise FloatingPointError(
                f"the solution is not finite at t = {float(problem.times[i]):g}; shorten dt or "
                "tighten the tolerances."
            )
