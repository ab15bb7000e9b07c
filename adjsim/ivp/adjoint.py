r"""The adjoint of an initial value problem.

For a loss that depends on the states :math:`y(t_k)`, with cotangents :math:`w_k`, the adjoint
:math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J =
    \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

The adjoint jumps at every time :math:`t_k`. If the forward method is explicit, the same method
integrates the adjoint backward, and the step size is carried across the jumps. The integral is
computed afterwards over the forward steps, with an error control of its own
(:mod:`adjsim.ivp.quadrature`), so that it does not enter the error norm of the adjoint. The linear
adjoint equation of a stiff problem is solved by collocation (:mod:`adjsim.ivp.collocation`).
Collocation is a one-step method, so a jump invalidates no history. It evaluates the integral at its
collocation points, so the boundary layer behind a jump need not be resolved. If the state is large,
Radau is used instead, in the same way as an explicit method. The gradient with respect to times is
computed separately, from :math:`\dot y = f`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from adjsim.ivp.forward_states import Backsolved, Checkpointed, StoredInterpolants
from adjsim.ivp.rate_check import RateCheck
from adjsim.ivp.rhs import AdjointStates, Array, to_numpy
from adjsim.ivp.sweep import AdjointSettings

Path = StoredInterpolants | Checkpointed | Backsolved


@dataclass
class Piece:
    """The data that the adjoint needs of one piece of a solution, between two resets.

    Args:
        start, end: its first and last time.
        sign: 1 if it is integrated forward in time, -1 if backward.
        path: the source of its states in the backward pass; None: no gradient is wanted.
        rate_check: stored rates of the right-hand side in the forward solution.
        adjoint: the settings of the adjoint.
    """

    start: float
    end: float
    sign: float
    path: Path | None
    rate_check: RateCheck
    adjoint: AdjointSettings

    def states(self, times: Array, states: Array, start: Tensor) -> Tensor:
        """Connect states ``(n, times)`` to the initial state and the parameters in autograd."""
        rhs = self.adjoint.rhs
        values = torch.as_tensor(states).to(rhs.like)
        needs_grad = any(x.requires_grad for x in (start, *rhs.parameters))
        if self.path is None or not torch.is_grad_enabled() or not needs_grad:
            return values
        pull = partial(self._backward, self.path, np.asarray(times, float), states)
        return AdjointStates.apply(pull, values, start, *rhs.parameters)

    def states_at(self, times: Tensor, states: Array, start: Tensor) -> Tensor:
        """Connect states to start, parameters and, if they require grad, the times."""
        return self.adjoint.rhs.with_time_derivative(
            self.states(times.detach().cpu().numpy(), states, start), times
        )

    def _backward(
        self, path: Path, times: Array, states: Array, cotangent: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the cotangents of the initial state and of the parameters.

        Args:
            path: the forward states.
            times: the times at which the states are used.
            states: the states, ``(n, times)``.
            cotangent: the cotangents of these states, ``(n, times)``.
        """
        self.rate_check.compare(self.adjoint.rhs)
        cotangents = to_numpy(cotangent)
        sweep = self.adjoint.sweep(np.zeros(len(states), states.dtype))
        nonzero = np.flatnonzero(np.any(cotangents != 0, axis=0))
        waiting = list(nonzero[np.argsort(-self.sign * times[nonzero], kind="stable")])
        now = float(times[waiting[0]]) if waiting else self.start
        stops = [(float(times[k]), states[:, k]) for k in waiting]
        for end, states_of in path.backward(stops) if now != self.start else [(now, None)]:
            while True:
                while waiting and times[waiting[0]] == now:
                    sweep.adjoint = sweep.adjoint + cotangents[:, waiting.pop(0)]
                if now == end or states_of is None:
                    break
                reached = waiting and self.sign * (times[waiting[0]] - end) >= 0
                until = float(times[waiting[0]]) if reached else end
                sweep.integrate(now, until, states_of, abs(until - self.start))
                now = until
        return torch.as_tensor(sweep.adjoint), sweep.integral.sums
