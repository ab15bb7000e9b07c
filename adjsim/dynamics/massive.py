"""Dynamics with masses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adjsim.core.arguments import as_tensor
from adjsim.core.parameters import NumberRule, register
from adjsim.core.state import AnyState, MomentumState, momentum_of, position_of
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
