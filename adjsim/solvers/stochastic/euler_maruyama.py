"""Steps for overdamped dynamics, which have no inverse in closed form."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.state import AnyState, State, position_of
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.sources import Coefficients, Combination, Random, Source
from adjsim.dynamics.thermostats.overdamped import Diffuse
from adjsim.solvers.base import LETTER, Stage, SteppingSolver, StepPlan
from adjsim.solvers.stochastic.drift_move import drift_plan


class EulerMaruyama(SteppingSolver):
    """The simplest step of overdamped Langevin dynamics::

        q' = q + dt F(q)/friction + sqrt(2 kT dt/friction) xi

    It is first order in averages (<x^2> of a harmonic well of stiffness k is too large by the
    factor 1/(1 - k dt/(2 friction))) and in the path. :class:`LeimkuhlerMatthews` costs the same
    and has better averages. A step has no inverse: use DirectAdjoint or CheckpointAdjoint.

    With constraints (:class:`~adjsim.Constrained`) each step is projected: see
    :class:`~adjsim.dynamics.constraints.diffusion.ConstrainedDiffusion`.

    It also solves an :class:`~adjsim.SDE` in the sense of Ito, for every noise::

        y' = y + dt drift(t, y) + sqrt(dt) diffusion(t, y) xi

    Averages are then first order in dt, and the path is of order 1/2, or 1 where the diffusion does
    not depend on y.

    Args:
        dt: the step, time.
    """

    order: ClassVar[int] = 1
    of_ito: ClassVar[bool] = True
    weights: ClassVar[tuple[float, ...]] = (1.0,)

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        takes_sde = type(self) is EulerMaruyama
        if takes_sde and isinstance(dynamics, SDE):
            return drift_plan(partial(self._step, dynamics), state, self.dt, self.order, noisy=True)
        term = dynamics.terms.get("D")
        if not isinstance(term, Diffuse):
            raise misfit(self, f"OverdampedLangevin{' and SDE' if takes_sde else ''}", dynamics)
        draws: tuple[Source, ...] = tuple(Random(i) for i in range(len(self.weights)))
        if len(draws) > 1 and term.no_averaged_noise is not None:
            raise TypeError(
                f"{type(self).__name__} averages the noise of two steps, and for "
                f"{type(dynamics).__name__} {term.no_averaged_noise.reason}."
            )
        moves = tuple(term.euler_moves(Combination("weights", draws)))
        stage = Stage("D", moves, 0.0, 0, len(draws))
        return StepPlan((stage,), self.dt, self.order, draws=1, noise_steps=len(draws))

    def _step(
        self, sde: SDE, h: float, t: Tensor, state: AnyState, dW: Tensor
    ) -> tuple[Tensor, ...]:
        noise, rates = sde.noise_increments(t, state, dW), sde.drift(t, state)
        return tuple(
            torch.add(y, rate, alpha=h) + x for y, rate, x in zip(state, rates, noise, strict=True)
        )

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        if isinstance(dynamics, SDE):
            return {LETTER: {}}
        term: Any = dynamics.terms["D"]
        weights = torch.tensor(self.weights, dtype=torch.float64).to(position_of(state))
        return {"D": {**term.euler_coefficients(self.dt, state), "weights": weights}}


class LeimkuhlerMatthews(EulerMaruyama):
    """Euler-Maruyama with the noise of two steps averaged::

        q_{k+1} = q_k + dt F(q_k)/friction + sqrt(2 kT dt/friction) (xi_k + xi_{k+1})/2

    Stationary averages are second order, and exact for harmonic forces: BAOAB in the limit of large
    friction (Leimkuhler and Matthews 2013; Leimkuhler, Matthews and Tretyakov, Proc. R. Soc. A 470,
    20140120 (2014)). The path is of order 1/2, and averages from a start out of equilibrium are of
    first order. Constraints, which project the noise at each position, are refused.

    Args:
        dt: the step, time.
    """

    order: ClassVar[int] = 2
    weights: ClassVar[tuple[float, ...]] = (0.5, 0.5)


def misfit(solver: object, fits: str, dynamics: Dynamics[Any], first: str = "") -> TypeError:
    """Make the error of a dynamics that takes no stochastic method of a vector field."""
    continuous = all(term.no_equation is None for term in dynamics.terms.values())
    return TypeError(
        f"{type(solver).__name__} is for {fits}; for {type(dynamics).__name__} use {first}a "
        f"splitting{' or SDESolver(dt=...)' if continuous else ''}."
    )
