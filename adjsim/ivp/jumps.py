r"""Discontinuous right-hand sides, and the derivative of a solution across a jump.

Let :math:`f` jump where :math:`g(t, y, \theta) = 0`, and let the solution cross this surface at
:math:`t_e` with the rates :math:`f^- = \lim_{t \uparrow t_e} f(t, y(t))` before and :math:`f^+ =
\lim_{t \downarrow t_e} f(t, y(t))` after. A change :math:`dy`, :math:`d\theta` of the problem moves
the crossing by

.. math:: dt_e = -\frac{\partial_y g \, dy + \partial_\theta g \, d\theta}{\dot g^-}, \qquad
          \dot g^- = \partial_t g + \partial_y g \, f^-.

The state at the crossing then changes by :math:`dy + f^- dt_e`. A later crossing shortens the piece
after it, so at the old crossing time the change of that piece is :math:`dy^+ = dy + (f^- - f^+) \,
dt_e`. With :math:`d\theta = 0`, :math:`dy^+ = S \, dy` with the saltation matrix

.. math:: S = 1 + \frac{(f^+ - f^-) \, \partial_y g}{\dot g^-}.

The state at the crossing lies on the surface up to rounding, and there ``fun`` may return either
limit or neither. So both limits are evaluated next to the surface, at :math:`(t, y) \pm \delta
(\partial_t g, \partial_y g)`, with :math:`\delta` a few times the rounding error of g. A solution
that is integrated forward in time leaves into the side whose rate points away from the surface. It
has arrived from the side whose rate points away from the surface backward in time. Where the rates
of both sides point at the surface, the solution slides along it (Filippov). Its sliding motion is
not determined by ``fun`` alone, so an error is raised.

If no event marks a jump, :math:`S` is missing and the gradient is wrong by any amount at any
tolerance. Solvers resolve a jump by short steps. Within these, bisection distinguishes a jump from
a rapid change, since only a jump keeps its height. A jump at a fixed time has :math:`\partial_y g =
0`, so :math:`S = 1`, and needs no event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolver

from adjsim.ivp.rate_check import StepRates
from adjsim.ivp.rhs import Array, RightHandSide
from adjsim.ivp.roots import time_unit

# A step is searched for a jump if the rate changes this many times faster than over the step
# before.
STEEPER = 3.0
# A step counts as short if it is below this fraction of the longest one.
SHORT = 1e-2
# After every so many consecutive short steps, as many steps ahead are searched for a jump.
AHEAD = 8
# Bisection to 1e-7 of a step is finer than any step resolves, and coarse enough that rounding does
# not put a state on the surface itself.
HALVINGS = 24
# Smallest height of a jump relative to the variation of fun on either side of it.
SCATTER = 10.0

Rate = Callable[[float], Array]


class DiscontinuityCheck:
    """An observer of a SciPy solver that finds jumps that no event marks.

    Args:
        rhs: the right-hand side, whose declared tensors may determine the time of a jump.
        rates: the rates at a solver's states, as the solver evaluates them.
        rtol, atol: the tolerances of the solution.
        span: the length of the time span.
    """

    def __init__(
        self, rhs: RightHandSide, rates: StepRates, rtol: Any, atol: Any, span: float
    ) -> None:
        self.rhs, self.rates, self.rtol, self.atol, self.span = rhs, rates, rtol, atol, span
        #: Time and state of the jump in the last step, and the uncertainty of its time.
        self.found: tuple[float, Array, float] | None = None
        # A jump ahead of short steps, and a time before which an event would have marked it.
        self._ahead: tuple[tuple[float, Array, float], float] | None = None
        self._begin: float | None = None
        self._before: tuple[float, Array, float] | None = None
        self._longest, self._short = 0.0, 0

    def __call__(self, solver: OdeSolver) -> None:
        now, rate = float(solver.t), np.array(self.rates(solver))
        if (
            self.found is None
            and self._ahead is not None
            and solver.direction * (now - self._ahead[1]) > 0
        ):
            self.found = self._ahead[0]
        if self.found is not None:
            self._raise()
        self._begin = now if self._begin is None else self._begin
        steepness = 0.0
        if self._before is not None and now != self._before[0]:
            begin, before, earlier = self._before
            change = self._size(rate - before, now, solver.y)
            steepness = change / abs(now - begin)
            if change > 1 and steepness > STEEPER * earlier:
                self.found = self._jump(solver.dense_output(), begin, now, solver.y)
            self._look_ahead(now, now - begin, solver.y, rate)
        self._before = (now, rate, steepness)

    def _look_ahead(self, now: float, step: float, state: Array, rate: Array) -> None:
        """Search ahead of short steps.

        Where the solution slides, short steps accumulate in front of a jump, and none crosses it.
        """
        self._longest = max(self._longest, abs(step))
        self._short = self._short + 1 if abs(step) < SHORT * self._longest else 0
        if self._short and self._short % AHEAD == 0 and self._ahead is None:
            jump = self._jump(lambda t: state + (t - now) * rate, now, now + AHEAD * step, state)
            self._ahead = None if jump is None else (jump, now + 2 * AHEAD * step)

    def refuse(self, end: float, sign: float, marked: bool) -> None:
        """Raise an error for a jump in the last step.

        There is no error if the piece was ended by an event (``marked``) at or before the jump.
        """
        if self.found is not None and not (
            marked and sign * (end - self.found[0]) <= self.found[2]
        ):
            self._raise()

    def _size(self, change: Array, now: float, state: Array) -> float:
        """Estimate the effect of a rate change on the final state, relative to the tolerance."""
        span = self.span if np.isfinite(self.span) else abs(now - (self._begin or 0.0))
        return float(
            np.max(np.abs(change) * span / (self.atol + self.rtol * np.abs(state)), initial=0.0)
        )

    def _jump(
        self, path: Rate, begin: float, end: float, state: Array
    ) -> tuple[float, Array, float] | None:
        """Search for a jump of the rate between two times along a path.

        Returns:
            its time and state, and the uncertainty of the time; None without a jump.
        """
        a, b, of_a, of_b = (
            begin,
            end,
            self.rates.of(begin, path(begin)),
            self.rates.of(end, path(end)),
        )
        height = whole = self._size(of_b - of_a, end, state)
        if whole <= 1:
            return None
        for halvings in range(HALVINGS):
            middle = (a + b) / 2
            if abs(b - a) < 64 * np.spacing(abs(middle)):
                break
            of_middle = self.rates.of(middle, path(middle))
            first, second = (
                self._size(of_middle - of_a, end, state),
                self._size(of_b - of_middle, end, state),
            )
            a, b, of_a, of_b = (
                (a, middle, of_a, of_middle) if first > second else (middle, b, of_middle, of_b)
            )
            height = max(first, second)
            if halvings and height < 0.5 * whole:
                return None
        apart = max(abs(end - begin) * 2.0**-12, abs(b - a)) * np.sign(end - begin)
        low, high = min(begin, end), max(begin, end)
        near = [(of_a, a - k * apart) for k in (1, 2, 3)] + [
            (of_b, b + k * apart) for k in (1, 2, 3)
        ]
        beside = [(of, min(max(t, low), high)) for of, t in near]
        scatter = max(self._size(self.rates.of(t, path(t)) - of, end, state) for of, t in beside)
        if height <= SCATTER * scatter or self._at_fixed_time(a, b, path, (end, state, height)):
            return None
        rounding = 64 * float(torch.finfo(self.rhs.like.dtype).eps)
        reached = float(np.max(np.abs(state))) / (float(np.max(np.abs(of_a))) or 1.0)
        return (
            a,
            path(a),
            1e-6 * abs(end - begin) + rounding * (time_unit(end - begin) + abs(a) + reached),
        )

    def _at_fixed_time(
        self, a: float, b: float, path: Rate, at: tuple[float, Array, float]
    ) -> bool:
        """Test whether a jump is at a fixed time.

        The rate then jumps for any state, and no declared tensor determines the time of the jump.
        """
        end, state, height = at
        generic = (
            (1 + 0.5 * np.cos(np.arange(state.size) ** 2))
            * 1e-6
            * (np.abs(state) + 1e-6 * np.max(np.abs(state)))
        )
        for t in (a, b):
            values = [
                self.rates.of(t, path(t) + shift) for shift in (0.0 * generic, generic, -generic)
            ]
            if max(self._size(value - values[0], end, state) for value in values) > 0.5 * height:
                return False
        return not self.rhs.has_unused_parameter((a, path(a)), (b, path(b)))

    def _raise(self) -> None:
        assert self.found is not None
        time, state, _ = self.found
        shown = np.array2string(state[:6], precision=6, separator=", ")
        raise ValueError(
            f"fun jumps at t = {time:.9g}, y = {shown}{' ...' if state.size > 6 else ''}, where "
            "no event restarts the solution, so its derivative across the jump would be wrong. "
            "Give solve_ivp() an event that is zero on the switching surface, with the identity "
            "as its reset: event.reset = lambda t, y, *args: y."
        )
