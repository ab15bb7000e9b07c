"""ODE solvers, by torchdiffeq: the summed drift of all terms as one vector field."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torchdiffeq import odeint, odeint_adjoint

from adjsim._state import State, stack
from adjsim._trajectory import TimeAverage, grid
from adjsim.solvers.base import ContinuousSolver, Problem, check_dt

ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun")
ONE_STEP = ("euler", "midpoint", "heun2", "heun3", "rk4")
MULTISTEP = ("explicit_adams", "implicit_adams", "fixed_adams")
SCIPY = ("scipy_solver",)


class ODESolver(ContinuousSolver):
    """Solve ``dy/dt = drift(t, y)`` with a method of torchdiffeq, whole states in, whole states out.

    Adaptive methods (dopri8, dopri5, bosh3, fehlberg2, adaptive_heun, and scipy_solver, which is SciPy's LSODA) choose
    their steps from the tolerances and interpolate at save times. Fixed-step methods (euler, midpoint, heun2, heun3, rk4,
    explicit_adams, implicit_adams, fixed_adams) take steps of dt, counted in whole steps from ts[0], and save times must
    lie on them. Either way the path does not depend on the save times. Interpolation is of fourth order, coarser than the
    steps of dopri8 at tight tolerances: prefer dopri5 there. explicit_adams is held to order 4.

    For long molecular runs prefer a splitting: it conserves what the physics conserves, costs one force a step, and its
    gradient is exact in constant memory.

    Args:
        method: a name of torchdiffeq.
        rtol, atol: error tolerances of adaptive methods (and of the corrector of implicit_adams).
        dt: the step of fixed-step methods, time; they need it, adaptive ones refuse it.
    """

    def __init__(self, method: str = "dopri5", *, rtol: float = 1e-7, atol: float = 1e-9, dt: float | None = None) -> None:
        known = ADAPTIVE + SCIPY + ONE_STEP + MULTISTEP
        if method not in known:
            raise ValueError(f"unknown ODE method {method!r}; torchdiffeq has {', '.join(known)}.")
        if not (rtol > 0 and atol > 0):
            raise ValueError(f"rtol and atol must be positive; got {rtol} and {atol}.")
        self.fixed_step = method in ONE_STEP + MULTISTEP
        if self.fixed_step and dt is None:
            raise ValueError(f"{method!r} takes fixed steps: give dt.")
        if not self.fixed_step and dt is not None:
            raise ValueError(f"{method!r} chooses its own steps: leave dt out and set rtol and atol.")
        self.method, self.rtol, self.atol = method, rtol, atol
        self.dt = None if dt is None else check_dt(dt)

    def solve(self, problem: Problem, backsolve: dict[str, Any] | None) -> tuple[State | None, Tensor | None, State]:
        if backsolve is None and self.method in SCIPY and torch.is_grad_enabled() and _asks_gradient(problem):
            raise TypeError("scipy_solver cannot be backpropagated through: use BacksolveAdjoint(), or another method.")
        average = problem.record if isinstance(problem.record, TimeAverage) else None
        times, saves = self._times(problem, average)
        field = _VectorField(problem, average, self.dt if self.fixed_step else None)
        start = tuple(problem.state)
        if average is not None:
            start = (*start, torch.zeros_like(average.function(problem.state)))
        frames = self._integrate(field, start, times, problem, backsolve)
        _check_finite(frames, problem, saves)
        kind = type(problem.state)
        count = len(problem.state)
        states = [kind(*(x[i] for x in frames[:count])) for i in saves]
        problem.stats["steps"] = round(float(times[-1])) if self.fixed_step else None
        if average is not None:
            quadrature, first = frames[-1], len(times) - 1
            if average.burn_in > 0:
                first = int((times - times[0] - self._in_units(average.burn_in)).abs().argmin())
                total = quadrature[-1] - quadrature[first]
            else:
                total = quadrature[-1]
            span = float(problem.times[-1] - problem.times[0]) - average.burn_in
            return None, total / span, states[-1]
        record = problem.record
        if record is not None and not isinstance(record, TimeAverage):
            return None, torch.stack([record(state) for state in states]), states[-1]
        return stack(states), None, states[-1]

    def _integrate(
        self,
        field: _VectorField,
        start: tuple[Tensor, ...],
        times: Tensor,
        problem: Problem,
        backsolve: dict[str, Any] | None,
    ) -> tuple[Tensor, ...]:
        """torchdiffeq's solution at the times, time leading."""
        options: dict[str, Any] = {"step_size": 1.0} if self.fixed_step else {}
        if self.method == "explicit_adams":
            # Its own choice goes up to order 12, whose region of stability is too small to be of use.
            options["max_order"] = 4
        if self.method not in SCIPY:
            options["norm"] = _state_norm(len(problem.state))
        common: dict[str, Any] = {"rtol": self.rtol, "atol": self.atol, "method": self.method}
        times = times.to(start[0].device)
        try:
            if backsolve is not None:
                return cast(
                    "tuple[Tensor, ...]",
                    odeint_adjoint(
                        field,
                        start,
                        times,
                        options=options,
                        adjoint_params=tuple(problem.parameters.values()),
                        adjoint_rtol=backsolve["rtol"],
                        adjoint_atol=backsolve["atol"],
                        **common,
                    ),
                )
            if self.method in ONE_STEP:
                # torchdiffeq writes frames into one tensor, whose backward is quadratic in their number. One-step methods
                # remember nothing, so solving from save to save gives the same path.
                frames = [start]
                for pair in pairwise(times):
                    ends = odeint(field, frames[-1], torch.stack(pair), options=options, **common)
                    frames.append(tuple(x[1] for x in ends))
                return tuple(torch.stack(field_frames) for field_frames in zip(*frames, strict=True))
            return cast("tuple[Tensor, ...]", odeint(field, start, times, options=options, **common))
        except AssertionError as failure:
            raise FloatingPointError(
                f"{self.method} gave up ({failure}): the solution leaves the finite numbers or is stiff. "
                "Loosen the tolerances, shorten the run, or use a splitting."
            ) from failure

    def _in_units(self, time: float) -> float:
        return time / self.dt if self.dt is not None else time

    def _times(self, problem: Problem, average: TimeAverage | None) -> tuple[Tensor, list[int]]:
        """The times to solve for, in steps from the start where the step is fixed, and which of them are save times."""
        times = problem.times
        if self.dt is not None:
            times = torch.tensor(grid(times, self.dt), dtype=torch.float64)
        saves = list(range(len(times)))
        if average is not None and average.burn_in > 0:
            begin = float(times[0]) + self._in_units(average.burn_in)
            if begin >= float(times[-1]):
                raise ValueError(f"burn_in = {average.burn_in:g} leaves nothing of the run to average.")
            if self.dt is not None:
                if abs(begin - round(begin)) > 1e-3:
                    raise ValueError(f"burn_in = {average.burn_in:g} is not a whole number of steps of dt = {self.dt:g}.")
                begin = float(round(begin))
            all_times = sorted({*times.tolist(), begin})
            saves = [all_times.index(t) for t in times.tolist()]
            times = torch.tensor(all_times, dtype=torch.float64)
        return times, saves

    def __repr__(self) -> str:
        settings = f"dt={self.dt:g}" if self.dt is not None else f"rtol={self.rtol:g}, atol={self.atol:g}"
        return f"ODESolver({self.method!r}, {settings})"


class _VectorField(torch.nn.Module):
    """The drift as torchdiffeq wants it, on tuples, in units of the step if that is fixed. Counts passes over the energy."""

    def __init__(self, problem: Problem, average: TimeAverage | None, unit: float | None) -> None:
        super().__init__()
        self._problem, self._average, self._unit = [problem], average, unit

    def forward(self, t: Tensor, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        problem = self._problem[0]
        count = len(problem.state)
        state = type(problem.state)(*fields[:count])
        time = t if self._unit is None else problem.times[0] + t * self._unit
        rates: tuple[Tensor, ...] = tuple(problem.dynamics.drift(time, state))
        if self._average is not None:
            rates = (*rates, self._average.function(state))
        problem.stats["energy_evaluations"] += 1
        tracked = next((rate for rate in rates if rate.requires_grad), None)
        if tracked is not None:
            # The product with the Jacobian is one more pass, made when the cotangent arrives.
            tracked.register_hook(lambda _: _count(problem.stats))
        return rates if self._unit is None else tuple(rate * self._unit for rate in rates)


def _count(stats: dict[str, Any]) -> None:
    stats["energy_evaluations"] += 1


def _state_norm(count: int) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """The largest root mean square over the fields of the state: a quadrature carried along does not steer the steps."""

    def norm(fields: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([x.abs().pow(2).mean().sqrt() for x in fields[:count]]).amax()

    return norm


def _asks_gradient(problem: Problem) -> bool:
    return bool(problem.parameters) or any(x.requires_grad for x in problem.state)


def _check_finite(frames: tuple[Tensor, ...], problem: Problem, saves: list[int]) -> None:
    for i, save in enumerate(saves):
        if not all(bool(torch.isfinite(x[save].detach()).all()) for x in frames):
            raise FloatingPointError(
                f"the solution is not finite at t = {float(problem.times[i]):g}; shorten dt or tighten the tolerances."
            )
