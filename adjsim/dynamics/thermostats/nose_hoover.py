"""The Nose-Hoover chain: constant temperature without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_whole
from adjsim.core.parameters import register
from adjsim.core.state import AnyState
from adjsim.core.typing import Energies, Number, Positions, Seed
from adjsim.dynamics.cotangents import Cotangents, replace_link, select_link
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Coefficients, Field, Linearised, MoveContext, unbroadcast
from adjsim.dynamics.starts import check_shape
from adjsim.dynamics.terms import Holder, Term
from adjsim.dynamics.thermostats.base import Bath, Rescaling


class ChainState(NamedTuple):
    """Position and momentum of particles, ``(*batch, atoms, dim)``, and chain.

    The fields of the chain are ``(*batch, length, 1, 1)``.
    """

    position: Positions
    momentum: Positions
    bath_position: Float[Tensor, "*batch length 1 1"]
    bath_momentum: Float[Tensor, "*batch length 1 1"]


class ChainNames(NamedTuple):
    """The fields of a chain, and the field that its first link scales."""

    momentum: str
    bath_position: str
    bath_momentum: str


class Chain(Term[Any]):
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
    first to the last. With the force G_j on link j without the damping by v_{j+1}, its advance over
    a time h is one scale and one shear::

        b_j <- exp(-h v_{j+1}/2) (exp(-h v_{j+1}/2) b_j + h G_j)
             = exp(-h v_{j+1}) b_j + h exp(-h v_{j+1}/2) G_j
    """

    names = ChainNames("momentum", "bath_position", "bath_momentum")

    def __init__(self, bath: Bath, tau: Tensor, length: int) -> None:
        self.bath, self.tau, self.length = bath, tau, length

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        c, names = self.coefficients(0.0, state), self.names
        b = getattr(state, names.bath_momentum)
        v = b * c["1/Q"]
        drive = torch.stack([_chain_force(state, c, j, names) for j in range(self.length)], -3)
        damping = torch.cat([v[..., 1:, :, :], torch.zeros_like(v[..., :1, :, :])], -3)
        return {
            names.momentum: -getattr(state, names.momentum) * v[..., 0, :, :],
            names.bath_position: v,
            names.bath_momentum: drive - b * damping,
        }

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        Q, target = self.links(state)
        return {"1/Q": 1 / Q, "h/Q": h / Q, "target": target, "1/m": 1 / self.masses(state)}

    def masses(self, state: Any) -> Tensor:
        """Return the masses of the momenta that the chain scales."""
        return self.bath.masses(state.momentum)

    def degrees(self, state: Any) -> Tensor | float:
        """Count the degrees of freedom of these momenta."""
        return self.bath.degrees(state.position)

    def links(self, state: Any) -> tuple[Tensor, Tensor]:
        """Compute masses of the links and means of twice their kinetic energies."""
        like = state.position
        count = torch.ones(self.length, 1, 1, dtype=like.dtype, device=like.device)
        count[0] = self.degrees(state)
        kT, tau = self.bath.kT.to(like), self.tau.to(like)
        return count * (kT * tau**2), count * kT

    def moves(self, h: float, state: ChainState) -> Sequence[Move]:
        last = self.length - 1
        inward = [move for j in range(last, -1, -1) for move in self._link(j, h / 2)]
        outward = [move for j in range(last + 1) for move in self._link(j, h / 2)]
        names = self.names
        scale = Scale(names.momentum, ChainScaling(0, h, names))
        advance = Shear(names.bath_position, Field(names.bath_momentum), "h/Q")
        return (*inward, scale, advance, *outward)

    def constrained(self, holder: Holder) -> Term[Any]:
        return self

    def _link(self, j: int, h: float) -> list[Move]:
        names, field = self.names, self.names.bath_momentum
        if j == self.length - 1:
            return [Shear(field, ChainForce(j, h, None, names), link=j)]
        return [
            Scale(field, ChainScaling(j + 1, h, names), link=j),
            Shear(field, ChainForce(j, h, j + 1, names), link=j),
        ]


def _chain_force(state: Any, c: Coefficients, j: int, names: ChainNames) -> Tensor:
    """Compute twice the kinetic energy that link j controls, minus its equilibrium value."""
    if j == 0:
        squares = getattr(state, names.momentum) ** 2 * c["1/m"]
        return squares.sum((-1, -2), keepdim=True) - c["target"][0]
    return (
        select_link(getattr(state, names.bath_momentum), j - 1) ** 2 * c["1/Q"][j - 1]
        - c["target"][j]
    )


@dataclass(frozen=True)
class ChainScaling:
    """The factor ``exp(-h b_j/Q_j)`` by which link j scales momenta."""

    link: int
    h: float
    names: ChainNames

    def value(self, state: Any, context: MoveContext) -> Tensor:
        b, inverse = getattr(state, self.names.bath_momentum), context.coefficients["1/Q"]
        return torch.exp(select_link(b, self.link) * inverse[self.link] * -self.h)

    def vjp(self, state: Any, context: MoveContext, cotangents: Cotangents) -> Linearised:
        value = self.value(state, context)
        products = _ChainProducts(state, context, cotangents, self.names)
        return value, lambda cotangent: products.add_scaling(self.link, self.h, cotangent * value)


@dataclass(frozen=True)
class ChainForce:
    """The force on link j over h, ``h G_j``, times ``exp(-h b_k/2Q_k)`` if link k damps it."""

    link: int
    h: float
    damped_by: int | None
    names: ChainNames

    def value(self, state: Any, context: MoveContext) -> Tensor:
        impulse, damping = self._factors(state, context)
        return impulse if damping is None else impulse * damping

    def vjp(self, state: Any, context: MoveContext, cotangents: Cotangents) -> Linearised:
        impulse, damping = self._factors(state, context)
        products, k = _ChainProducts(state, context, cotangents, self.names), self.damped_by
        if k is None or damping is None:
            return impulse, lambda cotangent: products.add_force(self.link, cotangent * self.h)
        value = impulse * damping

        def accumulate(cotangent: Tensor) -> None:
            products.add_scaling(k, self.h / 2, cotangent * value)
            products.add_force(self.link, cotangent * damping * self.h)

        return value, accumulate

    def _factors(self, state: Any, context: MoveContext) -> tuple[Tensor, Tensor | None]:
        k, names = self.damped_by, self.names
        impulse = _chain_force(state, context.coefficients, self.link, names) * self.h
        if k is None:
            return impulse, None
        return impulse, ChainScaling(k, self.h / 2, names).value(state, context)


class _ChainProducts(NamedTuple):
    """The cotangents that a move along the chain adds to, at a state."""

    state: Any
    context: MoveContext
    cotangents: Cotangents
    names: ChainNames

    def add_scaling(self, j: int, h: float, cotangent: Tensor) -> None:
        """Add the products of the cotangent of a scaling factor, times the factor."""
        self._add_to_bath(j, cotangent * self.context.coefficients["1/Q"][j] * -h)
        b = getattr(self.state, self.names.bath_momentum)
        self._add_to_link("1/Q", j, cotangent * select_link(b, j) * -h)

    def add_force(self, j: int, cotangent: Tensor) -> None:
        """Add the products of the cotangent of G_j."""
        state, context, cotangents, names = self
        c, momentum = context.coefficients, getattr(state, names.momentum)
        self._add_to_link("target", j, -cotangent)
        if j == 0:
            scaled, inverse_mass = momentum * cotangent, c["1/m"]
            cotangents[names.momentum] = torch.addcmul(
                cotangents[names.momentum], scaled, inverse_mass, value=2
            )
            if inverse_mass.requires_grad:
                found = unbroadcast(scaled * momentum, inverse_mass)
                cotangents.add_coefficient(context.letter, "1/m", found)
        else:
            before = select_link(getattr(state, names.bath_momentum), j - 1)
            self._add_to_bath(j - 1, cotangent * before * c["1/Q"][j - 1] * 2)
            self._add_to_link("1/Q", j - 1, cotangent * before**2)

    def _add_to_bath(self, j: int, cotangent: Tensor) -> None:
        field = self.names.bath_momentum
        like = select_link(self.cotangents[field], j)
        self.cotangents.add(field, unbroadcast(cotangent, like), j)

    def _add_to_link(self, name: str, j: int, cotangent: Tensor) -> None:
        """Add to the cotangent of one link of a coefficient."""
        whole = self.context.coefficients[name]
        if whole.requires_grad:
            found = replace_link(torch.zeros_like(whole), j, unbroadcast(cotangent, whole[j]))
            self.cotangents.add_coefficient(self.context.letter, name, found)


class NoseHooverChain(Rescaling[ChainState]):
    """Canonical dynamics by a Nose-Hoover chain of thermostats.

    See Martyna, Klein and Tuckerman, J. Chem. Phys. 97, 2635 (1992).

    Terms: A (stream), B (kick), N (chain, see :class:`Chain`). Schemes: "NBABN" and other
    palindromes. Each system of a batch has its own chain. Link j has the position x_j, the momentum
    b_j and the mass Q_j, energy time^2: Q_1 = dof kT tau^2, and Q_j = kT tau^2 for j > 1. The
    invariant is the extended energy
    ``sum p^2/2m + U + sum b_j^2/2Q_j + dof kT x_1 + kT sum_{j>1} x_j``. With length 3 or more the
    dynamics is ergodic even for one harmonic oscillator; with length 1 it is not. It is
    deterministic and, in practice, chaotic. A start has the chain at rest.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
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
        # The base class validates the length too.
        self.length = as_whole("length", length)
        super().__init__(potential, mass, kT, dof)
        register(self, "tau", tau, positive=True, single=True)

    def validate(self) -> None:
        """Refuse a length or degrees of freedom that the constructor would refuse."""
        if self.length < 1:
            raise ValueError(f"length must be at least 1 link; got {self.length}.")
        super().validate()

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "N": self.chain}

    @property
    def chain(self) -> Chain:
        return Chain(self.bath, self.tau, self.length)

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        bath = position.new_zeros((*position.shape[:-2], self.length, 1, 1))
        return (*super().started(position, p, generator), bath, bath)

    def check(self, state: AnyState) -> None:
        super().check(state)
        for name in ("bath_position", "bath_momentum"):
            check_shape(state, name, (*state[0].shape[:-2], self.length, 1, 1))

    def characteristic_scales(self, t: float, state: ChainState, time: float) -> dict[str, Tensor]:
        Q, target = self.chain.links(state)
        # In the extended energy x_1 has the weight dof kT and the other x_j have kT. So the others
        # are of order one, and x_1 is smaller.
        bath = {"bath_momentum": torch.sqrt(Q * target), "bath_position": torch.ones_like(Q)}
        return super().characteristic_scales(t, state, time) | bath

    def stationary_density(self) -> Canonical:
        """Declare the canonical density, without the chain's positions, which have none."""
        return Canonical(self, {"bath_momentum": lambda state: self.chain.links(state)[0]})

    def invariant(self, state: ChainState) -> Energies:
        """Compute the extended energy."""
        Q, target = self.chain.links(state)
        bath = (state.bath_momentum**2 / (2 * Q) + target * state.bath_position).sum((-1, -2, -3))
        return self.kinetic_energy(state) + self.potential(state.position) + bath
