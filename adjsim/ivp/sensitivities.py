r"""Forward sensitivities: derivatives of a solution along given tangents.

The derivative :math:`s` of the states along a tangent :math:`\delta\theta` of the parameters and
:math:`\delta y_0` of the start obeys

.. math:: \dot s = J(t, y)\, s + F(t, y)\, \delta\theta, \qquad s(t_0) = \delta y_0, \qquad
   F = \partial f/\partial\theta,

along the solution. With one more entry that remains constant, :math:`e = 1`, the equation is linear
and homogeneous, so it is solved by the collocation of the adjoint, forward in time. All tangents
share the states, J and the steps. Each tangent has an entry e of its own, which is scaled to the
size of its sensitivities, so that the tolerances are relative to this size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.integrate import OdeSolution
from torch import Tensor

from adjsim.ivp.collocation_sweep import CollocationSweep
from adjsim.ivp.quadrature import Integral
from adjsim.ivp.rhs import Array, Graph, to_numpy
from adjsim.ivp.sweep import AdjointSettings

# Times along a solution at which the size of its sensitivities is estimated.
SAMPLES = 9


class Sensitivities(CollocationSweep):
    """The sensitivities of a solution along tangents: the start's ``(k, n)``, the parameters'.

    Its adjoints ``(k, n + k)`` are the sensitivities and the entries e.
    """

    def __init__(
        self, settings: AdjointSettings, path: OdeSolution, start: Array, along: Sequence[Tensor]
    ) -> None:
        self.along, self.rows = along, len(start)
        ends = float(path.ts[0]), float(path.ts[-1])
        rates = [settings.rhs.linearised(t, path(t), along)[1] for t in np.linspace(*ends, SAMPLES)]
        driven = abs(ends[1] - ends[0]) * np.abs(rates).max((0, 1))
        sizes = np.maximum(np.abs(start).max(1, initial=0.0), driven)
        self.scales = np.where(sizes > 0, sizes, 1.0)
        super().__init__(settings, np.concatenate([start, np.diag(self.scales)], 1))
        # There is no integral along this equation.
        self.integral = Integral([], self.rows, self.rtol)

    def _matrices(self, times: Array, path: OdeSolution) -> tuple[Array, list[Graph]]:
        states = path(times)
        found = [
            self.rhs.linearised(float(t), y, self.along)
            for t, y in zip(times, states.T, strict=True)
        ]
        jacobians, rates = (np.stack(parts) for parts in zip(*found, strict=True))
        n = len(states)
        matrices = np.zeros((len(times), n + self.rows, n + self.rows))
        matrices[:, :n, :n], matrices[:, :n, n:] = jacobians, rates / self.scales
        return matrices, []


def sensitivities(
    settings: AdjointSettings, path: OdeSolution, times: Array, rows: Sequence[Tensor]
) -> Tensor:
    """Return the derivatives ``(k, n, times)`` along rows of tangents of start and parameters."""
    start = to_numpy(rows[0])
    n, first, last = start.shape[1], float(path.ts[0]), float(path.ts[-1])
    solver = Sensitivities(settings, path, start, [x.detach() for x in rows[1:]])
    found, now = np.zeros((*start.shape, len(times))), first
    for k in np.argsort(np.sign(last - first) * times, kind="stable"):
        until = float(times[k])
        if until != now:
            solver.integrate(now, until, path, 0.0)
            now = until
        found[..., k] = solver.adjoint[:, :n]
    return torch.as_tensor(found)
