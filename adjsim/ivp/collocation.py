r"""Radau collocation for linear equations, as an ``OdeSolver`` of SciPy's.

The adjoint of a stiff problem is linear, :math:`\dot z = A(t) z`, and jumps at every time that is read. The collocation
polynomial of degree s through :math:`z(t_0)` that solves the equation at Radau's s points :math:`t_0 + c_i h` has the values

.. math:: Z_i = z_0 + h \sum_j a_{ij} A_j Z_j, \qquad A_j = A(t_0 + c_j h),

a system of linear equations that is solved as it is: no Newton iteration, and no history that a jump would void. The last
:math:`Z_i` is the result, of order 2 s - 1; the method is stiffly accurate and L-stable. A quadrature of order s on the
points and :math:`t_0` gives the error (E. Hairer and G. Wanner, Solving Ordinary Differential Equations II, IV.8).

Not for large systems: the linear equations are s times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import DenseOutput, OdeSolver
from scipy.special import roots_jacobi

Array = np.ndarray[Any, Any]

STAGES = 5
# Radau's points in (0, 1], the last of them 1.
POINTS = np.append((roots_jacobi(STAGES - 1, 1, 0)[0] + 1) / 2, 1.0)
_POWERS = np.vander(POINTS, STAGES, increasing=True)
# Integrals of the powers from zero to each point, in terms of values at the points.
STAGE_WEIGHTS = (POINTS[:, None] * _POWERS / np.arange(1, STAGES + 1)) @ np.linalg.inv(_POWERS)
# The weight of the beginning in the second quadrature: the real eigenvalue, for which its errors decay as the method's do.
_EIGENVALUES = np.linalg.eigvals(STAGE_WEIGHTS)
BEGINNING = float(_EIGENVALUES[np.argmin(np.abs(_EIGENVALUES.imag))].real)
DIFFERENCES = np.linalg.solve(_POWERS.T, -BEGINNING * np.eye(STAGES)[0])
# Coefficients of the polynomial through the beginning and the points.
_INTERPOLATION = np.linalg.inv(np.vander(np.append(0.0, POINTS), STAGES + 1, increasing=True))

SAFETY, SHRINK, GROW = 0.9, 0.2, 30.0
# Of the first step, in units of the time in which the solution changes by its own size.
FIRST = 0.5
# Of the tolerance, for the difference of two quadratures: that is of order s + 1 in the step, and the error of order 2 s. The
# integrals of the parameters read the polynomial in between, whose order is s + 1 too.
POWER = 0.75


class Collocation(OdeSolver):
    """Solves a real linear equation, z' = A(t) z, by collocation at Radau's points.

    Args:
        fun: not called; SciPy's solvers have it.
        t0, y0, t_bound: as SciPy's.
        matrices: gives A at times ``(k,)``, as ``(k, n, n)``.
        rtol, atol: tolerances, as SciPy's.
        max_step: the longest step.
        first_step: the first one at most, if the solution does not change faster.
    """

    def __init__(
        self,
        fun: Callable[[float, Array], Array],
        t0: float,
        y0: Array,
        t_bound: float,
        *,
        matrices: Callable[[Array], Array],
        rtol: float,
        atol: Any,
        max_step: float = np.inf,
        first_step: float | None = None,
    ) -> None:
        super().__init__(fun, t0, y0, t_bound, vectorized=False)
        self.matrices, self.rtol, self.atol, self.max_step = matrices, rtol**POWER, atol * rtol ** (POWER - 1), max_step
        self._here = matrices(np.array([t0]))[0]
        fastest = float(np.abs(self._here @ self.y).max(initial=0.0))
        time = FIRST * float(np.abs(self.y).max(initial=0.0)) / max(fastest, np.finfo(float).tiny)
        self.h_abs = min(time or np.inf, first_step or np.inf, abs(t_bound - t0))
        self._polynomial: Array | None = None

    def _step_impl(self) -> tuple[bool, str | None]:
        smallest = 10 * float(np.abs(np.nextafter(self.t, self.direction * np.inf) - self.t))
        size = min(self.h_abs, self.max_step)
        while True:
            size = max(size, smallest)
            end = self.t + self.direction * size
            if self.direction * (end - self.t_bound) > 0:
                end = self.t_bound
            h = end - self.t
            matrices, values = self._collocate(h)
            error = self._error(h, matrices, values)
            if error <= 1:
                break
            if abs(h) <= smallest:
                return False, self.TOO_SMALL_STEP
            size = abs(h) * max(SHRINK, SAFETY * error ** (-1 / (STAGES + 1)))
        wanted = abs(h) * min(GROW, SAFETY * max(error, np.finfo(float).tiny) ** (-1 / (STAGES + 1)))
        # A step that was cut short at the end says nothing against a longer one.
        self.h_abs = max(wanted, size) if end == self.t_bound else wanted
        self._polynomial = np.concatenate([self.y[None], values]).T @ _INTERPOLATION.T
        self.t, self.y, self._here = end, values[-1], matrices[-1]
        return True, None

    def _collocate(self, h: float) -> tuple[Array, Array]:
        """The matrices ``(s, n, n)`` and values ``(s, n)`` at the points of a step."""
        matrices, n = self.matrices(self.t + h * POINTS), self.n
        system = np.eye(STAGES * n) - h * np.einsum("ij,jkl->ikjl", STAGE_WEIGHTS, matrices).reshape(STAGES * n, STAGES * n)
        return matrices, np.linalg.solve(system, np.tile(self.y, STAGES)).reshape(STAGES, n)

    def _error(self, h: float, matrices: Array, values: Array) -> float:
        """The difference of the two quadratures, relative to what is allowed."""
        off = h * np.einsum("i,ikl,il->k", DIFFERENCES, matrices, values)
        damping = np.eye(self.n) - h * BEGINNING * self._here
        scale = self.atol + self.rtol * np.maximum(np.abs(self.y), np.abs(values[-1]))
        error = np.linalg.solve(damping, off + h * BEGINNING * (self._here @ self.y))
        size = _norm(error / scale)
        if size > 1:
            # Where the step is long beside a time of the equation, the first difference is all of what decays.
            error = np.linalg.solve(damping, off + h * BEGINNING * (self._here @ (self.y + error)))
            size = _norm(error / scale)
        return size if np.isfinite(size) else np.inf

    def _dense_output_impl(self) -> DenseOutput:
        assert self._polynomial is not None
        assert self.t_old is not None
        return _Polynomial(self.t_old, self.t, self._polynomial)


class _Polynomial(DenseOutput):
    def __init__(self, t_old: float, t: float, coefficients: Array) -> None:
        super().__init__(t_old, t)
        self.coefficients = coefficients

    def _call_impl(self, t: Array) -> Array:
        x = (np.asarray(t) - self.t_old) / (self.t - self.t_old)
        powers = np.power.outer(x, np.arange(self.coefficients.shape[1]))
        return self.coefficients @ powers.T


def _norm(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
