"""The adjoint by collocation, and the choice between it and a solver of SciPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.integrate import BDF, LSODA, OdeSolution, OdeSolver, Radau
from torch import Tensor

from adjsim.core.step_control import next_factor
from adjsim.ivp.collocation import ORDER, TIMES, Step
from adjsim.ivp.forward_states import adjoint_error
from adjsim.ivp.quadrature import DIVISIONS, STRIDE, Integral, no_convergence
from adjsim.ivp.rhs import Array, Graph
from adjsim.ivp.solver_sweep import SolverSweep
from adjsim.ivp.sweep import AdjointSettings, Sweep, as_real, as_state_type, forward_steps_between

# Largest ratio of a collocation step to the one before.
GROW = 30.0
# The order of the error, in the size of the step, of the first step behind a jump, of which a layer
# is most; and the ratio of the step that is tried behind the next jump, if this one was accepted.
ORDER_BEHIND, GROW_BEHIND = 2, 3.0
# Power of the tolerance that is required of the difference of two collocation results. The
# difference is of order 6 in the step size and the error of order 10. The power 6 / 10 would be too
# lax where the integrand jumps, since the difference is then about as large as the error.
POWER = 0.85
# Number of rejected steps since the last forward step behind which the integrand jumps.
FEW = 2
# Largest number of real state entries for which the adjoint of a stiff problem is solved by
# collocation, which solves one dense linear system per step.
MAX_COLLOCATION_SIZE = 128
# The same for an explicit method: up to it collocation took less time in every network measured.
MAX_EXPLICIT_SIZE = 16
# Largest number of intervals between jumps whose matrices are evaluated together, and of rows of
# these matrices, each of which takes the memory of one evaluation of ``fun``.
MOST_TOGETHER, MOST_ROWS = 32, 4096
IMPLICIT = (Radau, BDF, LSODA)


def begin_sweep(settings: AdjointSettings, adjoint: Array) -> Sweep:
    """Make the sweep that begins with cotangents ``(k, n)`` of the state."""
    implicit = issubclass(settings.method, IMPLICIT)
    # Functions that vmap does not take are evaluated at one time after the other.
    largest_explicit = MAX_EXPLICIT_SIZE if settings.rhs.takes_vmap else 0
    size = (1 + np.iscomplexobj(adjoint)) * adjoint.shape[1]
    if size > (MAX_COLLOCATION_SIZE if implicit else largest_explicit):
        return SolverSweep(settings, adjoint, Radau if implicit else settings.method)
    return CollocationSweep(settings, adjoint)


class CollocationSweep(Sweep):
    """Integration by collocation, with the integral as one more component of the equation.

    The boundary layer behind a jump of the adjoint is not resolved. ``behind`` is the size of the
    step over the last one, and the layers of all jumps are much alike.
    """

    def __init__(self, settings: AdjointSettings, adjoint: Array) -> None:
        super().__init__(settings, adjoint)
        self.rtol, self.rejections = settings.rtol**POWER, 0
        self.integral = Integral(self.rhs.parameter_leaves, len(adjoint), self._largest)
        self.behind, self._reached = np.inf, adjoint
        # The number of intervals that are tried together; 1 after a failure.
        self.together = 1

    def through(
        self,
        times: Sequence[float],
        cotangents: Sequence[Array | None],
        path: OdeSolution,
        remaining: float,
    ) -> None:
        k, last = 0, len(times) - 1
        while k < last:
            end = k + self._count_short(times[k:], path)
            rest = remaining + abs(times[-1] - times[end])
            if end > k + 1 and self._together(times[k : end + 1], cotangents[k:end], path, rest):
                self.together = min(2 * self.together, MOST_TOGETHER)
            else:
                self.together, end = 2 if end == k + 1 else 1, k + 1
                rest = remaining + abs(times[-1] - times[end])
                super().through(times[k : end + 1], cotangents[k:end], path, rest)
            k = end

    def _count_short(self, times: Sequence[float], path: OdeSolution) -> int:
        """Return the number of intervals, at least one, that can be tried with one step each."""
        rows = len(TIMES) * as_real(self.adjoint).shape[1]
        ends = np.asarray(times[: min(self.together, max(1, MOST_ROWS // rows)) + 1])
        longest = min(self.step or 0.0, self.behind, self.settings.options.get("max_step", np.inf))
        passed = np.abs(np.diff(_number_of_step(ends, path)))
        long = np.flatnonzero((np.abs(np.diff(ends)) > longest) | (passed >= STRIDE))
        return max(1, int(long[0]) if len(long) else len(ends) - 1)

    def _together(
        self,
        times: Sequence[float],
        cotangents: Sequence[Array | None],
        path: OdeSolution,
        remaining: float,
    ) -> bool:
        """Take one step in each of several intervals, whose graphs are made at once.

        Return whether all errors are within the tolerances; if not, nothing has changed. The
        tolerance of the integral holds for the intervals together.
        """
        before, lengths = self.adjoint, np.diff(times)
        nodes = (np.asarray(times[:-1])[:, None] + lengths[:, None] * TIMES).ravel()
        matrices, graphs = self._matrices(nodes, path)
        weights, differences, sizes = [], [], []
        for k, h in enumerate(lengths):
            if cotangents[k] is not None:
                self.adjoint = self.adjoint + cotangents[k]
            part = slice(k * len(TIMES), (k + 1) * len(TIMES))
            step = Step(float(h), as_real(self.adjoint).T, matrices[part])
            atol = self._absolute() * self.settings.rtol ** (POWER - 1)
            beyond = remaining + abs(times[-1] - times[k + 1])
            error, propagated = step.error(self.rtol, atol, beyond)
            if not error <= 1:
                self.adjoint = before
                return False
            weights.append(step.weighted())
            differences.append(step.differences(propagated))
            sizes += [np.abs(step.start), np.abs(step.values[-1])]
            self.adjoint = as_state_type(step.values[-1].T, before)
        if self.integral.sums:
            found, error = self._integral(
                self.rtol,
                nodes,
                np.concatenate(weights, 2),
                np.concatenate(differences, 2),
                np.max(sizes, 0),
                path,
                graphs,
                abs(times[-1] - times[0]),
            )
            if error > 1:
                self.adjoint = before
                return False
            self.integral.add(found)
        self._reached = self.adjoint
        self.behind = max(self.behind, GROW_BEHIND * abs(float(lengths[-1])))
        return True

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        now, marks = begin, forward_steps_between(begin, end, path)
        z, jumps = as_real(self.adjoint).T, self.adjoint is not self._reached
        # There is no end of a forward step inside, if the states at these ends are read.
        self.rejections = 0
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
        self.adjoint = self._reached = as_state_type(z.T, self.adjoint)

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
            # A step that was cut short, to 1e-12 where two grids of times meet, tells nothing.
            self.behind = max(abs(step.h) * grow, size if cut else 0.0)
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
        sizes = np.maximum(np.abs(step.start), np.abs(step.values[-1]))
        # Where one step after the other is rejected the integrand jumps, and its error is as large
        # as the difference, of which no power is allowed.
        tolerance = self.settings.rtol if self.rejections > FEW else self.rtol
        found, error = self._integral(
            tolerance,
            now + step.h * TIMES,
            step.weighted(),
            step.differences(propagated),
            sizes,
            path,
            graphs,
            length,
        )
        self.rejections += error > 1
        if self.rejections > DIVISIONS:
            raise no_convergence(now + step.h / 2)
        return error, found

    def _integral(
        self,
        tolerance: float,
        times: Array,
        weighted: Array,
        differences: Array,
        sizes: Array,
        path: OdeSolution,
        graphs: list[Graph],
        length: float,
    ) -> tuple[list[Tensor], float]:
        """Return an integral over times ``(times,)`` and its error relative to the tolerance.

        ``sizes`` are the largest entries ``(n, k)`` of the adjoint there, in real numbers.
        """
        middle = (times[0] + times[-1]) / 2
        weights, differences, most = (
            as_state_type(x, self.adjoint) for x in (weighted, differences, sizes.T)
        )
        found, off = self.rhs.parameter_vjp(graphs, -weights, -differences)
        error = self.integral.error(
            found,
            off,
            tolerance,
            middle,
            lambda: self._rounding(length, middle, most, path),
            lambda: self._uncertainty(times, path, differences),
        )
        return found, error


def _number_of_step(times: Array, path: OdeSolution) -> Array:
    """Return the number of ends of forward steps that are below each time."""
    ends = path.ts if path.ts[-1] >= path.ts[0] else path.ts[::-1]
    return np.searchsorted(ends, times)
