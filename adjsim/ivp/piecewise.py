"""Solution of an initial value problem piece by piece, from reset to reset, and its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import BDF, RK23, RK45, OdeSolution, Radau
from scipy.optimize import OptimizeResult
from torch import Tensor
from torch.utils._pytree import tree_map

from adjsim.core.rows import has_rows
from adjsim.core.transforms import outside_transforms
from adjsim.ivp.collocation_sweep import begin_sweep
from adjsim.ivp.connection import is_tracked, plain
from adjsim.ivp.events import Event, GrazingCheck
from adjsim.ivp.forward_states import (
    Backsolved,
    Checkpointed,
    RateCheck,
    StepRates,
    StoredInterpolants,
    solution,
)
from adjsim.ivp.histories import History, Section
from adjsim.ivp.jumps import DiscontinuityCheck
from adjsim.ivp.march import March, check_times, march
from adjsim.ivp.rhs import Array, as_state, as_times, to_numpy
from adjsim.ivp.sensitivities import sensitivities
from adjsim.ivp.sweep import AdjointSettings

ADJOINTS = ("interpolate", "checkpoint", "backsolve")
# Resets closer than this fraction of the time since the start count as accumulating.
ZENO = 1e-10
# Degrees of interpolants of SciPy's methods; others have the largest one of DOP853.
INTERPOLANT_DEGREES = {RK23: 3, RK45: 4, Radau: 3, BDF: 5}
MOST = 7

Rates = Callable[[float, Array], Array]
Path = StoredInterpolants | Checkpointed | Backsolved


@dataclass
class Piece:
    """The data that the adjoint needs of one piece of a solution, between two resets.

    ``path`` is the source of its states in the backward pass; None: no gradient is wanted.
    """

    begin: float
    start: Tensor
    sign: float
    path: Path | None
    rate_check: RateCheck
    settings: AdjointSettings

    def states(self, times: Array, states: Array) -> Tensor:
        """Connect states ``(n, times)`` to the initial state and the parameters in autograd."""
        rhs = self.settings.rhs
        values = torch.as_tensor(states).to(rhs.like)
        if self.path is None:
            return values
        path, pull = self.path, partial(self._backward, self.path, times, states)
        if not isinstance(path, StoredInterpolants) or np.iscomplexobj(states):
            return rhs.completed(times, rhs.connected(values, self.start, pull))

        def push(*rows: Tensor) -> Tensor:
            return sensitivities(self.settings, path.solution(), times, rows).to(values)

        return rhs.completed(times, rhs.connected(values, self.start, pull, push))

    def _backward(self, path: Path, times: Array, states: Array, rows: Tensor) -> list[Tensor]:
        """Return the rows of cotangents of the initial state and of the parameters.

        They belong to rows ``(k, n, times)`` of cotangents of the states.
        """
        self.rate_check.compare(self.settings.rhs)
        cotangents = to_numpy(rows)
        sweep = begin_sweep(self.settings, np.zeros((len(rows), len(states)), states.dtype))
        nonzero = np.flatnonzero(np.any(cotangents != 0, axis=(0, 1)))
        waiting = list(nonzero[np.argsort(-self.sign * times[nonzero], kind="stable")])
        now = float(times[waiting[0]]) if waiting else self.begin

        def used() -> Array | None:
            """Return the sum of the cotangents of the states at the present time."""
            total = None
            while waiting and times[waiting[0]] == now:
                cotangent = cotangents[..., waiting.pop(0)]
                total = cotangent if total is None else total + cotangent
            return total

        stops = [(float(times[k]), states[:, k]) for k in waiting]
        for end, states_of in path.backward(stops) if now != self.begin else ():
            ends, added = [now], list[Array | None]()
            while now != end:
                added.append(used())
                reached = waiting and self.sign * (times[waiting[0]] - end) >= 0
                now = float(times[waiting[0]]) if reached else end
                ends.append(now)
            sweep.through(ends, added, states_of, abs(end - self.begin))
        last = used()
        if last is not None:
            sweep.adjoint = sweep.adjoint + last
        # A complex view of real numbers may have strides that torch does not take.
        return [torch.as_tensor(sweep.adjoint.copy()), *sweep.integral.sums]


@dataclass
class PiecewiseSolve:
    """The solution over the time span, with one of SciPy's solvers per piece.

    The states and event times of each piece are connected to their inputs in autograd. ``kind`` is
    one of :data:`ADJOINTS`, the span has no axes, and ``sign`` is 1 forward in time, -1 backward.
    """

    settings: AdjointSettings
    kind: str
    begin: Tensor
    end: Tensor
    sign: float
    t_eval: Tensor | None
    dense_output: bool
    events: list[Event]
    wants_gradient: bool
    times: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    pieces: list[tuple[OdeSolution, Piece | None]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"nfev": 0, "njev": 0, "nlu": 0})

    def __post_init__(self) -> None:
        self.rhs, self.method = self.settings.rhs, self.settings.method
        self.options, self.final_time = self.settings.options, float(plain(self.end))

    def run(self, start: Tensor) -> March:
        """Solve from the start to the end, and return the last piece."""
        first = float(plain(self.begin))
        if self.t_eval is not None:
            check_times(to_numpy(self.t_eval), first, self.final_time)
        for event in self.events:
            event.check_start(first, to_numpy(start))
        begin, close, rate_after = self.begin, 0, None
        while True:
            found, stopped = self._piece(begin, start, rate_after)
            if stopped is None or stopped.reset is None or stopped.terminal_left == 0:
                return found
            before, begin, state = float(begin.detach()), stopped.times[-1], stopped.states[-1]
            now = float(begin.detach())
            close = close + 1 if abs(now - before) <= ZENO * abs(now - first) else 0
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
        """Solve from one start to the end or to the next reset, and return the event of the reset.

        ``rate_after`` is the rate after a reset; None at the start of the time span.
        """
        t0 = float(plain(begin))
        start = self.rhs.with_start_time(start, begin, rate_after)
        tolerances = self.options["rtol"], self.options["atol"]
        wants_gradient = self.wants_gradient or is_tracked(start)
        if wants_gradient and np.min(tolerances[0]) >= 1e-3:
            _warn_loose()
        rate, batched_rate = self.rhs.smooth_rate, self.rhs.numpy
        if rate_after is not None:
            rate, batched_rate = (
                _with_rate_at_start(rates, t0, to_numpy(start), rate_after)
                for rates in (rate, batched_rate)
            )
        rates = StepRates(rate)
        rate_check, grazing = RateCheck(rates), GrazingCheck(self.events, *tolerances)
        jumps = DiscontinuityCheck(self.rhs, rates, *tolerances, t0, self.final_time)
        path = self._path(t0, start) if wants_gradient else None
        every = (path, grazing, rate_check, jumps)
        observers = [x for x in every if callable(x)] if wants_gradient else []
        eval_times = self.t_eval
        if eval_times is not None and self.times:
            # The time of a reset belongs to the piece before it.
            eval_times = eval_times[self.sign * eval_times.detach() > self.sign * t0]
        known = {**self.rhs.solver_options(), **self.options}
        method: Any = self.method
        times = None if eval_times is None else to_numpy(eval_times)
        with outside_transforms():
            solver = method(batched_rate, t0, to_numpy(start), self.final_time, **known)
            found = march(solver, self.events, times, self.dense_output, observers)
        for name in self.counts:
            self.counts[name] += getattr(solver, name)
        if found.status < 0:
            raise RuntimeError(f"{self.method.__name__} failed: {found.message}")
        stopped, end = self._stop(found)
        piece = Piece(t0, start, self.sign, path, rate_check, self.settings)
        if self.dense_output:
            self.pieces.append((solution(found.ends, found.interpolants, self.method), piece))
        with outside_transforms():
            jumps.refuse(end, self.sign, stopped is not None)
            grazing.refuse(end, self.sign)
        self._connect(piece, found, begin, eval_times, rate_after, grazing, stopped)
        return found, stopped

    def _path(self, begin: float, start: Tensor) -> Path:
        if self.kind == "interpolate":
            return StoredInterpolants(self.method)
        if self.kind == "checkpoint":
            return Checkpointed(self.method)
        options = self.settings.solver_options(self.options["atol"])
        return Backsolved(begin, to_numpy(start), self.method, self.rhs.rate, options)

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
        begin: Tensor,
        eval_times: Tensor | None,
        rate_after: Array | None,
        grazing: GrazingCheck,
        stopped: Event | None,
    ) -> None:
        """Connect the states and event times of a piece to their inputs in autograd."""
        pairs = zip(self.events, found.roots, strict=True)
        happened = [(event, root) for event, roots in pairs for root in roots]
        saved, rhs = found.t, self.rhs
        every = np.concatenate([saved, [root.t for _, root in happened]])
        states = [found.y, *(root.y[:, None] for _, root in happened)]
        connected = piece.states(every, np.concatenate(states, 1))
        arriving = None
        for i, (event, root) in enumerate(happened, len(saved)):
            at = connected[:, i]
            flow = cache(partial(event.rate_before, root))
            time = event.event_time(root.t, at, partial(grazing.rate, event, root, flow))
            if time.requires_grad:
                at = rhs.with_time_derivative(at, time, flow())
                arriving = flow() if event is stopped else arriving
            event.times.append(time)
            event.states.append(at)
        connected = connected[:, : len(saved)]
        if eval_times is not None:
            times = eval_times[: len(saved)]
            connected = rhs.with_time_derivative(connected, times)
        else:
            # The times of the solver's intermediate steps are constants.
            last = self.end if stopped is None else stopped.times[-1]
            first = rhs.with_time_derivative(connected[:, 0], begin, rate_after)
            final = rhs.with_time_derivative(connected[:, -1], last, arriving)
            times = torch.cat([begin[None], torch.as_tensor(saved[1:-1]).to(begin), last[None]])
            connected = torch.cat([first[:, None], connected[:, 1:-1], final[:, None]], 1)
        self.times.append(times)
        self.states.append(connected)


@cache
def _warn_loose() -> None:
    warnings.warn(
        "a gradient at rtol = 1e-3 or looser has errors like the solution: a few per cent, or "
        "more. Pass a smaller rtol, such as 1e-6.",
        stacklevel=6,
    )


def _with_rate_at_start(rates: Rates, t0: float, start: Array, rate_after: Array) -> Rates:
    """Make a right-hand side that returns a given rate at the start of a piece.

    After a reset the start may lie on a jump, where rounding would decide between the two sides.
    """

    def found(t: float, y: Array) -> Array:
        at_start = t == t0 and np.array_equal(y.reshape(-1), start)
        return rate_after.reshape(y.shape) if at_start else rates(t, y)

    return found


class OdeResult(OptimizeResult):
    """The result of :func:`solve_ivp`: SciPy's fields, with torch tensors.

    A copy, and a result from a file, have no gradient.
    """

    def __copy__(self) -> OdeResult:
        return OdeResult(self)

    def __reduce__(self) -> Any:
        fields = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, dict(self))
        return OdeResult, (fields,)


class DenseSolution(History):
    """The solution as a differentiable function of time.

    Called with a time or times ``(k,)`` it returns the state ``(n,)`` or states ``(n, k)``. At the
    time of a reset it returns the state before the reset. A copy, and a solution from a file, have
    no gradient.

    Args:
        pieces: the pieces between resets, each with its interpolants; None: they have no gradient.
        like: a state.
    """

    def __init__(self, pieces: Sequence[tuple[OdeSolution, Piece | None]], like: Tensor) -> None:
        self._pieces, self._like = pieces, like
        begin, end = float(pieces[0][0].ts[0]), float(pieces[-1][0].ts[-1])
        self._sign = 1.0 if end >= begin else -1.0
        self.t_min, self.t_max = min(begin, end), max(begin, end)

    @property
    def is_connected(self) -> bool:
        return any(piece is not None and piece.path is not None for _, piece in self._pieces)

    def sections(self) -> tuple[list[Section], int]:
        def of(inside: OdeSolution, piece: Piece | None) -> Callable[[Array], Tensor]:
            if piece is None:
                return lambda at: torch.as_tensor(inside(at[:, 0])).to(self._like)[..., None]
            return lambda at: piece.states(at[:, 0], inside(at[:, 0]))[..., None]

        found = [x for x in self._pieces if x[0].ts[0] != x[0].ts[-1]]
        methods = [piece.settings.method for _, piece in found[:1] if piece is not None]
        known = [
            d for m, d in INTERPOLANT_DEGREES.items() if any(issubclass(x, m) for x in methods)
        ]
        sections = [(inside.ts[:, None], of(inside, piece)) for inside, piece in found]
        return sections, max(known, default=MOST) + 1

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self._like)
        if times.ndim > 1:
            raise ValueError(f"t must be a time or times (k,); got shape {tuple(times.shape)}.")
        read = self.read(times.reshape(-1, 1))
        if read is not None:
            return read[:, 0, 0] if times.ndim == 0 else read[..., 0]
        if has_rows(times):
            raise ValueError(
                "a function of one sample at a time (batch_first=True) reads a solution that is a "
                "global variable or an attribute of a class: pass it in args=(..., solution.sol), "
                "or capture it in a local function."
            )
        outside = bool(((times < self.t_min) | (times > self.t_max)).any())
        if outside and torch.is_grad_enabled() and any(x and x.path for _, x in self._pieces):
            raise ValueError(
                f"there is no gradient outside of [{self.t_min:g}, {self.t_max:g}]: call the "
                "solution under torch.no_grad()."
            )
        flat = times.reshape(-1)
        at = to_numpy(flat)
        ends = [self._sign * inside.ts[-1] for inside, _ in self._pieces[:-1]]
        numbers = np.searchsorted(ends, self._sign * at, side="left")
        found = [self._like.new_zeros((len(self._like), 0))]
        for number in np.unique(numbers):
            inside, piece = self._pieces[number]
            members = np.flatnonzero(numbers == number)
            states = inside(at[members])
            if piece is None:
                found.append(torch.as_tensor(states).to(self._like))
                continue
            connected, rhs = piece.states(at[members], states), piece.settings.rhs
            found.append(rhs.with_time_derivative(connected, flat[members]))
        states = torch.cat(found, 1)[:, np.argsort(np.argsort(numbers, kind="stable"))]
        return states[:, 0] if times.ndim == 0 else states

    def __copy__(self) -> DenseSolution:
        return DenseSolution(self._pieces, self._like)

    def __reduce__(self) -> Any:
        # The gradient needs fun, which may be a local function, and the graph of the start.
        return DenseSolution, ([(inside, None) for inside, _ in self._pieces], self._like)
