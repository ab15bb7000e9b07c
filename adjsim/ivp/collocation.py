r"""Radau collocation for a linear equation and an integral along its solution.

The adjoint of a stiff problem is linear, :math:`\dot z = A(t) z` with :math:`A = -J^T`, and jumps
at every time at which the solution is used. The collocation polynomial of degree s through
:math:`z(t_0)` satisfies the equation at the s Radau points :math:`t_i = t_0 + c_i h`. Its values
there are

.. math:: Z_i = z_0 + h \sum_j a_{ij} A_j Z_j, \qquad A_j = A(t_j).

This linear system is solved directly, without Newton iterations. The method is a one-step method,
so a jump invalidates no history. The last :math:`Z_i` is the result, of order 2 s - 1; the method
is stiffly accurate and L-stable. An integral :math:`\dot g = B(t) z` is computed with the weights
:math:`b_j = a_{sj}` at the same points, :math:`g_1 = g_0 + h \sum_j b_j B_j Z_j`, as if g were one
more component of the equation.

**A jump need not be resolved.** The components that decay within a time :math:`\tau \ll h` form a
boundary layer behind a jump, and only the area of the layer contributes to an integral. Let
:math:`\varphi = B A^{-1}`, so that :math:`B z = \varphi \dot z`. The collocation polynomial u
satisfies the equation at the points, so :math:`h \sum_j b_j B_j Z_j = h \sum_j b_j \varphi_j \dot
u_j`. For a polynomial :math:`\varphi` of degree s - 1 Radau's formula is exact:

.. math:: h \sum_j b_j \varphi_j \dot u_j = \varphi u \Big|_{t_0}^{t_1} - \int_{t_0}^{t_1}
   \dot\varphi\, u \, dt.

For :math:`\tau \ll h`, u is zero at all the points, so it is orthogonal to polynomials of degree
s - 2. Then only :math:`-\varphi(t_0) z_0` remains, which is the area of the layer. The remainder of
the layer in :math:`Z_s` is of order :math:`\tau / h`. The next steps account for it, since the
terms :math:`\varphi u` at the step ends cancel. (The polynomial itself does not approximate the
layer, and must not be evaluated between the points.)

**Errors.** Collocation at three points gives a second result, of order 5. It takes A and B from
the polynomials through their values at :math:`t_0` and the s points, so it needs no further
evaluations. Where z hardly changes, the difference of the two results is that of two quadrature
formulas on these six points. The error estimate is the part of the differences :math:`e_0` of z and
:math:`\delta` of g that persists in later steps. If :math:`A_s` and :math:`B_s` remain constant,
the method propagates the differences as

.. math:: e_{k+1} = R(h A_s)\, e_k, \qquad \delta + B_s \sum_k h \sum_j b_j E_{kj},

where R is the stability function and :math:`E_{kj}` are the values at the points of a step k that
starts from :math:`e_k`. So a difference :math:`e_0` that decays, and whose integral cancels
:math:`\delta`, does not count as an error. The propagation covers a few steps of the present size,
and ends at the end of the time span, where the solution is used.
"""

from __future__ import annotations

import numpy as np
from scipy.special import roots_jacobi

from adjsim.ivp.rhs import Array


def _radau(stages: int) -> tuple[Array, Array]:
    """Compute the Radau points in (0, 1], of which the last is 1, and the integration matrix ``a``.

    Row i integrates from 0 to point i the polynomial through values at all points.
    """
    points = np.append((roots_jacobi(stages - 1, 1, 0)[0] + 1) / 2, 1.0)
    powers = np.vander(points, stages, increasing=True)
    return points, (points[:, None] * powers / np.arange(1, stages + 1)) @ np.linalg.inv(powers)


STAGES, LOW_STAGES = 5, 3
# Order of the difference of the two results in the step size.
ORDER = 2 * LOW_STAGES
POINTS, WEIGHTS = _radau(STAGES)
LOW_POINTS, LOW_WEIGHTS = _radau(LOW_STAGES)
# Evaluation times of a step, and the matrix that interpolates from them to the three points.
TIMES = np.append(0.0, POINTS)
INTERPOLATION = np.vander(LOW_POINTS, STAGES + 1) @ np.linalg.inv(np.vander(TIMES, STAGES + 1))
# The eigenvalues of the integration matrix that are real or above the real axis, and the parts of
# the stages in them, of which those of a pair count twice.
_eigenvalues, _vectors = np.linalg.eig(WEIGHTS)
_upper = np.imag(_eigenvalues) >= 0
EIGENVALUES = _eigenvalues[_upper]
PARTS = (_vectors * np.linalg.inv(_vectors).sum(1) * np.where(np.imag(_eigenvalues) == 0, 1, 2))[
    :, _upper
]
# Number of steps over which a difference is propagated.
LOOKAHEAD = 3


class Step:
    """A collocation step of size h, negative backward in time, from k rows ``start`` ``(n, k)``.

    ``matrices`` are the matrices A at :data:`TIMES`, ``(s + 1, n, n)``. ``values`` are those at the
    s points ``(s, n, k)``, of which the last is the result, and ``low_values`` those at three
    points.
    """

    def __init__(self, h: float, start: Array, matrices: Array) -> None:
        self.h, self.start, self.matrices = h, start, matrices
        low_matrices = np.einsum("ij,jkl->ikl", INTERPOLATION, matrices)
        self.values = _solve(h * WEIGHTS, matrices[1:], start)
        self.low_values = _solve(h * LOW_WEIGHTS, low_matrices, start)

    def error(self, rtol: float, atol: Array, remaining: float) -> tuple[float, Array]:
        """Return the propagated error relative to the tolerance, and the sum over :math:`E_{kj}`.

        ``atol`` is that of each row ``(k,)``, and ``remaining`` the length of the time span after
        this step.
        """
        scale = atol + rtol * np.maximum(np.abs(self.start), np.abs(self.values[-1]))
        error = self.values[-1] - self.low_values[-1]
        size, propagated = _norm(error / scale), np.zeros_like(error)
        if size > 1 and remaining > 0:
            length = np.copysign(min(abs(self.h), remaining), self.h)
            later = _propagators(length * self.matrices[-1])
            area = length * np.einsum("i,ikl->kl", WEIGHTS[-1], later)
            for _ in range(min(LOOKAHEAD, int(remaining / abs(length)))):
                error, propagated = later[-1] @ error, propagated + area @ error
            size = _norm(error / scale)
        return size if np.isfinite(size) else np.inf, propagated

    def weighted(self) -> Array:
        """Return the values at :data:`TIMES` times their quadrature weights, ``(k, n, s + 1)``."""
        weights = self.h * WEIGHTS[-1][:, None, None]
        return np.concatenate([np.zeros_like(self.values[:1]), weights * self.values]).T

    def differences(self, propagated: Array) -> Array:
        """Return the weighted values of the error of the integral, like :meth:`weighted`."""
        low = self.h * LOW_WEIGHTS[-1][:, None, None] * self.low_values
        found = self.weighted() - low.T @ INTERPOLATION
        found[..., -1] += propagated.T
        return found


def _solve(weights: Array, matrices: Array, start: Array) -> Array:
    """Solve for the values at the points of a step, from a start ``(n, k)``."""
    stages, size = len(weights), len(weights) * len(start)
    system = np.eye(size) - np.einsum("ij,jkl->ikjl", weights, matrices).reshape(size, size)
    return np.linalg.solve(system, np.concatenate([start] * stages)).reshape(stages, *start.shape)


def _propagators(matrix: Array) -> Array:
    """Return the matrices ``(s, n, n)`` from a start to the values at the points of a step.

    The matrix of the equation is ``matrix`` / h at all points. In the eigenvectors of the
    integration matrix each stage is a system of its own.
    """
    unit = np.eye(len(matrix))
    systems = unit - EIGENVALUES[:, None, None] * matrix
    return np.real(np.tensordot(PARTS, np.linalg.inv(systems), 1))


def _norm(x: Array) -> float:
    """Return the largest root mean square of a row of ``(n, k)``."""
    return float(np.sqrt(np.max(np.mean(x**2, 0)))) if x.size else 0.0
