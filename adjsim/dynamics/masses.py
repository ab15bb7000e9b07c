"""The masses of the atoms of a system, and the kinetic energy above which a run has blown up."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adjsim.core.parameters import check_count
from adjsim.core.state import AnyState, detached, momentum_of, position_of
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import ForceField

# The shapes of one number, or a number for each atom.
PER_ATOM = ((), ("atoms",), ("atoms", 1))
LARGEST_RISE = 100.0
"""A kinetic energy this many times that of kT, of the start, and of the potential energy given up
since the start has no source. At equilibrium such a ratio to kT has a probability of 1e-23 for one
degree of freedom, and less for more."""


class Masses:
    """The masses of the atoms of a system, infinite for pinned ones.

    ``masses(like)`` returns them in the dtype of a field, a scalar or ``(atoms, 1)``, also where
    the number of atoms equals dim. ``pinned(atoms)`` says which are pinned in addition.
    """

    __slots__ = ("mass", "pinned")

    def __init__(self, mass: Tensor, pinned: Callable[[int], Tensor] | None = None) -> None:
        self.mass, self.pinned = mass, pinned

    def __call__(self, like: Tensor) -> Tensor:
        check_count("mass", self.mass, like.shape[-2])
        found = per_atom(self.mass, like)
        if self.pinned is None:
            return found
        return torch.where(self.pinned(like.shape[-2]), torch.inf, found)

    def mobile(self, like: Tensor) -> Tensor:
        """Return 1 for atoms that move, 0 for pinned ones; a scalar or ``(atoms, 1)``."""
        return torch.isfinite(self(like.detach())).to(like)

    def dof(self, position: Tensor) -> Tensor:
        """Count the degrees of freedom of one system, without pinned atoms."""
        # A tensor, since compiled loops evaluate stationary densities, which read it.
        return self.mobile(position).expand(position.shape[-2], 1).sum() * position.shape[-1]

    def thermal(self, like: Tensor, kT: Tensor) -> Tensor:
        """Compute the thermal momentum sqrt(m kT), a scalar or ``(atoms, 1)``; zero if pinned."""
        mass = self(like)
        mobile = torch.isfinite(mass.detach())
        thermal = torch.sqrt(torch.where(mobile, mass, 1.0) * kT.to(like))
        return torch.where(mobile, thermal, 0.0)

    def kinetic_energy(self, momentum: Positions) -> Energies:
        """Compute ``sum p^2 / 2m``, ``(*batch,)``."""
        return 0.5 * (momentum**2 / self(momentum)).sum((-1, -2))


def per_atom(value: Tensor, like: Tensor) -> Tensor:
    """Convert a number to a field's dtype, as a scalar or ``(atoms, 1)``."""
    value = value.to(like)
    return value.reshape(-1, 1) if value.ndim and value.numel() > 1 else value.reshape(())


class HeatLimit:
    """The largest kinetic energy of each system of a run with a bath at kT.

    Potential energy that is given up may become kinetic energy. A force field may do any work, so
    with one there is no limit. The dynamics has masses, kT and a potential.
    """

    def __init__(self, dynamics: Any, start: AnyState) -> None:
        self.masses: Masses = dynamics.masses
        self.kT: Tensor = dynamics.kT
        self.dynamics, self.start = dynamics, detached(start)

    @cached_property
    def thermal(self) -> float:
        """The mean kinetic energy at kT; infinite where there is no limit."""
        known = not isinstance(self.dynamics.potential, ForceField) and self.dof > 0
        return self.dof / 2 * float(self.kT.detach()) if known else math.inf

    @cached_property
    def dof(self) -> float:
        """The degrees of freedom of a system."""
        return float(self.masses.dof(position_of(self.start)))

    @cached_property
    def largest(self) -> Tensor:
        """The limit of each system by kT and by its start."""
        return LARGEST_RISE * self._kinetic(self.start).clamp(min=self.thermal)

    @cached_property
    def energy(self) -> Tensor:
        """The potential energy at the start."""
        return self.dynamics.potential_energy(self.start)

    @torch.no_grad()
    def exceeded(self, state: AnyState) -> Tensor:
        """Return which systems have more kinetic energy than bath and potential give."""
        found = self._kinetic(state)
        hot = found > self.largest
        if not bool(hot.any()):
            return hot
        given = LARGEST_RISE * (self.energy - self.dynamics.potential_energy(state))
        # A potential energy that is not finite gives nothing.
        return hot & ~(found <= given)

    @torch.no_grad()
    def describe(self, state: AnyState, where: str, smaller: str) -> str:
        """Describe the hottest system beyond the limit, with the likely causes and a way out."""
        kinetic, beyond = self._kinetic(state), self.exceeded(state)
        r = int(torch.where(beyond, kinetic / self.largest, 0.0).argmax())
        found = float(kinetic.flatten()[r])
        system = f" of system {r}" if kinetic.numel() > 1 else ""
        return (
            f"the kinetic temperature{system} is {2 * found / self.dof:.3g} {where}: "
            f"{found / self.thermal:.2g} times kT = {float(self.kT):.3g}, and more "
            f"than {LARGEST_RISE:g} times that of the start. Either the step is too long for the "
            f"fastest vibration: use {smaller}. Or units are mixed: kT is an energy, so with eV "
            "write kT = 300 * ase.units.kB for 300 K and dt = ase.units.fs for a femtosecond; "
            "check kT, masses and positions."
        )

    def _kinetic(self, state: AnyState) -> Tensor:
        return self.masses.kinetic_energy(momentum_of(state))
