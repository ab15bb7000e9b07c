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
0`, so :math:`S = 1`, and needs no event. The search handles all columns of a solution at once, and
the states of a single problem are one column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolver
from torch import Tensor

from adjsim.ivp.column_steps import ColumnState, ColumnStepper, Rate, Step, interpolate
from adjsim.ivp.rate_check import StepRates
from adjsim.ivp.rhs import Array, RightHandSide, to_numpy
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

# The states (n, batch) at times (batch,).
Path = Callable[[Tensor], Tensor]


@dataclass
class JumpSearch:
    """A search for jumps of the rates.

    Args:
        rhs: the right-hand side, whose declared tensors may determine the time of a jump.
        rate: the rates.
        rtol, atol: the tolerances of the solution, numbers or of shape ``(n, 1)``.
    """

    rhs: RightHandSide
    rate: Rate
    rtol: Any
    atol: Any

    def size(self, change: Tensor, state: Tensor, span: Tensor) -> Tensor:
        """Estimate the effect of a rate change on the final state, relative to the tolerance.

        Args:
            change, state: the change of the rates and the states, ``(n, batch)``.
            span: the lengths of the time spans ``(batch,)``.
        """
        return (change.abs() * span / (self.atol + self.rtol * state.abs())).amax(0)

    def along(
        self, path: Path, begin: Tensor, end: Tensor, state: Tensor, span: Tensor, searched: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Search for jumps between two times along a path, in some of the columns.

        Returns:
            times, states, and a mask of the columns in which there is a jump there.
        """

        def size(change: Tensor) -> Tensor:
            return self.size(change, state, span)

        a, b = begin, torch.where(searched, end, begin)
        of_a, of_b = self.rate(a, path(a)), self.rate(b, path(b))
        height = whole = size(of_b - of_a)
        found = searched & (whole > 1)
        for halvings in range(HALVINGS):
            if not found.any():
                return a, state, found
            middle = (a + b) / 2
            of_middle = self.rate(middle, path(middle))
            first, second = size(of_middle - of_a), size(of_b - of_middle)
            coarse = (b - a).abs() >= 64 * (torch.nextafter(middle, b) - middle).abs()
            left, right = coarse & (first > second), coarse & (first <= second)
            a, of_a = torch.where(right, middle, a), torch.where(right, of_middle, of_a)
            b, of_b = torch.where(left, middle, b), torch.where(left, of_middle, of_b)
            height = torch.where(coarse, first.maximum(second), height)
            if halvings:
                found = found & (height >= 0.5 * whole)
        apart = ((end - begin).abs() * 2.0**-12).maximum((b - a).abs()) * (end - begin).sign()
        low, high = begin.minimum(end), begin.maximum(end)
        scatter = torch.zeros_like(height)
        for k in (1, 2, 3):
            for of, t in ((of_a, a - k * apart), (of_b, b + k * apart)):
                beside = t.maximum(low).minimum(high)
                scatter = scatter.maximum(size(self.rate(beside, path(beside)) - of))
        found = found & (height > SCATTER * scatter)
        if found.any():
            found = found & ~self._at_fixed_time(a, b, path, state, size, height)
        return a, path(a), found

    def _at_fixed_time(
        self, a: Tensor, b: Tensor, path: Path, state: Tensor, size: Path, height: Tensor
    ) -> Tensor:
        """Test whether jumps are at a fixed time.

        The rates then jump for any state, and no declared tensor determines the times of the jumps.
        """
        weights = 1 + 0.5 * torch.cos(torch.arange(len(state), device=state.device) ** 2)
        shift = 1e-6 * weights[:, None] * (state.abs() + 1e-6 * state.abs().amax(0))
        fixed = torch.ones_like(a, dtype=torch.bool)
        points: list[tuple[Any, Array]] = []
        for t in (a, b):
            y = path(t)
            known = self.rate(t, y)
            for moved in (y + shift, y - shift):
                fixed = fixed & (size(self.rate(t, moved) - known) <= 0.5 * height)
            at, x = to_numpy(t), to_numpy(y)
            points.append((at, x) if self.rhs.like.ndim == 2 else (float(at[0]), x[:, 0]))
        return fixed & (not self.rhs.has_unused_parameter(*points))


def jump_error(t: float, state: Array, where: str, remedy: str) -> ValueError:
    """Make the error for a jump that no event marks; ``remedy`` ends before "an event"."""
    shown = np.array2string(state[:6], precision=6, separator=", ")
    return ValueError(
        f"fun jumps at t = {t:.9g}, y = {shown}{' ...' if state.size > 6 else ''}{where}, where no "
        f"event restarts the solution, so its derivative across the jump would be wrong. {remedy} "
        "an event that is zero on the switching surface, with the identity as its reset: "
        "event.reset = lambda t, y, *args: y."
    )


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
        self.rates, self.rtol, self.atol, self.span = rates, rtol, atol, span
        self.search = JumpSearch(
            rhs,
            lambda t, y: _column(rates.of(float(t), y[:, 0].numpy())),
            *(torch.as_tensor(np.reshape(x, (-1, 1))) for x in (rtol, atol)),
        )
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
        scale = self.atol + self.rtol * np.abs(state)
        return float(np.max(np.abs(change) * self._span_at(now) / scale, initial=0.0))

    def _span_at(self, now: float) -> float:
        return self.span if np.isfinite(self.span) else abs(now - (self._begin or 0.0))

    def _jump(
        self, path: Callable[[float], Array], begin: float, end: float, state: Array
    ) -> tuple[float, Array, float] | None:
        """Search for a jump of the rate between two times along a path.

        Returns:
            its time and state, and the uncertainty of the time; None without a jump.
        """
        a, b, span = torch.tensor([[begin], [end], [self._span_at(end)]], dtype=torch.float64)
        time, _, found = self.search.along(
            lambda t: _column(path(float(t))), a, b, _column(state), span, torch.tensor([True])
        )
        if not found:
            return None
        t = float(time)
        rounding = 64 * self.search.rhs.eps
        rate = float(np.max(np.abs(self.rates.of(t, path(t))))) or 1.0
        reached = time_unit(end - begin) + abs(t) + float(np.max(np.abs(state))) / rate
        return t, path(t), 1e-6 * abs(end - begin) + rounding * reached

    def _raise(self) -> None:
        assert self.found is not None
        time, state, _ = self.found
        raise jump_error(time, state, "", "Give solve_ivp()")


def _column(x: Array) -> Tensor:
    return torch.as_tensor(x)[:, None]


class ColumnJumpCheck:
    """An observer of the steps of columns that refuses jumps of the right-hand side.

    A column takes no events, so each jump of which the time depends on the state or on a declared
    tensor is an error.

    Args:
        rhs: the right-hand side, whose declared tensors may determine the time of a jump.
        stepper: the steps.
        start: the state before the first step.
    """

    def __init__(self, rhs: RightHandSide, stepper: ColumnStepper, start: ColumnState) -> None:
        self.stepper = stepper
        self.search = JumpSearch(rhs, stepper.rate, stepper.rtol, stepper.atol)
        self.span = (stepper.end - start.t).abs()
        self._rate = self._rate_of(start)
        self._steepness = torch.zeros_like(start.t)
        self._longest, self._short = torch.zeros_like(start.t), torch.zeros_like(start.t)
        # The time beyond which a jump ahead of short steps is refused, and this jump.
        self._until = stepper.direction * torch.inf
        self._ahead: tuple[Tensor, Tensor] = start.t, start.y

    def __call__(self, before: ColumnState, after: ColumnState, step: Step) -> None:
        direction, moved = self.stepper.direction, after.t != before.t
        self._refuse(*self._ahead, moved & (direction * (after.t - self._until) > 0))
        h = torch.where(moved, after.t - before.t, 1.0)
        rate = self._rate_of(after)
        change = self.search.size(rate - self._rate, after.y, self.span)
        steepness = change / h.abs()
        suspect = moved & (change > 1) & (steepness > STEEPER * self._steepness)
        if suspect.any():
            coefficients = step.polynomial()

            def inside(t: Tensor) -> Tensor:
                return interpolate(before.y, coefficients, (t - before.t) / h)

            self._refuse(*self.search.along(inside, before.t, after.t, after.y, self.span, suspect))
        self._look_ahead(after, torch.where(moved, h, 0.0), rate)
        self._rate = torch.where(moved, rate, self._rate)
        self._steepness = torch.where(moved, steepness, self._steepness)

    def _rate_of(self, state: ColumnState) -> Tensor:
        return self.stepper.rate(state.t, state.y) if state.rate is None else state.rate

    def _look_ahead(self, state: ColumnState, h: Tensor, rate: Tensor) -> None:
        """Search ahead of short steps, which accumulate in front of a jump that none crosses."""
        moved = h != 0
        self._longest = self._longest.maximum(h.abs())
        short = torch.where(h.abs() < SHORT * self._longest, self._short + 1, 0.0)
        self._short = torch.where(moved, short, self._short)
        due = moved & (self._short > 0) & (self._short % AHEAD == 0) & self._until.isinf()
        if due.any():

            def onward(t: Tensor) -> Tensor:
                return state.y + (t - state.t) * rate

            time, y, found = self.search.along(
                onward, state.t, state.t + AHEAD * h, state.y, self.span, due
            )
            self._until = torch.where(found, state.t + 2 * AHEAD * h, self._until)
            times, states = self._ahead
            self._ahead = torch.where(found, time, times), torch.where(found, y, states)

    def _refuse(self, times: Tensor, states: Tensor, wrong: Tensor) -> None:
        if not wrong.any():
            return
        column = int(wrong.nonzero()[0, 0])
        raise jump_error(
            float(times[column]),
            to_numpy(states[:, column]),
            f" in column {column}",
            "Solve the columns one by one, with y0 of shape (n,) and",
        )
