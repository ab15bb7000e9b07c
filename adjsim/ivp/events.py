r"""Events of an initial value problem: their times as functions of what the solution depends on,
and resets.

An event happens at the time :math:`t_e` at which :math:`g(t_e, y(t_e)) = 0`. Where the solution
crosses it,

.. math::
    dt_e = -\frac{dg|_{t_e}}{\dot g}, \qquad \dot g = \partial_t g + \partial_y g \cdot f,

where :math:`dg|_{t_e}` is the change of g at a held time. A reset takes the state to :math:`y^+ =
r(t_e, y(t_e))`, from which a new piece starts at :math:`t_e`; since start time and start state both
carry their derivatives, the saltation matrix
:math:`\partial_y r + (f^+ - \partial_y r f^- - \partial_t r) \, \partial_y g / \dot g` is the chain
rule. The rates
:math:`f^-` and :math:`f^+` are limits from before and after, which differ where ``fun`` jumps on
the surface (:mod:`adjsim.ivp.jumps`).

Where the solution only touches, :math:`t_e` has no derivative: an error of the size of the
tolerance, :math:`\delta g`, makes two events or none when :math:`\dot g^2 \le 2 |\ddot g| \delta
g`. Such grazing is refused, with an event and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import OdeSolver
from scipy.optimize import minimize_scalar
from torch import Tensor

from adjsim.ivp.foreign import computes_with_numpy, refusal, refused
from adjsim.ivp.rhs import Array, RightHandSide, refuse_second, to_numpy


class GrazingError(ValueError):
    """A solution touches an event without crossing it: its time has no derivative."""


class _Side(NamedTuple):
    """Of a surface: how fast the solution leaves by it, the rate of the state, and a step to it."""

    outward: float
    flow: Array
    shift: Array


class Event:
    """An event of the user's, as SciPy calls it and as its time is differentiated.

    Args:
        function: ``event(t, y, *args)``, with SciPy's attributes ``terminal`` and ``direction`` and
            our ``reset``.
        field: the right-hand side.
        number: which one it is, for messages.
    """

    def __init__(self, function: Callable[..., Any], rhs: RightHandSide, number: int) -> None:
        self.function, self.rhs, self.number = function, rhs, number
        terminal = getattr(function, "terminal", None)
        if not (terminal is None or (int(terminal) == terminal and terminal >= 0)):
            raise ValueError(
                "The `terminal` attribute of each event must be a boolean or positive integer."
            )
        self.left = int(terminal) if terminal else None
        self.direction: float = getattr(function, "direction", 0)
        self.reset: Callable[..., Any] | None = getattr(function, "reset", None)
        self.times: list[Tensor] = []
        self.states: list[Tensor] = []
        self._start: tuple[float, float] | None = None
        self._of_arrays = False

    @property
    def terminal(self) -> int | None:
        """After how many more of them SciPy's call has to end."""
        return 1 if self.reset is not None else self.left

    def __call__(self, t: float, y: Array) -> float:
        if self._start is not None and t == self._start[0]:
            return self._start[1]
        if self._of_arrays:
            return float(self.function(t, y, *self.rhs.args))
        with torch.no_grad():
            return float(self.value(self.rhs.time(t), self.rhs.tensor(y)))

    def value(self, t: Tensor, y: Tensor) -> Any:
        return self.function(t, y, *self.rhs.args)

    def reads_gradient(self, t: Tensor, y: Tensor) -> bool:
        """Whether it reads a tensor that requires grad, besides time and state. Called first, with
        the start: a function that computes with NumPy is found by calling it."""
        at, x = t.detach().to(y.real.dtype), y.detach()
        with torch.no_grad():
            self._of_arrays = computes_with_numpy(self.function, at, x, self.rhs.args)
        value = None if self._of_arrays else self.value(at, x)
        return isinstance(value, Tensor) and value.requires_grad

    def take_side(
        self, t: float, before: Array, after: Array, flow: Array, sign: float, stopped: bool
    ) -> None:
        """Say on which side of the event a piece starts after a reset, where it starts at it and
        rounding would decide: behind it, if it has happened; else before it, so that it happens
        next. ``flow`` is the rate of the state after the reset."""
        self._start = None
        (left, old, _), (value, new, weights) = self.slopes(t, before), self.slopes(t, after, flow)
        near = self._rounding(t, after, weights, abs(old) + abs(new))
        # What happened has left a value that should be zero.
        if abs(value) > near + (4 * abs(left) if stopped else 0.0):
            return
        rounding = 16 * float(torch.finfo(self.rhs.like.dtype).eps)
        happened = stopped or any(
            abs(float(x.detach()) - t) <= rounding * (1 + abs(t)) for x in self.times[-1:]
        )
        if stopped and new == 0:
            raise RuntimeError(
                f"the reset of event {self.number} at t = {t:.9g} leaves the solution at rest on "
                "the event, where it would "
                "happen for ever. Let it end the solution (terminal), or reset to what moves away."
            )
        self._start = (
            t,
            float(np.copysign(np.finfo(float).tiny, sign * (new if happened else -old))),
        )

    def check_start(self, t: float, y: Array) -> None:
        """Refuse to start at an event with a reset whose direction is not said: it would happen at
        once, or not.
        """
        if self.reset is not None and self.direction == 0 and self(t, y) == 0:
            raise ValueError(
                f"the solution starts at event {self.number}, which has a reset: set its "
                "direction, so that it is known "
                "whether it happens there."
            )

    def found_times(self, like: Tensor) -> Tensor:
        return torch.stack(self.times).to(like.real.dtype) if self.times else like.detach().real[:0]

    def found_states(self, like: Tensor) -> Tensor:
        """As rows ``(events, n)``."""
        return torch.stack(self.states) if self.states else like.detach()[:0]

    def slopes(self, t: float, y: Array, flow: Array | None = None) -> tuple[float, float, Array]:
        """Its value, its rate along the solution, and how strongly it depends on each entry of the
        state. ``flow`` is the rate of the state; None: that of ``fun`` at this very state."""
        value, by_time, by_state = self._gradient(t, y)
        flow = self.rhs.rate(t, y) if flow is None else flow
        return value, by_time + float((by_state.conj() * flow).sum().real), np.abs(by_state)

    def _gradient(self, t: float, y: Array) -> tuple[float, float, Array]:
        """Its value and the derivatives by time and state."""
        if self._of_arrays:
            raise refusal(f"event {self.number}, which has a reset or a gradient is asked for,")
        with torch.enable_grad(), refused(f"event {self.number}"):
            at, x = self.rhs.time(t).requires_grad_(), self.rhs.tensor(y).requires_grad_()
            value = self._scalar(self.value(at, x))
        by_time, by_state = (
            torch.autograd.grad(value, (at, x), allow_unused=True)
            if value.requires_grad
            else (None, None)
        )
        gradient = np.zeros_like(y) if by_state is None else to_numpy(by_state)
        return float(value.detach()), 0.0 if by_time is None else float(by_time), gradient

    def arriving(self, t: float, y: Array, sign: float) -> Array:
        """The rate of a state on the event's surface, as the limit along the solution from before.

        ``way`` is 1 where the solution goes on in time, -1 where it goes back. The derivation is in
        :mod:`adjsim.ivp.jumps`.
        """
        found = [side.flow for side in self._beside(t, y, -sign, 0.0) if side.outward > 0]
        if len(found) == 2:
            raise self._sliding(t)
        return found[0] if found else self.rhs.rate(t, y)

    def leaving(self, t: float, before: Array, y: Array, sign: float) -> tuple[Array, Array]:
        """The rate of a state behind a reset, as the limit along the solution from after, and what
        moves the state off the event's surface to the side by which it leaves, where ``fun`` jumps
        there. A state that is off the surface has the rate of ``fun`` and stays.

        Raises:
            RuntimeError: the rates of both sides point at the surface, along which the solution
                slides.
        """
        sides = self._beside(t, y, sign, self(t, before))
        if len(sides) == 2 and all(side.outward < 0 for side in sides):
            raise self._sliding(t)
        found = [side for side in sides if side.outward > 0]
        if len(found) != 1:
            return self.rhs.rate(t, y), np.zeros_like(y)
        apart = np.abs(sides[0].flow - sides[1].flow)
        smooth = np.all(
            apart
            <= float(torch.finfo(self.rhs.like.dtype).eps) ** 0.5 * np.max(np.abs(found[0].flow))
        )
        return found[0].flow, np.zeros_like(y) if smooth else found[0].shift

    def _sliding(self, t: float) -> RuntimeError:
        return RuntimeError(
            f"the solution slides along event {self.number} from t = {t:.9g} on: fun points at "
            "the surface from both sides. "
            "Let the event end the solution (terminal), or reset to an equation of the sliding."
        )

    def _beside(self, t: float, y: Array, sense: float, off: float) -> list[_Side]:
        """Either side of the event's surface, next to a state and in a sense of time; nothing for a
        state off the surface by more than rounding and ``off``."""
        value, by_time, by_state = self._gradient(t, y)
        rate = by_time + float((by_state.conj() * self.rhs.rate(t, y)).sum().real)
        near = 4 * self._rounding(t, y, np.abs(by_state), abs(rate)) + 4 * abs(off)
        steep = float((np.abs(by_state) ** 2).sum())
        if abs(value) > near or by_time**2 + steep == 0:
            return []
        found = []
        for side in (1.0, -1.0):
            near_t, shift = (
                side * near * by_time / (by_time**2 + steep),
                side * near * by_state / (steep or 1.0),
            )
            flow = self.rhs.rate(t + near_t, y + shift)
            found.append(
                _Side(
                    side * sense * (by_time + float((by_state.conj() * flow).sum().real)),
                    flow,
                    shift,
                )
            )
        return found

    def _rounding(self, t: float, y: Array, weights: Array, rate: float) -> float:
        """What rounding of time and state leaves of an event's value."""
        rounding = 16 * float(torch.finfo(self.rhs.like.dtype).eps)
        return rounding * (float(np.sum(weights * np.abs(y))) + (1 + abs(t)) * rate)

    def event_time(self, time: float, state: Tensor, rate: Callable[[], float]) -> Tensor:
        """When it happens: the time that was found, with the derivative that the state at this time
        gives it. ``rate`` gives the event's rate as the solution arrives."""
        found = torch.tensor(time, dtype=torch.float64, device=state.device)
        value = None if self._of_arrays else self.value(self.rhs.time(time), state)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return found
        return _EventTime.apply(self._scalar(value).double(), found, rate())

    def _scalar(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"event {self.number} returns {type(value).__name__}; for a gradient or a reset "
                "it must return a tensor."
            )
        return value.reshape(())


class _EventTime(torch.autograd.Function):
    """The time of an event, whose derivative by the event's value is the inverse of its rate."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, time: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return time.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second()
        return -grad_outputs[0] / ctx.rate, None, None


class Grazing:
    """Watches a SciPy solver for events that are touched and not crossed.

    Args:
        events: whose.
        rtol, atol: what errors the solution may have.
    """

    def __init__(self, events: Sequence[Event], rtol: Any, atol: Any) -> None:
        self.events, self.rtol, self.atol = events, rtol, atol
        self.touches: list[tuple[float, Event]] = []
        # Steps that events happen in: between which times, and their rates at the first.
        self.crossings: dict[Event, list[tuple[float, float, float]]] = {
            event: [] for event in events
        }
        self._before: tuple[float, list[tuple[float, float, Array]]] | None = None

    def __call__(self, solver: OdeSolver) -> None:
        now, slopes = float(solver.t), [event.slopes(solver.t, solver.y) for event in self.events]
        if self._before is not None and now != self._before[0]:
            begin, before = self._before
            for event, (value, rate, _), (g, r, _) in zip(self.events, before, slopes, strict=True):
                if value * g <= 0:
                    self.crossings[event].append((begin, now, rate))
                # On one side at both ends, and nearer in between.
                elif value * rate * solver.direction < 0 < g * r * solver.direction:
                    self._between(solver, event, begin)
        self._before = (now, slopes)

    def _between(self, solver: OdeSolver, event: Event, begin: float) -> None:
        dense = solver.dense_output()
        side = np.sign(event(begin, dense(begin))) or 1.0
        bounds = sorted((begin, solver.t))
        nearest = minimize_scalar(
            lambda t: side * event(t, dense(t)), bounds=bounds, method="bounded"
        )
        state = dense(nearest.x)
        if side * event(nearest.x, state) <= self._uncertain(
            event.slopes(nearest.x, state)[2], state
        ):
            self.touches.append((float(nearest.x), event))

    def _uncertain(self, gradient: Array, state: Array) -> float:
        """What the solution's own tolerance makes uncertain in an event's value."""
        return float(np.sum(gradient * (self.atol + self.rtol * np.abs(state))))

    def refuse(self, end: float, sign: float) -> None:
        """Raise for an event that was touched before the end, which is known once a piece has
        ended.
        """
        for time, event in self.touches:
            if sign * (end - time) >= 0:
                raise GrazingError(
                    f"the solution touches event {event.number} near t = {time:g}, or crosses it "
                    "twice within a step, so its "
                    "time has no derivative. Where it does cross, a smaller max_step or rtol "
                    "tells it apart."
                )

    def rate(self, event: Event, time: float, state: Array, flow: Array) -> float:
        """The rate of an event where it happens, which must not vanish; ``flow`` is that of the
        state as it arrives.
        """
        _, rate, gradient = event.slopes(time, state, flow)
        inside = [
            (a, r)
            for a, b, r in self.crossings[event]
            if min(a, b) <= time <= max(a, b) and time != a
        ]
        curvature = max((abs((rate - r) / (time - a)) for a, r in inside), default=0.0)
        if not rate and not gradient.any():
            raise ValueError(
                f"event {event.number} at t = {time:g} does not depend on t or y in a way that "
                "has a derivative."
            )
        if rate * rate <= 2 * curvature * self._uncertain(gradient, state):
            raise GrazingError(
                f"the solution touches event {event.number} at t = {time:g} and hardly crosses it "
                f"(rate {rate:.3g}), so its "
                "time has no derivative."
            )
        return rate
