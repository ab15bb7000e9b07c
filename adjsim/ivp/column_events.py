r"""Search for events in the steps of columns: each column has event times of its own.

An attempt takes a whole step of every column. Where an event's value changes its sign over the
step, its root in the step's interpolant is the event. In a column that ends or is reset there, the
step counts up to the first such root only, and the next attempt begins at its time and at the state
after the reset. Grazing, sliding and accumulating resets are found as for single states
(:mod:`adjsim.ivp.events`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.ivp.column_crossings import ColumnEvent, Crossing, Root, Slope
from adjsim.ivp.column_roots import find_minima, find_roots
from adjsim.ivp.column_steps import (
    ColumnState,
    ColumnStepper,
    EventState,
    Step,
    first_of,
    interpolate,
)
from adjsim.ivp.events import ACCURACY, FINE, GrazingError
from adjsim.ivp.piecewise import ZENO
from adjsim.ivp.rhs import RightHandSide


class ColumnEvents:
    """Events of the steps of columns. With a ``tolerance`` events without a derivative are refused.

    ``tolerance`` takes states to their tolerated errors; None: no gradient is wanted. Columns begin
    at the times ``begin``.
    """

    def __init__(
        self,
        events: Sequence[ColumnEvent],
        rhs: RightHandSide,
        begin: Tensor,
        tolerance: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.events, self.rhs, self._begin, self.tolerance = events, rhs, begin, tolerance
        self._unit = 16 * rhs.eps

    def start(self, t: Tensor, y: Tensor) -> EventState:
        """Return the state of the events at the start."""
        values = torch.stack([event(t, y) for event in self.events])
        for event, value in zip(self.events, values, strict=True):
            if event.reset is not None and event.direction == 0 and bool((value == 0).any()):
                raise ValueError(
                    f"column {first_of(value == 0)} starts at event {event.number}, which has a "
                    "reset: set its direction, which determines whether the event happens at the "
                    "start."
                )
        left = torch.stack([torch.full_like(t, x.terminal or torch.inf) for x in self.events])
        never = torch.full_like(left, torch.nan)
        return EventState(
            values, left, never, t, torch.zeros_like(t), torch.zeros_like(t, dtype=torch.bool), 0
        )

    def cross(
        self, stepper: ColumnStepper, before: ColumnState, after: ColumnState, step: Step, h: Tensor
    ) -> tuple[ColumnState, Crossing | None]:
        """Find the events of a step, and return the state after them."""
        old, moved = before.events, after.t != before.t
        assert old is not None
        values = torch.stack([event(after.t, after.y) for event in self.events])
        values = torch.where(moved, values, old.values)
        happened = [
            moved & event.happens(a, b)
            for event, a, b in zip(self.events, old.values, values, strict=True)
        ]
        touched = self._touched(stepper, before, after, step, h, values, happened)
        if not any(bool(x.any()) for x in happened):
            _refuse_touched(touched, 1.0)
            return after._replace(events=old._replace(values=values)), None
        coefficients = step.polynomial()
        xs = [
            self._root(event, before, coefficients, h, old.values[k], values[k], happened[k])
            for k, event in enumerate(self.events)
        ]
        limit = torch.full_like(h, torch.inf)
        stop = torch.full_like(h, -1, dtype=torch.int64)
        for k, event in enumerate(self.events):
            ends = happened[k] & ((old.left[k] <= 1) | (event.reset is not None))
            first = ends & (xs[k] < limit)
            limit, stop = torch.where(first, xs[k], limit), torch.where(first, k, stop)
        _refuse_touched(touched, limit)
        roots, left, last, count = [], old.left, old.last, old.hits
        for k, x in enumerate(xs):
            counts = happened[k] & ((x < limit) | (stop == k))
            if counts.any():
                root = self._characterized(stepper, before, coefficients, h, k, counts, x, count)
                roots.append(root)
                count += int(counts.sum())
                row = torch.arange(len(xs), device=h.device)[:, None] == k
                left = torch.where(row & counts, left - 1, left)
                last = torch.where(row & counts, before.t + x * h, last)
        state = EventState(values, left, last, old.piece, old.close, old.ended, count)
        stops = stop >= 0
        if not stops.any():
            zero = torch.zeros_like(after.y)
            return after._replace(events=state), Crossing(roots, stop, stops, zero, zero)
        t = torch.where(stops, before.t + limit * h, after.t)
        inside = interpolate(before.y, coefficients, torch.where(stops, limit, 0.0))
        y = torch.where(stops, inside, after.y)
        return self._stopped(stepper, after._replace(events=state), t, y, h, roots, stop)

    def _stopped(
        self,
        stepper: ColumnStepper,
        after: ColumnState,
        t: Tensor,
        y: Tensor,
        h: Tensor,
        roots: Sequence[Root],
        stop: Tensor,
    ) -> tuple[ColumnState, Crossing]:
        """End or reset columns at times t, in states y."""
        old, stops = after.events, stop >= 0
        assert old is not None
        new, again = y, torch.zeros_like(stops)
        for k, event in enumerate(self.events):
            here = (stop == k) & (old.left[k] > 0)
            if event.reset is not None and here.any():
                new, again = torch.where(here, event.reset_state(t, y), new), again | here
        zero, state = torch.zeros_like(y), old._replace(ended=old.ended | (stops & ~again))
        if not again.any():
            found = after._replace(t=t, y=new, events=state)
            return found, Crossing(roots, stop, again, zero, zero)
        unit, flow, shift = _time_unit(h), stepper.rate(t, new), zero
        for k, event in enumerate(self.events):
            here = again & (stop == k)
            if here.any():
                found = self._after(stepper, event, t, y, new, unit, here)
                flow, shift = (
                    torch.where(here, *x) for x in zip(found, (flow, shift), strict=True)
                )
        new = new + shift
        if stepper.mass is not None:
            stepper.mass.refuse_inconsistent(t, new, again, stepper.tolerance)
        near = (t - old.piece).abs() <= ZENO * (t - self._begin).abs()
        close = torch.where(near, old.close + 1, 0)
        self._refuse_zeno(again & (close > len(self.events)), stop, t)
        slow = stepper.rate(t, y)
        values = [
            self._side(stepper, k, t, y, new, slow, flow, stop == k, old.last[k], unit, again)
            for k in range(len(self.events))
        ]
        state = state._replace(
            values=torch.where(again, torch.stack(values), old.values),
            piece=torch.where(again, t, old.piece),
            close=torch.where(again, close, old.close),
        )
        size = torch.where(again, stepper.first_size(t, new, flow), after.size)
        rate = None if after.rate is None else torch.where(again, flow, after.rate)
        found = after._replace(t=t, y=new, size=size, rate=rate, events=state)
        return found, Crossing(roots, stop, again, flow, shift)

    def _root(
        self,
        event: ColumnEvent,
        before: ColumnState,
        coefficients: Sequence[Tensor],
        h: Tensor,
        low: Tensor,
        high: Tensor,
        wanted: Tensor,
    ) -> Tensor:
        """Return the parts x of the step at which an event happens in the ``wanted`` columns."""
        if not wanted.any():
            return torch.zeros_like(h)
        farthest = before.t.abs().maximum((before.t + h).abs())
        spacing = torch.nextafter(farthest, torch.full_like(h, torch.inf)) - farthest
        length = torch.where(h == 0, 1.0, h.abs())

        def accuracy(x: Tensor) -> Tensor:
            return (FINE * x).minimum(ACCURACY / length).maximum(spacing / length)

        along = _along(event, before, coefficients, h)
        return find_roots(along, low, high, accuracy, wanted)

    def _characterized(
        self,
        stepper: ColumnStepper,
        before: ColumnState,
        coefficients: Sequence[Tensor],
        h: Tensor,
        number: int,
        columns: Tensor,
        x: Tensor,
        offset: int,
    ) -> Root:
        """Return a root with its rate, which must not vanish where a gradient is wanted."""
        t, y = before.t + x * h, interpolate(before.y, coefficients, x)
        place, hits = (number, columns, x), (offset, t[columns], y[:, columns].T)
        if self.tolerance is None:
            return Root(*place, torch.ones_like(h), torch.zeros_like(y), *hits)
        event, unit = self.events[number], _time_unit(h)
        flow = self._before(stepper, event, t, y, unit, columns)
        slope, rate = event.slope(t, y), _rate(stepper, before)
        speed, earlier = slope.along(flow), event.slope(before.t, before.y).along(rate)
        curvature = torch.where(x * h != 0, (speed - earlier).abs() / (x * h).abs(), 0.0)
        lost = columns & (speed == 0) & (slope.by_state == 0).all(0)
        if lost.any():
            raise ValueError(
                f"event {number} at t = {float(t[lost][0]):g} in column {first_of(lost)} does not "
                "depend on t or y in a way that has a derivative."
            )
        uncertain = (slope.by_state.abs() * self.tolerance(y)).sum(0)
        grazing = columns & (speed.square() <= 2 * curvature * uncertain)
        if grazing.any():
            raise GrazingError(
                f"the solution of column {first_of(grazing)} touches event {number} at t = "
                f"{float(t[grazing][0]):g} and hardly crosses it (rate "
                f"{float(speed[grazing][0]):.3g}), so its time has no derivative."
            )
        return Root(*place, torch.where(columns, speed, 1.0), flow, *hits)

    def _touched(
        self,
        stepper: ColumnStepper,
        before: ColumnState,
        after: ColumnState,
        step: Step,
        h: Tensor,
        values: Tensor,
        happened: Sequence[Tensor],
    ) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """Return events that are touched between the ends of a step, the columns, x and times."""
        found = []
        if self.tolerance is None:
            return found
        assert before.events is not None
        rates = _rate(stepper, before), _rate(stepper, after)
        for k, event in enumerate(self.events):
            first, last = before.events.values[k], values[k]
            slopes = [
                event.slope(state.t, state.y).along(rate) * stepper.direction
                for state, rate in zip((before, after), rates, strict=True)
            ]
            near = (first * last > 0) & (first * slopes[0] < 0) & (last * slopes[1] > 0)
            near = near & (after.t != before.t) & ~happened[k]
            if not near.any():
                continue
            coefficients, side = step.polynomial(), first.sign()
            along = _along(event, before, coefficients, h)
            x = find_minima(lambda x, f=along, s=side: s * f(x), h)
            t, y = before.t + x * h, interpolate(before.y, coefficients, x)
            uncertain = (event.slope(t, y).by_state.abs() * self.tolerance(y)).sum(0)
            found.append((k, near & (side * along(x) <= uncertain), x, t))
        return found

    def _sides(
        self, stepper: ColumnStepper, event: ColumnEvent, t: Tensor, y: Tensor, off: Any, unit: Any
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Test which states are on the surface, and evaluate both sides of it.

        Each side has the rate at which an event's value moves away from zero, the flow and the
        displacement of the state. A value as small as ``off`` counts as zero.
        """
        slope = event.slope(t, y)
        rate = slope.along(stepper.rate(t, y)).abs()
        near = 4 * self._rounding(t, y, slope, rate, unit) + 4 * off
        steep, square = slope.by_state.square().sum(0), slope.by_time.square()
        on = (slope.value.abs() <= near) & (square + steep != 0)
        found = []
        for side in (1.0, -1.0):
            later = side * near * slope.by_time / torch.where(on, square + steep, 1.0)
            shift = side * near * slope.by_state / torch.where(steep == 0, 1.0, steep)
            flow = stepper.rate(torch.where(on, t + later, t), torch.where(on, y + shift, y))
            found.append((side * slope.along(flow) * stepper.direction, flow, shift))
        return on, found

    def _before(
        self, stepper: ColumnStepper, event: ColumnEvent, t: Tensor, y: Tensor, unit: Tensor,
        columns: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the limit, from before the event, of the rates at states on the surface."""
        on, ((out, flow, _), (other_out, other, _)) = self._sides(stepper, event, t, y, 0.0, unit)
        first, second = on & (out < 0), on & (other_out < 0)
        self._refuse_sliding(columns & first & second, event, t)
        return torch.where(first, flow, torch.where(second, other, stepper.rate(t, y)))

    def _after(
        self, stepper: ColumnStepper, event: ColumnEvent, t: Tensor, before: Tensor, y: Tensor,
        unit: Tensor, columns: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the limit, from after the event, of the rates at states, and their shift."""
        off = event(t, before).abs()
        on, ((out, flow, shift), (other_out, other, back)) = self._sides(
            stepper, event, t, y, off, unit
        )
        self._refuse_sliding(columns & on & (out < 0) & (other_out < 0), event, t)
        first, second = on & (out > 0) & (other_out <= 0), on & (other_out > 0) & (out <= 0)
        found = torch.where(first, flow, other)
        small = self.rhs.eps**0.5 * found.abs().amax(0)
        jumps = (first | second) & ((flow - other).abs() > small).any(0)
        shift = torch.where(first, shift, back)
        plain = stepper.rate(t, y)
        return torch.where(jumps, found, plain), torch.where(jumps, shift, 0.0)

    def _side(
        self, stepper: ColumnStepper, number: int, t: Tensor, before: Tensor, after: Tensor,
        flow_before: Tensor, flow_after: Tensor, stopped: Tensor, last: Tensor, unit: Tensor,
        again: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the value of an event after a reset, of the sign of the side it starts on.

        Rounding would decide if a piece starts on the surface. If the event has just happened, the
        piece starts behind the surface, otherwise before it.
        """
        event = self.events[number]
        slope, ended = event.slope(t, after), event.slope(t, before)
        new, old = slope.along(flow_after), ended.along(flow_before)
        near = self._rounding(t, after, slope, old.abs() + new.abs(), unit)
        near = near + torch.where(stopped, 4 * ended.value.abs(), 0.0)
        close = slope.value.abs() <= near
        happened = stopped | ((last - t).abs() <= self._unit * (unit + t.abs()))
        rest = again & close & stopped & (new == 0)
        if rest.any():
            raise RuntimeError(
                f"the reset of event {number} at t = {float(t[rest][0]):.9g} leaves column "
                f"{first_of(rest)} at rest on the event, which would happen again without end. Let "
                "the event end the solution (terminal), or reset to a state that moves away from "
                "it."
            )
        side = stepper.direction * torch.where(happened, new, -old)
        tiny = torch.full_like(t, torch.finfo(t.dtype).tiny)
        return torch.where(close, torch.where(side < 0, -tiny, tiny), slope.value)

    def _rounding(self, t: Tensor, y: Tensor, slope: Slope, rate: Tensor, unit: Any) -> Tensor:
        """Estimate the error of an event's value due to rounding of time and state."""
        return self._unit * ((slope.by_state * y).abs().sum(0) + (unit + t.abs()) * rate)

    def _refuse_sliding(self, wrong: Tensor, event: ColumnEvent, t: Tensor) -> None:
        if wrong.any():
            raise RuntimeError(
                f"the solution of column {first_of(wrong)} slides along event {event.number} from "
                f"t = {float(t[wrong][0]):.9g} on: fun points at the surface from both sides. Let "
                "the event end the solution (terminal), or switch to an equation of the sliding "
                "motion in the reset."
            )

    def _refuse_zeno(self, wrong: Tensor, stop: Tensor, t: Tensor) -> None:
        if wrong.any():
            column = first_of(wrong)
            raise RuntimeError(
                f"resets of event {int(stop[column])} accumulate at t = {float(t[column]):.9g} in "
                f"column {column} (Zeno): there is no solution beyond this time. End the time span "
                "of this column before it, or let the event end the solution (terminal)."
            )


def _along(
    event: ColumnEvent, before: ColumnState, coefficients: Sequence[Tensor], h: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the value of an event along the interpolant of a step, as a function of x."""
    return lambda x: event(before.t + x * h, interpolate(before.y, coefficients, x))


def _rate(stepper: ColumnStepper, state: ColumnState) -> Tensor:
    return stepper.rate(state.t, state.y) if state.rate is None else state.rate


def _time_unit(h: Tensor) -> Tensor:
    """Return the time that counts as one in estimates of rounding, for a root in a step."""
    return (h.abs() * (FINE / ACCURACY)).clamp(max=1.0)


def _refuse_touched(
    touched: Sequence[tuple[int, Tensor, Tensor, Tensor]], limit: Tensor | float
) -> None:
    """Refuse events that are touched up to a part of the step."""
    for number, columns, x, t in touched:
        wrong = columns & (x <= limit)
        if wrong.any():
            raise GrazingError(
                f"the solution of column {first_of(wrong)} touches event {number} near t = "
                f"{float(t[wrong][0]):g}, or crosses it twice within a step, so its time has no "
                "derivative. If it does cross, use a smaller max_step or rtol to resolve both "
                "crossings."
            )
