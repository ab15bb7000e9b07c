r"""Radau collocation of a linear equation with an integral along it.

The adjoint of a stiff problem is linear, :math:`\dot z = A(t) z` with :math:`A = -J^T`, and jumps
at every time that is read. The collocation polynomial of degree s through :math:`z(t_0)` that
solves the equation at Radau's s points
:math:`t_i = t_0 + c_i h` has the values

.. math:: Z_i = z_0 + h \sum_j a_{ij} A_j Z_j, \qquad A_j = A(t_j),

a system of linear equations that is solved as it is: no Newton iteration, and no history that a
jump would void. The last
:math:`Z_i` is the result, of order 2 s - 1; the method is stiffly accurate and L-stable. An
integral :math:`\dot g = B(t) z` is taken with the weights :math:`b_j = a_{sj}` of the same points,
:math:`g_1 = g_0 + h \sum_j b_j B_j Z_j`, as one more row of the equation would be.

**A jump need not be resolved.** Behind a jump what decays within a time :math:`\tau`, short beside
h, is a layer whose area is all that an integral takes of it. Let :math:`\varphi = B A^{-1}`, so
that :math:`B z = \varphi \dot z`. The collocation polynomial u solves the equation at the points,
so that :math:`h \sum_j b_j B_j Z_j = h \sum_j b_j \varphi_j \dot u_j`, and for a polynomial
:math:`\varphi` of degree s - 1 Radau's formula is exact:

.. math:: h \sum_j b_j \varphi_j \dot u_j = \varphi u \Big|_{t_0}^{t_1} - \int_{t_0}^{t_1}
   \dot\varphi\, u \, dt.

In the limit of :math:`\tau \ll h` u is zero at all the points, so it is orthogonal to polynomials
of degree s - 2, and what remains is :math:`-\varphi(t_0) z_0`: the area of the layer. What is left
of it in :math:`Z_s`, of the order of
:math:`\tau / h`, is accounted for by the next steps, since :math:`\varphi u` at their ends cancels.
(The polynomial itself is no approximation of the layer, and must not be read between its points.)

**Errors.** The same with three points has another result, of order 5. It takes A and B z from the
polynomials through their values at :math:`t_0` and the s points, so that it asks for nothing else;
where z hardly changes, this is the difference of two quadratures on these six. What counts of the
differences :math:`e_0` of z and :math:`\delta` of g is what is left of them in the end. The method
itself gives for the next steps, if :math:`A_s` and :math:`B_s` remain as they are,

.. math:: e_{k+1} = R(h A_s)\, e_k, \qquad \delta + B_s \sum_k h \sum_j b_j E_{kj},

where R is its stability function and :math:`E_{kj}` are the values at the points of step k that
starts from :math:`e_k`. So an error that decays, and whose integral makes up for what is missing in
:math:`\delta`, is none. Some steps are looked ahead, as long as this one, and no farther than the
way goes, since its end is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import roots_jacobi

Array = np.ndarray[Any, Any]


def _radau(stages: int) -> tuple[Array, Array]:
    """Points in (0, 1], the last of them 1, and integrals from zero to each of them in terms of
    values at all of them.
    """
    points = np.append((roots_jacobi(stages - 1, 1, 0)[0] + 1) / 2, 1.0)
    powers = np.vander(points, stages, increasing=True)
    return points, (points[:, None] * powers / np.arange(1, stages + 1)) @ np.linalg.inv(powers)


STAGES, FEWER = 5, 3
# Of the difference of the two results in the step.
ORDER = 2 * FEWER
POINTS, WEIGHTS = _radau(STAGES)
FEWER_POINTS, FEWER_WEIGHTS = _radau(FEWER)
# Times of a step at which something is evaluated, and what takes values there to the fewer points.
TIMES = np.append(0.0, POINTS)
BETWEEN = np.vander(FEWER_POINTS, STAGES + 1) @ np.linalg.inv(np.vander(TIMES, STAGES + 1))
# Steps that are looked ahead.
DECAYS = 3


@dataclass
class Step:
    """A step of collocation.

    Args:
        h: its length, negative backward in time.
        start: value at its beginning ``(n,)``.
        matrices: those at :data:`TIMES` ``(s + 1, n, n)``.
    """

    h: float
    start: Array
    matrices: Array
    #: At the points ``(s, n)``, the last of them the result; and at the fewer ones.
    values: Array = field(init=False)
    fewer: Array = field(init=False)

    def __post_init__(self) -> None:
        self.values = _solve(self.h * WEIGHTS, self.matrices[1:], self.start)
        self.fewer = _solve(
            self.h * FEWER_WEIGHTS, np.einsum("ij,jkl->ikl", BETWEEN, self.matrices), self.start
        )

    def error(self, rtol: float, atol: float, remaining: float) -> tuple[float, Array]:
        """What is left of the error of the value in units of what is allowed, and the sum over
        :math:`E_{kj}`. ``remaining`` is the length of the way after this step."""
        scale = atol + rtol * np.maximum(np.abs(self.start), np.abs(self.values[-1]))
        error = self.values[-1] - self.fewer[-1]
        size, lasting = _norm(error / scale), np.zeros_like(error)
        if size > 1 and remaining > 0:
            length = np.copysign(min(abs(self.h), remaining), self.h)
            later = _solve(
                length * WEIGHTS, np.tile(self.matrices[-1], (STAGES, 1, 1)), np.eye(error.size)
            )
            area = length * np.einsum("i,ikl->kl", WEIGHTS[-1], later)
            for _ in range(min(DECAYS, int(remaining / abs(length)))):
                error, lasting = later[-1] @ error, lasting + area @ error
            size = _norm(error / scale)
        return size if np.isfinite(size) else np.inf, lasting

    def weighted(self) -> Array:
        """What the integral takes at :data:`TIMES` ``(n, s + 1)``: values with their weights."""
        return np.concatenate(
            [np.zeros((1, self.start.size)), self.h * WEIGHTS[-1][:, None] * self.values]
        ).T

    def differences(self, lasting: Array) -> Array:
        """The same for the error of the integral."""
        found = self.weighted() - ((self.h * FEWER_WEIGHTS[-1][:, None] * self.fewer).T @ BETWEEN)
        found[:, -1] += lasting
        return found


def _solve(weights: Array, matrices: Array, start: Array) -> Array:
    """The values at the points of a step from a start ``(n,)``, or from several ``(n, k)``. Its
    length is in the weights.
    """
    stages, size = len(weights), len(weights) * len(start)
    system = np.eye(size) - np.einsum("ij,jkl->ikjl", weights, matrices).reshape(size, size)
    return np.linalg.solve(system, np.concatenate([start] * stages)).reshape(stages, *start.shape)


def _norm(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
