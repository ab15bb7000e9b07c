"""The solution of many initial value problems in columns, and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.rows import pulled_rows
from adjsim.ivp.column_crossings import ColumnEvent, Crossing
from adjsim.ivp.column_steps import (
    Attempt,
    ColumnReads,
    ColumnState,
    ColumnStepper,
    InterpolatedStep,
    Step,
)
from adjsim.ivp.connection import Pull
from adjsim.ivp.forward_states import SEGMENT_STEPS, Thinned, changed_message
from adjsim.ivp.histories import History, Section
from adjsim.ivp.jumps import ColumnJumpCheck
from adjsim.ivp.mass import Mass
from adjsim.ivp.rhs import RightHandSide, as_times, to_numpy

# Steps of the backward pass between two searches for tensors that were not declared.
CHECK_EVERY = 16


class StoredSteps:
    """The attempts in which a column advanced."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def __call__(self, state: ColumnState) -> None:
        if state.came is not None and bool((state.came.h != 0).any()):
            self.attempts.append(state.came)

    def backward(self) -> Iterable[Attempt]:
        """Return the attempts, last one first."""
        return reversed(self.attempts)


class CheckpointedSteps(Thinned[ColumnState]):
    """States from which segments of the forward solution are solved again, bit for bit.

    At most twice :data:`~adjsim.ivp.forward_states.SEGMENT_STEPS` states are stored.
    """

    last: ColumnState

    def __init__(self, stepper: ColumnStepper) -> None:
        super().__init__(2 * SEGMENT_STEPS, SEGMENT_STEPS, lambda state: state._replace(came=None))
        self.stepper = stepper

    def __call__(self, state: ColumnState) -> None:
        super().__call__(state)
        self.last = state

    def backward(self) -> Iterator[Attempt]:
        """Yield the attempts, last one first.

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
class DenseColumns(History):
    """The solution in columns as a function of time, by interpolants that have no gradient.

    Called with a time, it returns the states ``(n, batch)``; with times ``(k,)`` for all columns,
    or ``(k, batch)`` for each, the states ``(n, k, batch)``. There is no extrapolation.

    Args:
        begin, end: the time spans ``(batch,)``.
        direction: 1 where a column is integrated forward in time, -1 where backward, ``(batch,)``.
        start: the initial states ``(n, batch)``.
        polynomials: for each step the times and states before, its sizes, the times after, and the
            coefficients of the interpolant.
        last: the times up to which there are states, which are NaN after a terminal event; None:
            the ends of the time spans.
    """

    begin: Tensor
    end: Tensor
    direction: Tensor
    start: Tensor
    polynomials: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]]] = ()
    last: Tensor | None = None

    @property
    def has_resets(self) -> bool:
        """Whether the states may jump."""
        return False

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self.start)
        rows = per_column(times.reshape(1) if times.ndim == 0 else times, self.begin, 2, "t")
        read = self.read(rows)
        if read is not None:
            return read[:, 0] if times.ndim == 0 else read
        refuse_outside(rows.detach(), self.begin, self.end, "t")
        order = (self.direction * rows.detach()).argsort(0)
        ordered = rows.take_along_dim(order, 0)
        found = self.start.detach().double()[:, None].expand(-1, len(rows), -1).clone()
        reads = ColumnReads(ordered.detach(), self.direction)
        with torch.no_grad():
            for step in self._steps():
                reads.write(found, step)
        found = self.connected(ordered, self.without_later(ordered, found)).take_along_dim(
            order.argsort(0)[None], 1
        )
        return found[:, 0] if times.ndim == 0 else found

    def sections(self) -> tuple[list[Section], int]:
        steps = [(t, end) for t, _, _, end, _ in self._steps()]
        times = torch.stack([*(t for t, _ in steps[:1]), *(end for _, end in steps)])
        whole = (to_numpy(times), lambda at: self(torch.as_tensor(at).to(self.begin)))
        # The largest degree of an interpolant, and one more.
        return [whole] if steps and not self.has_resets else [], 5

    def connected(self, times: Tensor, states: Tensor) -> Tensor:
        """Connect states ``(n, times, batch)`` to the start, the parameters and the times."""
        return states.to(self.start.dtype)

    def without_later(self, times: Tensor, states: Tensor) -> Tensor:
        """Replace states by NaN after the terminal event of their column."""
        if self.last is None:
            return states
        return states.where(self.direction * (times.detach() - self.last) <= 0, torch.nan)

    def _steps(self) -> Iterator[InterpolatedStep]:
        for t, y, h, end, coefficients in self.polynomials:
            yield t, y, h, end, partial(list, coefficients)


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
        events: Sequence[ColumnEvent] = (),
        mass: Mass | None = None,
    ) -> None:
        super().__init__(begin, stepper.end, stepper.direction, start)
        self.events, self.mass = events, mass
        self.rhs, self.stepper, self.history, self.attempts = rhs, stepper, history, 0
        self.steps = torch.zeros_like(begin, dtype=torch.int64)
        self.rejections = self.steps.clone()
        # For the hits of events, in the order of attempts: the event, the column, time and state.
        self.hits: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        # The number of the hit that ended a column, or -1.
        self.ended_by = torch.full_like(self.steps, -1)

    @property
    def has_resets(self) -> bool:
        return any(event.reset is not None for event in self.events)

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
            came = state.came
            assert came is not None
            reads.write(found, (*came[:4], step.polynomial))
            if came.crossing is not None:
                self._note(came.crossing)
            if store:
                self.history(state)
        if state.events is not None and bool(state.events.ended.any()):
            self.last = torch.where(state.events.ended, state.t, self.end)
        return self.without_later(times, found)

    def _note(self, crossing: Crossing) -> None:
        """Keep the events of an attempt."""
        for root in crossing.roots:
            (columns,) = root.columns.nonzero(as_tuple=True)
            event = torch.full_like(columns, root.event)
            self.hits.append((event, columns, root.time, root.state))
            number = torch.full_like(self.ended_by, -1)
            number[columns] = root.offset + torch.arange(len(columns), device=columns.device)
            ends = root.columns & (crossing.stop == root.event) & ~crossing.again
            self.ended_by = torch.where(ends, number, self.ended_by)

    def __copy__(self) -> ColumnSolution:
        return self

    def __reduce__(self) -> Any:
        # The gradient needs fun, which may be a local function, and the graph of the start.
        with torch.no_grad():
            polynomials = [(*step[:4], step[4]()) for step in self._steps()]
        span = self.begin, self.end, self.direction
        return DenseColumns, (*span, self.start.detach(), polynomials, self.last)

    def _steps(self) -> Iterator[InterpolatedStep]:
        assert isinstance(self.history, StoredSteps)
        for came in self.history.attempts:
            yield *came[:4], lambda x=came: self._step(x, x.y).polynomial()

    def connected(self, times: Tensor, states: Tensor) -> Tensor:
        values, pull = super().connected(times, states), partial(self._backward, times.detach())
        return self._with_times(self._connected(values, pull), times)

    def connected_hits(
        self, times: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Connect states, and all hits of events, as :meth:`connected` does.

        Returns the states, and for each hit the event, the column, the time ``(hits,)`` and the
        state ``(hits, n)``.
        """
        n, dtype = len(self.start), self.start.dtype
        empty = states.new_zeros(0, dtype=torch.int64), states.new_zeros(0)
        events, columns, at, found = (
            torch.cat([x, *rows])
            for x, *rows in zip(
                (empty[0], empty[0], empty[1], states.new_zeros(0, n)), *self.hits, strict=True
            )
        )
        sizes = states.numel(), len(at), found.numel()

        def pull(rows: Tensor) -> list[Tensor]:
            of_states, of_times, of_found = rows.split(sizes, 1)
            of_states = of_states.unflatten(1, states.shape)
            return self._backward(
                times.detach(), of_states, of_times, of_found.unflatten(1, found.shape)
            )

        flat = self._connected(torch.cat([states.flatten(), at, found.flatten()]), pull)
        values, at, found_flat = flat.split(sizes)
        values = self._with_times(values.view_as(states).to(dtype), times)
        found = found_flat.view_as(found).to(dtype)
        return values, events, columns, at, found

    def _connected(self, values: Tensor, pull: Pull) -> Tensor:
        return self.rhs.connected(values, self.start, pull, more=self._extra)

    @property
    def _extra(self) -> list[Tensor]:
        """The tensors that events read, other than those of the run."""
        found = {key: x for event in self.events for key, x in event.reads.items()}
        return [*found.values(), *([] if self.mass is None else self.mass.reads)]

    def _with_times(self, states: Tensor, times: Tensor) -> Tensor:
        """Give states ``(n, times, batch)`` their derivative with respect to their times."""
        rates = None
        if self.mass is not None and times.requires_grad:
            rows = zip(times.detach(), states.detach().double().unbind(1), strict=True)
            rates = torch.stack([self.mass.rate(t, y) for t, y in rows], 1)
        return self.rhs.with_time_derivative(states, times, rates)

    def _backward(
        self, times: Tensor, rows: Tensor, of_hits: Tensor | None = None,
        of_states: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Return rows of cotangents of the start, of the parameters, and of what events read.

        They belong to rows ``(k, n, times, batch)`` of cotangents of the states. ``of_hits``
        ``(k, hits)`` and ``of_states`` ``(k, hits, n)`` are those of the event times and of the
        states there.
        """
        reads, every = ColumnReads(times, self.direction), rows.double()
        cotangent = every.new_zeros((len(every), *self.start.shape))
        leaves = [*self.rhs.parameter_leaves, *self._extra]
        sums = [x.new_zeros((len(every), *x.shape)) for x in leaves]

        def cotangents(read: Any, t: Tensor, h: Tensor, degree: int) -> list[Tensor]:
            found = [reads.cotangents(row, read, t, h, degree) for row in every]
            return [torch.stack(parts) for parts in zip(*found, strict=True)]

        for count, came in enumerate(self.history.backward()):
            read, weights = reads.between(came.t, came.end), list[Tensor]()
            roots = () if came.crossing is None else came.crossing.roots
            if of_hits is not None and of_states is not None:
                for of in (of_hits, of_states):
                    weights += [of[:, x.offset : x.offset + len(x.time)] for x in roots]
            if not read and not any(bool(x.any()) for x in (cotangent, *weights)):
                continue
            if count % CHECK_EVERY == 0:
                self.rhs.evaluate_checked(to_numpy(came.t), to_numpy(came.y))
            with torch.enable_grad():
                start = came.y.detach().requires_grad_()
                step, hits = self._step(came, start), list[Tensor]()
                end, polynomial = step.end, step.polynomial() if read or roots else []
                if came.crossing is not None:
                    end, *found = came.crossing.connected(
                        self.events, came.t, came.h, start, step.end, polynomial
                    )
                    hits = [*found[0], *found[1]]
            _refuse_changed(end.detach(), came)
            polynomial = polynomial if read else []
            by_start, *of_read = cotangents(read, came.t, came.h, len(polynomial))
            outputs = [end, *polynomial, *(hits if weights else ())]
            found = pulled_rows(outputs, [start, *leaves], [cotangent, *of_read, *weights])
            cotangent = found[0] + by_start
            for total, x in zip(sums, found[1:], strict=True):
                total += x
        read = reads.between(-torch.inf * self.direction, self.begin)
        at_start = cotangents(read, self.begin, self.begin, 0)
        return [cotangent + at_start[0], *sums]

    def _step(self, came: Attempt, y: Tensor) -> Step:
        return self.stepper.step(came.t, came.h, y, None)


def _refuse_changed(end: Tensor, came: Attempt) -> None:
    """Refuse a step that ends in another state than in the forward solution."""
    # A column that did not advance has a step of size zero, which ends where it begins.
    off, size = (end - came.state).abs().amax(0), came.state.abs().amax(0)
    wrong = ~(off <= torch.finfo(end.dtype).eps ** 0.5 * size.clamp(min=1e-300))
    if wrong.any():
        raise RuntimeError(changed_message(float(came.t[wrong][0])))


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
