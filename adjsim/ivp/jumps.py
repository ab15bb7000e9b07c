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
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolver
from torch import Tensor

from adjsim.ivp.column_steps import ColumnState, ColumnStepper, Rate, Step, interpolate
from adjsim.ivp.events import time_unit
from adjsim.ivp.forward_states import StepRates
from adjsim.ivp.rhs import Array, RightHandSide, to_numpy

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

# Part of a step, before an event that ends a piece, in which a jump belongs to the event.
BESIDE = 1e-6

# The states (n, batch) at times (batch,).
Path = Callable[[Tensor], Tensor]
# Times (batch,), states (n, batch), and a mask of the columns in which there is a jump there.
Jump = tuple[Tensor, Tensor, Tensor]


class JumpSearch:
    """A search for jumps of the rates in columns. The states of a single problem are one column.

    The tolerances are numbers or of shape ``(n, 1)``, the time spans ``(batch,)``.
    """

    def __init__(
        self, rhs: RightHandSide, rate: Rate, rtol: Any, atol: Any, begin: Tensor, end: Tensor
    ) -> None:
        self.rhs, self.rate, self.rtol, self.atol = rhs, rate, rtol, atol
        self.begin, self.end, self._finite = begin, end, bool(end.isfinite().all())

    def _size(self, change: Tensor, state: Tensor, t: Tensor) -> Tensor:
        """Estimate the effect of a rate change on the final state, relative to the tolerance."""
        span = ((self.end if self._finite else t) - self.begin).abs()
        return (change.abs() * span / (self.atol + self.rtol * state.abs())).amax(0)

    def _along(
        self, path: Path, begin: Tensor, end: Tensor, state: Tensor, searched: Tensor
    ) -> Jump:
        """Search some of the columns for jumps between two times along a path."""

        def size(change: Tensor) -> Tensor:
            return self._size(change, state, end)

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

    def _refuse(self, times: Tensor, states: Tensor, wrong: Tensor) -> None:
        """Refuse the first of some jumps that no event marks."""
        if not wrong.any():
            return
        column = int(wrong.nonzero()[0, 0])
        where = f" in column {column}" if self.rhs.like.ndim == 2 else ""
        state = to_numpy(states[:, column])
        shown = np.array2string(state[:6], precision=6, separator=", ")
        raise ValueError(
            f"fun jumps at t = {float(times[column]):.9g}, y = {shown}"
            f"{' ...' if state.size > 6 else ''}{where}, where no event restarts the solution, so "
            "its derivative across the jump would be wrong. Give solve_ivp() an event that is zero "
            "on the switching surface, with the identity as its reset: event.reset = lambda t, y, "
            "*args: y."
        )


class DiscontinuityCheck(JumpSearch):
    """An observer of a SciPy solver that finds jumps that no event marks."""

    def __init__(
        self, rhs: RightHandSide, rates: StepRates, rtol: Any, atol: Any, begin: float, end: float
    ) -> None:
        super().__init__(
            rhs,
            lambda t, y: _column(rates.of(float(t), y[:, 0].numpy())),
            *(torch.as_tensor(np.reshape(x, (-1, 1))) for x in (rtol, atol)),
            *torch.tensor([[begin], [end]], dtype=torch.float64),
        )
        self.rates, self._scale = rates, lambda y: atol + rtol * np.abs(y)
        # The jump in the last step, and the uncertainty of its time.
        self._jump: Jump | None = None
        self._uncertainty = 0.0
        # A jump ahead of short steps, and a time before which an event would have marked it.
        self._ahead: tuple[Jump, float] | None = None
        self._before: tuple[float, Array, float] | None = None
        self._longest, self._short = 0.0, 0

    def __call__(self, solver: OdeSolver) -> None:
        now, y, rate = float(solver.t), solver.y, np.array(self.rates(solver))
        if self._ahead is not None and solver.direction * (now - self._ahead[1]) > 0:
            self._jump = self._jump or self._ahead[0]
        if self._jump is not None:
            self._refuse(*self._jump)
        begin, before, earlier = self._before or (now, rate, 0.0)
        step, steepness = now - begin, 0.0
        if step:
            span = abs((float(self.end) if self._finite else now) - float(self.begin))
            change = float(np.max(np.abs(rate - before) * span / self._scale(y), initial=0.0))
            steepness = change / abs(step)
            if change > 1 and steepness > STEEPER * earlier:
                self._jump = self._search(solver.dense_output(), begin, now, y)
                if self._jump is not None:
                    self._uncertainty = self._uncertainty_of(self._jump, step)
            self._longest = max(self._longest, abs(step))
            self._short = self._short + 1 if abs(step) < SHORT * self._longest else 0
            if self._short and self._short % AHEAD == 0 and self._ahead is None:
                jump = self._search(lambda t: y + (t - now) * rate, now, now + AHEAD * step, y)
                self._ahead = None if jump is None else (jump, now + 2 * AHEAD * step)
        self._before = now, rate, steepness

    def _search(
        self, path: Callable[[float], Array], begin: float, end: float, state: Array
    ) -> Jump | None:
        a, b = torch.tensor([[begin], [end]], dtype=torch.float64)
        found = self._along(
            lambda t: _column(path(float(t))), a, b, _column(state), torch.tensor([True])
        )
        return found if found[2] else None

    def _uncertainty_of(self, jump: Jump, step: float) -> float:
        time, state, _ = jump
        rate = float(self.rate(time, state).abs().max()) or 1.0
        reached = time_unit(step) + abs(float(time)) + float(state.abs().max()) / rate
        return 1e-6 * abs(step) + 64 * self.rhs.eps * reached

    def refuse(self, end: float, sign: float, marked: bool) -> None:
        """Refuse a jump in the last step, unless an event at or before it ended the piece."""
        if self._jump is not None:
            until = float(self._jump[0]) + sign * self._uncertainty
            if not (marked and sign * (end - until) <= 0):
                self._refuse(*self._jump)


def _column(x: Array) -> Tensor:
    return torch.as_tensor(x)[:, None]


class ColumnJumpCheck(JumpSearch):
    """An observer of the steps of columns, which finds jumps that no event marks."""

    def __init__(self, rhs: RightHandSide, stepper: ColumnStepper, start: ColumnState) -> None:
        super().__init__(rhs, stepper.field, stepper.rtol, stepper.atol, start.t, stepper.end)
        self.direction, self._before = stepper.direction, self._rate_of(start)
        self._steepness = self._longest = self._short = torch.zeros_like(start.t)
        # A jump ahead of short steps, and the time beyond which it is refused.
        self._ahead, self._until = (start.t, start.y), stepper.direction * torch.inf

    def __call__(self, before: ColumnState, after: ColumnState, step: Step) -> None:
        assert after.came is not None
        moved, t, y, crossing = after.t != before.t, after.t, after.y, after.came.crossing
        h, rate = torch.where(moved, after.came.h, 1.0), self._rate_of(after)
        polynomial = cache(step.polynomial)

        def inside(time: Tensor) -> Tensor:
            return interpolate(before.y, polynomial(), (time - before.t) / h)

        new, known = moved & False, rate
        if crossing is not None and bool((crossing.stop >= 0).any()):
            # The rates may jump at an event that ends or resets a column.
            new = crossing.stop >= 0
            t = torch.where(new, t - BESIDE * (t - before.t), t)
            y = torch.where(new, inside(t), y)
            known = torch.where(new, self.rate(t, y), rate)
        self._refuse(*self._ahead, moved & (self.direction * (t - self._until) > 0))
        change = self._size(known - self._before, y, t)
        steepness = change / h.abs()
        suspect = moved & (change > 1) & (steepness > STEEPER * self._steepness)
        if suspect.any():
            self._refuse(*self._along(inside, before.t, t, y, suspect))
        self._before = torch.where(moved, rate, self._before)
        self._steepness = torch.where(moved, torch.where(new, 0.0, steepness), self._steepness)
        self._longest = torch.where(new, 0.0, self._longest)
        self._short = torch.where(new, 0.0, self._short)
        self._until = torch.where(new, self.direction * torch.inf, self._until)
        self._look_ahead(t, y, torch.where(moved & ~new, h, 0.0), rate)

    def _rate_of(self, state: ColumnState) -> Tensor:
        return self.rate(state.t, state.y) if state.rate is None else state.rate

    def _look_ahead(self, t: Tensor, y: Tensor, h: Tensor, rate: Tensor) -> None:
        """Search ahead of short steps, which accumulate before a jump where the solution slides."""
        moved = h != 0
        self._longest = self._longest.maximum(h.abs())
        short = torch.where(h.abs() < SHORT * self._longest, self._short + 1, 0.0)
        self._short = torch.where(moved, short, self._short)
        due = moved & (self._short > 0) & (self._short % AHEAD == 0) & self._until.isinf()
        if due.any():
            found = self._along(lambda time: y + (time - t) * rate, t, t + AHEAD * h, y, due)
            times, states, ahead = found
            self._until = torch.where(ahead, t + 2 * AHEAD * h, self._until)
            before = self._ahead
            self._ahead = times.where(ahead, before[0]), states.where(ahead, before[1])
