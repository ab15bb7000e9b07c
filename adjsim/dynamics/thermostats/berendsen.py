"""The Berendsen thermostat: the kinetic energy relaxes to its mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import PhaseState
from adjsim.dynamics.moves import Move
from adjsim.dynamics.sources import Coefficients
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.base import Relax, Relaxing, rescaling


class WeakCoupling(Relax):
    """The weak coupling, R, under which the kinetic energy K of each system relaxes::

        dp/dt = (K_0/K - 1) p / (2 tau),     so that     dK/dt = (K_0 - K)/tau,     K_0 = dof kT/2

    The inverse of its exact flow is the flow over -h::

        K' = a K + (1 - a) K_0        a = exp(-h/tau)        p' = sqrt(K'/K) p
        K  = (K' - (1 - a) K_0)/a                            p  = sqrt(K/K') p'
    """

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        return self.relaxation(state.momentum, self.bath.target(state.position))

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        exponent = -h / self.tau.to(state.position)
        return {
            **super().coefficients(h, state),
            "decay": torch.exp(exponent),
            # expm1 keeps the digits of 1 - a where h/tau is small.
            "supply": -torch.expm1(exponent) * self.bath.target(state.position),
        }

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        return (rescaling(_factor, _inverse),)


def _factor(c: Coefficients, T: Tensor) -> Tensor:
    return torch.sqrt((c["decay"] * T + c["supply"]) / T)


def _inverse(c: Coefficients, T: Tensor) -> Tensor:
    # Rounding can take a vanishing kinetic energy below zero. The error is then measured, and NaN
    # would hide it.
    return torch.sqrt((T - c["supply"]).clamp(min=0) / (c["decay"] * T))


class Berendsen(Relaxing):
    """Newton's equations with the weak coupling of Berendsen et al.::

        dq/dt = p/m
        dp/dt = F(q) + (K_0/K - 1) p / (2 tau),      K = sum p^2/2m,      K_0 = dof kT/2

    See Berendsen, Postma, van Gunsteren, DiNola and Haak, J. Chem. Phys. 81, 3684 (1984).

    Terms: A (stream), B (kick), R (:class:`WeakCoupling`). Schemes: "BABR", or "RBABR", which is
    second order. It is also an ODE: :class:`~adjsim.ODESolver`. Without a force the kinetic energy
    decays to K_0 as exp(-t/tau). Momenta relax half as fast, and a friction rate of a Langevin
    equation corresponds to 1/(2 tau).

    Use it to bring a system to a temperature. It does not sample the canonical distribution, since
    the kinetic energy fluctuates too little, and it moves energy from fast into slow motions, as
    :class:`~adjsim.VelocityRescale` does. For averages use :class:`~adjsim.Bussi`, which is the
    same relaxation with the noise that belongs to it. There is no conserved quantity.

    Reversing a step multiplies errors in the kinetic energy by exp(dt/tau), so
    :class:`~adjsim.ReversibleAdjoint` stores checkpoints.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        tau: relaxation time of the kinetic energy, time.
        dof: degrees of freedom of one system; see :class:`~adjsim.NoseHooverChain`.

    Raises:
        ValueError: a dof above atoms x dim, in ``init`` or ``simulate``.
    """

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "R": WeakCoupling(self.bath, self.tau)}
