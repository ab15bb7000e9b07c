"""A solution in the making, from reset to reset."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import scipy.integrate
import torch
from scipy.integrate import OdeSolution, OdeSolver
from torch import Tensor

from adjsim.ivp.adjoint import Adjoint, Path, Piece
from adjsim.ivp.events import Event, Grazing
from adjsim.ivp.field import Field, as_state, to_numpy
from adjsim.ivp.paths import Backsolved, Checkpointed, Dense, solution, watched

ADJOINTS = ("interpolate", "checkpoint", "backsolve")
# Of the time to be solved: resets that follow each other within it accumulate.
ZENO = 1e-10


@dataclass
class Way:
    """Goes from a start to the end, with a call to SciPy for each piece, and connects what is found to what it depends on.

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

    rhs: Field
    method: type[OdeSolver]
    kind: str
    adjoint: Adjoint
    begin: Tensor
    end: Tensor
    t_eval: Tensor | None
    dense_output: bool
    events: list[Event]
    options: dict[str, Any]
    asked: bool
    times: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    pieces: list[tuple[Piece, OdeSolution, Tensor]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"nfev": 0, "njev": 0, "nlu": 0})

    def __post_init__(self) -> None:
        self.last = float(self.end.detach())
        self.span = abs(self.last - float(self.begin.detach()))
        self.sign = 1.0 if self.last >= float(self.begin.detach()) else -1.0

    def go(self, start: Tensor) -> Any:
        """From the start to the end; returns SciPy's last word."""
        begin, close = self.begin, 0
        for event in self.events:
            event.check_start(float(begin.detach()), to_numpy(start))
        while True:
            found, stopped = self._piece(begin, start)
            if stopped is None or stopped.reset is None or stopped.left == 0:
                return found
            before, begin, state = float(begin.detach()), stopped.times[-1], stopped.states[-1]
            now = float(begin.detach())
            close = close + 1 if abs(now - before) <= ZENO * self.span else 0
            if close > len(self.events):
                raise RuntimeError(
                    f"resets of event {stopped.number} accumulate at t = {now:.9g} (Zeno): there is no solution beyond. "
                    "End before, or let the event end the solution (terminal)."
                )
            start = as_state(stopped.reset(begin.to(state.real.dtype), state.clone(), *self.rhs.args)).to(state)
            if start.shape != state.shape:
                raise ValueError(f"reset returned shape {tuple(start.shape)} for a state of shape {tuple(state.shape)}.")
            for event in self.events:
                event.take_side(now, to_numpy(state), to_numpy(start), self.sign, event is stopped)

    def _piece(self, begin: Tensor, start: Tensor) -> tuple[Any, Event | None]:
        """From one start to the end or to the next reset, and the event that ended it."""
        t0 = float(begin.detach())
        # A start that is later by dt has come from one that lay back by f dt.
        start = start - (self.rhs.moved(start[:, None].detach(), begin.reshape(1))[:, 0] - start.detach())
        asked = self.asked or (torch.is_grad_enabled() and start.requires_grad)
        if asked and np.min(self.options["rtol"]) >= 1e-3:
            _warn_loose()
        path = self._path(t0) if asked else None
        grazing = Grazing(self.events, self.options["rtol"], self.options["atol"]) if asked and self.events else None
        watchers: list[Any] = [watcher for watcher in (path, grazing) if callable(watcher)]
        method: Any = watched(self.method, watchers) if watchers else self.method
        wanted = self._wanted(t0)
        found = scipy.integrate.solve_ivp(
            self.rhs.numpy,
            (t0, self.last),
            to_numpy(start),
            method,
            None if wanted is None else wanted.detach().cpu().numpy(),
            self.dense_output,
            self.events or None,
            self.rhs.vectorized,
            **self.options,
        )
        watchers.clear()
        for name in self.counts:
            self.counts[name] += getattr(found, name)
        if found.status < 0:
            raise RuntimeError(f"{self.method.__name__} failed: {found.message}")
        stopped, end = self._count(found)
        piece = Piece(t0, end, self.sign, path, self.adjoint)
        if self.dense_output:
            self.pieces.append((piece, solution(found.sol.ts, found.sol.interpolants, self.method), start))
        if grazing is not None:
            grazing.refuse(end, self.sign)
        self._keep(piece, found, start, begin, wanted, grazing, stopped)
        return found, stopped

    def _path(self, start: float) -> Path:
        if self.kind == "interpolate":
            return Dense(self.method)
        return Checkpointed(self.method) if self.kind == "checkpoint" else Backsolved(start)

    def _wanted(self, begin: float) -> Tensor | None:
        """Of the times that are wanted, those from here on. What is at the time of a reset was given before it."""
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
        wanted: Tensor | None,
        grazing: Grazing | None,
        stopped: Event | None,
    ) -> None:
        """Connect the states of a piece and the times of its events to what they depend on."""
        events = list(zip(self.events, found.t_events or (), found.y_events or (), strict=True))
        happened = [(event, float(t), np.asarray(y)) for event, ts, ys in events for t, y in zip(ts, ys, strict=True)]
        saved = np.asarray(found.t, float)
        states = [np.asarray(found.y).reshape(len(start), len(saved)), *(y[:, None] for _, _, y in happened)]
        every = np.concatenate([saved, [t for _, t, _ in happened]])
        connected = piece.states(every, np.concatenate(states, 1), start)
        for i, (event, t, y) in enumerate(happened):
            at = connected[:, len(saved) + i]
            time = torch.tensor(t, dtype=torch.float64, device=at.device)
            if torch.is_grad_enabled():
                rate = event.rate if grazing is None else partial(grazing.rate, event)
                time = event.moment(t, at, partial(rate, t, y))
            event.times.append(time)
            event.states.append(self.rhs.moved(at[:, None], time.reshape(1))[:, 0])
        connected = connected[:, : len(saved)]
        if wanted is not None:
            times = wanted[: len(saved)]
            connected = self.rhs.moved(connected, times)
        else:
            # Times of steps in between are constants.
            last = (self.end if stopped is None else stopped.times[-1]).reshape(1)
            ends = [self.rhs.moved(connected[:, :1], begin.reshape(1)), self.rhs.moved(connected[:, -1:], last)]
            times = torch.cat([begin.reshape(1), torch.as_tensor(saved[1:-1]).to(begin), last])
            connected = torch.cat([ends[0], connected[:, 1:-1], ends[1]], 1)
        self.times.append(times)
        self.states.append(connected)


@cache
def _warn_loose() -> None:
    warnings.warn(
        "a gradient at rtol = 1e-3 or looser is about as rough as the solution: a few per cent, or worse. Pass a smaller rtol, "
        "such as 1e-6.",
        stacklevel=5,
    )
