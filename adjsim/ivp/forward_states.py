"""Sources of the forward states that an adjoint equation needs in its backward pass.

They differ in the data stored during the forward solution: the interpolant of every step
(:class:`StoredInterpolants`), solver checkpoints from which short segments are solved again
(:class:`Checkpointed`), or nothing (:class:`Backsolved`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver

from adjsim.ivp.rate_check import agree_to_rounding, changed_message
from adjsim.ivp.rhs import Array
from adjsim.ivp.thinned import Thinned

# Times at which the solution is used, each with its state, in the order of the backward pass.
Stops = Sequence[tuple[float, Array]]
Observer = Callable[[OdeSolver], None]

# Largest number of steps whose interpolants are in memory at once.
SEGMENT_STEPS = 64
# Error of the state that backsolve integrates to the start, in units of the tolerances, from which
# the gradient is doubted.
LOST = 1e4


def observed(method: type[OdeSolver], observers: list[Observer]) -> type[OdeSolver]:
    """Derive a SciPy solver that calls observers before the first step and after every step.

    Clear the list of observers when the solver has finished, since observers may store solvers.
    """

    class Observed(method):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.observers = observers
            self._notify()

        def step(self) -> str | None:
            message = super().step()
            if self.status != "failed":
                self._notify()
            return message

        def _notify(self) -> None:
            for observer in self.observers:
                observer(self)

    Observed.__name__ = method.__name__
    return Observed


def snapshot(solver: Any) -> Any:
    """Copy a SciPy solver, so that the copy continues with bit-identical steps.

    Arrays into which a solver writes are copied, all others are shared.
    """
    copied = copy(solver)
    copied.observers = []
    # The increments of the finite-difference Jacobian are stored on the original solver, since the
    # closure that evaluates the Jacobian refers to the original.
    copied.first = getattr(solver, "first", solver)
    copied.jac_factor = getattr(copied.first, "jac_factor", None)
    if isinstance(copied, BDF):
        copied.D = copied.D.copy()
    if isinstance(copied, LSODA):
        ode = copied._lsoda_solver = copy(copied._lsoda_solver)
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
    return copied


class StoredInterpolants:
    """The interpolants of all steps, stored during the forward solution.

    Args:
        method: SciPy's solver class.
    """

    def __init__(self, method: type[OdeSolver]) -> None:
        self.method, self.times, self.interpolants = method, [], []

    def __call__(self, solver: OdeSolver) -> None:
        self.times.append(solver.t)
        if len(self.times) > 1:
            self.interpolants.append(solver.dense_output())

    def solution(self) -> OdeSolution:
        return solution(self.times, self.interpolants, self.method)

    def backward(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Yield segments of the solution in backward order, from the first stop on.

        Each item is the time at which the segment ends, and the states as a function of time.
        """
        if stops[0][0] != self.times[0]:
            yield self.times[0], self.solution()


@dataclass
class Backsolved:
    """The states integrated backward, from each stop to the next and then to the start.

    Args:
        start: the first time of the forward solution.
        state: the state there.
        method: SciPy's solver class.
        rate: the right-hand side.
        options: the solver's tolerances and its largest step size.
    """

    start: float
    state: Array
    method: type[OdeSolver]
    rate: Callable[[float, Array], Array]
    options: dict[str, Any]

    def backward(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Yield segments as :class:`StoredInterpolants` does.

        A segment has at most :data:`SEGMENT_STEPS` steps.
        """
        step = None
        for (begin, state), end in zip(
            stops, [*(t for t, _ in stops[1:]), self.start], strict=True
        ):
            if begin == end:
                continue
            first = {} if step is None else {"first_step": min(step, abs(end - begin))}
            solver: Any = self.method(self.rate, begin, state, end, **self.options, **first)
            storage = StoredInterpolants(self.method)
            storage(solver)
            while solver.status == "running":
                message = solver.step()
                if solver.status == "failed":
                    raise adjoint_error(solver.t, message)
                storage(solver)
                step = (
                    max(solver.step_size, step or 0.0)
                    if solver.status == "finished"
                    else solver.step_size
                )
                if len(storage.interpolants) == SEGMENT_STEPS or solver.status == "finished":
                    yield float(solver.t), storage.solution()
                    storage = StoredInterpolants(self.method)
                    storage.times.append(solver.t)
            if end == self.start:
                self._warn_lost(solver.y)

    def _warn_lost(self, found: Array) -> None:
        """Warn if the state integrated backward does not end at the start."""
        scale = self.options["atol"] + self.options["rtol"] * np.abs(self.state)
        error = float(np.max(np.abs(found - self.state) / scale))
        # The tolerances hold for each step, and errors of some hundred steps add up.
        if not error <= LOST:
            warnings.warn(
                "adjoint='backsolve': the state integrated backward misses the start by "
                f"{error:.1g} times the tolerances, so the gradient is lost where the equation "
                "contracts. Use adjoint='checkpoint'.",
                stacklevel=2,
            )


class Checkpointed(Thinned[Any]):
    """Solver checkpoints, from which segments of the forward solution are solved again.

    At most twice :data:`SEGMENT_STEPS` checkpoints are stored, whatever the number of steps. They
    are :data:`SEGMENT_STEPS` steps apart at first. A segment that is longer is solved again with
    checkpoints of its own. So memory does not grow with the number of steps, and the time per step
    grows with the logarithm of this number to the base :data:`SEGMENT_STEPS`. Each checkpoint of an
    implicit method holds a Jacobian and its factors.

    Args:
        method: SciPy's solver class.
    """

    def __init__(self, method: type[OdeSolver]) -> None:
        super().__init__(2 * SEGMENT_STEPS, SEGMENT_STEPS, snapshot)
        self.method = method

    def backward(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Yield segments as :class:`StoredInterpolants` does.

        Raises:
            RuntimeError: a segment that is solved again does not end in the state of the next
                checkpoint.
        """
        end, state = stops[0][0], None
        for solver in reversed(self.kept):
            if solver.direction * (end - solver.t) > 0:
                yield from self._solve_again(snapshot(solver), end, state)
                end, state = float(solver.t), solver.y

    def _solve_again(
        self, solver: Any, end: float, state: Array | None
    ) -> Iterator[tuple[float, OdeSolution]]:
        """Solve again from one checkpoint to the time ``end`` of the next, which has ``state``."""
        short = self.every <= SEGMENT_STEPS
        storage = StoredInterpolants(self.method) if short else Checkpointed(self.method)
        storage(solver)
        solver.observers, solver.first.jac_factor = [storage], solver.jac_factor
        while solver.direction * (end - solver.t) > 0:
            solver.step()
        if state is not None and not agree_to_rounding(solver.dense_output()(end), state):
            raise RuntimeError(changed_message(end))
        yield from storage.backward([(end, solver.y)])


def adjoint_error(t: float, message: str | None) -> RuntimeError:
    """Make the error for a solver that fails in a backward pass, with SciPy's message."""
    return RuntimeError(f"the adjoint failed at t = {t:g}: {message}")


def solution(times: Any, interpolants: Any, method: type[OdeSolver]) -> OdeSolution:
    """Combine interpolants into one function of time, as SciPy does."""
    return OdeSolution(times, interpolants, alt_segment=issubclass(method, BDF | LSODA))
