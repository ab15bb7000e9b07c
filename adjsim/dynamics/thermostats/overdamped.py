"""Overdamped Langevin dynamics, for positions alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from adjsim.core.parameters import register
from adjsim.core.refusal import Refusal
from adjsim.core.typing import Number, Positions, Seed
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.density import CanonicalPositions
from adjsim.dynamics.masses import PER_ATOM, Masses, per_atom
from adjsim.dynamics.moves import GeneralFlow, Move, Shear
from adjsim.dynamics.sources import Force, Source
from adjsim.dynamics.terms import Holder, Term
from adjsim.potentials.base import force, force_vjp

POWER_ITERATIONS = 30


class PositionState(NamedTuple):
    """Position ``(*batch, atoms, dim)``."""

    position: Positions


class Diffuse(Term[PositionState]):
    """Diffusion, D: ``dq = F(q)/friction dt + sqrt(2 kT/friction) dW``, without a closed flow.

    ``no_averaged_noise`` says why a step cannot average the noise of two steps; None if it can.
    """

    draws = 1
    solved_by = "EulerMaruyama(dt)"
    no_averaged_noise: ClassVar[Refusal | None] = None

    def __init__(self, potential: nn.Module, kT: Tensor, friction: Tensor) -> None:
        self.potential, self.kT, self.friction = potential, kT, friction

    def drift(self, t: Any, state: PositionState) -> Mapping[str, Tensor]:
        friction = per_atom(self.friction, state.position)
        return {"position": force(self.potential, state.position, t) / friction}

    def moves(self, h: float, state: PositionState) -> NoReturn:
        raise TypeError(
            "the overdamped drift has no flow to split: use EulerMaruyama, LeimkuhlerMatthews or "
            "SDESolver."
        )

    def diffusion(self, t: Any, state: PositionState) -> Mapping[str, Tensor]:
        q = state.position
        # Two roots, so that infinite friction has the slope zero by kT.
        return {"position": torch.sqrt(2 * self.kT.to(q)) * per_atom(self.friction, q).rsqrt()}

    def euler_coefficients(self, dt: float, state: PositionState) -> dict[str, Tensor]:
        """Compute the mobility and the noise of an Euler-Maruyama step, times dt and its root."""
        noise = math.sqrt(dt) * self.diffusion(0.0, state)["position"]
        return {"mobility": dt / per_atom(self.friction, state.position), "noise": noise}

    def euler_moves(self, noise: Source) -> Sequence[Move]:
        """List the moves of an Euler-Maruyama step with this noise."""
        drift = GeneralFlow(
            ("position",), lambda c, force, q: (q + c["mobility"] * force,), None, (Force(),)
        )
        return drift, Shear("position", noise, "noise")

    def constrained(self, holder: Holder) -> Term[Any] | Refusal:
        return holder.diffusing(self)


class OverdampedLangevin(Dynamics[PositionState]):
    """Brownian dynamics, the limit of large friction::

        dq = F(q)/friction dt + sqrt(2 kT/friction) dW

    It samples exp(-U/kT). Here ``friction`` is a force per velocity, mass times the rate of
    :class:`~adjsim.Langevin`, which is for rates, velocities and other dynamical quantities.
    Solvers: :class:`~adjsim.EulerMaruyama`, :class:`~adjsim.LeimkuhlerMatthews` (with averages of
    second order), :class:`~adjsim.SDESolver`.

    Args:
        potential: energy module, or a force field.
        kT: temperature, energy; one number.
        friction: energy time / length^2; scalar, ``(atoms,)`` or ``(atoms, 1)``; infinite for
            pinned atoms.
    """

    state_type = PositionState
    per_atom = ("friction",)
    damping_name = "curvature / friction"
    potential: nn.Module  # pyright: ignore[reportIncompatibleVariableOverride]
    kT: Tensor
    friction: Tensor

    def __init__(self, potential: nn.Module, kT: Number = 1.0, friction: Number = 1.0) -> None:
        super().__init__(potential)
        register(self, "kT", kT, positive=True, single=True)
        register(self, "friction", friction, positive=True, shapes=PER_ATOM)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {"D": Diffuse(self.potential, self.kT, self.friction)}

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        if p is not None:
            raise ValueError("OverdampedLangevin has no momentum; use Langevin if momenta matter.")
        return (position,)

    metric_name = "friction"

    @property
    def metric(self) -> Masses:
        """The frictions, which are the metric of diffusion along constraints."""
        return Masses(self.friction)

    def stationary_density(self) -> CanonicalPositions:
        return CanonicalPositions(self)

    def damping(self, state: PositionState) -> float:
        """Estimate the largest curvature of the potential at the state, over the friction.

        It is the rate at which two paths with the same noise converge near the state.
        """
        generator, q = torch.Generator().manual_seed(0), state.position.detach()
        v = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q)
        friction, rate = per_atom(self.friction, q).detach().sqrt(), 0.0
        for _ in range(POWER_ITERATIONS):
            v = v / v.norm()
            _, pullback = force_vjp(self.potential, q, [])
            pulled = -pullback(v / friction)[0].detach() / friction
            rate = float((v * pulled).sum())
            if not float(pulled.norm()) > 0:
                return 0.0
            v = pulled
        return max(rate, 0.0)
