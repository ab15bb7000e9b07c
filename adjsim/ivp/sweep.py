r"""Integration of an adjoint backward in time, between times at which the solution is used.

For a loss that depends on the states :math:`y(t_k)`, with cotangents :math:`w_k`, the adjoint
:math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J =
    \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

The adjoint jumps at every time :math:`t_k`. The adjoint equation is linear, and is solved by
collocation, integral included, which has no history that a jump could invalidate
(:mod:`adjsim.ivp.collocation_sweep`). Where the state is large, the explicit forward method also
integrates the adjoint, or Radau that of a stiff problem, and its step size is carried across the
jumps (:mod:`adjsim.ivp.solver_sweep`). Gradients with respect to times come from :math:`\dot y =
f`. Each tensor of parameters has an error control of its own.

A sweep takes k adjoints at once, for as many rows of a Jacobian. They share the states, the steps
and the graphs of ``fun``, and each row keeps the tolerances that it would have alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.integrate import OdeSolution, OdeSolver
from torch import Tensor

from adjsim.ivp.quadrature import ROUNDING, Integral, largest_entries
from adjsim.ivp.rhs import Array, RightHandSide

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


class Sweep(ABC):
    """The adjoints ``(k, n)`` and the integrals in one backward pass.

    ``step`` is the size of the last step that was not cut short.
    """

    integral: Integral

    def __init__(self, settings: AdjointSettings, adjoint: Array) -> None:
        self.settings, self.rhs, self.adjoint = settings, settings.rhs, adjoint
        self.step: float | None = None

    def through(
        self,
        times: Sequence[float],
        cotangents: Sequence[Array | None],
        path: OdeSolution,
        remaining: float,
    ) -> None:
        """Integrate from the first time to the last, and add cotangents where intervals begin.

        ``remaining`` is the length of the time span after the last time, in the direction of the
        sweep.
        """
        for begin, end, cotangent in zip(times, times[1:], cotangents, strict=False):
            if cotangent is not None:
                self.adjoint = self.adjoint + cotangent
            self.integrate(begin, end, path, remaining + abs(times[-1] - end))

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


def forward_steps_between(begin: float, end: float, path: OdeSolution) -> list[float]:
    """Return the ends of forward steps between two times, in order from ``begin`` on."""
    low, high = min(begin, end), max(begin, end)
    ends = path.ts if path.ts[-1] >= path.ts[0] else path.ts[::-1]
    inside = ends[np.searchsorted(ends, low, "right") : np.searchsorted(ends, high)].tolist()
    return inside[::-1] if begin > end else inside


def _without_cancellation(weights: Array) -> Array:
    """Return the sizes of weights ``(k, n, times)``, with factors against cancellation in sums."""
    return (1 + 0.5 * np.cos(np.arange(weights.shape[1]) ** 2))[:, None] * np.abs(weights)


def as_real(z: Array) -> Array:
    """View cotangents as real numbers, over which the adjoint of a complex state is linear."""
    return np.ascontiguousarray(z).view(float) if np.iscomplexobj(z) else z


def as_state_type(z: Array, like: Array) -> Array:
    """Invert :func:`as_real`, for cotangents ``(k, n)`` or ``(k, n, times)``."""
    if not np.iscomplexobj(like):
        return z
    return np.ascontiguousarray(z.swapaxes(1, -1)).view(complex).swapaxes(1, -1)
