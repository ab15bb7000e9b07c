"""Mechanics of bodies: Newton's equations with contact, friction, damping and control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import describe_type
from adjsim.core.derived import derived
from adjsim.core.parameters import check_count, register
from adjsim.core.reading import as_part
from adjsim.core.state import AnyState, PhaseState, in_transform, momentum_of, position_of
from adjsim.core.typing import Array, Energies, Number, PositionsLike, Seed
from adjsim.dynamics.masses import PER_ATOM, Masses
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.mechanics.control import Feedback
from adjsim.dynamics.mechanics.damping import RayleighDamping, ViscousDamping
from adjsim.dynamics.mechanics.friction import CoulombFriction
from adjsim.dynamics.mechanics.prescribed import Prescribed, PrescribedStream
from adjsim.dynamics.stable_step import largest_stable_step
from adjsim.dynamics.starts import as_start
from adjsim.dynamics.terms import Term
from adjsim.potentials import Contact, SurfaceContact
from adjsim.potentials.base import ForceField, force
from adjsim.potentials.signals.controls import Controller

# Relative error of the square of the frequency that bounds the step.
STEP_TOLERANCE = 1e-3


class Mechanics(MassiveDynamics[PhaseState]):
    """Newton's equations of a body with contact, friction, damping and control::

        dq/dt = p/m
        dp/dt = F(q) + F_contact(q) + friction - gamma p - beta K M^-1 p + u(t, q, p/m)

    ====== ========================================= =======================
    letter term                                      present with
    ====== ========================================= =======================
    A      stream, :class:`~.terms.Stream`           always
    B      kick, :class:`~.terms.Kick`               always
    F      :class:`~.friction.CoulombFriction`       friction
    D      :class:`~.damping.ViscousDamping`, or     damping,
           :class:`~.damping.RayleighDamping`        stiffness_damping
    U      :class:`~.control.Feedback`               a Controller as control
    ====== ========================================= =======================

    A term is present if its number is not zero, or requires grad. ``scheme`` is a palindrome over
    the terms that are present: "BAB" (velocity Verlet) without, and "FDBABDF" with friction and
    damping.

    A run with an explicit step above the largest stable one at its start, 2 over the largest
    angular frequency, is refused, with the bound. A body that an actuator stiffens later needs
    less. For stiff bodies use an implicit solver, and for rigid bodies with impacts
    :func:`~adjsim.solve_ivp` with events. Friction has no static regime.

    Reversing a step multiplies rounding errors by exp(rate dt), with the rates of damping and, for
    vertices that stick, ``mu N/(m v_s)``, so :class:`~adjsim.ReversibleAdjoint` stores checkpoints.

    Args:
        potential: energy of the body and of the loads on it, or a force field.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``; infinite for fixed vertices.
        contact: contact of vertices with a surface, whose normal force is that of friction.
            Contacts without friction may also be part of the potential.
        friction: coefficient mu of friction with the surface, of the shapes of mass.
        smoothing: velocity v_s above which friction is that of sliding, length / time; one number.
        damping: rate gamma at which momenta decay, 1/time, of the shapes of mass.
        stiffness_damping: beta, time; one number. A mode of angular frequency w decays at the rate
            ``beta w^2 / 2``. K is that of the start, of time zero if the body depends on time.
        control: a :class:`~adjsim.Controller`, or a force field that sees time and positions alone,
            which is added to the potential.
        prescribed: ``(index, path)``: the vertices ``(vertices,)`` and a function of time whose
            values are their positions ``(vertices, dim)``. The start has to agree with it. A path
            that is not a module is a function without parameters.

    Raises:
        ValueError: friction without a contact; negative friction or damping; stiffness damping of a
            body with prescribed vertices, whose velocities it does not see. In ``simulate``: a step
            above the stable one, a start that is not on the path, a penetration beyond the limit.
        TypeError: a contact or a control of another kind.
    """

    body: nn.Module
    contact: SurfaceContact | None
    control: Any
    friction: Tensor
    smoothing: Tensor
    damping_rate: Tensor
    stiffness_damping: Tensor

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        *,
        contact: SurfaceContact | None = None,
        friction: Number = 0.0,
        smoothing: Number = 1e-2,
        damping: Number = 0.0,
        stiffness_damping: Number = 0.0,
        control: ForceField | Controller | None = None,
        prescribed: tuple[Array, Callable[[Any], Tensor]] | None = None,
    ) -> None:
        super().__init__(potential, mass)
        self.contact, self.control = contact, control
        self.prescribed = None if prescribed is None else Prescribed(*prescribed)
        register(self, "friction", friction, shapes=PER_ATOM)
        register(self, "smoothing", smoothing, positive=True, single=True)
        register(self, "damping_rate", damping, shapes=PER_ATOM)
        register(self, "stiffness_damping", stiffness_damping, single=True)
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        # The potential is the sum of the body and of what acts on it.
        super().__setattr__("body" if name == "potential" else name, value)

    @property
    def potential(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The potential of the body, the contact and a control that is not a Controller."""
        total: Any = self.body
        for part in (self.contact, self.control):
            if part is not None and not isinstance(part, Controller):
                total = total + part
        return total if total is self.body else as_part(total, self)

    def validate(self) -> None:
        """Refuse numbers and parts that do not go together."""
        contact, control = self.contact, self.control
        if contact is not None and not isinstance(contact, SurfaceContact):
            raise TypeError(
                f"contact must be a contact with a surface, such as PlaneContact(...); got "
                f"{describe_type(contact)}."
            )
        if control is not None and not isinstance(control, ForceField | Controller):
            raise TypeError(
                "control must be a force field, such as OpenLoop(signal), or a Controller, such as "
                f"NeuralController(network); got {describe_type(control)}."
            )
        if "F" in self.present and contact is None:
            raise ValueError("friction needs a surface: give a contact.")
        if "R" in self.present and self.prescribed is not None:
            raise ValueError(
                "stiffness_damping does not see the velocities of prescribed vertices. Use "
                "damping, or fix vertices that do not move by an infinite mass."
            )

    @derived("friction", "damping_rate", "stiffness_damping")
    def present(self) -> str:
        """The forces whose numbers are not zero: F friction, R Rayleigh damping, V viscous."""
        numbers = {"F": "friction", "R": "stiffness_damping", "V": "damping_rate"}
        return "".join(
            letter
            for letter, name in numbers.items()
            if _is_given(name.removesuffix("_rate"), getattr(self, name))
        )

    @property
    def terms(self) -> dict[str, Term[Any]]:
        masses, found = self.masses, self.motion
        if self.prescribed is not None:
            found["A"] = PrescribedStream(masses, self.prescribed)
        if "F" in self.present:
            assert self.contact is not None
            found["F"] = CoulombFriction(masses, self.contact, self.friction, self.smoothing)
        if "R" in self.present:
            rates = self.damping_rate, self.stiffness_damping
            found["D"] = RayleighDamping(masses, self.body, *rates)
        elif "V" in self.present:
            found["D"] = ViscousDamping(self.damping_rate)
        if isinstance(self.control, Controller):
            found["U"] = Feedback(masses, self.control)
        return found

    @property
    def scheme(self) -> str:
        """A palindrome over the terms, such as "FDBABDF", for :class:`~adjsim.Splitting`."""
        outer = "".join(letter for letter in "FDU" if letter in self.terms)
        return f"{outer}BAB{outer[::-1]}"

    @property
    def masses(self) -> Masses:
        return Masses(self.mass, None if self.prescribed is None else self.prescribed.mask)

    def init(
        self,
        position: PositionsLike,
        momentum: PositionsLike | None = None,
        generator: Seed = None,
        *,
        velocity: PositionsLike | None = None,
    ) -> PhaseState:
        """Make a start, at rest unless the momentum or the velocity is given, but not both.

        A velocity v, ``(*batch, atoms, dim)`` as the position, becomes the momentum ``m v``,
        differentiable in both, and zero on fixed and prescribed vertices.
        """
        if momentum is not None and velocity is not None:
            raise ValueError("init takes a momentum or a velocity, not both.")
        at, p = as_start(position, momentum)
        if velocity is not None:
            _, v = as_start(position, velocity)
            assert v is not None
            m = self.masses(at)
            mobile = torch.isfinite(m)
            p = torch.where(mobile, torch.where(mobile, m, 0.0) * v, 0.0)
        state = PhaseState(at, torch.zeros_like(at) if p is None else p)
        self.check(state)
        return state

    def check(self, state: AnyState) -> None:
        super().check(state)
        for name, value in (("friction", self.friction), ("damping", self.damping_rate)):
            check_count(name, value, state[0].shape[-2])
        if self.prescribed is not None:
            self.prescribed.check_momentum(momentum_of(state))

    def check_step(self, dt: float, state: PhaseState, t: float = 0.0) -> None:
        bound = self.largest_step(state, t)
        if dt > bound:
            raise ValueError(
                f"dt = {dt:g} is too long for the stiffness of the body or its contact: steps "
                f"above {bound:.3g} (2 / omega_max) are unstable. Use a smaller dt, softer "
                "numbers, or an implicit solver such as BackwardEuler(dt)."
            )

    @torch.no_grad()
    def largest_step(self, state: PhaseState, t: float = 0.0) -> float:
        """Estimate the largest stable step of the schemes, 2 / omega_max, at a state.

        Contact counts with the largest stiffness that the energy of the start reaches.
        """
        q, energy = state.position.detach(), self._available_energy(state, t)
        options: dict[str, Any] = {"contact": self.contact, "tolerance": STEP_TOLERANCE}
        return largest_stable_step(self.body, self.masses(q).detach(), q, energy=energy, **options)

    def _available_energy(self, state: PhaseState, t: float) -> float | None:
        """Estimate the largest energy that contact with one vertex can store; None: unknown.

        It is the kinetic energy, that of the contact, and the work of the forces along the gaps.
        """
        contact, q = self.contact, state.position
        if contact is None:
            return None
        load = (-force(self.body, q, t) * contact.normal(q, t)).sum(-1).clamp(min=0)
        total = (load * contact.gap(q, t).clamp(min=0)).sum(-1) + self.kinetic_energy(state)
        if isinstance(contact, Contact):
            total = total + contact(q)
        found = float(total.max())
        return found if found > 0 else None

    @property
    def limit(self) -> SurfaceLimit | None:
        return None if self.contact is None else SurfaceLimit(self.contact)

    def check_values(self, t: float, state: PhaseState) -> None:
        super().check_values(t, state)
        if in_transform():
            return
        with torch.no_grad():
            if self.prescribed is not None:
                self.prescribed.check(t, state.position.detach())
            if self.contact is not None:
                self.contact.refuse_penetration(state.position.detach(), t)

    def damping(self, state: PhaseState) -> float:
        with torch.no_grad():
            term = self.terms.get("D")
            if isinstance(term, RayleighDamping):
                return max(term.bounds(state))
            return float(self.damping_rate.max())

    def error_growth(self, t: Any, state: PhaseState) -> Tensor | None:
        term = self.terms.get("F")
        return term.rate(t, state) if isinstance(term, CoulombFriction) else None

    def energy(self, state: PhaseState) -> Energies:
        """Compute the energy ``sum p^2/2m + U(q)``, ``(*batch,)``, with that of the contact."""
        potential = self.potential
        if isinstance(potential, ForceField):
            raise TypeError(
                "energy: a moving contact, a control or another force field is a force without an "
                "energy. kinetic_energy(state) and the energies of the parts are defined."
            )
        return self.kinetic_energy(state) + potential(state.position)

    def invariant(self, state: PhaseState) -> Energies:
        """Compute the energy, which is conserved without friction, damping, feedback and paths."""
        if len(self.terms) > 2 or self.prescribed is not None:
            return super().invariant(state)
        return self.energy(state)


@dataclass(frozen=True)
class SurfaceLimit:
    """A surface behind which no vertex may be."""

    surface: SurfaceContact

    def margin(self, state: AnyState, t: Any) -> Tensor | None:
        return self.surface.margin(position_of(state), t)

    def refuse(self, state: AnyState, t: float) -> None:
        self.surface.refuse_penetration(position_of(state), t)


def _is_given(name: str, number: Tensor) -> bool:
    value = number.detach()
    if not bool((value >= 0).all()):
        raise ValueError(f"{name} must not be negative; got {value.tolist()}.")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} must be finite; got {value.tolist()}.")
    return number.requires_grad or bool((value != 0).any())
