"""Solution of an initial value problem piece by piece, from reset to reset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolution, OdeSolver
from torch import Tensor

from adjsim.ivp.adjoint import Path, Piece
from adjsim.ivp.events import Event
from adjsim.ivp.forward_states import (
    Backsolved,
    Checkpointed,
    StoredInterpolants,
    observed,
    solution,
)
from adjsim.ivp.grazing import GrazingCheck
from adjsim.ivp.jumps import DiscontinuityCheck
from adjsim.ivp.march import March, check_times, march
from adjsim.ivp.rate_check import RateCheck, StepRates
from adjsim.ivp.rhs import Array, RightHandSide, as_state, to_numpy
from adjsim.ivp.sweep import AdjointSettings

ADJOINTS = ("interpolate", "checkpoint", "backsolve")
# Resets closer than this fraction of the time since the start count as accumulating.
ZENO = 1e-10

Rates = Callable[[float, Array], Array]


@dataclass
class PiecewiseSolve:
    """The solution over the time span, with one of SciPy's solvers per piece.

    The states and event times of each piece are connected to their inputs in autograd.

    Args:
        rhs: the right-hand side.
        method: SciPy's solver class.
        kind: the source of the forward states for the adjoint, one of :data:`ADJOINTS`.
        adjoint: the settings of the adjoint.
        begin, end: the time span, as tensors without axes.
        sign: 1 if the solution is integrated forward in time, -1 if backward.
        t_eval: times at which the solution is returned; None: those of the solver's steps.
        dense_output: whether the solution is also returned as a function of time.
        events: the user's events.
        options: SciPy's options, including its tolerances.
        wants_gradient: whether a gradient is wanted.
    """

    rhs: RightHandSide
    method: type[OdeSolver]
    kind: str
    adjoint: AdjointSettings
    begin: Tensor
    end: Tensor
    sign: float
    t_eval: Tensor | None
    dense_output: bool
    events: list[Event]
    options: dict[str, Any]
    wants_gradient: bool
    times: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    pieces: list[tuple[Piece, OdeSolution, Tensor]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"nfev": 0, "njev": 0, "nlu": 0})

    def __post_init__(self) -> None:
        self.final_time = float(self.end.detach())

    def run(self, start: Tensor) -> March:
        """Solve from the start to the end, and return the last piece."""
        if self.t_eval is not None:
            times = self.t_eval.detach().cpu().numpy()
            check_times(times, float(self.begin.detach()), self.final_time)
        begin, close, rate_after = self.begin, 0, None
        for event in self.events:
            event.check_start(float(begin.detach()), to_numpy(start))
        while True:
            found, stopped = self._piece(begin, start, rate_after)
            if stopped is None or stopped.reset is None or stopped.terminal_left == 0:
                return found
            before, begin, state = float(begin.detach()), stopped.times[-1], stopped.states[-1]
            now = float(begin.detach())
            elapsed = abs(now - float(self.begin.detach()))
            close = close + 1 if abs(now - before) <= ZENO * elapsed else 0
            if close > len(self.events):
                raise RuntimeError(
                    f"resets of event {stopped.number} accumulate at t = {now:.9g} (Zeno): there "
                    "is no solution beyond this time. End the time span before it, or let the "
                    "event end the solution (terminal)."
                )
            start = as_state(
                stopped.reset(begin.to(state.real.dtype), state.clone(), *self.rhs.args)
            ).to(state)
            if start.shape != state.shape:
                raise ValueError(
                    f"reset returned shape {tuple(start.shape)} for a state of shape "
                    f"{tuple(state.shape)}."
                )
            old, new = to_numpy(state), to_numpy(start)
            unit = found.roots[stopped.number][-1].unit
            rate_after, shift = stopped.rate_after(now, old, new, unit)
            start = start + torch.as_tensor(shift).to(start) if shift.any() else start
            for event in self.events:
                event.take_side(now, old, new, rate_after, event is stopped, unit)

    def _piece(
        self, begin: Tensor, start: Tensor, rate_after: Array | None
    ) -> tuple[March, Event | None]:
        """Solve from one start to the end or to the next reset.

        Args:
            begin, start: the start time and state.
            rate_after: the rate after a reset; None at the start of the time span.

        Returns:
            the piece, and the event that ended the piece.
        """
        t0 = float(begin.detach())
        start = self.rhs.with_start_time(start, begin, rate_after)
        wants_gradient = self.wants_gradient or (torch.is_grad_enabled() and start.requires_grad)
        if wants_gradient and np.min(self.options["rtol"]) >= 1e-3:
            _warn_loose()
        rate, batched_rate = self.rhs.rate, self.rhs.numpy
        if rate_after is not None:
            rate, batched_rate = (
                _with_rate_at_start(rates, t0, to_numpy(start), rate_after)
                for rates in (rate, batched_rate)
            )
        tolerances, rates = (self.options["rtol"], self.options["atol"]), StepRates(rate)
        rate_check = RateCheck(rates)
        jumps = DiscontinuityCheck(self.rhs, rates, *tolerances, abs(self.final_time - t0))
        path = self._path(t0, start) if wants_gradient else None
        grazing = GrazingCheck(self.events, *tolerances)
        observers: list[Any] = [x for x in (path, grazing, rate_check, jumps) if callable(x)]
        method = observed(self.method, observers) if wants_gradient else self.method
        found = self._call(batched_rate, t0, start, method)
        observers.clear()
        stopped, end = self._stop(found)
        piece = Piece(t0, end, self.sign, path, rate_check, self.adjoint)
        if self.dense_output:
            self.pieces.append(
                (piece, solution(found.ends, found.interpolants, self.method), start)
            )
        jumps.refuse(end, self.sign, stopped is not None)
        grazing.refuse(end, self.sign)
        self._connect(piece, found, start, begin, rate_after, grazing, stopped)
        return found, stopped

    def _call(self, rates: Rates, t0: float, start: Tensor, method: Any) -> March:
        """Take the steps of one piece."""
        eval_times = self._eval_times(t0)
        solver = method(
            rates,
            t0,
            to_numpy(start),
            self.final_time,
            vectorized=self.rhs.vectorized,
            **self.options,
        )
        times = None if eval_times is None else eval_times.detach().cpu().numpy()
        found = march(solver, self.events, times, self.dense_output)
        for name in self.counts:
            self.counts[name] += getattr(solver, name)
        if found.status < 0:
            raise RuntimeError(f"{self.method.__name__} failed: {found.message}")
        return found

    def _path(self, start: float, state: Tensor) -> Path:
        if self.kind == "interpolate":
            return StoredInterpolants(self.method)
        if self.kind == "checkpoint":
            return Checkpointed(self.method)
        options = {
            "rtol": self.adjoint.rtol,
            "atol": self.options["atol"],
            "max_step": self.adjoint.max_step,
        }
        return Backsolved(start, to_numpy(state), self.method, self.rhs.rate, options)

    def _eval_times(self, begin: float) -> Tensor | None:
        """Return the evaluation times from the start of a piece on.

        The state at the time of a reset belongs to the piece before.
        """
        if self.t_eval is None or not self.times:
            return self.t_eval
        return self.t_eval[self.sign * self.t_eval.detach() > self.sign * begin]

    def _stop(self, found: March) -> tuple[Event | None, float]:
        """Return the event that ended a piece, if any, and the end time."""
        stopped, end = None, self.final_time
        for event, roots in zip(self.events, found.roots, strict=True):
            if found.status == 1 and event.terminal is not None and len(roots) >= event.terminal:
                stopped, end = event, roots[-1].t
            if event.terminal_left is not None:
                event.terminal_left -= len(roots)
        return stopped, end

    def _connect(
        self,
        piece: Piece,
        found: March,
        start: Tensor,
        begin: Tensor,
        rate_after: Array | None,
        grazing: GrazingCheck,
        stopped: Event | None,
    ) -> None:
        """Connect the states and event times of a piece to their inputs in autograd."""
        happened = [
            (event, root)
            for event, roots in zip(self.events, found.roots, strict=True)
            for root in roots
        ]
        saved = found.t
        every = np.concatenate([saved, [root.t for _, root in happened]])
        states = [found.y, *(root.y[:, None] for _, root in happened)]
        connected = piece.states(every, np.concatenate(states, 1), start)
        arriving = None
        for i, (event, root) in enumerate(happened):
            at = connected[:, len(saved) + i]
            time = torch.tensor(root.t, dtype=torch.float64, device=at.device)
            if torch.is_grad_enabled():
                flow = cache(partial(event.rate_before, *root[:2], root.unit))
                rate = partial(grazing.rate, event, *root[:2], flow)
                time = event.event_time(root.t, at, rate)
                if time.requires_grad:
                    at = self.rhs.with_time_derivative(at, time, flow())
                    arriving = flow() if event is stopped else arriving
            event.times.append(time)
            event.states.append(at)
        connected = connected[:, : len(saved)]
        eval_times = self._eval_times(piece.start)
        if eval_times is not None:
            times = eval_times[: len(saved)]
            connected = self.rhs.with_time_derivative(connected, times)
        else:
            # The times of the solver's intermediate steps are constants.
            last = (self.end if stopped is None else stopped.times[-1])[None]
            first = self.rhs.with_time_derivative(connected[:, 0], begin, rate_after)
            final = self.rhs.with_time_derivative(connected[:, -1], last[0], arriving)
            times = torch.cat([begin[None], torch.as_tensor(saved[1:-1]).to(begin), last])
            connected = torch.cat([first[:, None], connected[:, 1:-1], final[:, None]], 1)
        self.times.append(times)
        self.states.append(connected)


@cache
def _warn_loose() -> None:
    warnings.warn(
        "a gradient at rtol = 1e-3 or looser has errors like the solution: a few per cent, or "
        "more. Pass a smaller rtol, such as 1e-6.",
        stacklevel=5,
    )


def _with_rate_at_start(rates: Rates, t0: float, start: Array, rate_after: Array) -> Rates:
    """Make a right-hand side that returns a given rate at the start of a piece.

    After a reset, the start may lie on a jump, where rounding would decide between the two sides.
    """

    def found(t: float, y: Array) -> Array:
        return (
            rate_after.reshape(y.shape)
            if t == t0 and np.array_equal(y.reshape(-1), start)
            else rates(t, y)
        )

    return found
