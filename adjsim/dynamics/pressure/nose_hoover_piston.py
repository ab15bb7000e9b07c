"""Constant pressure and temperature without noise: a piston and Nose-Hoover chains."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_whole
from adjsim.core.parameters import register
from adjsim.core.state import AnyState
from adjsim.core.typing import Energies, Number, Positions
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.pressure.base import PistonDynamics
from adjsim.dynamics.pressure.terms import Piston
from adjsim.dynamics.starts import check_shape
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.base import Bath, Counting
from adjsim.dynamics.thermostats.nose_hoover import Chain, ChainNames


class PistonChainState(NamedTuple):
    """A :class:`~adjsim.PistonState` with two chains.

    The fields of the chains are ``(*batch, length, 1, 1)``.
    """

    position: Positions
    momentum: Positions
    strain: Float[Tensor, "*batch 1 axes"]
    strain_momentum: Float[Tensor, "*batch 1 axes"]
    bath_position: Float[Tensor, "*batch length 1 1"]
    bath_momentum: Float[Tensor, "*batch length 1 1"]
    piston_bath_position: Float[Tensor, "*batch length 1 1"]
    piston_bath_momentum: Float[Tensor, "*batch length 1 1"]


class PistonChain(Chain):
    """The chain, M, whose first link acts on the momentum of the piston, as :class:`Chain`."""

    names = ChainNames("strain_momentum", "piston_bath_position", "piston_bath_momentum")

    def __init__(self, bath: Bath, tau: Tensor, length: int, piston: Piston) -> None:
        super().__init__(bath, tau, length)
        self.piston = piston

    def masses(self, state: Any) -> Tensor:
        return self.piston.mass(state)

    def degrees(self, state: Any) -> float:
        return float(state.strain.shape[-1])


class NoseHooverPiston(  # pyright: ignore[reportIncompatibleMethodOverride]
    PistonDynamics, Counting[Any]
):
    """Constant pressure and temperature: a piston, and Nose-Hoover chains on atoms and piston.

    The equations are those of Martyna, Tobias and Klein, J. Chem. Phys. 101, 4177 (1994), which
    :class:`~adjsim.LangevinPiston` lists with Langevin baths. Here two chains of thermostats
    (:class:`~adjsim.NoseHooverChain`) take the place of friction and noise, one for the atoms and
    one for the piston. The dynamics is deterministic and, in practice, chaotic. A start has both
    chains at rest.

    Terms: A (stream), B (kick), V (piston kick), S (box and positions), N (chain of the atoms), M
    (chain of the piston). The scheme ``NoseHooverPiston.scheme``, "NMBVSASVBMN", is second order
    and costs one force a step. The invariant is the enthalpy with that of the piston and of both
    chains, of :class:`~adjsim.NoseHooverChain` each. For averages take
    :class:`~adjsim.LangevinPiston`, which is ergodic without conditions.

    Args:
        potential, mass, kT, pressure, tau, axes, tail: see :class:`~adjsim.LangevinPiston`.
        dof: degrees of freedom of the atoms' chain, see :class:`~adjsim.NoseHooverChain`.
        chain_tau: relaxation time of the chains, time; a few times the period of the slowest
            vibration that should be thermalised well. None: ``tau``.
        length: links of each chain.

    Raises:
        ValueError, TypeError: as :class:`~adjsim.LangevinPiston`; a length below one.
    """

    state_type = PistonChainState
    scheme: ClassVar[str] = "NMBVSASVBMN"
    chain_tau: Tensor | None

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        pressure: Number = 0.0,
        tau: Number = 1.0,
        *,
        chain_tau: Number | None = None,
        length: int = 3,
        dof: float | int | None = None,
        axes: str = "isotropic",
        tail: bool = False,
    ) -> None:
        super().__init__(potential, mass, kT, pressure, tau, axes, tail)
        self.dof = None if dof is None else as_number("dof", dof)
        self.length = as_whole("length", length)
        if chain_tau is None:
            self.register_buffer("chain_tau", None)
        else:
            register(self, "chain_tau", chain_tau, positive=True, single=True)
        self.validate()

    def validate(self) -> None:
        """Refuse settings, numbers and a potential that the constructor would refuse."""
        super().validate()
        Counting.validate(self)
        if self.length < 1:
            raise ValueError(f"length must be at least 1 link; got {self.length}.")

    @property
    def chains(self) -> tuple[Chain, PistonChain]:
        """The chain of the atoms, and that of the piston."""
        bath, tau = self.bath, self.tau if self.chain_tau is None else self.chain_tau
        return Chain(bath, tau, self.length), PistonChain(bath, tau, self.length, self.piston)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, **dict(zip("NM", self.chains, strict=True))}

    def bath_at_rest(self, position: Tensor) -> tuple[Tensor, ...]:
        return (position.new_zeros((*position.shape[:-2], self.length, 1, 1)),) * 4

    def check(self, state: AnyState) -> None:
        super().check(state)
        for name in PistonChainState._fields[4:]:
            check_shape(state, name, (*state[0].shape[:-2], self.length, 1, 1))

    def characteristic_scales(self, t: float, state: Any, time: float) -> dict[str, Tensor]:
        found = super().characteristic_scales(t, state, time)
        for chain in self.chains:
            Q, target = chain.links(state)
            found[chain.names.bath_momentum] = torch.sqrt(Q * target)
            found[chain.names.bath_position] = torch.ones_like(Q)
        return found

    def stationary_density(self) -> Canonical:
        """Declare the isothermal-isobaric density, without the chains' positions."""

        def weight(k: int) -> Any:
            return lambda state: self.chains[k].links(state)[0]

        weights = {chain.names.bath_momentum: weight(k) for k, chain in enumerate(self.chains)}
        return Canonical(self, {"strain_momentum": self.piston.mass, **weights})

    def invariant(self, state: Any) -> Energies:
        """Compute the enthalpy with that of the piston and of both chains."""
        found = super().invariant(state)
        for chain in self.chains:
            Q, target = chain.links(state)
            b, x = (getattr(state, name) for name in chain.names[:0:-1])
            found = found + (b**2 / (2 * Q) + target * x).sum((-1, -2, -3))
        return found
