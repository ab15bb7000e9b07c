"""Stochastic velocity rescaling: the kinetic energy relaxes, and fluctuates as it should."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole
from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.moves import Move
from adjsim.dynamics.sources import Coefficients, Random
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.base import Relax, Relaxing, rescaling


class StochasticRescale(Relax):
    """The stochastic rescaling, R, of the kinetic energy K of each system::

        dK = (K_0 - K)/tau dt + 2 sqrt(K K_0/(dof tau)) dW,      K_0 = dof kT/2

    Its flow over h is exact in distribution. It takes the first dof numbers R_i of one field of
    noise, so that the sum of squares needs no gamma variate. With T = 2K, c = exp(-h/tau) and
    g^2 = (1 - c) kT::

        u = sqrt(c T) + g R_1        S = R_2^2 + ... + R_dof^2        T' = u^2 + g^2 S
        p' = sqrt(T'/T) p            but p' = u/sqrt(T) p for dof = 1, where S = 0

    In units of sqrt(m), u is the momentum along p after an Ornstein-Uhlenbeck step of all dof
    momenta. It may change its sign. For dof > 1 momenta keep their direction: the canonical
    distribution is even in the momenta, and with the sign of u (Bussi and Parrinello 2008) the
    factor would jump from one sign to the other. For dof = 1 the two signs meet at zero, so the
    factor with the sign is the smooth one.

    The inverse solves T' for T, a parabola in sqrt(T) that grows with T where u > 0. There::

        u = sqrt(T' - g^2 S)         T = (u - g R_1)^2 / c         p = sqrt(T/T') p'

    Where u < 0 this inverse takes the wrong root. At equilibrium that has the probability
    I(dof/2, 1/2) / 2 a step, with I the regularised incomplete beta function at 1 - c. It is less
    than (h/tau)^(dof/2).
    """

    draws = 1
    no_equation = Refusal(
        "it is one noise a system, whose amplitude depends on the momenta, and continuous solvers "
        "take independent noises of fixed amplitude"
    )

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        """Compute the drift in the sense of Ito, ``((1 - 1/dof) K_0/K - 1) p / (2 tau)``."""
        p, dof = state.momentum, self.bath.degrees(state.position)
        return self.relaxation(p, (dof - 1) * self.bath.kT.to(p))

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        position = state.position
        exponent = -h / self.tau.to(position)
        entry = torch.arange(math.prod(position.shape[-2:]), device=position.device)
        others = (entry > 0) & (entry < self.bath.degrees(position))
        return {
            **super().coefficients(h, state),
            "decay": torch.exp(exponent / 2),
            # expm1 keeps the digits of 1 - c where h/tau is small.
            "noise": torch.sqrt(-torch.expm1(exponent) * self.bath.kT.to(position)),
            "others": others.to(position.dtype).reshape(position.shape[-2:]),
        }

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        signed = bool(self.bath.degrees(state.position) == 1)
        return (rescaling(_signed_factor if signed else _factor, _inverse, (Random(),)),)


def _noise(c: Coefficients, xi: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the noise along the momentum, g R_1, and across it, g^2 S."""
    g = c["noise"]
    return g * xi[..., :1, :1], g**2 * (xi**2 * c["others"]).sum((-1, -2), keepdim=True)


def _factor(c: Coefficients, T: Tensor, xi: Tensor) -> Tensor:
    along, across = _noise(c, xi)
    root = torch.sqrt(T)
    return torch.sqrt((c["decay"] * root + along) ** 2 + across) / root


def _signed_factor(c: Coefficients, T: Tensor, xi: Tensor) -> Tensor:
    """Compute the factor of a single degree of freedom, which has no noise across it."""
    along, _ = _noise(c, xi)
    return c["decay"] + along / torch.sqrt(T)


def _inverse(c: Coefficients, T: Tensor, xi: Tensor) -> Tensor:
    along, across = _noise(c, xi)
    # Rounding can take a vanishing square below zero. The error is then measured, and NaN would
    # hide it.
    u = torch.sqrt((T - across).clamp(min=0))
    return (u - along) / (c["decay"] * torch.sqrt(T))


class Bussi(Relaxing):
    """Canonical dynamics by stochastic velocity rescaling::

        dq = p/m dt
        dp = F(q) dt + ((1 - 1/dof) K_0/K - 1) p dt / (2 tau) + sqrt(K_0/(dof tau K)) p dW

    with K = sum p^2/2m, K_0 = dof kT/2 and one W a system. See Bussi, Donadio and Parrinello, J.
    Chem. Phys. 126, 014101 (2007), and for the sign of the factor, which only a single degree of
    freedom has here, Bussi and Parrinello, Comput. Phys. Commun. 179, 26 (2008).

    Terms: A (stream), B (kick), R (:class:`StochasticRescale`). Schemes: "BABR", or "RBABR", a
    palindrome. It samples the canonical distribution for every tau, and since all momenta of a
    system keep their direction, diffusion and time correlations are close to those at constant
    energy. It is as ergodic as the motion at constant energy, so for a few harmonic oscillators use
    :class:`~adjsim.Langevin`, which it equals in one degree of freedom, with friction 1/(2 tau).
    There is no conserved quantity that is a function of the state.

    Pathwise gradients are complete, except for a motion along one line, such as that of a single
    particle from the centre of a harmonic well: there a kick can take all momenta through zero,
    which makes a jump that pathwise gradients leave out.

    :class:`~adjsim.ReversibleAdjoint` undoes a step unless the noise outweighs the momentum, which
    at equilibrium has a probability below (dt/tau)^(dof/2) a step. It measures the error and raises
    after such a step. An error in the kinetic energy grows backward as exp(t/tau), so it stores
    checkpoints. With few degrees of freedom take a tau of many dt, or another adjoint.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        tau: relaxation time of the kinetic energy, time.
        dof: degrees of freedom of one system, an integer; see :class:`~adjsim.NoseHooverChain`.

    Raises:
        ValueError: a dof above atoms x dim, in ``init`` or ``simulate``.
        TypeError: in ``simulate``, ``exact=True`` or a continuous solver.
    """

    def validate(self) -> None:
        """Refuse degrees of freedom that are no whole number."""
        super().validate()
        if self.dof is not None:
            as_whole("dof", self.dof)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "R": StochasticRescale(self.bath, self.tau)}

    def stationary_density(self) -> Canonical:
        return Canonical(self)
