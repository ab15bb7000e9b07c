"""The Heun step of stochastic differential equations in the sense of Stratonovich."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.state import State
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.sources import Coefficients, Random, Time
from adjsim.solvers.base import Stage, SteppingSolver, StepPlan
from adjsim.solvers.clock import check_dt
from adjsim.solvers.runge_kutta.runge_kutta import LETTER
from adjsim.solvers.stochastic.drift_move import DriftMove
from adjsim.solvers.stochastic.euler_maruyama import fitting_solvers


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

    def __init__(self, dt: float) -> None:
        self.dt = check_dt(dt)

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        if not isinstance(dynamics, SDE):
            raise TypeError(
                f"StochasticHeun is for SDE; for {type(dynamics).__name__} use "
                f"RungeKutta('heun', dt), {fitting_solvers(dynamics)}."
            )
        sde, kind, dt = dynamics, type(state), self.dt

        def added(t: Tensor, dW: Tensor, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            at = kind._make(fields)
            noise = sde.noise_increments(t, at, dW)
            return tuple(
                torch.add(x, rate, alpha=dt)
                for rate, x in zip(sde.drift(t, at), noise, strict=True)
            )

        def step(
            coefficients: Coefficients, t: Tensor, xi: Tensor, *fields: Tensor
        ) -> tuple[Tensor, ...]:
            dW = math.sqrt(dt) * xi
            first = added(t, dW, fields)
            end = tuple(y + x for y, x in zip(fields, first, strict=True))
            second = added(t + dt, dW, end)
            return tuple(y + 0.5 * (x + z) for y, x, z in zip(fields, first, second, strict=True))

        move = DriftMove(
            state._fields,
            step,
            None,
            (Time(), Random()),
            Refusal("it loses the state inside of the step"),
            reads_parameters=True,
            evaluations=2,
        )
        return StepPlan((Stage(LETTER, (move,), 0.0, 0, 1),), dt, self.order, draws=1)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        return {LETTER: {}}

    def __repr__(self) -> str:
        return f"StochasticHeun(dt={self.dt:g})"
