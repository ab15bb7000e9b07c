"""Hamiltonian dynamics: Newton's equations at constant energy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjsim.core.state import PhaseState
from adjsim.core.typing import Energies, Seed
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.terms import Term


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
        """Compute the total energy."""
        return self.kinetic_energy(state) + self.potential(state.position)
