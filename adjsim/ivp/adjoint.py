r"""The adjoint of an initial value problem.

For a loss that reads the states :math:`y(t_k)` with cotangents :math:`w_k`, the adjoint :math:`\lambda(t) = dL/dy(t)` obeys

.. math::
    \dot\lambda = -J(t, y)^T \lambda, \qquad \lambda(t_k^-) = \lambda(t_k^+) + w_k, \qquad J = \partial f/\partial y,

backward from the last :math:`t_k`, and the gradients are :math:`dL/dy_0 = \lambda(t_0)` and
:math:`dL/d\theta = \int_{t_0} \lambda^T \partial f/\partial\theta \, dt`.

It is integrated by the method that went forward, anew from every time that is read, since it jumps there. The integral is no
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

from adjsim.ivp.field import Array, Field, refuse_second, to_numpy
from adjsim.ivp.paths import Backsolved, Checkpointed, Interpolant, StoredInterpolants, solution
from adjsim.ivp.quadrature import Integral
from adjsim.ivp.unchanged import Witness, alike, changed

METHODS: dict[str, type[OdeSolver]] = {
    "RK23": RK23,
    "RK45": RK45,
    "DOP853": DOP853,
    "Radau": Radau,
    "BDF": BDF,
    "LSODA": LSODA,
}
IMPLICIT = (Radau, BDF, LSODA)

Path = StoredInterpolants | Checkpointed | Backsolved


@dataclass
class Adjoint:
    """How the adjoint of a problem is integrated.

    Args:
        field: its right-hand side.
        method: SciPy's solver.
        rtol, atol: of the adjoint; atol is relative to the largest entry of the cotangents.
        state_atol: of a state that is integrated with it.
        max_step: as forward.
    """

    field: Field
    method: type[OdeSolver]
    rtol: float
    atol: float
    state_atol: Array
    max_step: float

    def pull(self, piece: Piece, path: Path, times: Array, cotangents: Array, states: Array) -> tuple[Array, list[Tensor]]:
        """The cotangents of start and parameters for those ``(n, times)`` of states at times."""
        self.field.reads.refuse_changed()
        piece.witness.compare(self.field)
        integral = Integral(self.field.parameters, self.rtol)
        read = np.flatnonzero(np.any(cotangents != 0, axis=0))
        read = read[np.argsort(-piece.way * times[read], kind="stable")]
        adjoint = np.zeros(len(states), states.dtype)
        if not read.size:
            return adjoint, integral.sums
        now, waiting, state = float(times[read[0]]), list(read), states[:, read[0]]
        for end, inside in path.back(now) if now != piece.start else [(now, None)]:
            while True:
                while waiting and times[waiting[0]] == now:
                    state = states[:, waiting[0]]
                    adjoint = adjoint + cotangents[:, waiting.pop(0)]
                if now == end:
                    break
                reached = waiting and piece.way * (times[waiting[0]] - end) >= 0
                until = float(times[waiting[0]]) if reached else end
                adjoint, state = self._carry(adjoint, state, now, until, inside, integral)
                now = until
        return adjoint, integral.sums

    def _carry(
        self, adjoint: Array, state: Array, begin: float, end: float, path: Interpolant | None, integral: Integral
    ) -> tuple[Array, Array]:
        """Take the adjoint from one time back to another. Without a path the state is integrated along with it."""
        n, field = adjoint.size, self.field

        def alone(t: float, z: Array) -> Array:
            assert path is not None
            return -field.pull_state(t, path(t), z)

        def both(t: float, z: Array) -> Array:
            return np.concatenate([-field.pull_state(t, z[n:], z[:n]), field.numpy(t, z[n:])])

        start = adjoint if path is not None else np.concatenate([adjoint, state])
        scale = self.atol * max(np.abs(adjoint).max(), np.finfo(float).tiny)
        options: dict[str, Any] = {"rtol": self.rtol, "max_step": self.max_step}
        options["atol"] = np.full(start.size, scale)
        if path is None:
            options["atol"][n:] = self.state_atol
        if path is not None and issubclass(self.method, IMPLICIT):
            options["jac"] = lambda t, z: -field.rows(t, path(t)).T
        solver: Any = self.method(alone if path is not None else both, begin, start, end, **options)
        times, interpolants = [begin], []
        while solver.status == "running":
            message = solver.step()
            if solver.status == "failed":
                raise RuntimeError(f"the adjoint failed at t = {solver.t:g}: {message}")
            times.append(solver.t)
            interpolants.append(solver.dense_output())
        found = solution(times, interpolants, self.method)

        def integrand(times: Array, weights: Array, differences: Array) -> list[list[Tensor]]:
            z = found(times)
            states = path(times) if path is not None else z[n:]
            return field.pull_parameters(times, states, -weights * z[:n], -differences * z[:n])

        def scale(t: float) -> list[Tensor]:
            z = found(t)
            generic = 1 + 0.5 * np.cos(np.arange(n) ** 2)
            state = path(t) if path is not None else z[n:]
            return field.pull_parameters(np.array([t]), state[:, None], (generic * np.abs(z[:n]))[:, None])[0]

        # The way forward knows how fast things change along it.
        steps = times if path is None else getattr(path, "ts", times)
        inside = sorted({t for t in map(float, steps) if min(begin, end) < t < max(begin, end)}, reverse=bool(begin > end))
        if field.parameters:
            integral.over([begin, *inside, end], integrand, scale)
        return (solver.y, state) if path is not None else (solver.y[:n], solver.y[n:])


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
    way: float
    path: Path | None
    witness: Witness
    adjoint: Adjoint

    def states(self, times: Array, states: Array, start: Tensor) -> Tensor:
        """The states ``(n, times)`` that were found at times, as functions of the start and of the parameters."""
        field = self.adjoint.field
        values = torch.as_tensor(states).to(field.like)
        if self.path is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in (start, *field.parameters)):
            return values
        return _States.apply(self, np.asarray(times, float), states, values, start, *field.parameters)

    def states_at(self, times: Tensor, states: Array, start: Tensor) -> Tensor:
        """The same with the derivative by these times, where they require grad."""
        return self.adjoint.field.with_time_derivative(self.states(times.detach().cpu().numpy(), states, start), times)


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
        start, sums = ctx.piece.adjoint.pull(ctx.piece, ctx.piece.path, ctx.times, to_numpy(grad_outputs[0]), ctx.states)
        like = ctx.piece.adjoint.field.like
        found = (total.to(p) for total, p in zip(sums, parameters, strict=True))
        return None, None, None, None, torch.as_tensor(start).to(like), *found
