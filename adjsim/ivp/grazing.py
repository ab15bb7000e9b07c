r"""Events that a solution touches without crossing them.

If the solution only touches the surface, :math:`t_e` has no derivative: an error :math:`\delta g`
of the size of the tolerance makes two events or none when :math:`\dot g^2 \le 2 |\ddot g| \delta
g`. Such grazing raises an error, whether or not the solver has found an event there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.integrate import OdeSolver
from scipy.optimize import minimize_scalar

from adjsim.ivp.events import Event, Root
from adjsim.ivp.rhs import Array


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
