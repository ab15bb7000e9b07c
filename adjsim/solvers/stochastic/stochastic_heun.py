"""The Heun step of stochastic differential equations in the sense of Stratonovich."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.solvers.stochastic.euler_maruyama import misfit
from adjsim.solvers.stochastic.path_steps import PathSteps


class StochasticHeun(PathSteps):
    """Take Heun steps of an SDE in the sense of Stratonovich::

        F_t(y) = drift(t, y) dt + diffusion(t, y) dW
        a  = y + F_t(y)          y' = y + (F_t(y) + F_{t+dt}(a))/2

    with one dW a step (Rümelin, SIAM J. Numer. Anal. 19, 604 (1982)). The path is of order 1 for
    diagonal, scalar and additive noise, and of order 1/2 for general noise. Averages are of first
    order, and of second where the diffusion does not depend on y. A step evaluates drift and
    diffusion twice and has no inverse: gradients come from DirectAdjoint or CheckpointAdjoint.
    :class:`~adjsim.ReversibleHeun` can be undone. For the equation of Ito use
    :class:`~adjsim.EulerMaruyama` or :class:`~adjsim.Milstein`.

    ``dt=Adaptive(rtol, atol)`` chooses steps along a :class:`~adjsim.BrownianPath`: a step of size
    h is compared with two of size h/2 on the same path, and these are taken where the difference is
    within the tolerances. A pass without a gradient records the times. The run and its gradient
    then have these times fixed, and the noise of every system of a batch has the same steps.

    Args:
        dt: the step, time; or :class:`Adaptive`, or :class:`StepTimes`, on a path.

    Raises:
        TypeError: dynamics that are not an SDE; steps that differ in size without a path (when a
            run begins).
        FloatingPointError: adaptive steps shorter than two ticks of the path.
    """

    order = 1
    evaluations = 2
    loses = "the state inside of the step"

    def equation(self, dynamics: Dynamics[Any]) -> SDE:
        if not isinstance(dynamics, SDE):
            raise misfit(self, "SDE", dynamics, "RungeKutta('heun', dt), ")
        return dynamics

    def step(self, sde: SDE, h: float, t: Any, at: Any, dW: Tensor) -> tuple[Tensor, ...]:
        def added(t: Any, at: Any) -> tuple[Tensor, ...]:
            noise = sde.noise_increments(t, at, dW)
            return tuple(
                torch.add(x, rate, alpha=h) for rate, x in zip(sde.drift(t, at), noise, strict=True)
            )

        first = added(t, at)
        end = type(at)._make(y + x for y, x in zip(at, first, strict=True))
        second = added(t + h, end)
        return tuple(y + 0.5 * (x + z) for y, x, z in zip(at, first, second, strict=True))
