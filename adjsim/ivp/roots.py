"""Roots of functions along the path of one step, and the accuracy of their times.

SciPy seeks the time of an event to an absolute accuracy of 4 eps. A step may be shorter than 4 eps,
so here the accuracy is also relative to the time from the start of the step to the event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from adjsim.ivp.rhs import Array

# SciPy's accuracy of the time of an event, absolute and relative.
ACCURACY = 4 * float(np.finfo(float).eps)
# Accuracy of the time from the start of the step to the event.
FINE = 1e-12
# Bisection of a step to the smallest number takes fewer iterations.
MOST_ITERATIONS = 3_000


class Root(NamedTuple):
    """The time and the state at which a function is zero, and the length of the step there."""

    t: float
    y: Array
    step: float

    @property
    def unit(self) -> float:
        """The unit of time in estimates of rounding."""
        return time_unit(self.step)


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
            return Root(t, path(t), abs(end - begin))
        accuracy = wanted


def time_unit(step: float) -> float:
    """Return the time that counts as one in estimates of rounding, for a root in a step.

    It is one in all but short steps, where a root is found to a smaller absolute accuracy.
    """
    return min(1.0, abs(step) * FINE / ACCURACY)
