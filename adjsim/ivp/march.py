"""The loop over the steps of one of SciPy's solvers, with events and times of evaluation.

The loop is that of :func:`scipy.integrate.solve_ivp`, with the same results to the last bit. Only
the time of an event is sought to a relative accuracy as well (:func:`adjsim.ivp.events.find_root`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import scipy.integrate
from scipy.integrate import OdeSolver

from adjsim.ivp.events import Event, Root, find_root
from adjsim.ivp.rhs import Array

ENDED = "The solver successfully reached the end of the integration interval."
STOPPED = "A termination event occurred."
# Factor by which a step of LSODA that ended in NaN is shortened.
SHORTER = 8.0


class March(NamedTuple):
    """The solution from the start of a solver to its end, or to a terminal event.

    Attributes:
        t, y: the saved times and states ``(n, times)``.
        ends, interpolants: the times between the interpolants, and these if they are stored.
        status: 0 at the end, 1 at a terminal event, -1 if the solver failed.
    """

    t: Array
    y: Array
    ends: list[float]
    interpolants: list[Any]
    roots: list[list[Root]]
    status: int
    message: str | None


def march(
    solver: Any,
    events: Sequence[Event],
    t_eval: Array | None,
    dense_output: bool,
    observers: Sequence[Callable[[OdeSolver], None]],
) -> March:
    """Take all steps of a solver, and save the states at ``t_eval``; None: those of the steps.

    Observers are called before the first step and after every step.
    """
    for observer in observers:
        observer(solver)
    start, direction = float(solver.t), solver.direction
    along = None if t_eval is None else direction * t_eval
    ends, states, interpolants, passed = [start], [], [], 0
    roots: list[list[Root]] = [[] for _ in events]
    if along is None:
        states.append(solver.y[:, None])
    status, message = 0, ENDED
    values = [event(start, solver.y) for event in events]
    while solver.status == "running" and status == 0:
        begin, failure = float(solver.t), solver.step()
        if solver.status == "failed":
            status, message = -1, failure
            break
        for observer in observers:
            observer(solver)
        t, y = float(solver.t), solver.y
        path: Callable[[], Any] = cache(solver.dense_output)
        before, values = values, [event(t, y) for event in events]
        active = [k for k, event in enumerate(events) if _happens(event, before[k], values[k])]
        if active:
            last = _add_roots(roots, events, active, path(), begin, t)
            if last is not None:
                t, y, status, message = last.t, last.y, 1, STOPPED
        # A solution that ends at the start of a step has no part of this step.
        if not dense_output or len(ends) == 1 or t != ends[-1]:
            ends.append(t)
            if dense_output:
                interpolants.append(path())
            if along is None:
                states.append(y[:, None])
        if along is not None:
            due = int(np.searchsorted(along, direction * t, side="right"))
            if due > passed:
                states.append(path()(direction * along[passed:due]))
                passed = due
    saved = np.array(ends) if along is None else direction * along[:passed]
    found = np.concatenate(states, 1) if states else np.empty((solver.n, 0))
    return March(saved, found, ends, interpolants, roots, status, message)


def check_times(t_eval: Array, begin: float, end: float) -> None:
    """Refuse times of evaluation outside of the time span or in another order, in SciPy's words."""
    if t_eval.ndim != 1:
        raise ValueError("`t_eval` must be 1-dimensional.")
    if np.any(t_eval < min(begin, end)) or np.any(t_eval > max(begin, end)):
        raise ValueError("Values in `t_eval` are not within `t_span`.")
    if end != begin and np.any(np.diff(t_eval) * np.sign(end - begin) <= 0):
        raise ValueError("Values in `t_eval` are not properly sorted.")


def _happens(event: Event, before: float, after: float) -> bool:
    """Test whether an event happens between two of its values."""
    up, down = before <= 0 <= after, before >= 0 >= after
    return up if event.direction > 0 else down if event.direction < 0 else up or down


def _add_roots(
    roots: list[list[Root]],
    events: Sequence[Event],
    active: Sequence[int],
    path: Callable[[float], Array],
    begin: float,
    end: float,
) -> Root | None:
    """Add the roots of the events of a step, up to the root that ends the solution, if one does."""
    found = [(k, find_root(events[k], path, begin, end)) for k in active]
    limits = [events[k].terminal or np.inf for k in range(len(events))]
    ending = [k for k in active if len(roots[k]) + 1 >= limits[k]]
    if ending:
        found.sort(key=lambda pair: abs(pair[1].t - begin))
    for k, root in found:
        roots[k].append(root)
        if k in ending:
            return root
    return None


class LSODA(scipy.integrate.LSODA):
    """SciPy's LSODA, which does not accept a step to a state that is not finite.

    ODEPACK compares the error of a step with its tolerance, and NaN passes this comparison. Here
    such a step is taken again from its start, as a first step of a shorter length.
    """

    def _step_impl(self) -> Any:
        t, y, base = self.t, self.y, super()
        success, message = base._step_impl()
        while success and not np.isfinite(self.y).all() and np.isfinite(y).all():
            step = (self.t - t) / SHORTER
            if abs(step) < 10 * np.abs(np.nextafter(t, self.direction * np.inf) - t):
                return False, self.TOO_SMALL_STEP
            ode: Any = self._lsoda_solver
            ode._integrator.first_step = step
            ode.set_initial_value(y, t)
            # As SciPy does at its start: a step does not go beyond this time.
            ode._integrator.rwork[0] = self.t_bound
            success, message = base._step_impl()
        return success, message
