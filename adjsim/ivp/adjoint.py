r"""The adjoint of an initial value problem.

For a loss that reads the states :math:`y(t_k)` with cotangents :math:`w_k`, the adjoint :math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J = \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

It jumps at every time that is read. An explicit method that went forward goes back as well, with the step size carried across
the jumps; the linear equation of a stiff problem is solved by collocation (:mod:`adjsim.ivp.collocation`), which has no history
for a jump to void, or, where it is large, by Radau. The integral is no
part of its system, so that it is in no norm of the error and no Jacobian of an implicit method: it is taken afterwards, over
the steps of the way forward, with an error of its own (:mod:`adjsim.ivp.quadrature`). Times carry their gradient outside of
it, as :math:`\dot y = f`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import BDF, DOP853, LSODA, RK23, RK45, OdeSolver, Radau
from torch import Tensor

from adjsim.ivp.collocation import Collocation
from adjsim.ivp.paths import Backsolved, Checkpointed, Interpolant, StoredInterpolants, solution
from adjsim.ivp.quadrature import Integral
from adjsim.ivp.rhs import Array, RightHandSide, refuse_second, to_numpy
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

# Of real entries of a state, up to which the adjoint of a stiff problem is solved as one system of linear equations a step.
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

    def backward(self, piece: Piece, path: Path, times: Array, cotangents: Array, states: Array) -> tuple[Array, list[Tensor]]:
        """The cotangents of start and parameters for those ``(n, times)`` of states at times."""
        self.rhs.reads.refuse_changed()
        piece.rate_check.compare(self.rhs)
        sweep = Sweep(self, Integral(self.rhs.parameters, self.rtol), np.zeros(len(states), states.dtype))
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
                sweep.integrate(now, until, inside)
                now = until
        return sweep.adjoint, sweep.integral.sums


@dataclass
class Sweep:
    """What one way back accumulates.

    Args:
        settings: how the adjoint is integrated.
        integral: cotangents of the parameters.
        adjoint: cotangent of the state, at the time that has been reached.
        step: size of the last step that was not cut short.
    """

    settings: AdjointSolver
    integral: Integral
    adjoint: Array
    step: float | None = None

    def integrate(self, begin: float, end: float, path: Interpolant) -> None:
        """Take the adjoint from one time back to another along a path of states, and add to the integral."""
        n, rhs = self.adjoint.size, self.settings.rhs
        start = _real(self.adjoint)
        solver = self._solver(begin, end, start, path)
        times, interpolants = [begin], []
        while solver.status == "running":
            proposed = float(getattr(solver, "h_abs", 0.0))
            message = solver.step()
            if solver.status == "failed":
                raise RuntimeError(f"the adjoint failed at t = {solver.t:g}: {message}")
            # A last step that the end cut short says nothing against a longer one.
            cut = solver.status == "finished" and solver.step_size < 0.999 * proposed
            self.step = max(proposed, float(getattr(solver, "h_abs", 0.0))) if cut else float(getattr(solver, "h_abs", 0.0))
            times.append(solver.t)
            interpolants.append(solver.dense_output())
        self.adjoint = _like(np.asarray(solver.y), self.adjoint)
        if not rhs.parameters:
            return
        found = solution(times, interpolants, type(solver))

        def integrand(times: Array, weights: Array, differences: Array) -> list[list[Tensor]]:
            z = _like(found(times), self.adjoint)
            return rhs.parameter_vjp(times, path(times), -weights * z, -differences * z)

        def scale(t: float) -> list[Tensor]:
            z = _like(found(np.array([t])), self.adjoint)
            generic = 1 + 0.5 * np.cos(np.arange(n) ** 2)
            return rhs.parameter_vjp(np.array([t]), path(t)[:, None], generic[:, None] * np.abs(z))[0]

        # The way forward knows how fast things change along it, and a stiff adjoint how fast it decays behind a jump.
        steps = [*getattr(path, "ts", []), *(times if isinstance(solver, Collocation) else [])]
        inside = sorted({t for t in map(float, steps) if min(begin, end) < t < max(begin, end)}, reverse=bool(begin > end))
        self.integral.integrate([begin, *inside, end], integrand, scale)

    def _solver(self, begin: float, end: float, start: Array, path: Interpolant) -> Any:
        how, rhs, like = self.settings, self.settings.rhs, self.adjoint
        scale = how.atol * max(np.abs(like).max(initial=0.0), np.finfo(float).tiny)
        options: dict[str, Any] = {"rtol": how.rtol, "atol": scale, "max_step": how.max_step}
        if self.step:
            options["first_step"] = min(self.step, abs(end - begin))

        def rate(t: float, z: Array) -> Array:
            return -_real(rhs.state_vjp(t, path(t), _like(z, like)))

        def matrices(times: Array) -> Array:
            return -rhs.matrices(times, path(times))

        if not issubclass(how.method, IMPLICIT):
            return how.method(rate, begin, start, end, **options)
        if start.size <= SMALL:
            return Collocation(rate, begin, start, end, matrices=matrices, **options)
        return Radau(rate, begin, start, end, jac=lambda t, z: matrices(np.array([t]))[0], **options)


def _real(z: Array) -> Array:
    """A cotangent as real numbers: the adjoint of a complex state is linear over these alone."""
    return z.view(float) if np.iscomplexobj(z) else z


def _like(z: Array, like: Array) -> Array:
    """The inverse of :func:`_real`, for one cotangent ``(n,)`` or several ``(n, k)``."""
    return np.ascontiguousarray(z.T).view(complex).T if np.iscomplexobj(like) else z


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
        """The states ``(n, times)`` that were found at times, as functions of the start and of the parameters."""
        rhs = self.adjoint.rhs
        values = torch.as_tensor(states).to(rhs.like)
        if self.path is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in (start, *rhs.parameters)):
            return values
        return _States.apply(self, np.asarray(times, float), states, values, start, *rhs.parameters)

    def states_at(self, times: Tensor, states: Array, start: Tensor) -> Tensor:
        """The same with the derivative by these times, where they require grad."""
        return self.adjoint.rhs.with_time_derivative(self.states(times.detach().cpu().numpy(), states, start), times)


class _States(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Any, times: Array, states: Array, values: Tensor, start: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.piece, ctx.times, ctx.states = piece, times, states
        # Not to be read, but torch then refuses those that were written to in the meantime.
        ctx.save_for_backward(*parameters)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second()
        parameters: tuple[Tensor, ...] = ctx.saved_tensors
        start, sums = ctx.piece.adjoint.backward(ctx.piece, ctx.piece.path, ctx.times, to_numpy(grad_outputs[0]), ctx.states)
        like = ctx.piece.adjoint.rhs.like
        found = (total.to(p) for total, p in zip(sums, parameters, strict=True))
        return None, None, None, None, torch.as_tensor(start).to(like), *found
