"""The way a forward solution went, given back from its end to its start.

An adjoint equation reads the state along the way it goes back. What is kept for that on the way forward is told apart here:
every step's interpolant (:class:`Dense`), states from which the way is solved again, a short piece at a time
(:class:`Checkpointed`), or nothing (:class:`Backsolved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver

from adjsim.ivp.field import Array

Interpolant = Callable[[Any], Array]

# Steps whose interpolants are held at once, and states that are kept of a piece of any length.
HELD = 64


def watched(method: type[OdeSolver], *watchers: Callable[[OdeSolver], None]) -> type[OdeSolver]:
    """A SciPy solver that shows itself after every step, and before the first."""

    class Watched(method):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for watcher in watchers:
                watcher(self)

        def step(self) -> str | None:
            message = super().step()
            for watcher in watchers if self.status != "failed" else ():
                watcher(self)
            return message

    Watched.__name__ = method.__name__
    return Watched


class Dense:
    """Every step's interpolant."""

    def __init__(self, method: type[OdeSolver]) -> None:
        self.method, self.times, self.interpolants = method, [], []

    def __call__(self, solver: OdeSolver) -> None:
        self.times.append(solver.t)
        if len(self.times) > 1:
            self.interpolants.append(solver.dense_output())

    def solution(self) -> OdeSolution:
        return solution(self.times, self.interpolants, self.method)

    def back(self, end: float) -> Iterator[tuple[float, Interpolant]]:
        """Pieces of the way back from a time: where each ends, and its states."""
        if end != self.times[0]:
            yield self.times[0], self.solution()


class Backsolved:
    """Nothing: the state is integrated backward."""

    def __init__(self) -> None:
        self.start = 0.0

    def __call__(self, solver: OdeSolver) -> None:
        if solver.t_old is None:
            self.start = float(solver.t)

    def back(self, end: float) -> Iterator[tuple[float, None]]:
        """As for :class:`Dense`, without states."""
        if end != self.start:
            yield self.start, None


class Checkpointed:
    """States from which the way is solved again, at most twice :data:`HELD` of them however many steps there are.

    When they become too many every second is dropped and half as many are kept from then on. A piece between two of them is
    solved again with states of its own where it is long, so that memory does not grow, and time as the logarithm of the
    number of steps to the base :data:`HELD`. One-step methods repeat their very steps; those of several steps start anew.
    """

    def __init__(self, again: Callable[..., OdeSolver], method: type[OdeSolver]) -> None:
        self.again, self.method = again, method
        self.kept: list[tuple[float, Array, float | None]] = []
        self.every, self.count = 1, 0

    def __call__(self, solver: OdeSolver) -> None:
        if self.count % self.every == 0:
            # The step it would try next; LSODA does not show it.
            self.kept.append((float(solver.t), np.array(solver.y), getattr(solver, "h_abs", None)))
            if len(self.kept) > 2 * HELD:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1

    def back(self, end: float) -> Iterator[tuple[float, Interpolant]]:
        """As for :class:`Dense`."""
        way = np.sign(end - self.kept[0][0])
        for start, state, step in reversed(self.kept):
            if way * (end - start) > 0:
                yield from self._again(start, state, step, end, self.every)
                end = start

    def _again(self, start: float, state: Array, step: float | None, end: float, steps: int) -> Iterator[Any]:
        keeper = Dense(self.method) if steps <= HELD else Checkpointed(self.again, self.method)
        solver = self.again(watched(self.method, keeper), start, state, step)
        while solver.status == "running" and solver.direction * (end - solver.t) > 0:
            message = solver.step()
            if solver.status == "failed":
                raise RuntimeError(f"solving again from t = {start:g} failed: {message}")
        yield from keeper.back(end)


def solution(times: Any, interpolants: Any, method: type[OdeSolver]) -> OdeSolution:
    """As SciPy puts interpolants together."""
    return OdeSolution(times, interpolants, alt_segment=issubclass(method, BDF | LSODA))
