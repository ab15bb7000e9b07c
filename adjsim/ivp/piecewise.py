"""A solution in the making, from reset to reset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import scipy.integrate
import torch
from scipy.integrate import OdeSolution, OdeSolver
from torch import Tensor

from adjsim.ivp.adjoint import AdjointSolver, Path, Piece
from adjsim.ivp.events import Event, Grazing
from adjsim.ivp.jumps import DiscontinuityCheck
from adjsim.ivp.paths import Backsolved, Checkpointed, StoredInterpolants, solution, watched
from adjsim.ivp.rhs import Array, RightHandSide, as_state, to_numpy
from adjsim.ivp.unchanged import RateCheck, StepRates

ADJOINTS = ("interpolate", "checkpoint", "backsolve")
# Of the time to be solved: resets that follow each other within it accumulate.
ZENO = 1e-10

Rates = Callable[[float, Array], Array]


@dataclass
class PiecewiseSolve:
    """Goes from a start to the end, with a call to SciPy for each piece, and connects what is found
    to what it depends on.

    Args:
        rhs: the right-hand side.
        method: SciPy's solver.
        kind: what is kept for the adjoint, one of :data:`ADJOINTS`.
        adjoint: how it is integrated.
        begin, end: times, as tensors of no axis.
        t_eval: times at which the solution is wanted.
        dense_output: whether interpolants are.
        events: those of the user.
        options: SciPy's, its tolerances among them.
        asked: whether a gradient is.
    """

    rhs: RightHandSide
    method: type[OdeSolver]
    kind: str
    adjoint: AdjointSolver
    begin: Tensor
    end: Tensor
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
        self.last = float(self.end.detach())
        self.span = abs(self.last - float(self.begin.detach()))
        self.sign = 1.0 if self.last >= float(self.begin.detach()) else -1.0

    def run(self, start: Tensor) -> Any:
        """From the start to the end; returns SciPy's last word."""
        begin, close, leaving = self.begin, 0, None
        for event in self.events:
            event.check_start(float(begin.detach()), to_numpy(start))
        while True:
            found, stopped = self._piece(begin, start, leaving)
            if stopped is None or stopped.reset is None or stopped.left == 0:
                return found
            before, begin, state = float(begin.detach()), stopped.times[-1], stopped.states[-1]
            now = float(begin.detach())
            span = self.span if np.isfinite(self.span) else abs(now - float(self.begin.detach()))
            close = close + 1 if abs(now - before) <= ZENO * span else 0
            if close > len(self.events):
                raise RuntimeError(
                    f"resets of event {stopped.number} accumulate at t = {now:.9g} (Zeno): there "
                    "is no solution beyond. "
                    "End before, or let the event end the solution (terminal)."
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
            leaving, aside = stopped.leaving(now, old, new, self.sign)
            start = start + torch.as_tensor(aside).to(start) if aside.any() else start
            for event in self.events:
                event.take_side(now, old, new, leaving, self.sign, event is stopped)

    def _piece(
        self, begin: Tensor, start: Tensor, leaving: Array | None
    ) -> tuple[Any, Event | None]:
        """From one start to the end or to the next reset, and the event that ended it. ``leaving``:
        the rate after a reset.
        """
        t0 = float(begin.detach())
        behind = None if leaving is None else leaving[:, None]
        # A start that is later by dt has come from one that lay back by f dt.
        later = self.rhs.with_time_derivative(start[:, None].detach(), begin.reshape(1), behind)[
            :, 0
        ]
        start = start - (later - start.detach())
        wants_gradient = self.wants_gradient or (torch.is_grad_enabled() and start.requires_grad)
        if wants_gradient and np.min(self.options["rtol"]) >= 1e-3:
            _warn_loose()
        numpy = (
            self.rhs.numpy
            if leaving is None
            else _starting(self.rhs.numpy, t0, to_numpy(start), leaving)
        )
        rate = (
            self.rhs.rate
            if leaving is None
            else _starting(self.rhs.rate, t0, to_numpy(start), leaving)
        )
        tolerances = self.options["rtol"], self.options["atol"]
        path = self._path(t0) if wants_gradient else None
        grazing = Grazing(self.events, *tolerances) if wants_gradient and self.events else None
        rates = StepRates(rate)
        rate_check, jumps = (
            RateCheck(rates),
            DiscontinuityCheck(self.rhs, rates, *tolerances, abs(self.last - t0)),
        )
        watchers: list[Any] = (
            [watcher for watcher in (path, grazing, rate_check, jumps) if callable(watcher)]
            if wants_gradient
            else []
        )
        found = self._call(
            numpy, t0, start, watched(self.method, watchers) if watchers else self.method
        )
        watchers.clear()
        stopped, end = self._count(found)
        piece = Piece(t0, end, self.sign, path, rate_check, self.adjoint)
        if self.dense_output:
            self.pieces.append(
                (piece, solution(found.sol.ts, found.sol.interpolants, self.method), start)
            )
        jumps.refuse(end, self.sign, stopped is not None)
        if grazing is not None:
            grazing.refuse(end, self.sign)
        self._keep(piece, found, start, begin, behind, grazing, stopped)
        return found, stopped

    def _call(self, rates: Rates, t0: float, start: Tensor, method: Any) -> Any:
        """SciPy's own, over one piece."""
        wanted = self._wanted(t0)
        found = scipy.integrate.solve_ivp(
            rates,
            (t0, self.last),
            to_numpy(start),
            method,
            None if wanted is None else wanted.detach().cpu().numpy(),
            self.dense_output,
            self.events or None,
            self.rhs.vectorized,
            **self.options,
        )
        for name in self.counts:
            self.counts[name] += getattr(found, name)
        if found.status < 0:
            raise RuntimeError(f"{self.method.__name__} failed: {found.message}")
        return found

    def _path(self, start: float) -> Path:
        if self.kind == "interpolate":
            return StoredInterpolants(self.method)
        if self.kind == "checkpoint":
            return Checkpointed(self.method)
        options = {
            "rtol": self.adjoint.rtol,
            "atol": self.options["atol"],
            "max_step": self.adjoint.max_step,
        }
        return Backsolved(start, self.method, self.rhs.rate, options)

    def _wanted(self, begin: float) -> Tensor | None:
        """Of the times that are wanted, those from here on. What is at the time of a reset was
        given before it.
        """
        if self.t_eval is None or not self.times:
            return self.t_eval
        return self.t_eval[self.sign * self.t_eval.detach() > self.sign * begin]

    def _count(self, found: Any) -> tuple[Event | None, float]:
        """The event that ended a piece, if one did, and its end."""
        stopped, end = None, self.last
        for event, times in zip(self.events, found.t_events or (), strict=True):
            if found.status == 1 and event.terminal is not None and len(times) >= event.terminal:
                stopped, end = event, float(times[-1])
            if event.left is not None:
                event.left -= len(times)
        return stopped, end

    def _keep(
        self,
        piece: Piece,
        found: Any,
        start: Tensor,
        begin: Tensor,
        behind: Array | None,
        grazing: Grazing | None,
        stopped: Event | None,
    ) -> None:
        """Connect the states of a piece and the times of its events to what they depend on."""
        events = list(zip(self.events, found.t_events or (), found.y_events or (), strict=True))
        happened = [
            (event, float(t), np.asarray(y))
            for event, ts, ys in events
            for t, y in zip(ts, ys, strict=True)
        ]
        saved = np.asarray(found.t, float)
        states = [
            np.asarray(found.y).reshape(len(start), len(saved)),
            *(y[:, None] for _, _, y in happened),
        ]
        every = np.concatenate([saved, [t for _, t, _ in happened]])
        connected = piece.states(every, np.concatenate(states, 1), start)
        arriving = None
        for i, (event, t, y) in enumerate(happened):
            at = connected[:, len(saved) + i]
            time = torch.tensor(t, dtype=torch.float64, device=at.device)
            if torch.is_grad_enabled():
                flow = cache(partial(event.arriving, t, y, self.sign))
                time = event.event_time(t, at, partial(_rate, grazing, event, t, y, flow))
                if time.requires_grad:
                    at = self.rhs.with_time_derivative(
                        at[:, None], time.reshape(1), flow()[:, None]
                    )[:, 0]
                    arriving = flow()[:, None] if event is stopped else arriving
            event.times.append(time)
            event.states.append(at)
        connected = connected[:, : len(saved)]
        wanted = self._wanted(piece.start)
        if wanted is not None:
            times = wanted[: len(saved)]
            connected = self.rhs.with_time_derivative(connected, times)
        else:
            # Times of steps in between are constants.
            last = (self.end if stopped is None else stopped.times[-1]).reshape(1)
            ends = [
                self.rhs.with_time_derivative(connected[:, :1], begin.reshape(1), behind),
                self.rhs.with_time_derivative(connected[:, -1:], last, arriving),
            ]
            times = torch.cat([begin.reshape(1), torch.as_tensor(saved[1:-1]).to(begin), last])
            connected = torch.cat([ends[0], connected[:, 1:-1], ends[1]], 1)
        self.times.append(times)
        self.states.append(connected)


@cache
def _warn_loose() -> None:
    warnings.warn(
        "a gradient at rtol = 1e-3 or looser is about as rough as the solution: a few per cent, "
        "or worse. Pass a smaller rtol, "
        "such as 1e-6.",
        stacklevel=5,
    )


def _rate(
    grazing: Grazing | None, event: Event, t: float, y: Array, flow: Callable[[], Array]
) -> float:
    """The rate of an event where it happens; without a watch for grazing, whatever it is."""
    return event.slopes(t, y, flow())[1] if grazing is None else grazing.rate(event, t, y, flow())


def _starting(rates: Rates, t0: float, start: Array, leaving: Array) -> Rates:
    """A function of time and state with the rate behind a reset at its start, where rounding would
    decide on which side of a jump it lies."""

    def found(t: float, y: Array) -> Array:
        return (
            leaving.reshape(y.shape)
            if t == t0 and np.array_equal(y.reshape(-1), start)
            else rates(t, y)
        )

    return found
