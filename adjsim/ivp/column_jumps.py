"""Detection of jumps of a right-hand side in columns.

The search is that of :class:`~adjsim.ivp.jumps.DiscontinuityCheck`, for all columns at once. A
column takes no events, so each jump of which the time depends on the state or on a declared tensor
is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from adjsim.ivp.column_steps import ColumnState, ColumnStepper, Step
from adjsim.ivp.jumps import AHEAD, HALVINGS, SCATTER, SHORT, STEEPER
from adjsim.ivp.rhs import RightHandSide, to_numpy

# The states (n, batch) at times (batch,).
Path = Callable[[Tensor], Tensor]


class ColumnJumpCheck:
    """An observer of the steps of columns that refuses jumps of the right-hand side.

    Args:
        rhs: the right-hand side, whose declared tensors may determine the time of a jump.
        stepper: the steps.
        start: the state before the first step.
    """

    def __init__(self, rhs: RightHandSide, stepper: ColumnStepper, start: ColumnState) -> None:
        self.rhs, self.stepper = rhs, stepper
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
        change = self._size(rate - self._rate, after.y)
        steepness = change / h.abs()
        suspect = moved & (change > 1) & (steepness > STEEPER * self._steepness)
        if suspect.any():
            coefficients = step.polynomial()

            def inside(t: Tensor) -> Tensor:
                x, found = (t - before.t) / h, torch.zeros_like(before.y)
                for coefficient in reversed(coefficients):
                    found = x * (coefficient + found)
                return before.y + found

            self._refuse(*self._jumps(inside, before.t, after.t, after.y, suspect))
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

            time, y, found = self._jumps(onward, state.t, state.t + AHEAD * h, state.y, due)
            self._until = torch.where(found, state.t + 2 * AHEAD * h, self._until)
            times, states = self._ahead
            self._ahead = torch.where(found, time, times), torch.where(found, y, states)

    def _size(self, change: Tensor, state: Tensor) -> Tensor:
        """Estimate the effect of a rate change on the final state, relative to the tolerance."""
        scale = self.stepper.atol + self.stepper.rtol * state.abs()
        return (change.abs() * self.span / scale).amax(0)

    def _jumps(
        self, path: Path, begin: Tensor, end: Tensor, state: Tensor, searched: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Search for jumps of the rates between two times along a path.

        Returns:
            times, states, and a mask of the columns in which there is a jump there.
        """
        rate = self.stepper.rate

        def size(change: Tensor) -> Tensor:
            return self._size(change, state)

        a, b = begin, torch.where(searched, end, begin)
        of_a, of_b = rate(a, path(a)), rate(b, path(b))
        height = whole = size(of_b - of_a)
        found = searched & (whole > 1)
        for halvings in range(HALVINGS):
            if not found.any():
                return a, state, found
            middle = (a + b) / 2
            of_middle = rate(middle, path(middle))
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
                scatter = scatter.maximum(size(rate(beside, path(beside)) - of))
        found = found & (height > SCATTER * scatter)
        if found.any():
            found = found & ~self._at_fixed_time(a, b, path, state, height)
        return a, path(a), found

    def _at_fixed_time(
        self, a: Tensor, b: Tensor, path: Path, state: Tensor, height: Tensor
    ) -> Tensor:
        """Test whether jumps are at a fixed time, for any state and declared tensor."""
        weights = 1 + 0.5 * torch.cos(torch.arange(len(state), device=state.device) ** 2)
        shift = 1e-6 * weights[:, None] * (state.abs() + 1e-6 * state.abs().amax(0))
        fixed = torch.ones_like(a, dtype=torch.bool)
        for t in (a, b):
            y = path(t)
            known = self.stepper.rate(t, y)
            for moved in (y + shift, y - shift):
                change = self._size(self.stepper.rate(t, moved) - known, state)
                fixed = fixed & (change <= 0.5 * height)
        points = [(to_numpy(t), to_numpy(path(t))) for t in (a, b)]
        return fixed & (not self.rhs.has_unused_parameter(*points))

    def _refuse(self, times: Tensor, states: Tensor, wrong: Tensor) -> None:
        if not wrong.any():
            return
        column = int(wrong.nonzero()[0, 0])
        state = to_numpy(states[:, column])
        shown = np.array2string(state[:6], precision=6, separator=", ")
        raise ValueError(
            f"fun jumps at t = {float(times[column]):.9g}, y = {shown}"
            f"{' ...' if state.size > 6 else ''} in column {column}, where no event restarts the "
            "solution, so its derivative across the jump would be wrong. Solve the columns one by "
            "one, with y0 of shape (n,) and an event that is zero on the switching surface, with "
            "the identity as its reset: event.reset = lambda t, y, *args: y."
        )
