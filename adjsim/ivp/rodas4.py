r"""The Rosenbrock method RODAS, order 4(3), for many stiff columns at once.

A step solves six linear systems with one matrix for each column. With the Jacobian :math:`J =
\partial f/\partial y` and the rate of change :math:`f_t = \partial f/\partial t` at the start of
the step, its stages are

.. math:: (1 - h\gamma J)\, u_i = h\gamma \Big[f\big(t + c_i h,\; y + \sum_{j<i} a_{ij} u_j\big)
   + \frac1h \sum_{j<i} c_{ij} u_j + h d_i f_t\Big], \qquad i = 1, ..., 6.

With a constant mass matrix M, :math:`M \dot y = f`, the matrix of the systems is :math:`M - h\gamma
J`, and M multiplies :math:`\sum_j c_{ij} u_j`. The order is the same for equations of index one.

The result is the argument of the last stage plus :math:`u_6`, which is also the error estimate. The
method is L-stable and stiffly accurate, and there is no Newton iteration that could fail in a
column. Its interpolant has order three.

The coefficients are those of RODAS (E. Hairer and G. Wanner, Solving Ordinary Differential
Equations II, second edition, section IV.10, the first set of the authors' program).
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.ivp.column_steps import Rate, Step, combine

_GAMMA = 0.25
_TIMES = [0.0, 0.386, 0.21, 0.63, 1.0, 1.0]
_TIME_DERIVATIVE = [0.25, -0.1043, 0.1035, -0.0362, 0.0, 0.0]
_FIFTH = [1.221224509226641, 6.019134481288629, 12.53708332932087, -0.687886036105895]
_STAGES = [
    [],
    [1.544],
    [0.9466785280815826, 0.2557011698983284],
    [3.314825187068521, 2.896124015972201, 0.9986419139977817],
    _FIFTH,
    [*_FIFTH, 1.0],
]
_RESULT = [*_FIFTH, 1.0, 1.0]
_COUPLING = [
    [],
    [-5.6688],
    [-2.430093356833875, -0.2063599157091915],
    [-0.1073529058151375, -9.594562251023355, -20.47028614809616],
    [7.496443313967647, -10.24680431464352, -33.99990352819905, 11.7089089320616],
    [8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136,
     -6.058818238834054],
]  # fmt: skip
_INTERPOLANT = [
    [10.12623508344586, -7.487995877610167, -34.80091861555747, -7.992771707568823,
     1.025137723295662],
    [-0.6762803392801253, 6.087714651680015, 16.43084320892478, 24.76722511418386,
     -6.594389125716872],
]  # fmt: skip


class Rodas4(Step):
    """A step of every column by RODAS. The rates of a column may depend on this column only."""

    name, error_order = "Rodas4", 3

    def __init__(
        self,
        rate: Rate,
        t: Tensor,
        h: Tensor,
        y: Tensor,
        first: Tensor | None,
        mass: Tensor | None = None,
    ) -> None:
        start, jacobian, by_time = derivatives(rate, t, y)
        if mass is None:
            inverse = _inverse(h * _GAMMA * jacobian)
        else:
            # A step of size zero stays, whatever the rank of the mass matrix.
            unit = torch.eye(len(y), dtype=y.dtype, device=y.device)[..., None]
            inverse = _inverse(h * _GAMMA * jacobian + unit - torch.where(h == 0, unit, mass))
        self._start, self._increments = y, list[Tensor]()
        for c, d, row, coupling in zip(_TIMES, _TIME_DERIVATIVE, _STAGES, _COUPLING, strict=True):
            slope = rate(t + c * h, combine(y, row, self._increments)) if row else start
            slope = slope + d * h * by_time if d else slope
            if mass is None:
                right = combine(h * slope, coupling, self._increments)
            else:
                added = combine(torch.zeros_like(y), coupling, self._increments)
                right = h * slope + (mass * added).sum(1)
            self._increments.append((inverse * (_GAMMA * right)).sum(1))
        self.end = combine(y, _RESULT, self._increments)

    def error(self) -> Tensor:
        return self._increments[-1]

    def polynomial(self) -> list[Tensor]:
        zero = torch.zeros_like(self._start)
        first, second = (combine(zero, row, self._increments) for row in _INTERPOLANT)
        return [self.end - self._start + first, second - first, -second]


def derivatives(rate: Rate, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rates ``(n, batch)``, their Jacobians ``(n, n, batch)`` and time derivatives.

    They have a graph if gradients are recorded.
    """
    record = torch.is_grad_enabled()
    with torch.enable_grad():
        at = t.detach().requires_grad_()
        x = y if record and y.requires_grad else y.detach().requires_grad_()
        out = rate(at, x)
        rows = [
            torch.autograd.grad(
                row.sum(), (x, at), retain_graph=True, create_graph=record, materialize_grads=True
            )
            if row.requires_grad
            else (torch.zeros_like(y), torch.zeros_like(t))
            for row in out
        ]
    jacobian, by_time = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return (out if record else out.detach()), jacobian, by_time


def _inverse(x: Tensor) -> Tensor:
    """Return the inverses of 1 - x for matrices ``(n, n, batch)``; NaN where there is none."""
    unit = torch.eye(len(x), dtype=x.dtype, device=x.device)
    # To solve a thousand systems of two equations six times takes LAPACK forty times as long.
    inverse, failed = torch.linalg.inv_ex(unit - x.movedim(2, 0))
    # With the columns last in memory, the product with a vector takes a seventh of the time.
    return torch.where(failed == 0, inverse.movedim(0, 2).contiguous(), torch.nan)
