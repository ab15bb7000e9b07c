"""States of an equation between its steps, by cubic interpolation.

With the states y_n and y_{n+1} of the steps around a time, their rates f, and the share u of the
step of size h that has passed (Hermite's interpolation, of third order)::

    y(t) = (1 + 2u) (1-u)^2 y_n + u^2 (3-2u) y_{n+1} + h u (1-u) ((1-u) f_n - u f_{n+1})

Its error is at most h^4 / 384 times the largest fourth derivative of y, beside that of the steps.
It is differentiated by autograd, to the states of the run, to the parameters in the rates and to
the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import State, in_transform
from adjsim.core.trajectory import ON_GRID, Record, TimeAverage, Trajectory
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.run import Run


@dataclass(frozen=True)
class Between:
    """Save times of which some are between steps: the times ``grid`` of steps around them.

    Attributes:
        rounded: the save times, of which those at a step are the time of this step.
    """

    grid: Tensor
    rounded: Tensor
    dt: float


def between_steps(dynamics: Dynamics[State], times: Tensor, solver: Any) -> Between | None:
    """Return the steps around the save times; None if a run saves at its steps alone."""
    if not dynamics.interpolates or not isinstance(solver, SteppingSolver) or not solver.one_size:
        return None
    dt = solver.dt
    exact = ((times - times[0]) / dt).tolist()
    near = [abs(x - round(x)) <= ON_GRID for x in exact]
    if all(near):
        return None
    steps = [round(x) if at else math.floor(x) for x, at in zip(exact, near, strict=True)]
    needed = {*steps, *(n + 1 for n, at in zip(steps, near, strict=True) if not at)}
    number = torch.tensor(sorted(needed), dtype=torch.float64)
    at_step = times[0] + dt * torch.tensor(steps, dtype=torch.float64)
    return Between(times[0] + dt * number, torch.where(torch.tensor(near), at_step, times), dt)


def interpolated(
    run: Trajectory[State], times: Tensor, between: Between, record: Record[State]
) -> Trajectory[State]:
    """Interpolate the frames of a run on the grid to the save times."""
    if isinstance(record, TimeAverage):
        raise ValueError(
            "a time average ends at a step, and a save time is between two: give ts at the steps "
            f"of dt = {between.dt:g}."
        )
    states = run.at(between.rounded)
    frames = [type(states)._make(x) for x in zip(*states, strict=True)]
    saved = None if record is None else torch.stack([record(x) for x in frames])
    if record is not None:
        return Trajectory(times, None, saved, frames[-1], run.stats)
    return Trajectory(times, states, None, frames[-1], run.stats, extension=run._extension)


@dataclass(frozen=True, eq=False)
class Extension:
    """The states of a run as a function of time, from its frames at the ``times``.

    Steps have the size ``dt``, or, if they vary, the ends ``step_times``. In a run that goes back
    ``sign`` is -1.
    ``refusal`` says why there are no states between frames, ``remedy`` what to do then.
    """

    times: Tensor
    states: Any
    reading: Any = None
    values: tuple[Tensor, ...] = ()
    dt: float = math.nan
    step_times: Tensor | None = None
    sign: float = 1.0
    refusal: str | None = None
    remedy: str = "put t among ts"

    @classmethod
    def of(cls, run: Run[Any], states: Any, step_times: Tensor | None) -> Extension:
        """Make the extension of the states of a run."""
        solver, kind = run.solver, type(run.dynamics).__name__
        if not run.dynamics.interpolates:
            why = f"a state of {kind} between steps has no meaning"
            return cls(run.times, states, refusal=why)
        if not isinstance(solver, SteppingSolver):
            why = f"{type(solver).__name__} does not say where its steps end"
            remedy = f"{cls.remedy}, or use solve_ivp(dense_output=True)"
            return cls(run.times, states, refusal=why, remedy=remedy)
        dt = solver.dt if solver.one_size else math.nan
        return cls(run.times, states, run.reading, run.tensors, dt, step_times)

    def __call__(self, t: Tensor) -> Any:
        """Return the state at times of any shape, which leads the axes of its fields."""
        times = self.sign * t.reshape(-1)
        at = times.detach()
        self._refuse_outside(at)
        # The frame at each time or before it, and the share of the way to the next.
        first = (torch.searchsorted(self.times, at, right=True) - 1).clamp(max=len(self.times) - 2)
        begin, length = self.times[first], self.times.diff()[first]
        share = (times - begin) / length
        inside = (share.detach() > 0) & (share.detach() < 1)
        if times.requires_grad and self.reading is None:
            raise ValueError(f"there is no gradient to t, since {self.refusal}: detach t.")
        if inside.any():
            self._refuse_far(at, first, inside)
        # At a frame the rates have no weight, but for the derivative by the time.
        needed = inside | times.requires_grad
        used = sorted({*first[needed].tolist(), *(first[needed] + 1).tolist()})
        row = torch.zeros(len(self.times), dtype=torch.int64)
        row[used] = torch.arange(len(used))
        found = []
        for states, rates in zip(self.states, self._rates(used), strict=True):
            place = first.to(states.device)
            y, z = states[place], states[place + 1]
            u, h = (_along(x, y) for x in (share, length))
            value = (1 + 2 * u) * (1 - u) ** 2 * y + u**2 * (3 - 2 * u) * z
            if used:
                f, g = (rates[row[first + k].to(rates.device)] for k in (0, 1))
                change = h * u * (1 - u) * ((1 - u) * f - u * g)
                value = value + torch.where(_along(needed, y, torch.bool), change, 0.0)
            found.append(value.reshape(*t.shape, *states.shape[1:]))
        return type(self.states)._make(found)

    def _rates(self, frames: list[int]) -> list[Tensor]:
        """Return the rates at some frames, each field ``(frames, ...)``, as the run read them."""
        if not frames:
            return [x[:0] for x in self.states]
        values, kind = self.values, type(self.states)
        if not in_transform() and torch.is_grad_enabled():
            # A parameter may have changed since. Its gradient goes to the same tensor.
            values = tuple(
                value.detach() + (x - x.detach()) if x.requires_grad else value
                for value, x in zip(values, self.reading.tensors, strict=True)
            )
        dynamics = self.reading.bound(values)
        found = [
            dynamics.drift(t, kind._make(x[k] for x in self.states))
            for t, k in zip(self.times[frames].tolist(), frames, strict=True)
        ]
        return [torch.stack(field) for field in zip(*found, strict=True)]

    def _refuse_outside(self, at: Tensor) -> None:
        outside = ~((at >= self.times[0]) & (at <= self.times[-1]))
        if outside.any():
            ends = ", ".join(f"{self.sign * float(x):g}" for x in (self.times[0], self.times[-1]))
            raise ValueError(
                f"t must lie in the time span [{ends}] of the run; got "
                f"{self.sign * float(at[outside][0]):g}."
            )

    def _refuse_far(self, at: Tensor, first: Tensor, inside: Tensor) -> None:
        """Refuse times between frames that are not those of one step."""
        why, remedy, wrong = self.refusal, self.remedy, inside
        if why is None:
            if self.step_times is None:
                steps, size = (self.times.diff() / self.dt).round(), f"dt = {self.dt:g}"
            else:
                ends = self.times - ON_GRID * self.times.diff().min()
                steps = torch.searchsorted(self.step_times, ends).diff()
                size = 'stats["step_times"]'
            wrong = inside & (steps[first] > 1)
            why = "more than one step lies between them"
            remedy += f", or save at every step of {size}"
        if wrong.any():
            k = int(first[wrong][0])
            low, high = (self.sign * float(x) for x in (self.times[k], self.times[k + 1]))
            raise ValueError(
                f"t = {self.sign * float(at[wrong][0]):.12g} is not a save time of this run; the "
                f"nearest are {low:.12g} and {high:.12g}, and {why}: {remedy}."
            )


def _along(x: Tensor, frames: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Give values ``(times,)`` the axes of frames, and their device and dtype."""
    kind = frames.real.dtype if dtype is None else dtype
    return x.to(frames.device, kind).reshape(-1, *[1] * (frames.ndim - 1))
