"""The Andersen thermostat: collisions that draw momenta again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from adjsim.core.parameters import register
from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.core.typing import Number
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.masses import PER_ATOM, Masses, per_atom
from adjsim.dynamics.moves import GeneralFlow, Move
from adjsim.dynamics.sources import Coefficients, Random
from adjsim.dynamics.terms import Holder, Term
from adjsim.dynamics.thermostats.base import Thermostat


class Collide(Term[PhaseState]):
    """The collisions, C, which draw the momentum of an atom from the thermal distribution.

    Each atom collides at random times with a given rate. Over h it collides at least once with the
    probability P, and the last collision decides::

        p' = sqrt(m kT) xi    with probability P = 1 - exp(-rate h)
        p' = p                otherwise

    An atom collides where the first component of its first field of noise is below the P-quantile
    of the normal distribution. The second field is xi. Where an atom collides, p is lost, so there
    is no inverse, and the product is::

        lambda_p <- 0      lambda_{sqrt(m kT)} += lambda_p . xi

    Whether an atom collides depends on the rate alone, by a jump, which has no derivative.
    """

    draws = 2
    no_equation = Refusal("its collisions are jumps")

    def __init__(self, masses: Masses, kT: Tensor, rate: Tensor) -> None:
        self.masses, self.kT, self.rate = masses, kT, rate

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        return {}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        rate = self.rate
        differentiated = torch.is_grad_enabled() and rate.requires_grad
        if differentiated or forward_ad.unpack_dual(rate).tangent is not None:
            raise ValueError(
                "Andersen: 'rate' requires grad, and paths have no derivative with respect to it, "
                "since collisions are jumps. Use ScoreFunction (equilibrium means do not depend on "
                "the rate) or FiniteDifference(h=0.1), whose step has to be large enough to change "
                "collisions, or give the rate as a number."
            )
        # In float64, since a quantile in float32 cannot tell small probabilities apart.
        probability = -torch.expm1(-h * per_atom(rate.detach(), rate.detach().double()))
        return {
            "threshold": torch.special.ndtri(probability).to(state.position),
            "thermal": self.masses.thermal(state.momentum, self.kT),
        }

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        def collide(c: Coefficients, choice: Tensor, xi: Tensor, p: Tensor) -> tuple[Tensor]:
            return (torch.where(choice[..., :1] < c["threshold"], c["thermal"] * xi, p),)

        lost = Refusal("it loses the momenta before collisions")
        return (GeneralFlow(("momentum",), collide, None, (Random(0), Random(1)), lost),)

    def constrained(self, holder: Holder) -> Term[Any]:
        return holder.colliding(self)


class Andersen(Thermostat[PhaseState]):
    """Newton's equations, interrupted by collisions with a bath::

        dq/dt = p/m,    dp/dt = F(q),    and at a rate, for each atom, p = sqrt(m kT) xi

    See Andersen, J. Chem. Phys. 72, 2384 (1980).

    Terms: A (stream), B (kick), C (:class:`Collide`). Schemes: "BABC", or "CBABC", a palindrome. It
    samples the canonical distribution for every rate, also for a few harmonic oscillators. The
    collisions destroy time correlations and the total momentum, so for diffusion or spectra use
    :class:`~adjsim.Bussi`, or a low rate. There is no conserved quantity.

    Steps cannot be undone: gradients come from :class:`~adjsim.CheckpointAdjoint` or
    :class:`~adjsim.DirectAdjoint`. There is no pathwise gradient with respect to the rate. For it
    use :class:`~adjsim.FiniteDifference` with a large step, such as h=0.1: a small step changes no
    collision, and then gives zero with an error of zero.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        rate: collisions of one atom per time, 1/time; scalar, ``(atoms,)`` or ``(atoms, 1)``.

    Raises:
        ValueError: in ``simulate``, where a gradient is taken and the rate requires grad.
        TypeError: in ``simulate``, :class:`~adjsim.ReversibleAdjoint`, ``exact=True`` or a
            continuous solver.
    """

    per_atom = ("mass", "rate")
    rate: Tensor

    def __init__(
        self, potential: nn.Module, mass: Number = 1.0, kT: Number = 1.0, rate: Number = 1.0
    ) -> None:
        super().__init__(potential, mass, kT)
        register(self, "rate", rate, positive=True, shapes=PER_ATOM)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "C": Collide(self.masses, self.kT, self.rate)}

    def stationary_density(self) -> Canonical:
        return Canonical(self)
