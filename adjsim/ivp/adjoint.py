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
from typing import Any

import numpy as np
import scipy.integrate
import torch
from scipy.integrate import BDF, DOP853, RK23, RK45, OdeSolver, Radau
from torch import Tensor

from adjsim.core.second_derivative import refuse_second_derivative
from adjsim.ivp.forward_states import Backsolved, Checkpointed, StoredInterpolants
from adjsim.ivp.lsoda import LSODA
from adjsim.ivp.rate_check import RateCheck
from adjsim.ivp.rhs import OF_A_SOLUTION, Array, RightHandSide, to_numpy
from adjsim.ivp.sweep import CollocationSweep, SolverSweep, Sweep

METHODS: dict[str, type[OdeSolver]] = {
    "RK23": RK23,
    "RK45": RK45,
    "DOP853": DOP853,
    "Radau": Radau,
    "BDF": BDF,
    "LSODA": LSODA,
}
IMPLICIT = (Radau, BDF, scipy.integrate.LSODA)

# Largest number of real state entries for which the adjoint of a stiff problem is solved by
# collocation, which solves one dense linear system per step.
MAX_COLLOCATION_SIZE = 32

Path = StoredInterpolants | Checkpointed | Backsolved


@dataclass
class AdjointSolver:
    """The settings with which the adjoint of a problem is integrated.

    Args:
        rhs: the right-hand side of the problem.
        method: SciPy's solver class for the forward solution.
        rtol, atol: tolerances of the adjoint; atol is relative to the adjoint's largest entry.
        max_step: largest step size, as in the forward solution.
        state_rtol, state_atol: tolerances of the forward solution.
    """

    rhs: RightHandSide
    method: type[OdeSolver]
    rtol: float
    atol: float
    max_step: float
    state_rtol: Any
    state_atol: Any

    def backward(
        self, piece: Piece, path: Path, times: Array, cotangents: Array, states: Array
    ) -> tuple[Array, list[Tensor]]:
        """Compute the cotangents of the initial state and of the parameters.

        Args:
            piece: the piece of the solution.
            path: its forward states.
            times: the times at which the states are used.
            cotangents: the cotangents of these states, ``(n, times)``.
            states: the states, ``(n, times)``.
        """
        piece.rate_check.compare(self.rhs)
        sweep = self._sweep(np.zeros(len(states), states.dtype))
        nonzero = np.flatnonzero(np.any(cotangents != 0, axis=0))
        waiting = list(nonzero[np.argsort(-piece.sign * times[nonzero], kind="stable")])
        if not waiting:
            return sweep.adjoint, sweep.integral.sums
        now = float(times[waiting[0]])
        stops = [(float(times[k]), states[:, k]) for k in waiting]
        for end, states_of in path.backward(stops) if now != piece.start else [(now, None)]:
            while True:
                while waiting and times[waiting[0]] == now:
                    sweep.adjoint = sweep.adjoint + cotangents[:, waiting.pop(0)]
                if now == end or states_of is None:
                    break
                reached = waiting and piece.sign * (times[waiting[0]] - end) >= 0
                until = float(times[waiting[0]]) if reached else end
                sweep.integrate(now, until, states_of, abs(until - piece.start))
                now = until
        return sweep.adjoint, sweep.integral.sums

    def _sweep(self, adjoint: Array) -> Sweep:
        tolerances = self.state_rtol, self.state_atol
        settings = self.rhs, self.rtol, self.atol, self.max_step, *tolerances, adjoint
        if not issubclass(self.method, IMPLICIT):
            return SolverSweep(*settings, self.method)
        return (
            CollocationSweep(*settings)
            if (1 + np.iscomplexobj(adjoint)) * adjoint.size <= MAX_COLLOCATION_SIZE
            else SolverSweep(*settings, Radau)
        )


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
    adjoint: AdjointSolver

    def states(self, times: Array, states: Array, start: Tensor) -> Tensor:
        """Connect states ``(n, times)`` to the initial state and the parameters in autograd."""
        rhs = self.adjoint.rhs
        values = torch.as_tensor(states).to(rhs.like)
        if (
            self.path is None
            or not torch.is_grad_enabled()
            or not any(x.requires_grad for x in (start, *rhs.parameters))
        ):
            return values
        return _States.apply(self, np.asarray(times, float), states, values, start, *rhs.parameters)

    def states_at(self, times: Tensor, states: Array, start: Tensor) -> Tensor:
        """Connect states to start, parameters and, if they require grad, the times."""
        return self.adjoint.rhs.with_time_derivative(
            self.states(times.detach().cpu().numpy(), states, start), times
        )


class _States(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        piece: Any,
        times: Array,
        states: Array,
        values: Tensor,
        start: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.piece, ctx.times, ctx.states = piece, times, states
        # Their values are those of the run, whatever becomes of them.
        ctx.likes = [x.new_empty(0) for x in parameters]
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second_derivative(OF_A_SOLUTION)
        start, sums = ctx.piece.adjoint.backward(
            ctx.piece, ctx.piece.path, ctx.times, to_numpy(grad_outputs[0]), ctx.states
        )
        like = ctx.piece.adjoint.rhs.like
        found = (total.to(each) for total, each in zip(sums, ctx.likes, strict=True))
        return None, None, None, None, torch.as_tensor(start).to(like), *found
