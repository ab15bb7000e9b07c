"""Sources of states and rates of a forward solution, for its backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver

from adjsim.ivp.rhs import Array, RightHandSide

# Times at which the solution is used, each with its state, in the order of the backward pass.
Stops = Sequence[tuple[float, Array]]

# Largest number of steps whose interpolants are in memory at once.
SEGMENT_STEPS = 64
# Error of the state that backsolve integrates to the start, in units of the tolerances, from which
# the gradient is doubted.
LOST = 1e4
# Largest number of stored rates, and number of those that are evaluated together.
KEPT, TOGETHER = 128, 8

T = TypeVar("T")


class Thinned(Generic[T]):
    """An observer that keeps ``record(state)`` of every so many steps, at most ``most`` records.

    When there are too many, every second one is dropped, and the distance of later ones doubles.
    """

    def __init__(self, most: int, every: int, record: Callable[[Any], T]) -> None:
        self.most, self.every, self.count, self.record = most, every, 0, record
        self.kept: list[T] = []

    def __call__(self, state: Any) -> None:
        if self.count % self.every == 0:
            self.kept.append(self.record(state))
            if len(self.kept) > self.most:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1


def snapshot(solver: Any) -> Any:
    """Copy a SciPy solver and the arrays that it overwrites, for bit-identical steps."""
    copied = copy(solver)
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
        before, after = inside.call_args[:4], inside.call_args[6:]
        inside.call_args = [*before, inside.rwork, inside.iwork, *after]
    return copied


class StoredInterpolants:
    """The interpolants of all steps of a SciPy method, stored during the forward solution."""

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
    """The states integrated backward, from each stop to the next and then to the start."""

    start: float
    state: Array
    method: type[OdeSolver]
    rate: Callable[[float, Array], Array]
    options: dict[str, Any]

    def backward(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Yield segments as :class:`StoredInterpolants` does, of :data:`SEGMENT_STEPS` steps."""
        step = None
        ends = [*(t for t, _ in stops[1:]), self.start]
        for (begin, state), end in zip(stops, ends, strict=True):
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
                finished = solver.status == "finished"
                step = max(solver.step_size, step or 0.0) if finished else solver.step_size
                if len(storage.interpolants) == SEGMENT_STEPS or finished:
                    yield float(solver.t), storage.solution()
                    storage = StoredInterpolants(self.method)
                    storage(solver)
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
    """Checkpoints of a SciPy solver, from which segments of the solution are solved again.

    At most twice :data:`SEGMENT_STEPS` checkpoints are stored, whatever the number of steps. They
    are :data:`SEGMENT_STEPS` steps apart at first. A segment that is longer is solved again with
    checkpoints of its own. So memory does not grow with the number of steps, and the time per step
    grows with the logarithm of this number to the base :data:`SEGMENT_STEPS`. Each checkpoint of an
    implicit method holds a Jacobian and its factors.
    """

    def __init__(self, method: type[OdeSolver]) -> None:
        super().__init__(2 * SEGMENT_STEPS, SEGMENT_STEPS, snapshot)
        self.method = method

    def backward(self, stops: Stops) -> Iterator[tuple[float, OdeSolution]]:
        """Yield segments as :class:`StoredInterpolants` does.

        A segment that does not end in the state of the next checkpoint is an error.
        """
        end, state = stops[0][0], None
        for kept in reversed(self.kept):
            if not kept.direction * (end - kept.t) > 0:
                continue
            solver = snapshot(kept)
            short = self.every <= SEGMENT_STEPS
            storage = StoredInterpolants(self.method) if short else Checkpointed(self.method)
            storage(solver)
            solver.first.jac_factor = solver.jac_factor
            while solver.direction * (end - solver.t) > 0:
                solver.step()
                storage(solver)
            if state is not None and not agree_to_rounding(solver.dense_output()(end), state):
                raise RuntimeError(changed_message(end))
            yield from storage.backward([(end, solver.y)])
            end, state = float(kept.t), kept.y


def adjoint_error(t: float, message: str | None) -> RuntimeError:
    """Make the error for a solver that fails in a backward pass, with SciPy's message."""
    return RuntimeError(f"the adjoint failed at t = {t:g}: {message}")


def solution(times: Any, interpolants: Any, method: type[OdeSolver]) -> OdeSolution:
    """Combine interpolants into one function of time, as SciPy does."""
    return OdeSolution(times, interpolants, alt_segment=issubclass(method, BDF | LSODA))


class StepRates:
    """The rate at a SciPy solver's current state, evaluated at most once per step."""

    def __init__(self, rate: Callable[[float, Array], Array]) -> None:
        self.of = rate
        self._last: tuple[float, Array] | None = None

    def __call__(self, solver: Any) -> Array:
        known = getattr(solver, "f", None)
        if known is not None:
            return known
        if self._last is None or self._last[0] != solver.t:
            self._last = (solver.t, self.of(solver.t, solver.y))
        return self._last[1]


class RateCheck(Thinned[tuple[float, Array, Array]]):
    """Rates at up to :data:`KEPT` states of the forward solution, compared before a backward pass.

    The adjoint evaluates the right-hand side again. Its tensors are the input tensors of the run
    (:mod:`adjsim.ivp.input_tensors`), but not its attributes, global variables and random numbers.
    """

    def __init__(self, rates: StepRates) -> None:
        super().__init__(KEPT, 1, lambda x: (float(x.t), np.array(x.y), np.array(rates(x))))

    def compare(self, rhs: RightHandSide) -> None:
        """Raise an error if the right-hand side returns other rates than the stored ones."""
        for first in range(1, len(self.kept), TOGETHER):
            kept = self.kept[first : first + TOGETHER]
            times, states, known = map(np.array, zip(*kept, strict=True))
            rates = rhs.rates_checked(times, states.T).T
            for t, rate, found in zip(times, known, rates, strict=True):
                if not agree_to_rounding(found, rate, rhs.eps):
                    raise RuntimeError(changed_message(t))


def agree_to_rounding(found: Array, known: Array, eps: float = float(np.finfo(float).eps)) -> bool:
    """Test whether two results differ by no more than the rounding of sums in another order."""
    return bool(np.all(np.abs(found - known) <= eps**0.5 * np.max(np.abs(known), initial=0.0)))


def changed_message(t: float) -> str:
    """Explain that the right-hand side has changed since the forward solution."""
    return (
        f"fun has changed since the forward solution: at t = {t:.9g} it returns another rate for "
        "the same state. Either it draws random numbers (dropout: call eval()), or it reads an "
        "attribute or a variable that has been modified. Call backward() before the change, or "
        "pass the changing quantity as a tensor in args."
    )
