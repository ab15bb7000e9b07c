"""Dynamics with masses, and Newton's equations at constant energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from adjsim.core.arguments import as_tensor
from adjsim.core.parameters import NumberRule, register
from adjsim.core.state import AnyState, MomentumState, PhaseState, momentum_of, position_of
from adjsim.core.typing import Energies, Number, Positions, PositionsLike, Seed
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.masses import PER_ATOM, Masses
from adjsim.dynamics.starts import as_start, check_momentum, standard_normal
from adjsim.dynamics.terms import Kick, Stream, Term


class MassiveDynamics(Dynamics[MomentumState]):
    """The base class of dynamics with masses.

    Args:
        potential: energy module, or a :class:`~adjsim.ForceField`.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``. An infinite mass pins its atom: it never
            moves.
    """

    per_atom = ("mass",)
    potential: nn.Module  # pyright: ignore[reportIncompatibleVariableOverride]
    mass: Tensor

    def __init__(self, potential: nn.Module, mass: Number = 1.0) -> None:
        super().__init__(potential)
        register(self, "mass", mass, positive=True, shapes=PER_ATOM)

    @property
    def masses(self) -> Masses:
        """The masses: ``masses(like)`` is a scalar or ``(atoms, 1)``."""
        return Masses(self.mass)

    @property
    def metric(self) -> Masses:
        return self.masses

    def projected(self, state: MomentumState, project: Callable[[Tensor], Tensor]) -> MomentumState:
        return state._replace(momentum=project(state.momentum))

    @property
    def motion(self) -> dict[str, Term[Any]]:
        """The terms of Newton's equations: A (stream) and B (kick)."""
        return {"A": Stream(self.masses), "B": Kick(self.masses, self.potential)}

    def kinetic_energy(self, state: MomentumState) -> Energies:
        """Compute ``sum p^2 / 2m``, ``(*batch,)``."""
        return self.masses.kinetic_energy(state.momentum)

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_momentum(momentum_of(state), position_of(state))

    def thermal_momentum(
        self, position: PositionsLike, kT: Number, generator: Seed = None
    ) -> Positions:
        """Draw momenta sqrt(m kT) xi, zero on pinned atoms.

        They carry a gradient to mass and kT. xi of replica i is the same in a batch of any size.
        The seed may also be that of the run, which has a separate stream.
        """
        at, temperature = as_start(position)[0], as_tensor("kT", kT)
        NumberRule(single=True)("kT", temperature)
        return self.masses.thermal(at, temperature) * standard_normal(at, generator)

    def characteristic_scales(
        self, t: float, state: MomentumState, time: float
    ) -> dict[str, Tensor]:
        kT = getattr(self, "kT", None)
        if kT is None:
            return {}
        momentum = self.masses.thermal(state.momentum, kT)
        return {"momentum": momentum, "position": time * momentum / self.masses(state.momentum)}


class Hamiltonian(MassiveDynamics[PhaseState]):
    """Microcanonical dynamics (NVE): ``dq/dt = p/m``, ``dp/dt = F(q)``.

    Terms: A (stream), B (kick). Schemes: "BAB" (velocity Verlet), "ABA" (position Verlet). The
    invariant is the energy ``sum p^2/2m + U(q)``. It samples one energy shell; for averages at a
    temperature use a thermostat. ``init`` needs the momentum, which no temperature determines.

    Args:
        potential: energy module, or a force field (without an invariant).
        mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
    """

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return self.motion

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        if p is None:
            raise ValueError(
                "Hamiltonian.init needs the momentum: NVE has no temperature to draw it from. "
                "thermal_momentum(position, kT, generator) draws one."
            )
        return position, p

    def invariant(self, state: PhaseState) -> Energies:
        return self.kinetic_energy(state) + self.potential(state.position)
