"""The Milstein step of stochastic differential equations in the sense of Ito."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import State, in_transform
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE, describe_cross_terms
from adjsim.solvers.base import StepPlan
from adjsim.solvers.stochastic.euler_maruyama import misfit
from adjsim.solvers.stochastic.path_steps import PathSteps


class Milstein(PathSteps):
    """Take Milstein steps of an SDE in the sense of Ito::

        y' = y + drift dt + diffusion dW + (Dg g) (dW^2 - dt)/2

    at (t, y), where g is the diffusion and Dg g its derivative along itself (Milstein, Theory
    Probab. Appl. 19, 557 (1975)). The path is of order 1 and averages are of first order. This
    holds for scalar noise, and for diagonal noise whose entry g_i depends on y_i alone; other noise
    needs double integrals of the path, which are not drawn. For noise that does not depend on y
    :class:`~adjsim.EulerMaruyama` is the same step. A step has no inverse: gradients come from
    DirectAdjoint or CheckpointAdjoint. For the equation of Stratonovich use
    :class:`~adjsim.StochasticHeun`.

    ``dt=Adaptive(rtol, atol)`` chooses steps as for :class:`~adjsim.StochasticHeun`.

    Args:
        dt: the step, time; or :class:`Adaptive`, or :class:`StepTimes`, on a path.

    Raises:
        TypeError: dynamics that are not an SDE (when a run begins).
        ValueError: noise that is neither scalar nor diagonal, or diagonal noise whose entries
            depend on other entries than their own near the start (when a run begins).
    """

    order = 1
    of_ito = True
    evaluations = 1
    loses = "the state"

    def check(self, plan: StepPlan, dynamics: Dynamics[State], state: State, t: float) -> None:
        if not isinstance(dynamics, SDE) or dynamics.noise != "diagonal" or in_transform():
            return
        # A derivative may vanish at the start itself, so a state beside it is tested too.
        generator = torch.Generator().manual_seed(0)
        beside = type(state)._make(
            y + (0.1 + y.abs()) * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y)
            for y in state
        )
        name = describe_cross_terms(dynamics, t, state) or describe_cross_terms(dynamics, t, beside)
        if name is not None:
            raise ValueError(
                f"Milstein with noise='diagonal' needs an entry g_i that depends on y_i alone, and "
                f"the diffusion of {name} depends on other entries too: use EulerMaruyama(dt)."
            )

    def equation(self, dynamics: Dynamics[Any]) -> SDE:
        if not isinstance(dynamics, SDE):
            raise misfit(self, "SDE", dynamics)
        if dynamics.matrix:
            raise ValueError(
                f"Milstein takes diagonal and scalar noise, not noise={dynamics.noise!r}: use "
                "EulerMaruyama(dt)."
            )
        return dynamics

    def step(self, sde: SDE, h: float, t: Any, at: Any, dW: Tensor) -> tuple[Tensor, ...]:
        def diffusion(*y: Tensor) -> tuple[Tensor, ...]:
            return tuple(sde.amplitudes(t, type(at)._make(y)))

        g = diffusion(*at)
        along = torch.func.jvp(diffusion, tuple(at), g)[1]
        half = 0.5 * (dW.square() - h)
        added = sde.times_increment(g, dW, at)
        corrections = sde.times_increment(along, half, at)
        return tuple(
            torch.add(y, rate, alpha=h) + x + z
            for y, rate, x, z in zip(at, sde.drift(t, at), added, corrections, strict=True)
        )
