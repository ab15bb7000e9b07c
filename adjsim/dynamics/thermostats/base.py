"""The parts that thermostats share: thermal starts, and the scaling of all momenta of a system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_positive
from adjsim.core.parameters import register
from adjsim.core.refusal import Refusal
from adjsim.core.state import AnyState, MomentumState, PhaseState
from adjsim.core.typing import Number, Seed
from adjsim.dynamics.masses import HeatLimit, Masses
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.moves import GeneralFlow
from adjsim.dynamics.sources import Source
from adjsim.dynamics.starts import check_dof
from adjsim.dynamics.terms import Holder, Term


class Thermostat(MassiveDynamics[MomentumState]):
    """The base class of thermostats. Their states begin with position and momentum."""

    kT: Tensor

    def __init__(self, potential: nn.Module, mass: Number, kT: Number) -> None:
        super().__init__(potential, mass)
        register(self, "kT", kT, positive=True, single=True)

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        """Return position and momentum, which is drawn as sqrt(m kT) xi if it is not given."""
        return position, self.thermal_momentum(position, self.kT, generator) if p is None else p

    def heat_limit(self, start: AnyState) -> HeatLimit:
        return HeatLimit(self, start)


class Counting(Thermostat[MomentumState]):
    """The base class of thermostats that count the degrees of freedom of a system, ``dof``."""

    dof: float | None

    def validate(self) -> None:
        """Refuse degrees of freedom that the constructor would refuse."""
        if self.dof is not None:
            as_positive("dof", self.dof)

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_dof(self.dof, state[0])

    @property
    def bath(self) -> Bath:
        return Bath(self.masses, self.kT, self.dof)


class Rescaling(Counting[MomentumState]):
    """The base class of thermostats that scale all momenta of a system by one factor."""

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        dof: float | int | None = None,
    ) -> None:
        super().__init__(potential, mass, kT)
        self.dof = None if dof is None else as_number("dof", dof)
        self.validate()


class Relaxing(Rescaling[PhaseState]):
    """The base class of thermostats that relax the kinetic energy of a system in a time tau."""

    tau: Tensor

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        tau: Number = 1.0,
        dof: float | int | None = None,
    ) -> None:
        super().__init__(potential, mass, kT, dof)
        register(self, "tau", tau, positive=True, single=True)

    def damping(self, state: PhaseState) -> float:
        return 1 / float(self.tau.detach().min())


@dataclass(frozen=True)
class Bath:
    """A bath at a temperature; without ``dof`` the degrees of freedom are those of mobile atoms."""

    masses: Masses
    kT: Tensor
    dof: float | None

    def degrees(self, position: Tensor) -> Tensor | float:
        """Count the degrees of freedom of one system."""
        return self.masses.dof(position) if self.dof is None else self.dof

    def target(self, position: Tensor) -> Tensor:
        """Compute twice the mean kinetic energy of one system, ``dof kT``."""
        return self.degrees(position) * self.kT.to(position)


class Rescale(Term[PhaseState]):
    """The base class of terms that scale all momenta of a system by one factor, R."""

    def __init__(self, bath: Bath) -> None:
        self.bath = bath

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        return {"1/m": 1 / self.bath.masses(state.momentum)}

    def constrained(self, holder: Holder) -> Term[Any]:
        return self


class Relax(Rescale):
    """The base class of rescalings that relax the kinetic energy in a time tau."""

    def __init__(self, bath: Bath, tau: Tensor) -> None:
        super().__init__(bath)
        self.tau = tau

    def relaxation(self, p: Tensor, supply: Tensor) -> dict[str, Tensor]:
        """Compute the drift ``(supply/T - 1) p / (2 tau)``, zero for momenta that are all zero."""
        T = twice_kinetic(p, 1 / self.bath.masses(p))
        moving = T > 0
        excess = torch.where(moving, supply / torch.where(moving, T, 1.0) - 1, 0.0)
        return {"momentum": excess * p / (2 * self.tau.to(p))}


def rescaling(
    factor: Callable[..., Tensor],
    inverse: Callable[..., Tensor] | None,
    reads: tuple[Source, ...] = (),
    irreversible: Refusal | None = None,
) -> GeneralFlow:
    """Make the move ``p' = f(T) p``, with T twice the kinetic energy of a system.

    The factor ``f(coefficients, T, *values)`` is ``(*batch, 1, 1)``; ``inverse`` is 1/f as a
    function of T', or None. Momenta that are all zero stay zero, with the identity as derivative.
    """

    def scale(f: Callable[..., Tensor]) -> Callable[..., tuple[Tensor]]:
        def flow(c: dict[str, Tensor], *arguments: Tensor) -> tuple[Tensor]:
            *values, p = arguments
            T = twice_kinetic(p, c["1/m"])
            # At rest the factor is infinite. Its derivative stays finite if it is not evaluated.
            moving = T > 0
            return (p * torch.where(moving, f(c, torch.where(moving, T, 1.0), *values), 1.0),)

        return flow

    back = None if inverse is None else scale(inverse)
    return GeneralFlow(("momentum",), scale(factor), back, reads, irreversible)


def twice_kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Compute ``sum p^2/m`` of each system, ``(*batch, 1, 1)``."""
    return (momentum**2 * inverse_mass).sum((-1, -2), keepdim=True)
