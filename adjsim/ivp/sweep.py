r"""Ways back of an adjoint, from one time that is read to the next.

Each takes :math:`\dot\lambda = -J^T \lambda` along a path of states, and the integral of
:math:`\lambda^T \partial f/\partial\theta` with an error of its own, which each tensor meets by
itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.integrate import OdeSolution, OdeSolver, Radau
from torch import Tensor

from adjsim.ivp.collocation import ORDER, POINTS, TIMES, Step
from adjsim.ivp.paths import solution
from adjsim.ivp.quadrature import DIVISIONS, STRIDE, Integral, SevenPoints, unsettled
from adjsim.ivp.rhs import Array, RightHandSide

SAFETY, SHRINK, GROW = 0.9, 0.2, 30.0
# Power of the tolerance, for the difference of two results by collocation: that is of order 6 in
# the step, and the error of order 10. The ratio of the two would be too much where what is
# integrated jumps, and the difference is about the error.
POWER = 0.85


@dataclass
class Sweep:
    """What one way back accumulates.

    Args:
        field: the right-hand side.
        rtol, atol: of the adjoint; atol is relative to its largest entry.
        max_step: the longest step.
        adjoint: cotangent of the state, at the time that has been reached.
        step: size of the last step that was not cut short.
    """

    rhs: RightHandSide
    rtol: float
    atol: float
    max_step: float
    adjoint: Array
    step: float | None = dataclasses.field(init=False)
    integral: Integral = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.step = None

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        """Take the adjoint from one time back to another along a path of states, and add to the
        integral. ``remaining`` is the length of the way from there on."""
        raise NotImplementedError

    def _absolute(self) -> float:
        return self.atol * max(np.abs(self.adjoint).max(initial=0.0), np.finfo(float).tiny)

    def _generic(self, t: float, adjoint: Array, path: OdeSolution) -> list[Tensor]:
        """The size of what is integrated at a time if nothing cancels in it."""
        weights = (1 + 0.5 * np.cos(np.arange(adjoint.size) ** 2)) * np.abs(adjoint)
        return self.rhs.parameter_vjp(np.array([t]), path(t)[:, None], weights[:, None])[0]


@dataclass
class BySolver(Sweep):
    """By one of SciPy's solvers, with the step size carried from each time that is read to the
    next. The integral is taken afterwards over the steps of the way forward.

    Args:
        method: an explicit solver, or Radau.
    """

    method: type[OdeSolver]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.integral = self.points = SevenPoints(self.rhs.parameters, self.rtol)

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        solver = self._solver(begin, end, path)
        times, interpolants = [begin], []
        while solver.status == "running":
            proposed = float(getattr(solver, "h_abs", 0.0))
            message = solver.step()
            if solver.status == "failed":
                raise _failed(solver.t, message)
            # A last step that the end cut short says nothing against a longer one.
            cut = solver.status == "finished" and solver.step_size < 0.999 * proposed
            self.step = (
                max(proposed, float(getattr(solver, "h_abs", 0.0)))
                if cut
                else float(getattr(solver, "h_abs", 0.0))
            )
            times.append(solver.t)
            interpolants.append(solver.dense_output())
        self.adjoint = _like(np.asarray(solver.y), self.adjoint)
        if not self.rhs.parameters:
            return
        found = solution(times, interpolants, type(solver))

        def integrand(times: Array, weights: Array, differences: Array) -> list[list[Tensor]]:
            z = _like(found(times), self.adjoint)
            return self.rhs.parameter_vjp(times, path(times), -weights * z, -differences * z)

        def generic(t: float) -> list[Tensor]:
            return self._generic(t, _like(found(np.array([t])), self.adjoint)[:, 0], path)

        # The way forward knows how fast things change along it.
        self.points.integrate([begin, *_between(begin, end, path), end], integrand, generic)

    def _solver(self, begin: float, end: float, path: OdeSolution) -> Any:
        like = self.adjoint
        options: dict[str, Any] = {
            "rtol": self.rtol,
            "atol": self._absolute(),
            "max_step": self.max_step,
        }
        if self.step:
            options["first_step"] = min(self.step, abs(end - begin))
        if issubclass(self.method, Radau):
            options["jac"] = lambda t, z: -self.rhs.matrices(np.array([t]), path(np.array([t])))[0]

        def rate(t: float, z: Array) -> Array:
            return -_real(self.rhs.state_vjp(t, path(t), _like(z, like)))

        return self.method(rate, begin, _real(like), end, **options)


@dataclass
class ByCollocation(Sweep):
    """By collocation, with the integral as one more row of the equation: a jump at a time that is
    read is not resolved.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.integral, self.misses = Integral(self.rhs.parameters, self.rtol**POWER), 0

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        now, marks = begin, _between(begin, end, path)
        z, here = _real(self.adjoint), self._matrices(np.array([begin]), path)
        while now != end:
            # The way forward knows how fast things change along it: its steps are not skipped.
            farthest = marks[STRIDE - 1] if len(marks) >= STRIDE else end
            now, step = self._step(now, farthest, z, here, path, remaining + abs(end - farthest))
            z, here = step.values[-1], step.matrices[-1:]
            while marks and (end - begin) * (marks[0] - now) <= 0:
                marks, self.misses = marks[1:], 0
        self.adjoint = _like(z, self.adjoint)

    def _step(
        self, now: float, farthest: float, z: Array, here: Array, path: OdeSolution, beyond: float
    ) -> tuple[float, Step]:
        """Take one step, at most to the given time, and return where it ends."""
        smallest = 10 * float(np.spacing(abs(now)))
        size, atol = (
            min(self.step or np.inf, self.max_step),
            self._absolute() * self.rtol ** (POWER - 1),
        )
        while True:
            size = max(size, smallest)
            cut = size >= abs(farthest - now)
            end = farthest if cut else now + float(np.copysign(size, farthest - now))
            step = Step(
                end - now,
                z,
                np.concatenate([here, self._matrices(now + (end - now) * POINTS, path)]),
            )
            error, lasting = step.error(self.rtol**POWER, atol, beyond + abs(farthest - end))
            found = []
            if error <= 1 and self.rhs.parameters:
                missed, found = self._integrate(now, step, lasting, path, abs(farthest - now))
                # The shortest step is all that can be told of where it jumps.
                error = max(error, missed if abs(step.h) > smallest else min(missed, 1.0))
            if error <= 1:
                self.integral.add(found)
                break
            if abs(step.h) <= smallest:
                raise _failed(now, OdeSolver.TOO_SMALL_STEP)
            size = abs(step.h) * max(SHRINK, SAFETY * error ** (-1 / ORDER))
        wanted = abs(step.h) * min(GROW, SAFETY * max(error, np.finfo(float).tiny) ** (-1 / ORDER))
        # A step that was cut short says nothing against a longer one.
        self.step = max(wanted, size) if cut else wanted
        return end, step

    def _matrices(self, times: Array, path: OdeSolution) -> Array:
        return -self.rhs.matrices(times, path(times))

    def _integrate(
        self, now: float, step: Step, lasting: Array, path: OdeSolution, sign: float
    ) -> tuple[float, list[Tensor]]:
        """The error of the integral over a step, and this itself. ``way`` is the length of which
        the step is a part: it may begin at a jump, where nothing is known yet of the size of the
        integral."""
        times, middle = now + step.h * TIMES, now + step.h / 2
        weights, differences = (
            _like(x, self.adjoint) for x in (step.weighted(), step.differences(lasting))
        )
        found, off = self.rhs.parameter_vjp(times, path(times), -weights, -differences)

        def generic() -> list[Tensor]:
            largest = _like(np.maximum(np.abs(step.start), np.abs(step.values[-1])), self.adjoint)
            return [sign * x for x in self._generic(middle, largest, path)]

        error = self.integral.error(found, off, middle, generic)
        self.misses += error > 1
        if self.misses > DIVISIONS:
            raise unsettled(middle)
        return error, found


def _between(begin: float, end: float, path: OdeSolution) -> list[float]:
    """Ends of the steps of the way forward that lie between two times, from the first on."""
    low, high = min(begin, end), max(begin, end)
    return sorted((t for t in map(float, path.ts) if low < t < high), reverse=bool(begin > end))


def _failed(t: float, message: str | None) -> RuntimeError:
    return RuntimeError(f"the adjoint failed at t = {t:g}: {message}")


def _real(z: Array) -> Array:
    """A cotangent as real numbers: the adjoint of a complex state is linear over these alone."""
    return z.view(float) if np.iscomplexobj(z) else z


def _like(z: Array, like: Array) -> Array:
    """The inverse of :func:`_real`, for one cotangent ``(n,)`` or several ``(n, k)``."""
    return np.ascontiguousarray(z.T).view(complex).T if np.iscomplexobj(like) else z
