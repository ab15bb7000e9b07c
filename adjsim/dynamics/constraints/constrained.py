"""Dynamics with fixed distances of pairs of atoms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import describe_type
from adjsim.core.derived import has_values
from adjsim.core.parameters import check_count
from adjsim.core.refusal import Refusal
from adjsim.core.state import AnyState, position_of
from adjsim.core.typing import Array, Energies, PositionsLike, Seed
from adjsim.dynamics.base import Dynamics, StateLimit
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.constraints.held import Held
from adjsim.dynamics.density import StationaryDensity
from adjsim.dynamics.forces import FORCE
from adjsim.dynamics.masses import HeatLimit, Masses
from adjsim.dynamics.pressure.terms import InBox, Piston
from adjsim.dynamics.starts import as_start
from adjsim.dynamics.terms import Term
from adjsim.potentials.base import Forces
from adjsim.potentials.points import ForcesAt

# Of the lengths: errors of a start that init mends without a word, and that it mends at all.
SILENT, MENDED = 1e-3, 0.15
# The relative errors of lengths and of momenta with which a run may start. The grid of an exact run
# leaves 1e-8 of lengths. Scales by chains leave 1e-5 of momenta, and of lengths 1e-6 at 2 fs.
TOLERANCE, MOMENTUM_TOLERANCE = 1e-5, 1e-4


class Constrained(Dynamics[Any]):
    """Dynamics in which distances of pairs of atoms are fixed, by RATTLE::

        dq = p/m dt        dp = (the terms of the dynamics) + G(q)^T dx        |q_i - q_j| = L

    G are the gradients of the constraints and x their multipliers. Terms, letters and schemes are
    those of the dynamics. A (stream) becomes the drift of
    :class:`~adjsim.dynamics.constraints.terms.ConstrainedStream`. Kicks and noise are projected to
    the momenta with ``G M^-1 p = 0``. ``Constrained(Langevin(...))`` with "BAOAB" is g-BAOAB of
    Leimkuhler and Matthews. A word may take several drifts a kick, such as "BAAOAAB".

    Constraints hold to rounding at the end of each drift. Gradients to lengths, masses, forces and
    starts follow from the implicit function theorem. Every adjoint takes them, and
    :class:`~adjsim.ReversibleAdjoint` undoes a drift by the drift over -h.

    Constrained bonds sample another density than stiff ones: that of the latter times the square
    root of det(G M^-1 G^T). A run starts from states that satisfy the constraints to 1e-5, which
    ``init`` makes.

    A piston (:class:`~adjsim.LangevinPiston`, :class:`~adjsim.NoseHooverPiston`) moves the centres
    of mass of bodies, which are the clusters of atoms that constraints join, and the single atoms:
    see :class:`~adjsim.dynamics.pressure.terms.PistonKick`.

    Args:
        dynamics: :class:`~adjsim.Hamiltonian`; :class:`~adjsim.GeneralizedLangevin`, whose memory
            acts on momenta by projected forces; :class:`~adjsim.Langevin` or
            :class:`~adjsim.Andersen`, with one friction or rate, or one for each molecule;
            :class:`~adjsim.LangevinPiston`, with one friction; or
            :class:`~adjsim.NoseHooverChain`, :class:`~adjsim.NoseHooverPiston`,
            :class:`~adjsim.Bussi`, :class:`~adjsim.Berendsen` or :class:`~adjsim.VelocityRescale`,
            with ``dof``, the degrees of freedom without the constraints (:meth:`dof`). Under
            Andersen all atoms of a molecule collide together. Or
            :class:`~adjsim.OverdampedLangevin`, with any frictions, which are then the masses of
            the constraints: see
            :class:`~adjsim.dynamics.constraints.diffusion.ConstrainedDiffusion`. Or
            :class:`~adjsim.ESH`, with ``dof``.
        constraints: the fixed distances.

    Raises:
        TypeError: dynamics with a term that constraints cannot hold.
        ValueError: rates that differ within a molecule; a thermostat without dof. In ``init``
            or ``simulate``: atoms that are not there, constraints that are not independent, a start
            that is far from satisfying them.
    """

    def __init__(self, dynamics: Dynamics[Any], constraints: Any) -> None:
        nn.Module.__init__(self)
        if not isinstance(constraints, DistanceConstraints):
            raise TypeError(
                "constraints must be DistanceConstraints(index, length); got "
                f"{describe_type(constraints)}."
            )
        self.dynamics: Any = dynamics
        self.constraints: DistanceConstraints = constraints
        self.validate()
        self.state_type = dynamics.state_type

    @property
    def potential(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The potential of the dynamics, without the constraints."""
        return self.dynamics.potential

    @property
    def mass(self) -> Tensor:
        return self.dynamics.mass

    @property
    def masses(self) -> Masses:
        """The masses, or the frictions of overdamped dynamics, by which constraints project."""
        return self.dynamics.metric

    def validate(self) -> None:
        """Refuse dynamics that cannot be constrained."""
        inner, name = self.dynamics, type(self.dynamics).__name__
        if not isinstance(inner, Dynamics) or inner.metric is None:
            raise TypeError(
                f"constraints need dynamics with masses or frictions; got {describe_type(inner)}."
            )
        for letter, term in inner.terms.items():
            found = term.constrained(self._held)
            if isinstance(found, Refusal):
                raise TypeError(
                    f"constraints cannot hold term {letter!r} of {name}, {type(term).__name__}: "
                    f"{found.reason}. Use dynamics of which every term declares how constraints "
                    "hold it, such as Hamiltonian, Langevin or NoseHooverChain."
                )
        for rate in ("friction", "rate"):
            # Frictions that are the metric may differ.
            if rate != inner.metric_name:
                self._refuse_unequal(rate, getattr(inner, rate, None))
        if getattr(inner, "dof", 0) is None:
            raise ValueError(
                f"constraints: {name} would count the degrees of freedom that constraints take. "
                "Give it dof = atoms x dim - constraints."
            )

    def _refuse_unequal(self, name: str, rates: Tensor | None) -> None:
        """Refuse rates, of friction or of collisions, that differ within a molecule.

        The exact flow of a friction is ``exp(-h P diag(friction) P)``. It scales the momenta of
        each atom where P commutes with the frictions, which are then those of molecules.
        """
        if rates is None or rates.numel() == 1 or not has_values():
            return
        index, each = self.constraints.index, rates.detach().flatten()
        if len(each) <= int(index.max()):
            return  # The check of a start refuses the atoms that are not there.
        ends = each[index]
        different = ends[:, 0] != ends[:, 1]
        if bool(different.any()):
            row = int(different.nonzero()[0])
            (i, j), (one, other) = index[row].tolist(), ends[row].tolist()
            raise ValueError(
                f"constraints: atoms {i} and {j}, which a constraint joins, have the {name} "
                f"{one:g} and {other:g}, which would take momenta out of the directions that "
                f"constraints allow. Give all atoms of a molecule one {name}."
            )

    @property
    def terms(self) -> dict[str, Term[Any]]:
        # Terms that refuse are found by validate.
        held: dict[str, Any] = {
            letter: term.constrained(self._held) for letter, term in self.dynamics.terms.items()
        }
        return held

    @property
    def _held(self) -> Held:
        return Held(self.constraints, self.masses)

    def init(
        self,
        position: PositionsLike,
        momentum: PositionsLike | None = None,
        generator: Seed = None,
        box: Array | None = None,
    ) -> Any:
        """Make a start at the nearest position that satisfies the constraints.

        Positions move by ``M^-1 G^T x``, differentiably. A warning tells of a move of more than a
        thousandth of a length, and a start whose lengths are off by 15 % is refused. Momenta,
        given or drawn, are projected to those that the constraints allow.

        Args:
            position: ``(*batch, atoms, dim)``; integers become float64.
            momentum: of the same shape; cast to the dtype and device of position.
            generator: a generator, or a seed, which may also be that of the run.
            box: the box of each system at constant pressure, see :class:`~adjsim.LangevinPiston`.
        """
        at, p = as_start(position, momentum)
        held, more = self.constraints, {} if box is None else {"box": box}
        if more and self.reference_box is None:
            raise TypeError(
                f"box is that of a state at constant pressure, and {type(self.dynamics).__name__} "
                "has none: give its potential the box."
            )
        held.check_atoms(at.shape[-2])
        for name in self.dynamics.per_atom:
            check_count(name, getattr(self.dynamics, name), at.shape[-2])
        c = held.coefficients(self.masses, at)
        if has_values():
            self._refuse_far(at, MENDED, "Start closer to them")
            held.refuse_dependent(c, at)
        moved = held.at_lengths(c, at)
        if has_values():
            largest = float((moved - at).detach().norm(dim=-1).max())
            if largest > SILENT * float(held.length.detach().min()):
                text = f"init moved an atom by {largest:.3g} to satisfy the constraints."
                warnings.warn(text, stacklevel=2)
        fields = self.dynamics.started(moved, p, generator, **more)
        state = self._projected(c, self.state_type._make(fields))
        self.check(state)
        return state

    def dof(self, position: Tensor) -> float:
        """Count the degrees of freedom of one system, without pinned atoms and constraints."""
        return float(self.masses.dof(position)) - len(self.constraints.index)

    @torch.no_grad()
    def check(self, state: AnyState) -> None:
        self.dynamics.check(state)
        q, held = position_of(state), self.constraints
        held.check_atoms(q.shape[-2])
        if not has_values():
            return
        dof = getattr(self.dynamics, "dof", None)
        if dof is not None and dof > self.dof(q):
            raise ValueError(
                f"dof is {dof:g}, and constraints and fixed atoms leave {self.dof(q):g} degrees of "
                "freedom: give at most these."
            )
        tolerance = max(TOLERANCE, math.sqrt(torch.finfo(q.dtype).eps))
        remedy = "Make the start by init, which moves it there. With FiniteDifference use h=1e-6"
        self._refuse_far(q, tolerance, remedy)
        c = held.coefficients(self.masses, q)
        held.refuse_dependent(c, q)
        for p, kept in zip(state, self._projected(c, state), strict=True):
            removed = float((p - kept).abs().max())
            if removed > max(MOMENTUM_TOLERANCE, tolerance) * float(p.abs().max()):
                raise ValueError(
                    "momenta at the start change the constrained distances: a part of "
                    f"{removed:g} is along constraints. Make the start by init, which takes it out."
                )

    @torch.no_grad()
    def _refuse_far(self, q: Tensor, tolerance: float, remedy: str) -> None:
        excess = self.constraints.excess(q).reshape(-1, len(self.constraints.index))
        worst, row = excess.abs().max(0).values.max(0)
        if not float(worst) <= tolerance:
            i, j = self.constraints.index[row].tolist()
            raise ValueError(
                f"the start is far from satisfying the constraints: the distance of atoms {i} and "
                f"{j} is off by {float(worst):.2g} of its length, and at most {tolerance:.2g} is "
                f"allowed. {remedy}."
            )

    def kinetic_energy(self, state: Any) -> Energies:
        """Compute ``sum p^2 / 2m``, ``(*batch,)``."""
        return self.dynamics.kinetic_energy(state)

    def potential_energy(self, state: AnyState) -> Energies:
        return self.dynamics.potential_energy(state)

    def constraint_virial(self, state: Any) -> Tensor:
        """Compute the sum of d f over constraints, f their pulls, ``(*batch, dim, dim)``."""
        held, q, p = self.constraints, state.position, state.momentum
        c, d = held.coefficients(self.masses, p), held.differences(q)
        forces = ForcesAt(Forces(self.potential)).values(0.0, self.force_point(state))
        x = held.reactions(c, d, p, forces[FORCE])
        return -(x.unsqueeze(-2) * d) @ d.mT

    def invariant(self, state: Any) -> Energies:
        return self.dynamics.invariant(state)

    @property
    def piston(self) -> Piston:
        """The piston of dynamics at constant pressure."""
        return self.dynamics.piston

    @property
    def reference_box(self) -> Tensor | None:
        return self.dynamics.reference_box

    @property
    def limit(self) -> StateLimit | None:
        return self.dynamics.limit

    def box(self, state: InBox) -> Tensor:
        """Return the boxes of systems at constant pressure, see :class:`~adjsim.LangevinPiston`."""
        return self.dynamics.box(state)

    def volume(self, state: InBox) -> Energies:
        """Compute the volume of each system at constant pressure, ``(*batch,)``."""
        return self.dynamics.volume(state)

    def density(self, state: InBox) -> Energies:
        """Compute the mass of all atoms over the volume, ``(*batch,)``."""
        return self.dynamics.density(state)

    def enthalpy(self, state: InBox) -> Energies:
        """Compute the enthalpy ``K + U + P V``, ``(*batch,)``."""
        return self.dynamics.enthalpy(state)

    def returned_to(self, start: Any) -> Any:
        """Return the state on the constraints that is nearest to a start."""
        held, q = self.constraints, start.position
        c = held.coefficients(self.masses, q)
        return self._projected(c, start._replace(position=held.at_lengths(c, q)))

    def _projected(self, c: Mapping[str, Tensor], state: Any) -> Any:
        """Return the state with tangent momenta."""
        return self.dynamics.projected(
            state, lambda p: self.constraints.project(c, state.position, p)
        )

    def draw_shape(self, t: float, state: AnyState) -> torch.Size:
        return self.dynamics.draw_shape(t, state)

    def characteristic_scales(self, t: float, state: Any, time: float) -> dict[str, Tensor]:
        return self.dynamics.characteristic_scales(t, state, time)

    def damping(self, state: Any) -> float:
        return self.dynamics.damping(state)

    def heat_limit(self, start: AnyState) -> HeatLimit | None:
        return self.dynamics.heat_limit(start)

    def stationary_density(self) -> StationaryDensity | None:
        """Declare the density of the dynamics, on the constraints.

        A length or a mass that requires grad is refused: the measure on the constraints,
        det(G M^-1 G^T)^(1/2), depends on it. So are frictions of atoms, which are the masses of
        diffusion along constraints.
        """
        metric, name = self.masses.mass, self.dynamics.metric_name
        named = {"length": self.constraints.length}
        # One friction changes the measure by a factor alone, and diffusion has no momenta.
        if name == "mass" or metric.numel() > 1:
            named[name] = metric
        for name, value in named.items():
            if value.requires_grad:
                raise TypeError(
                    f"the {name} of Constrained requires grad, and the measure on the constraints "
                    "depends on it, which is not part of the density here. Use Pathwise, or "
                    "do not train it."
                )
        return self.dynamics.stationary_density()
