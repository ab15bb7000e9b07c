r"""The adjoint of an initial value problem.

For a loss that reads the states :math:`y(t_k)` with cotangents :math:`w_k`, the adjoint
:math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J =
    \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

It jumps at every time that is read. An explicit method that went forward goes back as well, with
the step size carried across the jumps, and the integral is taken afterwards, over the steps of the
way forward, with an error of its own (:mod:`adjsim.ivp.quadrature`), so that it is in no norm of
the error. The linear equation of a stiff problem is solved by collocation
(:mod:`adjsim.ivp.collocation`), which has no history for a jump to void and takes the integral at
its own points: so what decays at once behind a jump need not be resolved. A large one is solved by
Radau, in the way of the explicit methods. Times carry their gradient outside of it, as :math:`\dot
y = f`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import BDF, DOP853, LSODA, RK23, RK45, OdeSolver, Radau
from torch import Tensor

from adjsim.ivp.paths import Backsolved, Checkpointed, StoredInterpolants
from adjsim.ivp.rhs import Array, RightHandSide, refuse_second, to_numpy
from adjsim.ivp.sweep import ByCollocation, BySolver, Sweep
from adjsim.ivp.unchanged import RateCheck

METHODS: dict[str, type[OdeSolver]] = {
    "RK23": RK23,
    "RK45": RK45,
    "DOP853": DOP853,
    "Radau": Radau,
    "BDF": BDF,
    "LSODA": LSODA,
}
IMPLICIT = (Radau, BDF, LSODA)

# Of real entries of a state, up to which the adjoint of a stiff problem is solved as one system of
# linear equations a step.
SMALL = 32

Path = StoredInterpolants | Checkpointed | Backsolved


@dataclass
class AdjointSolver:
    """How the adjoint of a problem is integrated.

    Args:
        field: its right-hand side.
        method: SciPy's solver.
        rtol, atol: of the adjoint; atol is relative to the largest entry of the cotangents.
        max_step: as forward.
    """

    rhs: RightHandSide
    method: type[OdeSolver]
    rtol: float
    atol: float
    max_step: float

    def backward(
        self, piece: Piece, path: Path, times: Array, cotangents: Array, states: Array
    ) -> tuple[Array, list[Tensor]]:
        """The cotangents of start and parameters for those ``(n, times)`` of states at times."""
        self.rhs.reads.refuse_changed()
        piece.rate_check.compare(self.rhs)
        sweep = self._sweep(np.zeros(len(states), states.dtype))
        read = np.flatnonzero(np.any(cotangents != 0, axis=0))
        waiting = list(read[np.argsort(-piece.sign * times[read], kind="stable")])
        if not waiting:
            return sweep.adjoint, sweep.integral.sums
        now = float(times[waiting[0]])
        stops = [(float(times[k]), states[:, k]) for k in waiting]
        for end, inside in path.back(stops) if now != piece.start else [(now, None)]:
            while True:
                while waiting and times[waiting[0]] == now:
                    sweep.adjoint = sweep.adjoint + cotangents[:, waiting.pop(0)]
                if now == end or inside is None:
                    break
                reached = waiting and piece.sign * (times[waiting[0]] - end) >= 0
                until = float(times[waiting[0]]) if reached else end
                sweep.integrate(now, until, inside, abs(until - piece.start))
                now = until
        return sweep.adjoint, sweep.integral.sums

    def _sweep(self, adjoint: Array) -> Sweep:
        settings = self.rhs, self.rtol, self.atol, self.max_step, adjoint
        if not issubclass(self.method, IMPLICIT):
            return BySolver(*settings, self.method)
        return (
            ByCollocation(*settings)
            if (1 + np.iscomplexobj(adjoint)) * adjoint.size <= SMALL
            else BySolver(*settings, Radau)
        )


@dataclass
class Piece:
    """A solution from one time to another, as its adjoint needs it.

    Args:
        start, end: times.
        way: 1 where the solution goes on in time, -1 where it goes back.
        path: its states on the way back; None: no gradient was asked for.
        witness: rates of the right-hand side on the way forward.
        adjoint: how.
    """

    start: float
    end: float
    sign: float
    path: Path | None
    rate_check: RateCheck
    adjoint: AdjointSolver

    def states(self, times: Array, states: Array, start: Tensor) -> Tensor:
        """The states ``(n, times)`` that were found at times, as functions of the start and of the
        parameters.
        """
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
        """The same with the derivative by these times, where they require grad."""
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
        # Not to be read, but torch then refuses those that were written to in the meantime.
        ctx.save_for_backward(*parameters)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second()
        parameters: tuple[Tensor, ...] = ctx.saved_tensors
        start, sums = ctx.piece.adjoint.backward(
            ctx.piece, ctx.piece.path, ctx.times, to_numpy(grad_outputs[0]), ctx.states
        )
        like = ctx.piece.adjoint.rhs.like
        found = (total.to(p) for total, p in zip(sums, parameters, strict=True))
        return None, None, None, None, torch.as_tensor(start).to(like), *found
