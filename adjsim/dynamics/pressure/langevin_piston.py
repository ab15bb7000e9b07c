"""Constant pressure and temperature: a piston and Langevin baths."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim.core.parameters import register
from adjsim.core.state import AnyState
from adjsim.core.typing import Number
from adjsim.dynamics.masses import PER_ATOM
from adjsim.dynamics.pressure.base import PistonDynamics
from adjsim.dynamics.pressure.terms import PistonBath, PistonState
from adjsim.dynamics.terms import Term


class LangevinPiston(PistonDynamics):
    """Constant pressure and temperature: a piston moves the box, and Langevin baths heat both::

        dq = (p/m + v q) dt                                   v = p_e/W
        dp = (F(q, e) - (1 + d/N_f) v p - friction p) dt + sqrt(2 friction m kT) dW
        de = v dt
        dp_e = (W_q + 2K - d V (P - P_tail) + (d/N_f) 2K - piston_friction p_e) dt
               + sqrt(2 piston_friction W kT) dW

    ============  ================================================================
    e, p_e        strain, the logarithm of the edges of the box over those of the
                  potential's box, and its momentum
    W             mass of the piston, (N_f + d) kT tau^2, energy time^2
    W_q           minus the derivative of the energy as box and positions are
                  stretched together
    N_f, d        degrees of freedom, d atoms, and dimension
    K, V          kinetic energy of the atoms, and volume
    P, P_tail     pressure, and that of the pairs beyond the cutoff (``tail=True``)
    ============  ================================================================

    These are the equations of Martyna, Tobias and Klein, J. Chem. Phys. 101, 4177 (1994), with
    Langevin baths in place of chains. They sample exp(-(U + K + P V + p_e^2/2W)/kT) in volume,
    positions and momenta, the isothermal-isobaric ensemble. With ``tail=True`` the energy
    P_tail V, which is inverse to the volume, is added to P V. With ``axes="each"`` each row of the
    box has a strain of its own, and keeps its direction; then W is divided by d, and 2K, W_q and v
    are those of the row.

    Terms: A (stream), B (kick), V (:class:`~.terms.PistonKick`), S (:class:`~.terms.Dilation`), O
    (:class:`~.terms.PistonBath`). All are shears and scales, so every adjoint and ``exact=True``
    apply. The scheme ``LangevinPiston.scheme``, "BVSAOASVB", is second order and costs one force a
    step. With zero friction there are no baths, O does nothing, and ``invariant`` is conserved.

    Rigid molecules are moved by their centres of mass: ``Constrained(LangevinPiston(...), ...)``,
    see :class:`~adjsim.Constrained`.

    The box has to be large enough for the cutoff throughout a run: a step after which the cutoff is
    above half the smallest width stops it. ``axes="each"`` is for solids and for boxes whose shape
    is held by the matter in them. In a liquid the shape of a box with free edges wanders until an
    edge is too short. Do not use a piston to heat, compress or equilibrate a start that is far from
    equilibrium with a short ``tau``.

    Args:
        potential: energy module with a periodic box, or a sum of modules, of which those without a
            box depend on differences of positions alone.
        mass: see :class:`~adjsim.dynamics.MassiveDynamics`; finite.
        kT: temperature, energy; one number.
        friction: rate at which momenta decay, 1/time, of the shapes of mass; may be zero.
        pressure: P, energy / length^d; one number. With ASE's units a bar is ``ase.units.bar``.
        tau: period of the piston, time; ten to a thousand times that of the fastest vibration.
        piston_friction: rate at which the momentum of the piston decays; None: ``friction``, which
            is one number then.
        axes: "isotropic", or "each", the length of each row of the box.
        tail: whether to add the pressure of the pairs that a cutoff leaves out, see
            :func:`~adjsim.potentials.tail_corrections`.

    Raises:
        ValueError: a potential without a box, one dimension, pinned atoms, negative friction, a
            pressure of more than a million bar in eV / angstrom^3, forces that do not sum to zero
            (a restraint to points in space), in ``init`` or ``simulate``.
        TypeError: a force field, or a potential that cannot follow a box that moves.
    """

    state_type = PistonState
    per_atom = ("mass", "friction")
    scheme: ClassVar[str] = "BVSAOASVB"
    friction: Tensor
    piston_friction: Tensor | None

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        friction: Number = 1.0,
        pressure: Number = 0.0,
        tau: Number = 1.0,
        *,
        piston_friction: Number | None = None,
        axes: str = "isotropic",
        tail: bool = False,
    ) -> None:
        super().__init__(potential, mass, kT, pressure, tau, axes, tail)
        register(self, "friction", friction, finite=True, shapes=PER_ATOM)
        if piston_friction is None:
            self.register_buffer("piston_friction", None)
        else:
            register(self, "piston_friction", piston_friction, finite=True, single=True)
        self.validate()

    def validate(self) -> None:
        """Refuse settings, numbers and a potential that the constructor would refuse."""
        super().validate()
        for name in ("friction", "piston_friction"):
            value = getattr(self, name)
            if value is not None and bool((value.detach() < 0).any()):
                raise ValueError(f"{name} must not be negative; got {value.tolist()}.")
        if self.piston_friction is None and self.friction.numel() > 1:
            raise ValueError(
                "friction has a number for each atom: give that of the piston, piston_friction=."
            )

    @property
    def terms(self) -> dict[str, Term[Any]]:
        piston, friction = self.piston, self.friction
        damping = friction if self.piston_friction is None else self.piston_friction
        bath = PistonBath(self.masses, self.kT, friction, piston, damping)
        return {**self.motion, "O": bath}

    def damping(self, state: PistonState) -> float:
        given = self.friction if self.piston_friction is None else self.piston_friction
        return max(float(x.detach().max()) for x in (self.friction, given))

    def draw_shape(self, t: float, state: AnyState) -> torch.Size:
        atoms, dim = state[0].shape[-2:]
        return torch.Size((atoms + 1, dim))
