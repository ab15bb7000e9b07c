"""Save times between the steps of an equation, by cubic interpolation.

With the states y_n and y_{n+1} of the steps around a time, their rates f, and the share u of the
step of size h that has passed (Hermite's interpolation, of third order)::

    y(t) = (1 + 2u) (1-u)^2 y_n + u^2 (3-2u) y_{n+1} + h u (1-u) ((1-u) f_n - u f_{n+1})

It is differentiated by autograd, to the states of the run and to the parameters in the rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import State
from adjsim.core.trajectory import ON_GRID, Record, TimeAverage, Trajectory
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.base import SteppingSolver


@dataclass(frozen=True)
class Between:
    """Save times of which some are between steps: the times ``grid`` of steps around them.

    Attributes:
        frames: for each save time the frame of the step at it, or of the step before it.
        shares: for each the share of the next step that has passed; zero at a step.
    """

    grid: Tensor
    frames: tuple[int, ...]
    shares: tuple[float, ...]
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
    grid = sorted(needed)
    shares = [0.0 if at else x - n for x, n, at in zip(exact, steps, near, strict=True)]
    return Between(
        times[0] + dt * torch.tensor(grid, dtype=torch.float64),
        tuple(map(grid.index, steps)),
        tuple(shares),
        dt,
    )


def interpolated(
    run: Trajectory[State],
    dynamics: Dynamics[State],
    times: Tensor,
    between: Between,
    record: Record[State],
) -> Trajectory[State]:
    """Interpolate the frames of a run on the grid to the save times."""
    if isinstance(record, TimeAverage):
        raise ValueError(
            "a time average ends at a step, and a save time is between two: give ts at the steps "
            f"of dt = {between.dt:g}."
        )
    kind: Any = type(run.final)
    rates: dict[int, State] = {}

    def frame(k: int) -> State:
        return kind._make(getattr(run, name)[k] for name in kind._fields)

    def rate(k: int) -> State:
        if k not in rates:
            rates[k] = dynamics.drift(float(between.grid[k]), frame(k))
        return rates[k]

    def at(k: int, u: float) -> State:
        if u == 0:
            return frame(k)
        ends = zip(frame(k), frame(k + 1), rate(k), rate(k + 1), strict=True)
        a, b, c = (1 + 2 * u) * (1 - u) ** 2, u * u * (3 - 2 * u), between.dt * u * (1 - u)
        return kind._make(a * y + b * z + c * ((1 - u) * f - u * g) for y, z, f, g in ends)

    states = [at(*place) for place in zip(between.frames, between.shares, strict=True)]
    saved = None if record is None else torch.stack([record(x) for x in states])
    joined = None if record is not None else kind._make(map(torch.stack, zip(*states, strict=True)))
    return Trajectory(times, joined, saved, states[-1], run.stats)
