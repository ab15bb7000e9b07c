"""The terms of dynamics in a box that moves with a piston."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.box import volume
from adjsim.core.strain import Strain
from adjsim.core.typing import Positions
from adjsim.dynamics.bodies import ATOMS, Atoms
from adjsim.dynamics.forces import FORCE, STRAIN_FORCE
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, RatioScale, Scale, Shear
from adjsim.dynamics.pressure.skew import Skew
from adjsim.dynamics.sources import (
    Coefficient,
    Coefficients,
    Field,
    Force,
    Function,
    Random,
    Source,
)
from adjsim.dynamics.terms import Holder, Kick, Term
from adjsim.dynamics.thermostats.langevin import OrnsteinUhlenbeck
from adjsim.potentials import PairPotential, tail_corrections
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.strained import reference_box, strained_force

# The largest change of a field by a half step of the piston that exact runs plan with, in bits.
BITS = 1 / 32


class PistonState(NamedTuple):
    """Position and momentum ``(*batch, atoms, dim)``, strain of the box and its momentum.

    The strain is the logarithm of the edges over those of the potential's box, ``(*batch, 1, 1)``
    where all edges move together, and ``(*batch, 1, dim)`` where each moves by itself. For a
    potential with another box, make the start by ``init(position, momentum, box=box(state))``.
    """

    position: Positions
    momentum: Positions
    strain: Float[Tensor, "*batch 1 axes"]
    strain_momentum: Float[Tensor, "*batch 1 axes"]


@runtime_checkable
class InBox(Protocol):
    """A state that carries its box, or a trajectory of such states."""

    @property
    def position(self) -> Tensor: ...
    @property
    def momentum(self) -> Tensor: ...
    @property
    def strain(self) -> Tensor: ...
    @property
    def strain_momentum(self) -> Tensor: ...


class Piston:
    """The piston: its pressure and mass, and the box and the potential that it compresses.

    ``tail`` is the potential whose pairs beyond the cutoff add to the pressure; None: none do.
    """

    def __init__(
        self, pressure: Tensor, kT: Tensor, tau: Tensor, box: Tensor, tail: Any = None
    ) -> None:
        self.pressure, self.kT, self.tau, self.box, self.tail = pressure, kT, tau, box, tail

    def mass(self, state: Any) -> Tensor:
        """Compute the mass W of each axis of a strain."""
        like = state.strain_momentum
        atoms, dim = state.position.shape[-2:]
        count = (atoms * dim + dim) / like.shape[-1]
        return count * self.kT.to(like) * self.tau.to(like) ** 2

    def thermal(self, state: Any) -> Tensor:
        """Compute the thermal momentum sqrt(W kT)."""
        mass = self.mass(state)
        return torch.sqrt(mass * self.kT.to(mass))

    def strain(self, state: Any) -> Strain:
        """Return the strain of the box of a state."""
        return Strain.of(self.box, state.strain)

    def numbers(self, state: Any) -> dict[str, Tensor]:
        """Return the pressure, the volume without strain, and the tail's pressure at V = 1.

        The tail's pressure is inverse to the squared volume. In a tilted box whose rows are
        stretched each, they include the rows.
        """
        like, base = state.position, volume(self.box)
        found = {"pressure": self.pressure.to(like).reshape(()), "volume": base.to(like)}
        rows = self.strain(state).rows
        if rows is not None:
            found["rows"] = rows
        if self.tail is not None:
            parts = tailed_parts(self.tail)
            tails = [tail_corrections(part, like.shape[-2], 1.0)[1] for part in parts]
            found["tail"] = torch.stack(tails).sum().to(like)
        return found

    def work(self, state: Any) -> Tensor:
        """Compute the energy of the pressure and of its tail correction, ``(*batch,)``."""
        c, dim = self.numbers(state), state.position.shape[-1]
        now = volume_at(c["volume"], state.strain, dim)
        work = c["pressure"] * now
        return (work + c["tail"] / now if "tail" in c else work)[..., 0, 0]


def tailed_parts(potential: nn.Module) -> list[PairPotential]:
    """Return the parts of a potential that leave out pairs beyond a cutoff."""
    parts = terms_of(potential)
    return [x for x in parts if isinstance(x, PairPotential) and x.cutoff is not None]


def volume_at(volume: Tensor, strain: Tensor, dim: int) -> Tensor:
    """Compute the volume at a strain, from that without strain."""
    axes = strain.shape[-1]
    return volume * torch.exp(strain.sum(-1, keepdim=True) * (dim / axes))


class StrainedKick(Kick[Any]):
    """The kick, B, by the force in the box of the state."""

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        strain = Strain.of(reference_box(self.potential), state.strain)
        return {"momentum": strained_force(self.potential, state.position, strain)[0]}


class PistonKick(Term[Any]):
    """The kick of the piston, V, with d the dimension, N bodies and N_f = d N::

        dp_e/dt = W_q + 2K + (d/N_f) 2K - d V (P - P_tail)            isotropic
        dp_e,a/dt = W_q,a + 2K_a + (1/N_f) 2K - V (P - P_tail)        each row a

    W_q is the force along the strain, minus the derivative of the energy as box and centres of
    bodies are stretched together; 2K is twice the kinetic energy of the centres, and 2K_a the part
    of row a, the sum of P_a V_a by coordinate along rows
    (:meth:`~adjsim.core.strain.Strain.along`). The terms in N_f make the pressure that of the Gibbs
    ensemble (Martyna, Tobias and Klein).

    The force along a strain that stretches all atoms is ``sum_i (q_i - Q) F_i`` more than W_q, with
    Q the centre of the body of atom i.
    """

    def __init__(
        self, masses: Masses, piston: Piston, potential: nn.Module, bodies: Atoms = ATOMS
    ) -> None:
        self.masses, self.piston, self.potential, self.bodies = masses, piston, potential, bodies

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        c, q, strain = self.coefficients(1.0, state), state.position, state.strain
        force, along = strained_force(self.potential, q, self.piston.strain(state))
        rest = _PressureForce(self.bodies)(c, state.momentum, strain)
        within = _InnerForce(self.bodies)(c, q, strain, force)
        return {"strain_momentum": along + rest + within}

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        like = state.momentum
        step = torch.as_tensor(h, dtype=like.dtype, device=like.device)
        numbers = {"h": step, "1/m": 1 / self.masses(like), **self.piston.numbers(state)}
        return numbers | self.bodies.coefficients(self.masses, like)

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        parts: list[Source] = [
            Force(STRAIN_FORCE),
            Function(_PressureForce(self.bodies), ("momentum", "strain")),
        ]
        if self.bodies.joined:
            inner = _InnerForce(self.bodies)
            parts.append(Function(inner, ("position", "strain"), (Force(FORCE),)))
        return [Shear("strain_momentum", part, "h") for part in parts]

    def constrained(self, holder: Holder) -> Term[Any]:
        return PistonKick(self.masses, self.piston, self.potential, holder.bodies)


class _PressureForce(NamedTuple):
    """The force on the piston, other than that of the potential."""

    bodies: Atoms

    def __call__(self, c: Coefficients, p: Tensor, strain: Tensor) -> Tensor:
        (atoms, dim), axes = p.shape[-2:], strain.shape[-1]
        dof, share, p = self.bodies.count(atoms) * dim, dim / axes, self.bodies.carried(c, p)
        along = Strain(strain, c.get("rows")).along(p * c["1/m"], p)
        twice = along.sum(-1, keepdim=True)
        volume = volume_at(c["volume"], strain, dim)
        work = -c["pressure"] * volume
        if "tail" in c:
            work = work + c["tail"] / volume
        return along + share * (work + twice / dof)


class _InnerForce(NamedTuple):
    """Minus the work of forces as atoms are stretched about the centres of their bodies."""

    bodies: Atoms

    def __call__(self, c: Coefficients, q: Tensor, strain: Tensor, force: Tensor) -> Tensor:
        about = q - self.bodies.centres(c, q)
        return -Strain(strain, c.get("rows")).along(about, force)


class Dilation(Term[Any]):
    """The flow of the box, S: box and centres of bodies are stretched, and momenta shrink::

        de/dt = p_e/W = v      dQ/dt = v Q      dP/dt = -(1 + d/N_f) v P

    Atoms keep their places, and velocities, about the centre of their body. For each row a,
    dP_a/dt = -(v_a + sum_b v_b/N_f) P_a, with the coordinates along rows. The flow over h is a
    shear of the strain, and scales of centres by exp(h v) and of momenta. Both factors are ratios
    of functions of the strain after and before.

    In a tilted box whose rows A are stretched each, shears of columns (:class:`Skew`) take the
    coordinates to those along rows and back. Shears of rows (:mod:`adjsim.dynamics.bodies`) take
    atoms to centres and back.
    """

    def __init__(self, masses: Masses, piston: Piston, bodies: Atoms = ATOMS) -> None:
        self.masses, self.piston, self.bodies = masses, piston, bodies

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        v = state.strain_momentum / self.piston.mass(state)
        strain, c = self.piston.strain(state), self.bodies.coefficients(self.masses, state.momentum)
        q, p = self.bodies.centres(c, state.position), self.bodies.carried(c, state.momentum)
        dof = self.bodies.count(p.shape[-2]) * p.shape[-1]
        return {
            "position": strain.dilated(q, v),
            "momentum": -strain.pulled_back(p, _shrinking(v, dof, p.shape[-1])),
            "strain": v,
        }

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        rows = self.piston.strain(state).rows
        skews = {} if rows is None else Skew(rows).matrices()
        shares = self.bodies.coefficients(self.masses, state.momentum)
        return {"h/W": h / self.piston.mass(state), **skews, **shares}

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        (atoms, dim), rows = state.momentum.shape[-2:], self.piston.strain(state).rows
        skew = None if rows is None else Skew(rows)
        order, dof = None if skew is None else skew.order, self.bodies.count(atoms) * dim
        shear = Shear("strain", Field("strain_momentum"), "h/W")
        moves: list[Move] = [shear]
        for name, of in (("position", _Stretched(order)), ("momentum", _Shrunk(order, dof, dim))):
            of = self.bodies.rows(of, atoms)
            factor = Function(_Change(of), ("strain_momentum",))
            scale = RatioScale(name, factor, bits=BITS, of=of, shear=shear)
            moves += self.bodies.around([scale] if skew is None else skew.around(name, scale))
        return moves

    def constrained(self, holder: Holder) -> Term[Any]:
        return Dilation(self.masses, self.piston, holder.bodies)


class _Change(NamedTuple):
    """The factor of a step, as a function of the momentum of the strain."""

    of: Callable[[Tensor], Tensor]

    def __call__(self, c: Coefficients, strain_momentum: Tensor) -> Tensor:
        return self.of(c["h/W"] * strain_momentum)


class _Stretched(NamedTuple):
    """The factor of positions as a function of the strain, by column, see :class:`Skew`."""

    order: tuple[int, ...] | None

    def __call__(self, strain: Tensor) -> Tensor:
        return _by_column(torch.exp(strain), self.order)


class _Shrunk(NamedTuple):
    """The factor of momenta as a function of the strain, by column, see :class:`Skew`."""

    order: tuple[int, ...] | None
    dof: int
    dim: int

    def __call__(self, strain: Tensor) -> Tensor:
        return _by_column(torch.exp(-_shrinking(strain, self.dof, self.dim)), self.order)


def _by_column(factor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    if order is None:
        return factor
    return torch.cat([factor[..., k : k + 1] for k in order], -1)


def _shrinking(v: Tensor, dof: int, dim: int) -> Tensor:
    """Compute v + (d/N_f) v, or v_a + sum_b v_b/N_f for each axis."""
    share = dim / v.shape[-1]
    return v + v.sum(-1, keepdim=True) * (share / dof)


class PistonBath(OrnsteinUhlenbeck):
    """The baths of momenta and piston, O, each as :class:`~.OrnsteinUhlenbeck`.

    The draw of a step is ``(atoms + 1, dim)``, whose last row is that of the piston.
    """

    def __init__(
        self, masses: Masses, kT: Tensor, friction: Tensor, piston: Piston, damping: Tensor
    ) -> None:
        super().__init__(masses, kT, friction)
        self.piston, self.piston_friction = piston, damping

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        friction = self.piston_friction.to(state.strain_momentum)
        return {
            **super().drift(t, state),
            "strain_momentum": -friction * state.strain_momentum,
        }

    def diffusion(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        friction = self.piston_friction.to(state.strain_momentum)
        thermal = self.piston.thermal(state)
        return {
            **super().diffusion(t, state),
            "strain_momentum": torch.sqrt(2 * friction) * thermal,
        }

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        friction = self.piston_friction.to(state.strain_momentum).reshape(())
        noise = torch.sqrt(-torch.expm1(-2 * h * friction)) * self.piston.thermal(state)
        return {
            **super().coefficients(h, state),
            "piston decay": torch.exp(-h * friction),
            "piston noise": noise,
        }

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        piston = Random(rows=(-1, None), columns=(0, state.strain.shape[-1]))
        return (
            Scale("momentum", Coefficient("decay")),
            Shear("momentum", Random(rows=(0, -1)), "noise"),
            Scale("strain_momentum", Coefficient("piston decay")),
            Shear("strain_momentum", piston, "piston noise"),
        )
