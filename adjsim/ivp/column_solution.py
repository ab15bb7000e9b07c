"""The solution of many initial value problems in columns, and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adjsim.core.rows import pulled_rows
from adjsim.ivp.column_steps import (
    ColumnReads,
    ColumnState,
    ColumnStepper,
    InterpolatedStep,
    Step,
)
from adjsim.ivp.forward_states import SEGMENT_STEPS, Thinned, changed_message
from adjsim.ivp.jumps import ColumnJumpCheck
from adjsim.ivp.rhs import RightHandSide, as_times, to_numpy

# Steps of the backward pass between two searches for tensors that were not declared.
CHECK_EVERY = 16
# The times (batch,) and the states (n, batch) before a step.
Point = tuple[Tensor, Tensor]


class StoredSteps:
    """The times and states before and after every attempt in which a column advanced."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def __call__(self, state: ColumnState) -> None:
        if not self.points or bool((state.t != self.points[-1][0]).any()):
            self.points.append((state.t, state.y))

    def forward(self) -> list[tuple[Point, Point]]:
        """Return the points before and after each step."""
        return list(pairwise(self.points))

    def backward(self) -> Iterable[tuple[Point, Point]]:
        """Return the points before and after each step, last step first."""
        return reversed(self.forward())


class CheckpointedSteps(Thinned[ColumnState]):
    """States from which segments of the forward solution are solved again, bit for bit.

    At most twice :data:`~adjsim.ivp.forward_states.SEGMENT_STEPS` states are stored.
    """

    last: ColumnState

    def __init__(self, stepper: ColumnStepper) -> None:
        super().__init__(2 * SEGMENT_STEPS, SEGMENT_STEPS, lambda state: state)
        self.stepper = stepper

    def __call__(self, state: ColumnState) -> None:
        super().__call__(state)
        self.last = state

    def backward(self) -> Iterator[tuple[Point, Point]]:
        """Yield the points before and after each step, last step first.

        A segment that ends at another time than in the forward solution is an error.
        """
        after = self.last
        for number in reversed(range(len(self.kept))):
            state = self.kept[number]
            attempts = min(self.every, self.count - 1 - number * self.every)
            short = attempts <= SEGMENT_STEPS
            storage = StoredSteps() if short else CheckpointedSteps(self.stepper)
            storage(state)
            with torch.no_grad():
                for _ in range(attempts):
                    state = self.stepper.advance(state)[0]
                    storage(state)
            if not torch.equal(state.t, after.t):
                raise RuntimeError(changed_message(float(after.t[state.t != after.t][0])))
            after = self.kept[number]
            yield from storage.backward()


@dataclass(eq=False)
class DenseColumns:
    """The solution in columns as a function of time, by interpolants that have no gradient.

    Called with a time, it returns the states ``(n, batch)``; with times ``(k,)`` for all columns,
    or ``(k, batch)`` for each, the states ``(n, k, batch)``. There is no extrapolation.

    Args:
        begin, end: the time spans ``(batch,)``.
        direction: 1 where a column is integrated forward in time, -1 where backward, ``(batch,)``.
        start: the initial states ``(n, batch)``.
        polynomials: for each step the times and states before, the times after, and the
            coefficients of the interpolant.
    """

    begin: Tensor
    end: Tensor
    direction: Tensor
    start: Tensor
    polynomials: Sequence[tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]] = ()

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self.start)
        rows = per_column(times.reshape(1) if times.ndim == 0 else times, self.begin, 2, "t")
        refuse_outside(rows.detach(), self.begin, self.end, "t")
        order = (self.direction * rows.detach()).argsort(0)
        ordered = rows.take_along_dim(order, 0)
        found = self.start.detach().double()[:, None].expand(-1, len(rows), -1).clone()
        reads = ColumnReads(ordered.detach(), self.direction)
        with torch.no_grad():
            for step in self._steps():
                reads.write(found, step)
        found = self.connected(ordered, found).take_along_dim(order.argsort(0)[None], 1)
        return found[:, 0] if times.ndim == 0 else found

    def connected(self, times: Tensor, states: Tensor) -> Tensor:
        """Connect states ``(n, times, batch)`` to the start, the parameters and the times."""
        return states.to(self.start.dtype)

    def _steps(self) -> Iterator[InterpolatedStep]:
        for begin, y, end, coefficients in self.polynomials:
            yield begin, y, end, partial(list, coefficients)


class ColumnSolution(DenseColumns):
    """The solution in columns, with its gradient. A solution from a file has no gradient.

    Attributes:
        steps, rejections: the numbers of accepted and of rejected steps ``(batch,)``.
        attempts: the number of attempts, each of which takes all columns.
    """

    def __init__(
        self,
        rhs: RightHandSide,
        stepper: ColumnStepper,
        begin: Tensor,
        start: Tensor,
        history: StoredSteps | CheckpointedSteps,
    ) -> None:
        super().__init__(begin, stepper.end, stepper.direction, start)
        self.rhs, self.stepper, self.history, self.attempts = rhs, stepper, history, 0
        self.steps = torch.zeros_like(begin, dtype=torch.int64)
        self.rejections = self.steps.clone()

    def solve(
        self, times: Tensor, first_step: float | None, store: bool, refuse_jumps: bool
    ) -> Tensor:
        """Take all steps, and return the states ``(n, times, batch)`` at sorted times."""
        state = self.stepper.start(self.begin, self.start.detach().double(), first_step)
        reads = ColumnReads(times, self.direction)
        found = state.y[:, None].expand(-1, len(times), -1).clone()
        if store:
            self.history(state)
        check = ColumnJumpCheck(self.rhs, self.stepper, state) if refuse_jumps else None
        while bool(self.stepper.active(state).any()):
            before = state
            state, step = self.stepper.advance(before)
            self.attempts += 1
            self.steps += state.t != before.t
            self.rejections += state.retry
            if check is not None:
                check(before, state, step)
            reads.write(found, (before.t, before.y, state.t, step.polynomial))
            if store:
                self.history(state)
        return found

    def __copy__(self) -> ColumnSolution:
        return self

    def __reduce__(self) -> Any:
        # The gradient needs fun, which may be a local function, and the graph of the start.
        with torch.no_grad():
            polynomials = [(*step[:3], step[3]()) for step in self._steps()]
        start = self.start.detach()
        return DenseColumns, (self.begin, self.end, self.direction, start, polynomials)

    def _steps(self) -> Iterator[InterpolatedStep]:
        assert isinstance(self.history, StoredSteps)
        for before, after in self.history.forward():
            yield *before, after[0], lambda at=before, to=after: self._step(at, to).polynomial()

    def connected(self, times: Tensor, states: Tensor) -> Tensor:
        values, pull = super().connected(times, states), partial(self._backward, times.detach())
        return self.rhs.with_time_derivative(self.rhs.connected(values, self.start, pull), times)

    def _backward(self, times: Tensor, rows: Tensor) -> list[Tensor]:
        """Return the rows of cotangents of the start and of the parameters.

        They belong to rows ``(k, n, times, batch)`` of cotangents of the states.
        """
        reads, every = ColumnReads(times, self.direction), rows.double()
        cotangent = every.new_zeros((len(every), *self.start.shape))
        leaves = self.rhs.parameter_leaves
        sums = [x.new_zeros((len(every), *x.shape)) for x in leaves]

        def cotangents(read: Any, t: Tensor, h: Tensor, degree: int) -> list[Tensor]:
            found = [reads.cotangents(row, read, t, h, degree) for row in every]
            return [torch.stack(parts) for parts in zip(*found, strict=True)]

        for count, (before, after) in enumerate(self.history.backward()):
            (t, y), read = before, reads.between(before[0], after[0])
            if not read and not bool(cotangent.any()):
                continue
            if count % CHECK_EVERY == 0:
                self.rhs.evaluate_checked(to_numpy(t), to_numpy(y))
            with torch.enable_grad():
                start = y.detach().requires_grad_()
                step = self._step((t, start), after)
                outputs = [step.end, *(step.polynomial() if read else ())]
            _refuse_changed(step.end.detach(), before, after)
            h, degree = after[0] - t, len(outputs) - 1
            by_start, *weights = cotangents(read, t, h, degree)
            found = pulled_rows(outputs, [start, *leaves], [cotangent, *weights])
            cotangent = found[0] + by_start
            for total, x in zip(sums, found[1:], strict=True):
                total += x
        read = reads.between(-torch.inf * self.direction, self.begin)
        at_start = cotangents(read, self.begin, self.begin, 0)
        return [cotangent + at_start[0], *sums]

    def _step(self, before: Point, after: Point) -> Step:
        stepper = self.stepper
        return stepper.method(stepper.rate, before[0], after[0] - before[0], before[1], None)


def _refuse_changed(end: Tensor, before: Point, after: Point) -> None:
    """Refuse a step that ends in another state than in the forward solution."""
    # A column that did not advance has a step of size zero, which ends where it begins.
    off, size = (end - after[1]).abs().amax(0), after[1].abs().amax(0)
    wrong = ~(off <= torch.finfo(end.dtype).eps ** 0.5 * size.clamp(min=1e-300))
    if wrong.any():
        raise RuntimeError(changed_message(float(before[0][wrong][0])))


def per_column(times: Tensor, like: Tensor, axes: int, name: str) -> Tensor:
    """Give times ``(...)`` or ``(..., batch)`` an axis of columns, which is axis ``axes - 1``."""
    if times.ndim == axes - 1:
        times = times[..., None].expand(*times.shape, len(like))
    if times.ndim != axes or times.shape[-1] != len(like):
        lead = "times, " if axes == 2 else ""
        raise ValueError(
            f"{name} must be the same for all columns or of shape ({lead}{len(like)}), one for "
            f"each column; got shape {tuple(times.shape)}."
        )
    return times


def refuse_outside(times: Tensor, begin: Tensor, end: Tensor, name: str) -> None:
    """Refuse times ``(k, batch)`` outside of the time span of their columns."""
    wrong = ~((times >= begin.minimum(end)) & (times <= begin.maximum(end)))
    if wrong.any():
        k, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must lie in the time span of each column; got {float(times[k, column]):g} for "
            f"column {column}, whose span is ({float(begin[column]):g}, {float(end[column]):g})."
        )
