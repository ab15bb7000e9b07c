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
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.base import Rescaling


class ChainState(NamedTuple):
    """Position and momentum of particles, ``(*batch, atoms, dim)``, and chain.

    The fields of the chain are ``(*batch, length, 1, 1)``.
    """

    position: Positions
    momentum: Positions
    bath_position: Float[Tensor, "*batch length 1 1"]
    bath_momentum: Float[Tensor, "*batch length 1 1"]


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
    first to the last. With the force G_j on link j without the damping by v_{j+1}, its advance over
    a time h is one scale and one shear::

        b_j <- exp(-h v_{j+1}/2) (exp(-h v_{j+1}/2) b_j + h G_j)
             = exp(-h v_{j+1}) b_j + h exp(-h v_{j+1}/2) G_j
    """

    def __init__(self, thermostat: NoseHooverChain) -> None:
        self.thermostat, self.length = thermostat, thermostat.length

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
        m = self.thermostat.masses(state.momentum)
        return {"1/Q": 1 / Q, "h/Q": h / Q, "target": target, "1/m": 1 / m}

    def links(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute masses of the links and means of twice their kinetic energies."""
        count = torch.ones(self.length, 1, 1, dtype=position.dtype, device=position.device)
        count[0] = self.thermostat.degrees(position)
        kT, tau = self.thermostat.kT.to(position), self.thermostat.tau.to(position)
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


def _chain_force(state: Any, c: Coefficients, j: int) -> Tensor:
    """Compute twice the kinetic energy that link j controls, minus its equilibrium value."""
    if j == 0:
        return (state.momentum**2 * c["1/m"]).sum((-1, -2), keepdim=True) - c["target"][0]
    return select_link(state.bath_momentum, j - 1) ** 2 * c["1/Q"][j - 1] - c["target"][j]


@dataclass(frozen=True)
class ChainScaling:
    """The factor ``exp(-h b_j/Q_j)`` by which link j scales momenta."""

    link: int
    h: float

    def value(self, state: Any, context: MoveContext) -> Tensor:
        b, inverse = state.bath_momentum, context.coefficients["1/Q"]
        return torch.exp(select_link(b, self.link) * inverse[self.link] * -self.h)

    def vjp(self, state: Any, context: MoveContext, cotangents: Cotangents) -> Linearised:
        value, products = self.value(state, context), _ChainProducts(state, context, cotangents)
        return value, lambda cotangent: products.add_scaling(self.link, self.h, cotangent * value)


@dataclass(frozen=True)
class ChainForce:
    """The force on link j over h, ``h G_j``, times ``exp(-h b_k/2Q_k)`` if link k damps it."""

    link: int
    h: float
    damped_by: int | None

    def value(self, state: Any, context: MoveContext) -> Tensor:
        impulse, damping = self._factors(state, context)
        return impulse if damping is None else impulse * damping

    def vjp(self, state: Any, context: MoveContext, cotangents: Cotangents) -> Linearised:
        impulse, damping = self._factors(state, context)
        products, k = _ChainProducts(state, context, cotangents), self.damped_by
        if k is None or damping is None:
            return impulse, lambda cotangent: products.add_force(self.link, cotangent * self.h)
        value = impulse * damping

        def accumulate(cotangent: Tensor) -> None:
            products.add_scaling(k, self.h / 2, cotangent * value)
            products.add_force(self.link, cotangent * damping * self.h)

        return value, accumulate

    def _factors(self, state: Any, context: MoveContext) -> tuple[Tensor, Tensor | None]:
        impulse, k = _chain_force(state, context.coefficients, self.link) * self.h, self.damped_by
        return impulse, None if k is None else ChainScaling(k, self.h / 2).value(state, context)


class _ChainProducts(NamedTuple):
    """The cotangents that a move along the chain adds to, at a state."""

    state: Any
    context: MoveContext
    cotangents: Cotangents

    def add_scaling(self, j: int, h: float, cotangent: Tensor) -> None:
        """Add the products of the cotangent of a scaling factor, times the factor."""
        self._add_to_bath(j, cotangent * self.context.coefficients["1/Q"][j] * -h)
        self._add_to_link("1/Q", j, cotangent * select_link(self.state.bath_momentum, j) * -h)

    def add_force(self, j: int, cotangent: Tensor) -> None:
        """Add the products of the cotangent of G_j."""
        state, context, cotangents = self
        c = context.coefficients
        self._add_to_link("target", j, -cotangent)
        if j == 0:
            scaled, inverse_mass = state.momentum * cotangent, c["1/m"]
            cotangents["momentum"] = torch.addcmul(
                cotangents["momentum"], scaled, inverse_mass, value=2
            )
            if inverse_mass.requires_grad:
                found = unbroadcast(scaled * state.momentum, inverse_mass)
                cotangents.add_coefficient(context.letter, "1/m", found)
        else:
            before = select_link(state.bath_momentum, j - 1)
            self._add_to_bath(j - 1, cotangent * before * c["1/Q"][j - 1] * 2)
            self._add_to_link("1/Q", j - 1, cotangent * before**2)

    def _add_to_bath(self, j: int, cotangent: Tensor) -> None:
        like = select_link(self.cotangents["bath_momentum"], j)
        self.cotangents.add("bath_momentum", unbroadcast(cotangent, like), j)

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
        return Chain(self)

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        bath = position.new_zeros((*position.shape[:-2], self.length, 1, 1))
        return (*super().started(position, p, generator), bath, bath)

    def check(self, state: AnyState) -> None:
        super().check(state)
        for name in ("bath_position", "bath_momentum"):
            check_shape(state, name, (*state[0].shape[:-2], self.length, 1, 1))

    def characteristic_scales(self, t: float, state: ChainState, time: float) -> dict[str, Tensor]:
        Q, target = self.chain.links(state.position)
        # In the extended energy x_1 has the weight dof kT and the other x_j have kT. So the others
        # are of order one, and x_1 is smaller.
        bath = {"bath_momentum": torch.sqrt(Q * target), "bath_position": torch.ones_like(Q)}
        return super().characteristic_scales(t, state, time) | bath

    def stationary_density(self) -> Canonical:
        """Declare the canonical density, without the chain's positions, which have none."""
        return Canonical(self, {"bath_momentum": lambda state: self.chain.links(state.position)[0]})

    def invariant(self, state: ChainState) -> Energies:
        Q, target = self.chain.links(state.position)
        bath = (state.bath_momentum**2 / (2 * Q) + target * state.bath_position).sum((-1, -2, -3))
        return self.kinetic_energy(state) + self.potential(state.position) + bath
