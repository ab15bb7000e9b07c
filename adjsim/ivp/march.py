"""The loop over the steps of one of SciPy's solvers, with events and times of evaluation.

The loop is that of :func:`scipy.integrate.solve_ivp`, with the same results to the last bit. Only
the time of an event is sought to a relative accuracy as well (:mod:`adjsim.ivp.roots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from adjsim.ivp.events import Event
from adjsim.ivp.rhs import Array
from adjsim.ivp.roots import Root, find_root

ENDED = "The solver successfully reached the end of the integration interval."
STOPPED = "A termination event occurred."


class March(NamedTuple):
    """The solution from the start of a solver to its end, or to a terminal event.

    Attributes:
        t, y: the saved times and states ``(n, times)``.
        ends, interpolants: the times between the interpolants, and the interpolants if they are
            stored.
        roots: the roots of each event.
        status: 0 at the end, 1 at a terminal event, -1 if the solver failed.
        message: the message that belongs to the status.
    """

    t: Array
    y: Array
    ends: list[float]
    interpolants: list[Any]
    roots: list[list[Root]]
    status: int
    message: str | None


def march(solver: Any, events: Sequence[Event], t_eval: Array | None, dense_output: bool) -> March:
    """Take all steps of a solver.

    Args:
        solver: a SciPy solver before its first step.
        events: the events.
        t_eval: sorted times at which the solution is saved; None: those of the steps.
        dense_output: whether the interpolants are stored.
    """
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
        t, y = float(solver.t), solver.y
        path: Any = solver.dense_output() if dense_output else None
        before, values = values, [event(t, y) for event in events]
        active = [k for k, event in enumerate(events) if _happens(event, before[k], values[k])]
        if active:
            path = solver.dense_output() if path is None else path
            last = _add_roots(roots, events, active, path, begin, t)
            if last is not None:
                t, y, status, message = last.t, last.y, 1, STOPPED
        # A solution that ends at the start of a step has no part of this step.
        if not dense_output or len(ends) == 1 or t != ends[-1]:
            ends.append(t)
            if dense_output:
                interpolants.append(path)
            if along is None:
                states.append(y[:, None])
        if along is not None:
            due = int(np.searchsorted(along, direction * t, side="right"))
            if due > passed:
                path = solver.dense_output() if path is None else path
                states.append(path(direction * along[passed:due]))
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
    """Add the roots of the events that happen in a step.

    Returns:
        the root at which a terminal event ends the solution, if one does.
    """
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
