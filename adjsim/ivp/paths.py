"""The way a forward solution went, given back from its end to its start.

An adjoint equation reads the state along the way it goes back. What is kept for that on the way
forward is told apart here: every step's interpolant (:class:`StoredInterpolants`), solvers from
which the way is solved again, a short piece at a time (:class:`Checkpointed`), or nothing
(:class:`Backsolved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver

from adjsim.ivp.rhs import Array
from adjsim.ivp.unchanged import alike, changed

# Times that are read on the way back, each with its state, in the order in which they are come to.
Stops = Sequence[tuple[float, Array]]
Watcher = Callable[[OdeSolver], None]

# Steps of a piece whose interpolants are held at once.
HELD = 64


def watched(method: type[OdeSolver], watchers: list[Watcher]) -> type[OdeSolver]:
    """A SciPy solver that shows itself after every step, and before the first. Clear the list when
    the solver has ended: those who watch may keep solvers."""

    class Watched(method):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.watchers = watchers
            self._show()

        def step(self) -> str | None:
            message = super().step()
            if self.status != "failed":
                self._show()
            return message

        def _show(self) -> None:
            for watcher in self.watchers:
                watcher(self)

    Watched.__name__ = method.__name__
    return Watched


def snapshot(solver: Any) -> Any:
    """A copy of a SciPy solver, which goes on from here by the very same steps.

    What a solver writes into is copied, the rest is shared.
    """
    again = copy(solver)
    again.watchers = []
    # Differences for the Jacobian have steps that are kept by the first solver, of which copies
    # know nothing.
    again.first = getattr(solver, "first", solver)
    again.jac_factor = getattr(again.first, "jac_factor", None)
    if isinstance(again, BDF):
        again.D = again.D.copy()
    if isinstance(again, LSODA):
        ode = again._lsoda_solver = copy(again._lsoda_solver)
        ode._y = ode._y.copy()
        inside = ode._integrator = copy(ode._integrator)
        for name in ("rwork", "iwork", "state_doubles", "state_ints"):
            setattr(inside, name, getattr(inside, name).copy())
        inside.call_args = [
            *inside.call_args[:4],
            inside.rwork,
            inside.iwork,
            *inside.call_args[6:],
        ]
    return again


class StoredInterpolants:
    """Every step's interpolant."""

    def __init__(self, method: type[OdeSolver]) -> None:
        self.method, self.times, self.interpolants = method, [], []

    def __call__(self, solver: OdeSolver) -> None:
        self.times.append(solver.t)
        if len(self.times) > 1:
            self.interpolants.append(solver.dense_output())

    def solution(self) -> OdeSolution:
        return solution(self.times, self.interpolants, self.method)

    def back(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Pieces of the way back from the first of some stops: where each ends, and its states."""
        if stops[0][0] != self.times[0]:
            yield self.times[0], self.solution()


@dataclass
class Backsolved:
    """Nothing: the state is integrated backward, from each time that is read to the next and to the
    start.

    Args:
        start: its time.
        method: SciPy's solver.
        rate: the right-hand side.
        options: the solver's tolerances and its longest step.
    """

    start: float
    method: type[OdeSolver]
    rate: Callable[[float, Array], Array]
    options: dict[str, Any]

    def back(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """As for :class:`StoredInterpolants`, at most :data:`HELD` steps at a time."""
        step = None
        for (begin, state), end in zip(
            stops, [*(t for t, _ in stops[1:]), self.start], strict=True
        ):
            if begin == end:
                continue
            first = {} if step is None else {"first_step": min(step, abs(end - begin))}
            solver: Any = self.method(self.rate, begin, state, end, **self.options, **first)
            keeper = StoredInterpolants(self.method)
            keeper(solver)
            while solver.status == "running":
                message = solver.step()
                if solver.status == "failed":
                    raise RuntimeError(f"the adjoint failed at t = {solver.t:g}: {message}")
                keeper(solver)
                step = (
                    max(solver.step_size, step or 0.0)
                    if solver.status == "finished"
                    else solver.step_size
                )
                if len(keeper.interpolants) == HELD or solver.status == "finished":
                    yield float(solver.t), keeper.solution()
                    keeper = StoredInterpolants(self.method)
                    keeper.times.append(solver.t)


class Checkpointed:
    """Solvers from which the way is solved again, at most twice :data:`HELD` of them however many
    steps there are.

    They are :data:`HELD` steps apart. When they become too many every second is dropped and half as
    many are kept from then on. A piece between two of them that is longer is solved again with some
    of its own, so that memory does not grow, and time as the logarithm of the number of steps to
    the base :data:`HELD`. Those of implicit methods have a Jacobian and its factors each.
    """

    def __init__(self, method: type[OdeSolver]) -> None:
        self.method, self.every, self.count = method, HELD, 0
        self.kept: list[Any] = []

    def __call__(self, solver: OdeSolver) -> None:
        if self.count % self.every == 0:
            self.kept.append(snapshot(solver))
            if len(self.kept) > 2 * HELD:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1

    def back(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """As for :class:`StoredInterpolants`.

        Raises:
            RuntimeError: the way that is solved again does not come to the states that were kept.
        """
        end, state = stops[0][0], None
        for solver in reversed(self.kept):
            if solver.direction * (end - solver.t) > 0:
                yield from self._again(snapshot(solver), end, state)
                end, state = float(solver.t), solver.y

    def _again(
        self, solver: Any, end: float, state: Array | None
    ) -> Iterator[tuple[float, OdeSolution]]:
        """Solve again from one checkpoint to a time, at which the next one has this state."""
        keeper = (
            StoredInterpolants(self.method) if self.every <= HELD else Checkpointed(self.method)
        )
        keeper(solver)
        solver.watchers, solver.first.jac_factor = [keeper], solver.jac_factor
        while solver.direction * (end - solver.t) > 0:
            solver.step()
        if state is not None and not alike(solver.dense_output()(end), state):
            raise RuntimeError(changed(end))
        yield from keeper.back([(end, solver.y)])


def solution(times: Any, interpolants: Any, method: type[OdeSolver]) -> OdeSolution:
    """As SciPy puts interpolants together."""
    return OdeSolution(times, interpolants, alt_segment=issubclass(method, BDF | LSODA))
