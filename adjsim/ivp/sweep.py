r"""Integration of an adjoint backward in time, between times at which the solution is used.

For a loss that depends on the states :math:`y(t_k)`, with cotangents :math:`w_k`, the adjoint
:math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J =
    \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

The adjoint jumps at every time :math:`t_k`. An explicit forward method also integrates the adjoint,
and its step size is carried across the jumps. The integral is computed afterwards over the forward
steps (:mod:`adjsim.ivp.quadrature`), so that it does not enter the error norm of the adjoint. The
linear adjoint equation of a stiff problem is solved by collocation, integral included, which has no
history that a jump could invalidate (:mod:`adjsim.ivp.collocation`). If the state is large, Radau
is used as an explicit method is. Gradients with respect to times come from :math:`\dot y = f`. Each
tensor of parameters has an error control of its own.

A sweep takes k adjoints at once, for as many rows of a Jacobian. They share the states, the steps
and the graphs of ``fun``, and each row keeps the tolerances that it would have alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver, Radau
from torch import Tensor

from adjsim.core.step_control import next_factor
from adjsim.ivp.collocation import ORDER, TIMES, Step
from adjsim.ivp.forward_states import StoredInterpolants, adjoint_error
from adjsim.ivp.quadrature import (
    DIVISIONS,
    ROUNDING,
    STRIDE,
    AdaptiveLobatto,
    Integral,
    largest_entries,
    no_convergence,
)
from adjsim.ivp.rhs import SMALLEST_RTOL, Array, Graph, RightHandSide

# Largest ratio of a collocation step to the one before.
GROW = 30.0
# The order of the error, in the size of the step, of the first step behind a jump, of which a layer
# is most; and the ratio of the step that is tried behind the next jump, if this one was accepted.
ORDER_BEHIND, GROW_BEHIND = 2, 3.0
# Power of the tolerance that is required of the difference of two collocation results. The
# difference is of order 6 in the step size and the error of order 10. The power 6 / 10 would be too
# lax where the integrand jumps, since the difference is then about as large as the error.
POWER = 0.85
# Largest number of real state entries for which the adjoint of a stiff problem is solved by
# collocation, which solves one dense linear system per step.
MAX_COLLOCATION_SIZE = 128
IMPLICIT = (Radau, BDF, LSODA)
# Fraction of a change of the states at which a change of the integrand has to be smaller too.
SHRUNK = 2.0**-10


@dataclass
class AdjointSettings:
    """The settings with which the adjoint of a problem is integrated.

    ``atol`` is relative to the adjoint's largest entry. ``method`` and ``options`` are those of the
    forward solution.
    """

    rhs: RightHandSide
    method: type[OdeSolver]
    rtol: float
    atol: float
    options: dict[str, Any]

    def solver_options(self, atol: Any) -> dict[str, Any]:
        """Return the options of a solver of a backward pass."""
        return {"rtol": self.rtol, "atol": atol, "max_step": self.options.get("max_step", np.inf)}

    def sweep(self, adjoint: Array) -> Sweep:
        """Make the sweep that begins with cotangents ``(k, n)`` of the state."""
        if not issubclass(self.method, IMPLICIT):
            return SolverSweep(self, adjoint, self.method)
        large = (1 + np.iscomplexobj(adjoint)) * adjoint.shape[1] > MAX_COLLOCATION_SIZE
        return SolverSweep(self, adjoint, Radau) if large else CollocationSweep(self, adjoint)


class Sweep(ABC):
    """The adjoints ``(k, n)`` and the integrals in one backward pass.

    ``step`` is the size of the last step that was not cut short.
    """

    integral: Integral

    def __init__(self, settings: AdjointSettings, adjoint: Array) -> None:
        self.settings, self.rhs, self.adjoint = settings, settings.rhs, adjoint
        self.step: float | None = None

    @abstractmethod
    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        """Integrate the adjoint along the states from one time to another, and add to the integral.

        ``remaining`` is the length of the time span after ``end``, in the direction of the sweep.
        """

    def _absolute(self) -> Array:
        """Return the absolute tolerance of each row ``(k,)``; a row of zeros remains zero."""
        sizes = np.abs(self.adjoint).max(1, initial=0.0)
        sizes[sizes == 0] = max(sizes.max(initial=0.0), np.finfo(float).tiny)
        return self.settings.atol * sizes

    def _largest(self, sums: Sequence[Tensor]) -> Array:
        """Return the largest entries of integrals, of which those of histories are smoothed."""
        return largest_entries(self.rhs.inputs.histories.smoothed(sums))

    def _rounding(self, length: float, t: float, adjoint: Array, path: OdeSolution) -> Array:
        """Return the rounding error of the integral over an interval around a time."""
        weights = _without_cancellation(adjoint[..., None])
        graphs = self.rhs.graphs(np.array([t]), path(t)[:, None])
        sizes = self.rhs.parameter_vjp(graphs, weights)[0]
        return ROUNDING * length * self._largest(sizes)

    def _uncertainty(self, times: Array, path: OdeSolution, weights: Array) -> Array:
        """Return the change of a weighted sum of the integrand if the states change.

        The states ``(n, times)`` change by as much as the tolerance of the solution. A difference
        of two formulas that is smaller is the roughness of the solution. Shorter intervals do not
        remove this roughness: where fun subtracts two large numbers, nothing else may remain. A
        change that is not in proportion to that of the states, as that of random numbers or of a
        jump of fun, is left out.
        """
        states, sizes = path(times), _without_cancellation(weights)
        known = self.settings.options
        scale = np.reshape(known["atol"], (-1, 1)) + known["rtol"] * np.abs(states)
        shift = np.cos(np.arange(len(states)) ** 2)[:, None] * scale
        here, there, nearby = (
            self.rhs.parameter_vjp(self.rhs.graphs(times, states + part * shift), sizes)[0]
            for part in (0.0, 1.0, SHRUNK)
        )
        changes, less = (
            self._largest([b - a for a, b in zip(here, sums, strict=True)])
            for sums in (there, nearby)
        )
        small = less / SHRUNK
        return np.where((changes / 16 <= small) & (small <= 16 * changes), changes, 0.0)


class SolverSweep(Sweep):
    """Integration by an explicit solver of SciPy or by Radau, whose step size outlasts jumps."""

    def __init__(self, settings: AdjointSettings, adjoint: Array, method: type[OdeSolver]) -> None:
        super().__init__(settings, adjoint)
        self.method = method
        rows = len(adjoint)
        self.integral = self.points = AdaptiveLobatto(
            self.rhs.parameter_leaves, rows, settings.rtol, self._largest
        )

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        solver, like = self._solver(begin, end, path), self.adjoint
        storage = StoredInterpolants(self.method)
        storage(solver)
        while solver.status == "running":
            proposed = float(getattr(solver, "h_abs", 0.0))
            message = solver.step()
            if solver.status == "failed":
                raise adjoint_error(solver.t, message)
            # If the end cut the last step short, the next one need not be as short.
            cut = solver.status == "finished" and solver.step_size < 0.999 * proposed
            following = float(getattr(solver, "h_abs", 0.0))
            self.step = max(proposed, following) if cut else following
            storage(solver)
        self.adjoint = _as_state_type(np.asarray(solver.y).reshape(len(like), -1), like)
        if not self.rhs.parameters:
            return
        found = storage.solution()

        def adjoint(times: Array) -> Array:
            return _as_state_type(found(times).reshape(len(like), -1, len(times)), like)

        def integrand(times: Array, weights: Array, differences: Array) -> list[list[Tensor]]:
            z = adjoint(times)
            graphs = self.rhs.graphs(times, path(times))
            return self.rhs.parameter_vjp(graphs, -weights * z, -differences * z)

        # The forward steps resolve how fast the states change.
        self.points.integrate(
            [begin, *_forward_steps_between(begin, end, path), end],
            integrand,
            lambda length, t: self._rounding(length, t, adjoint(np.array([t]))[..., 0], path),
            lambda times, weights: self._uncertainty(times, path, weights * adjoint(times)),
        )

    def _solver(self, begin: float, end: float, path: OdeSolution) -> Any:
        like, shape = self.adjoint, _as_real(self.adjoint).shape
        options = self.settings.solver_options(np.repeat(self._absolute(), shape[1]))
        # SciPy's error norm is the mean over all rows, of which one may have the whole error.
        share = len(like) ** -0.5
        options["rtol"] = max(share * options["rtol"], SMALLEST_RTOL)
        options["atol"] = share * options["atol"]
        if self.step:
            options["first_step"] = min(self.step, abs(end - begin))
        if issubclass(self.method, Radau):

            def jacobian(t: float, z: Array) -> Any:
                graphs = self.rhs.graphs(np.array([t]), path(np.array([t])))
                return _each_row(-self.rhs.transposed_jacobians(graphs)[0], len(like))

            options["jac"] = jacobian

        def rate(t: float, z: Array) -> Array:
            rows = _as_state_type(z.reshape(shape), like)
            return -_as_real(self.rhs.state_vjp(t, path(t), rows)).ravel()

        return self.method(rate, begin, _as_real(like).ravel(), end, **options)


class CollocationSweep(Sweep):
    """Integration by collocation, with the integral as one more component of the equation.

    The boundary layer behind a jump of the adjoint is not resolved. ``behind`` is the size of the
    step over the last one, and the layers of all jumps are much alike.
    """

    def __init__(self, settings: AdjointSettings, adjoint: Array) -> None:
        super().__init__(settings, adjoint)
        self.rtol, self.rejections = settings.rtol**POWER, 0
        self.integral = Integral(self.rhs.parameter_leaves, len(adjoint), self.rtol, self._largest)
        self.behind, self._reached = np.inf, adjoint

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        now, marks = begin, _forward_steps_between(begin, end, path)
        z, jumps = _as_real(self.adjoint).T, self.adjoint is not self._reached
        if jumps:
            self.step = min(self.step or np.inf, self.behind)
        while now != end:
            # The forward steps resolve how fast the states change, so a step covers few of them.
            farthest = marks[STRIDE - 1] if len(marks) >= STRIDE else end
            beyond = remaining + abs(end - farthest)
            now, step = self._step(now, farthest, z, path, beyond, jumps)
            z, jumps = step.values[-1], False
            while marks and (end - begin) * (marks[0] - now) <= 0:
                marks, self.rejections = marks[1:], 0
        self.adjoint = self._reached = _as_state_type(z.T, self.adjoint)

    def _step(
        self, now: float, farthest: float, z: Array, path: OdeSolution, beyond: float, jumps: bool
    ) -> tuple[float, Step]:
        """Take one step, at most to ``farthest``, and return the time at which it ends.

        ``jumps`` tells whether the adjoint jumps at its start.
        """
        smallest = 10 * float(np.spacing(abs(now)))
        size = min(self.step or np.inf, self.settings.options.get("max_step", np.inf))
        atol = self._absolute() * self.settings.rtol ** (POWER - 1)
        order, grow = ORDER_BEHIND if jumps else ORDER, GROW_BEHIND
        while True:
            size = max(size, smallest)
            cut = size >= abs(farthest - now)
            end = farthest if cut else now + float(np.copysign(size, farthest - now))
            matrices, graphs = self._matrices(now + (end - now) * TIMES, path)
            step = Step(end - now, z, matrices)
            error, propagated = step.error(self.rtol, atol, beyond + abs(farthest - end))
            found = []
            if error <= 1 and self.integral.sums:
                missed, found = self._integrate(
                    now, step, propagated, path, graphs, abs(farthest - now)
                )
                # A jump of the integrand cannot be located better than to the shortest step.
                error = max(error, missed if abs(step.h) > smallest else min(missed, 1.0))
            if error <= 1:
                if found:
                    self.integral.add(found)
                break
            if abs(step.h) <= smallest:
                raise adjoint_error(now, OdeSolver.TOO_SMALL_STEP)
            size, grow = abs(step.h) * next_factor(error, order), 1.0
        if jumps:
            self.behind = abs(step.h) * grow
        wanted = abs(step.h) * next_factor(error, ORDER, GROW)
        # If the step was cut short, the next one need not be as short.
        self.step = max(wanted, size) if cut else wanted
        return end, step

    def _matrices(self, times: Array, path: OdeSolution) -> tuple[Array, list[Graph]]:
        """Return the matrices of the equation at some times, and the graphs of the rates."""
        graphs = self.rhs.graphs(times, path(times))
        return -self.rhs.transposed_jacobians(graphs), graphs

    def _integrate(
        self,
        now: float,
        step: Step,
        propagated: Array,
        path: OdeSolution,
        graphs: list[Graph],
        length: float,
    ) -> tuple[float, list[Tensor]]:
        """Return the error, relative to the tolerance, and the integral over a step.

        ``graphs`` are those of the rates at :data:`TIMES`. ``length`` is that of the interval in
        which the step lies. It sets the scale of the integral, which is not known yet if the step
        begins at a jump.
        """
        times, middle = now + step.h * TIMES, now + step.h / 2
        sizes = np.maximum(np.abs(step.start), np.abs(step.values[-1]))
        weights, differences, most = (
            _as_state_type(x, self.adjoint)
            for x in (step.weighted(), step.differences(propagated), sizes.T)
        )
        found, off = self.rhs.parameter_vjp(graphs, -weights, -differences)
        error = self.integral.error(
            found,
            off,
            middle,
            lambda: self._rounding(length, middle, most, path),
            lambda: self._uncertainty(times, path, differences),
        )
        self.rejections += error > 1
        if self.rejections > DIVISIONS:
            raise no_convergence(middle)
        return error, found


def _forward_steps_between(begin: float, end: float, path: OdeSolution) -> list[float]:
    """Return the ends of forward steps between two times, in order from ``begin`` on."""
    low, high = min(begin, end), max(begin, end)
    return sorted((t for t in map(float, path.ts) if low < t < high), reverse=bool(begin > end))


def _without_cancellation(weights: Array) -> Array:
    """Return the sizes of weights ``(k, n, times)``, with factors against cancellation in sums."""
    return (1 + 0.5 * np.cos(np.arange(weights.shape[1]) ** 2))[:, None] * np.abs(weights)


def _each_row(matrix: Array, rows: int) -> Any:
    """Return the Jacobian of rows that have one matrix each: sparse, if there are several."""
    return matrix if rows == 1 else sparse.csc_matrix(sparse.kron(sparse.eye(rows), matrix))


def _as_real(z: Array) -> Array:
    """View cotangents as real numbers, over which the adjoint of a complex state is linear."""
    return np.ascontiguousarray(z).view(float) if np.iscomplexobj(z) else z


def _as_state_type(z: Array, like: Array) -> Array:
    """Invert :func:`_as_real`, for cotangents ``(k, n)`` or ``(k, n, times)``."""
    if not np.iscomplexobj(like):
        return z
    return np.ascontiguousarray(z.swapaxes(1, -1)).view(complex).swapaxes(1, -1)
