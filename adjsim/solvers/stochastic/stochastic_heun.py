"""The Heun step of stochastic differential equations in the sense of Stratonovich."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.state import State
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.solvers.base import SteppingSolver, StepPlan
from adjsim.solvers.stochastic.drift_move import drift_plan
from adjsim.solvers.stochastic.euler_maruyama import misfit


class StochasticHeun(SteppingSolver):
    """Take Heun steps of an SDE in the sense of Stratonovich::

        F_t(y) = drift(t, y) dt + diffusion(t, y) dW
        a  = y + F_t(y)          y' = y + (F_t(y) + F_{t+dt}(a))/2

    with one dW a step (Rümelin, SIAM J. Numer. Anal. 19, 604 (1982)). The path is of order 1 for
    diagonal, scalar and additive noise, and of order 1/2 for general noise. Averages are of first
    order, and of second where the diffusion does not depend on y. A step evaluates drift and
    diffusion twice and has no inverse: gradients come from DirectAdjoint or CheckpointAdjoint.
    :class:`~adjsim.ReversibleHeun` can be undone. For the equation of Ito use
    :class:`~adjsim.EulerMaruyama` or :class:`~adjsim.Milstein`.

    Args:
        dt: the step, time.

    Raises:
        TypeError: dynamics that are not an SDE (when a run begins).
    """

    order = 1

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        if not isinstance(dynamics, SDE):
            raise misfit(self, "SDE", dynamics, "RungeKutta('heun', dt), ")
        sde, kind, dt = dynamics, type(state), self.dt

        def added(t: Tensor, at: State, dW: Tensor) -> tuple[Tensor, ...]:
            noise = sde.noise_increments(t, at, dW)
            return tuple(
                torch.add(x, rate, alpha=dt)
                for rate, x in zip(sde.drift(t, at), noise, strict=True)
            )

        def step(t: Tensor, at: State, dW: Tensor) -> tuple[Tensor, ...]:
            first = added(t, at, dW)
            end = kind._make(y + x for y, x in zip(at, first, strict=True))
            second = added(t + dt, end, dW)
            return tuple(y + 0.5 * (x + z) for y, x, z in zip(at, first, second, strict=True))

        loses = "the state inside of the step"
        return drift_plan(step, state, dt, self.order, noisy=True, evaluations=2, loses=loses)
