"""The Nose-Hoover chain: constant temperature without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_whole
from adjsim.core.parameters import register
from adjsim.core.state import AnyMomentumState, AnyState, position_of
from adjsim.core.typing import Energies, Number, Positions, PositionsLike, Seed
from adjsim.dynamics.cotangents import Cotangents, replace_link, select_link
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.heat import HeatLimit
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Accumulate, Coefficients, Field, MoveContext, unbroadcast
from adjsim.dynamics.starts import as_start, check_dof
from adjsim.dynamics.term import Term


class ChainState(NamedTuple):
    """Position and momentum of the particles and of the chain.

    The fields of the particles are ``(*batch, atoms, dim)``, those of the chain
    ``(*batch, length, 1, 1)``.
    """

    position: Positions
    momentum: Positions
    bath_position: Float[Tensor, "*batch length 1 1"]
    bath_momentum: Float[Tensor, "*batch length 1 1"]


@runtime_checkable
class _WithChain(AnyMomentumState, Protocol):
    """A :class:`ChainState`, also on a lattice."""

    @property
    def bath_momentum(self) -> Tensor: ...


class Chain(Term[ChainState]):
    """The Nose-Hoover chain, N, whose first link acts on the particles.

    Each further link acts on the link before it. Link j has position x_j, momentum b_j and mass
    Q_j::

        dp/dt    = -p v_1                          v_j = b_j / Q_j
        dx_j/dt  = v_j
        db_1/dt  = sum p^2/m - dof kT  - b_1 v_2
        db_j/dt  = b_{j-1}^2/Q_{j-1} - kT - b_j v_{j+1}        (the last link has no v_{j+1})

    The flow over h is the symmetric factorisation of Martyna, Tuckerman, Tobias and Klein, Mol.
    Phys. 87, 1117 (1996). The links advance over h/2, from the last to the first. Then the momenta
    are scaled by exp(-h v_1) and the x_j moved by h v_j. Then the links advance over h/2, from the
    first to the last. The force on link j, without the damping by v_{j+1}, is G_j. The advance of a
    link over a time h applies G_j between two halves of the damping. It is one scale and one
    shear::

        b_j <- exp(-h v_{j+1}/2) (exp(-h v_{j+1}/2) b_j + h G_j)
             = exp(-h v_{j+1}) b_j + h exp(-h v_{j+1}/2) G_j
    """

    def __init__(
        self, masses: Masses, kT: Tensor, tau: Tensor, length: int, dof: float | None
    ) -> None:
        self.masses, self.kT, self.tau, self.length, self.dof = masses, kT, tau, length, dof

    def drift(self, t: Any, state: ChainState) -> Mapping[str, Tensor]:
        c = self.coefficients(0.0, state)
        b = state.bath_momentum
        v = b * c["1/Q"]
        drive = torch.stack([_chain_force(state, c, j) for j in range(self.length)], -3)
        damping = torch.cat([v[..., 1:, :, :], torch.zeros_like(v[..., :1, :, :])], -3)
        return {
            "momentum": -state.momentum * v[..., 0, :, :],
            "bath_position": v,
            "bath_momentum": drive - b * damping,
        }

    def coefficients(self, h: float, state: ChainState) -> dict[str, Tensor]:
        Q, target = self.links(state.position)
        return {
            "1/Q": 1 / Q,
            "h/Q": h / Q,
            "target": target,
            "1/m": 1 / self.masses(state.momentum),
        }

    def links(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the chain's masses and target values, each ``(length, 1, 1)``.

        The targets are the equilibrium values of twice the kinetic energies.
        """
        dof = self.masses.dof(position) if self.dof is None else self.dof
        count = torch.ones(self.length, 1, 1, dtype=position.dtype, device=position.device)
        count[0] = dof
        kT, tau = self.kT.to(position), self.tau.to(position)
        return count * (kT * tau**2), count * kT

    def moves(self, h: float, state: ChainState) -> Sequence[Move]:
        last = self.length - 1
        inward = [move for j in range(last, -1, -1) for move in self._link(j, h / 2)]
        outward = [move for j in range(last + 1) for move in self._link(j, h / 2)]
        scale = Scale("momentum", ChainScaling(0, h))
        advance = Shear("bath_position", Field("bath_momentum"), "h/Q")
        return (*inward, scale, advance, *outward)

    def _link(self, j: int, h: float) -> list[Move]:
        if j == self.length - 1:
            return [Shear("bath_momentum", ChainForce(j, h, None), link=j)]
        return [
            Scale("bath_momentum", ChainScaling(j + 1, h), link=j),
            Shear("bath_momentum", ChainForce(j, h, j + 1), link=j),
        ]


def _chain_force(state: _WithChain, c: Coefficients, j: int) -> Tensor:
    """Compute the force on link j of the chain.

    It is twice the kinetic energy that the link controls, minus the equilibrium value.
    """
    if j == 0:
        return (state.momentum**2 * c["1/m"]).sum((-1, -2), keepdim=True) - c["target"][0]
    return select_link(state.bath_momentum, j - 1) ** 2 * c["1/Q"][j - 1] - c["target"][j]


def _scaling(state: _WithChain, c: Coefficients, j: int, h: float) -> Tensor:
    """Compute the factor by which link j scales momenta over h."""
    return torch.exp(select_link(state.bath_momentum, j) * c["1/Q"][j] * -h)


@dataclass(frozen=True)
class ChainScaling:
    """The factor ``exp(-h b_j/Q_j)`` by which link j scales momenta."""

    link: int
    h: float

    def value(self, state: Any, context: MoveContext) -> Tensor:
        return _scaling(state, context.coefficients, self.link, self.h)

    def vjp(
        self, state: Any, context: MoveContext, cotangents: Cotangents
    ) -> tuple[Tensor, Accumulate]:
        value = self.value(state, context)
        return value, lambda cotangent: _scaling_vjp(
            self.link, self.h, cotangent * value, state, context, cotangents
        )


@dataclass(frozen=True)
class ChainForce:
    """The force on link j over a time h, ``h G_j``.

    It is multiplied by ``exp(-h b_k/2Q_k)`` if link k damps it.
    """

    link: int
    h: float
    damped_by: int | None

    def value(self, state: Any, context: MoveContext) -> Tensor:
        impulse = _chain_force(state, context.coefficients, self.link) * self.h
        return (
            impulse
            if self.damped_by is None
            else impulse * _scaling(state, context.coefficients, self.damped_by, self.h / 2)
        )

    def vjp(
        self, state: Any, context: MoveContext, cotangents: Cotangents
    ) -> tuple[Tensor, Accumulate]:
        impulse = _chain_force(state, context.coefficients, self.link) * self.h
        if self.damped_by is None:
            return impulse, lambda cotangent: self._chain_force_vjp(
                cotangent * self.h, state, context, cotangents
            )
        k, damping = (
            self.damped_by,
            _scaling(state, context.coefficients, self.damped_by, self.h / 2),
        )
        value = impulse * damping

        def accumulate(cotangent: Tensor) -> None:
            _scaling_vjp(k, self.h / 2, cotangent * value, state, context, cotangents)
            self._chain_force_vjp(cotangent * damping * self.h, state, context, cotangents)

        return value, accumulate

    def _chain_force_vjp(
        self, cotangent: Tensor, state: _WithChain, context: MoveContext, cotangents: Cotangents
    ) -> None:
        """Add the products of the cotangent of G_j to its fields and coefficients."""
        c, j = context.coefficients, self.link
        _add_to_link(context, cotangents, "target", j, -cotangent)
        if j == 0:
            scaled = state.momentum * cotangent
            cotangents["momentum"] = torch.addcmul(
                cotangents["momentum"], scaled, c["1/m"], value=2
            )
            if c["1/m"].requires_grad:
                cotangents.add_coefficient(
                    context.letter, "1/m", unbroadcast(scaled * state.momentum, c["1/m"])
                )
        else:
            before = select_link(state.bath_momentum, j - 1)
            _add_to_bath(cotangents, j - 1, cotangent * before * c["1/Q"][j - 1] * 2)
            _add_to_link(context, cotangents, "1/Q", j - 1, cotangent * before**2)


def _scaling_vjp(
    j: int,
    h: float,
    cotangent: Tensor,
    state: _WithChain,
    context: MoveContext,
    cotangents: Cotangents,
) -> None:
    """Add the products of the scaling factor's cotangent, times the factor, to b_j and 1/Q_j."""
    _add_to_bath(cotangents, j, cotangent * context.coefficients["1/Q"][j] * -h)
    _add_to_link(
        context, cotangents, "1/Q", j, cotangent * select_link(state.bath_momentum, j) * -h
    )


def _add_to_bath(cotangents: Cotangents, j: int, cotangent: Tensor) -> None:
    cotangents.add(
        "bath_momentum", unbroadcast(cotangent, select_link(cotangents["bath_momentum"], j)), j
    )


def _add_to_link(
    context: MoveContext, cotangents: Cotangents, name: str, j: int, cotangent: Tensor
) -> None:
    """Add to the cotangent of one link of a coefficient."""
    whole = context.coefficients[name]
    if whole.requires_grad:
        cotangents.add_coefficient(
            context.letter,
            name,
            replace_link(torch.zeros_like(whole), j, unbroadcast(cotangent, whole[j])),
        )


class NoseHooverChain(MassiveDynamics[ChainState]):
    """Canonical dynamics by a Nose-Hoover chain of thermostats.

    See Martyna, Klein and Tuckerman, J. Chem. Phys. 97, 2635 (1992).

    ========= ==================================================== ================
    symbol    meaning                                              units
    ========= ==================================================== ================
    kT        temperature                                          energy
    tau       relaxation time of the chain                         time
    dof       degrees of freedom of one system                     1
    Q_1       dof kT tau^2                                         energy time^2
    Q_j       kT tau^2, j > 1                                      energy time^2
    ========= ==================================================== ================

    Terms: A (stream), B (kick), N (chain, see :class:`Chain`). Schemes: "NBABN" and other
    palindromes. Each system of a batch has its own chain. The invariant is the extended energy
    ``sum p^2/2m + U + sum b_j^2/2Q_j + dof kT x_1 + kT sum_{j>1} x_j``, with x_j and b_j
    the position and momentum of link j. With length 3 or more the dynamics is ergodic even
    for one harmonic oscillator; with length 1 it is not. It is deterministic and, in
    practice, chaotic.

    Args:
        potential: energy module.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``.
        kT: temperature, energy; one number.
        tau: relaxation time; a few times the period of the slowest vibration that should be
            thermalised well.
        length: links of the chain.
        dof: degrees of freedom of one system. None: atoms x dim, pinned atoms left out. Pass atoms
            x dim - dim when the total momentum is zero and stays so.

    Raises:
        ValueError: a dof above atoms x dim, in ``init`` or ``simulate``.
    """

    state_type = ChainState
    kT: Tensor
    tau: Tensor

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        tau: Number = 1.0,
        length: int = 3,
        dof: float | int | None = None,
    ) -> None:
        super().__init__(potential, mass)
        register(self, "kT", kT, positive=True, single=True)
        register(self, "tau", tau, positive=True, single=True)
        self.length, self.dof = (
            as_whole("length", length),
            None if dof is None else as_number("dof", dof),
        )
        self.validate()

    def validate(self) -> None:
        """Refuse a length or degrees of freedom that the constructor would refuse."""
        if self.length < 1:
            raise ValueError(f"length must be at least 1 link; got {self.length}.")
        if self.dof is not None and not self.dof > 0:
            raise ValueError(f"dof must be positive; got {self.dof}.")

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "N": self.chain}

    @property
    def chain(self) -> Chain:
        """The term of the chain."""
        return Chain(self.masses, self.kT, self.tau, self.length, self.dof)

    def init(
        self, position: PositionsLike, momentum: PositionsLike | None = None, generator: Seed = None
    ) -> ChainState:
        """Make a start with the chain at rest.

        Momenta that are not given are drawn as sqrt(m kT) xi.
        """
        at, p = as_start(position, momentum)
        if p is None:
            p = self.thermal_momentum(at, self.kT, generator)
        bath = at.new_zeros((*at.shape[:-2], self.length, 1, 1))
        state = ChainState(at, p, bath, bath)
        self.check(state)
        return state

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_dof(self.dof, state)
        expected = (*position_of(state).shape[:-2], self.length, 1, 1)
        for name in ("bath_position", "bath_momentum"):
            if getattr(state, name).shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(state, name).shape)}; it must be {expected}."
                )

    def characteristic_scales(self, t: float, state: ChainState, time: float) -> dict[str, Tensor]:
        Q, target = self.chain.links(state.position)
        # In the extended energy x_1 has the weight dof kT and the other x_j have kT. So the others
        # are of order one, and x_1 is smaller.
        return {
            **super().characteristic_scales(t, state, time),
            "bath_momentum": torch.sqrt(Q * target),
            "bath_position": torch.ones_like(Q),
        }

    def heat_limit(self, start: AnyState) -> HeatLimit:
        return HeatLimit(self.masses, self.kT, self.potential, start)

    def stationary_density(self) -> Canonical:
        """Declare the canonical density, with the weights Q_j of the chain's momenta.

        The chain's positions have no stationary density.
        """
        return Canonical(self, {"bath_momentum": lambda state: self.chain.links(state.position)[0]})

    def invariant(self, state: ChainState) -> Energies:
        """Compute the extended energy."""
        Q, target = self.chain.links(state.position)
        bath = (state.bath_momentum**2 / (2 * Q) + target * state.bath_position).sum((-1, -2, -3))
        return self.kinetic_energy(state) + self.potential(state.position) + bath
