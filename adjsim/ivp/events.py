r"""Events of an initial value problem: their differentiable times, and resets.

An event happens at the time :math:`t_e` at which :math:`g(t_e, y(t_e)) = 0`. If the solution
crosses the surface g = 0, a change of the problem moves the event by

.. math::
    dt_e = -\frac{dg|_{t_e}}{\dot g}, \qquad \dot g = \partial_t g + \partial_y g \cdot f,

where :math:`dg|_{t_e}` is the change of g at fixed time. A reset maps the state to :math:`y^+ =
r(t_e, y(t_e))`, from which a new piece starts at :math:`t_e`. Both the start time and the start
state carry derivatives, so the saltation matrix :math:`\partial_y r + (f^+ - \partial_y r f^- -
\partial_t r) \, \partial_y g / \dot g` follows from the chain rule. The rates :math:`f^-` and
:math:`f^+` are the limits before and after the event. They differ if ``fun`` jumps on the surface
(:mod:`adjsim.ivp.jumps`).

If the solution only touches the surface, :math:`t_e` has no derivative: an error :math:`\delta g`
of the size of the tolerance makes two events or none when :math:`\dot g^2 \le 2 |\ddot g| \delta
g`. Such grazing raises an error, whether or not the solver has found an event there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import OdeSolver
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from adjsim.core.rows import pulled
from adjsim.ivp.connection import connected
from adjsim.ivp.rhs import (
    Array,
    RightHandSide,
    computes_with_numpy,
    naming_function,
    numpy_error,
    to_numpy,
)

# SciPy's accuracy of the time of an event, absolute and relative. A step may be shorter than this,
# so here the accuracy is also relative to the time from the start of the step to the event.
ACCURACY = 4 * float(np.finfo(float).eps)
# Accuracy of the time from the start of the step to the event.
FINE = 1e-12
# Bisection of a step to the smallest number takes fewer iterations.
MOST_ITERATIONS = 3_000


class Root(NamedTuple):
    """The time and the state at which a function is zero, and :func:`time_unit` there."""

    t: float
    y: Array
    unit: float


def find_root(
    function: Callable[[float, Array], float],
    path: Callable[[float], Array],
    begin: float,
    end: float,
) -> Root:
    """Find a root between the two ends of a step, at which the function has different signs."""
    accuracy = ACCURACY
    while True:
        found: Any = brentq(
            lambda t: function(t, path(t)),
            begin,
            end,
            xtol=accuracy,
            rtol=np.float64(ACCURACY),
            maxiter=MOST_ITERATIONS,
        )
        t = float(found)
        wanted = max(FINE * abs(t - begin), float(np.spacing(max(abs(t), abs(begin)))))
        if accuracy <= wanted:
            return Root(t, path(t), time_unit(end - begin))
        accuracy = wanted


def time_unit(step: float) -> float:
    """Return the time that counts as one in estimates of rounding, for a root in a step.

    It is one in all but short steps, where a root is found to a smaller absolute accuracy.
    """
    return min(1.0, abs(step) * FINE / ACCURACY)


class _Side(NamedTuple):
    """One side of an event's surface, next to a state on the surface.

    Attributes:
        outward: the speed at which the solution moves away from the surface into this side.
        shift: the displacement of the state from the surface into this side.
    """

    outward: float
    flow: Array
    shift: Array


def event_settings(
    function: Callable[..., Any],
) -> tuple[int | None, float, Callable[..., Any] | None]:
    """Return an event's terminal count, if any, its direction and its reset."""
    terminal = getattr(function, "terminal", None)
    if not (terminal is None or (int(terminal) == terminal and terminal >= 0)):
        raise ValueError(
            "The `terminal` attribute of each event must be a boolean or positive integer."
        )
    settings = getattr(function, "direction", 0), getattr(function, "reset", None)
    return int(terminal) if terminal else None, *settings


class Event:
    """A user's event function, in the form that SciPy calls, with a differentiable event time.

    Its ``number`` is for messages; ``sign`` is 1 forward in time, -1 backward.
    """

    def __init__(
        self, function: Callable[..., Any], rhs: RightHandSide, number: int, sign: float
    ) -> None:
        self.function, self.rhs, self.number, self.sign = function, rhs, number, sign
        self._rounding_unit = 16 * rhs.eps
        self.terminal_left, self.direction, self.reset = event_settings(function)
        self.times: list[Tensor] = []
        self.states: list[Tensor] = []
        self._start: tuple[float, float] | None = None
        self._uses_numpy = False

    @property
    def terminal(self) -> int | None:
        """The number of further occurrences after which SciPy's call ends."""
        return 1 if self.reset is not None else self.terminal_left

    def __call__(self, t: float, y: Array) -> float:
        if self._start is not None and t == self._start[0]:
            return self._start[1]
        if self._uses_numpy:
            return float(self.function(t, y, *self.rhs.args))
        with torch.no_grad():
            return float(self.function(self.rhs.time(t), self.rhs.tensor(y), *self.rhs.args))

    def reads_gradient(self, t: Tensor, y: Tensor) -> bool:
        """Test whether the function reads a tensor that requires grad, other than time and state.

        It is called first, and also finds out whether the function computes with NumPy.
        """
        at, x = t.detach().to(y.real.dtype), y.detach()
        with torch.no_grad():
            self._uses_numpy = computes_with_numpy(self.function, at, x, self.rhs.args)
        value = None if self._uses_numpy else self.function(at, x, *self.rhs.args)
        return isinstance(value, Tensor) and value.requires_grad

    def take_side(
        self, t: float, before: Array, after: Array, flow: Array, stopped: bool, unit: float
    ) -> None:
        """Fix the side of the event's surface on which a piece starts after a reset.

        This applies if the piece starts on the surface, where rounding would decide. If the event
        has just happened, the piece starts behind the surface. Otherwise it starts before it, so
        that the event happens next. ``flow`` is the rate after the reset, ``stopped`` says whether
        this event ended the previous piece.
        """
        self._start = None
        (left, old, _), (value, new, weights) = self.slopes(t, before), self.slopes(t, after, flow)
        near = self._rounding(t, after, weights, abs(old) + abs(new), unit)
        # If this event ended the previous piece, its exact value before the reset is zero, so
        # ``left`` is an error.
        if abs(value) > near + (4 * abs(left) if stopped else 0.0):
            return
        near = self._rounding_unit * (unit + abs(t))
        happened = stopped or any(abs(float(x.detach()) - t) <= near for x in self.times[-1:])
        if stopped and new == 0:
            raise RuntimeError(
                f"the reset of event {self.number} at t = {t:.9g} leaves the solution at rest on "
                "the event, which would happen again without end. Let the event end the solution "
                "(terminal), or reset to a state that moves away from it."
            )
        side = self.sign * (new if happened else -old)
        self._start = t, float(np.copysign(np.finfo(float).tiny, side))

    def check_start(self, t: float, y: Array) -> None:
        """Refuse a start at an event with a reset and no direction, which might happen at once."""
        if self.reset is not None and self.direction == 0 and self(t, y) == 0:
            raise ValueError(
                f"the solution starts at event {self.number}, which has a reset: set its "
                "direction, which determines whether the event happens at the start."
            )

    def found(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the times of the event so far, and the states ``(events, n)`` at these times."""
        if not self.times:
            return like.detach().real[:0], like.detach()[:0]
        return torch.stack(self.times).to(like.real.dtype), torch.stack(self.states)

    def slopes(self, t: float, y: Array, flow: Array | None = None) -> tuple[float, float, Array]:
        """Compute the value, its rate along ``flow``, and its absolute gradient in the state.

        ``flow`` None: the rate that ``fun`` returns at this state.
        """
        value, dg_dt, dg_dy = self._gradient(t, y)
        flow = self.rhs.rate(t, y) if flow is None else flow
        return value, dg_dt + _along(dg_dy, flow), np.abs(dg_dy)

    def _gradient(self, t: float, y: Array) -> tuple[float, float, Array]:
        """Compute the value and its derivatives with respect to time and state."""
        if self._uses_numpy:
            raise numpy_error(f"event {self.number}, which has a reset or needs a gradient,")
        with torch.enable_grad(), naming_function(f"event {self.number}"):
            at, x = self.rhs.time(t).requires_grad_(), self.rhs.tensor(y).requires_grad_()
            value = self._scalar(self.function(at, x, *self.rhs.args))
        dg_dt, dg_dy = pulled([value], [at, x], [torch.ones_like(value)], keep_graph=False)
        return float(value.detach()), float(dg_dt), to_numpy(dg_dy)

    def rate_before(self, root: Root) -> Array:
        """Compute the limit, from before the event, of the rate at a state on the surface."""
        sides = self._sides(root.t, root.y, -self.sign, 0.0, root.unit)
        found = [side.flow for side in sides if side.outward > 0]
        if len(found) == 2:
            raise self._sliding(root.t)
        return found[0] if found else self.rhs.rate(root.t, root.y)

    def rate_after(self, t: float, before: Array, y: Array, unit: float) -> tuple[Array, Array]:
        """Compute the limit, from after the event, of the rate at a state, and a shift.

        If ``fun`` jumps on the surface, the shift moves the state into the side into which the
        solution leaves. A state off the surface has the rate of ``fun`` and no shift.
        """
        sides = self._sides(t, y, self.sign, self(t, before), unit)
        if len(sides) == 2 and all(side.outward < 0 for side in sides):
            raise self._sliding(t)
        found = [side for side in sides if side.outward > 0]
        if len(found) != 1:
            return self.rhs.rate(t, y), np.zeros_like(y)
        apart = np.abs(sides[0].flow - sides[1].flow)
        smooth = np.all(apart <= self.rhs.eps**0.5 * np.max(np.abs(found[0].flow)))
        return found[0].flow, np.zeros_like(y) if smooth else found[0].shift

    def _sliding(self, t: float) -> RuntimeError:
        return RuntimeError(
            f"the solution slides along event {self.number} from t = {t:.9g} on: fun points at "
            "the surface from both sides. Let the event end the solution (terminal), or switch to "
            "an equation of the sliding motion in the reset."
        )

    def _sides(self, t: float, y: Array, sense: float, off: float, unit: float) -> list[_Side]:
        """Evaluate both sides of the surface next to a state; none if the state is not on it.

        ``outward`` is measured in the direction of time ``sense``, 1 or -1. A value of the event as
        small as ``off`` counts as zero, in addition to rounding.
        """
        value, dg_dt, dg_dy = self._gradient(t, y)
        rate = dg_dt + _along(dg_dy, self.rhs.rate(t, y))
        near = 4 * self._rounding(t, y, np.abs(dg_dy), abs(rate), unit) + 4 * abs(off)
        steep = float((np.abs(dg_dy) ** 2).sum())
        if abs(value) > near or dg_dt**2 + steep == 0:
            return []
        found = []
        for side in (1.0, -1.0):
            near_t = side * near * dg_dt / (dg_dt**2 + steep)
            shift = side * near * dg_dy / (steep or 1.0)
            flow = self.rhs.rate(t + near_t, y + shift)
            found.append(_Side(side * sense * (dg_dt + _along(dg_dy, flow)), flow, shift))
        return found

    def _rounding(self, t: float, y: Array, weights: Array, rate: float, unit: float) -> float:
        """Estimate the error of an event's value due to rounding of time and state."""
        return self._rounding_unit * (float(np.sum(weights * np.abs(y))) + (unit + abs(t)) * rate)

    def event_time(self, time: float, state: Tensor, rate: Callable[[], float]) -> Tensor:
        """Return the time of the event, with its derivative with respect to the state there."""
        found = torch.tensor(time, dtype=torch.float64, device=state.device)
        if self._uses_numpy or not torch.is_grad_enabled():
            return found
        value = self.function(self.rhs.time(time), state, *self.rhs.args)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return found
        speed = rate()
        value = self._scalar(value).double()
        return connected(found, [value], lambda rows: [-rows / speed], lambda rows: -rows / speed)

    def _scalar(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"event {self.number} returns {type(value).__name__}; for a gradient or a reset "
                "it must return a tensor."
            )
        return value.reshape(())


class GrazingError(ValueError):
    """Raised if a solution touches an event without crossing it: its time has no derivative."""


class GrazingCheck:
    """An observer of a SciPy solver that finds events that are touched but not crossed."""

    def __init__(self, events: Sequence[Event], rtol: Any, atol: Any) -> None:
        self.events, self.rtol, self.atol = events, rtol, atol
        self.touches: list[tuple[float, Event]] = []
        # For each event the steps in which it happens: both end times, and the rate at the first.
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
                # Both ends are on one side, and the event's value is closer to zero in between.
                elif value * rate * solver.direction < 0 < g * r * solver.direction:
                    self._between(solver, event, begin)
        self._before = (now, slopes)

    def _between(self, solver: OdeSolver, event: Event, begin: float) -> None:
        dense = solver.dense_output()
        side = np.sign(event(begin, dense(begin))) or 1.0
        bounds = sorted((begin, solver.t))
        nearest = minimize_scalar(
            lambda t: side * event(t, dense(t)),
            bounds=bounds,
            method="bounded",
            options={"xatol": 1e-5 * min(1.0, bounds[1] - bounds[0])},
        )
        state = dense(nearest.x)
        if side * event(nearest.x, state) <= self._uncertainty(
            event.slopes(nearest.x, state)[2], state
        ):
            self.touches.append((float(nearest.x), event))

    def _uncertainty(self, gradient: Array, state: Array) -> float:
        """Compute the uncertainty of an event's value due to the tolerance of the solution."""
        return float(np.sum(gradient * (self.atol + self.rtol * np.abs(state))))

    def refuse(self, end: float, sign: float) -> None:
        """Raise an error if an event was touched before the end of a finished piece."""
        for time, event in self.touches:
            if sign * (end - time) >= 0:
                raise GrazingError(
                    f"the solution touches event {event.number} near t = {time:g}, or crosses it "
                    "twice within a step, so its time has no derivative. If it does cross, use a "
                    "smaller max_step or rtol to resolve both crossings."
                )

    def rate(self, event: Event, root: Root, flow: Callable[[], Array]) -> float:
        """Return the rate of an event's value where it happens, which must not vanish."""
        time, state = root.t, root.y
        _, rate, gradient = event.slopes(time, state, flow())
        curvatures = [
            abs((rate - r) / (time - a))
            for a, b, r in self.crossings[event]
            if min(a, b) <= time <= max(a, b) and time != a
        ]
        curvature = max(curvatures, default=0.0)
        if not rate and not gradient.any():
            raise ValueError(
                f"event {event.number} at t = {time:g} does not depend on t or y in a way that "
                "has a derivative."
            )
        if rate * rate <= 2 * curvature * self._uncertainty(gradient, state):
            raise GrazingError(
                f"the solution touches event {event.number} at t = {time:g} and hardly crosses it "
                f"(rate {rate:.3g}), so its time has no derivative."
            )
        return rate


def _along(gradient: Array, flow: Array) -> float:
    """Return the rate at which a value changes along a flow."""
    return float((gradient.conj() * flow).sum().real)
