"""The base class of dynamics at constant pressure, whose piston moves the box."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from adjsim.core.box import Periodic, as_box, volume
from adjsim.core.layout import is_tracing
from adjsim.core.noise import NoiseStream
from adjsim.core.parameters import register
from adjsim.core.state import AnyState, in_transform
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Number, PositionsLike, Seed
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.pressure.following import refuse_unfollowing
from adjsim.dynamics.pressure.limit import BoxLimit
from adjsim.dynamics.pressure.terms import (
    Dilation,
    InBox,
    Piston,
    PistonKick,
    PistonState,
    StrainedKick,
    tailed_parts,
    volume_at,
)
from adjsim.dynamics.starts import as_start, check_shape, standard_normal
from adjsim.dynamics.terms import Stream, Term
from adjsim.dynamics.thermostats.base import Thermostat
from adjsim.potentials.base import ForceField
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.strained import has_box, reference_box, strained_energy

# A million bar in eV per cubic angstrom: more is a pressure in another unit, or a slip.
LARGEST_PRESSURE = 0.6242


class PistonDynamics(Thermostat[Any]):
    """The base class of dynamics at constant pressure.

    Their states begin with position, momentum, strain and strain momentum. Constructors of
    subclasses call ``validate`` last.

    Args:
        potential: energy module with a periodic box, or a sum of modules, of which those without a
            box depend on differences of positions alone.
        mass: see :class:`~adjsim.dynamics.MassiveDynamics`; finite.
        kT: temperature, energy; one number.
        pressure: P, energy / length^d; one number. With ASE's units a bar is ``ase.units.bar``.
        tau: period of the piston, time; ten to a thousand times that of the fastest vibration.
        axes: "isotropic", or "each", the length of each row of the box.
        tail: whether to add the pressure of the pairs that a cutoff leaves out, see
            :func:`~adjsim.potentials.tail_corrections`.
    """

    pressure: Tensor
    tau: Tensor

    def __init__(
        self,
        potential: nn.Module,
        mass: Number,
        kT: Number,
        pressure: Number,
        tau: Number,
        axes: str,
        tail: bool,
    ) -> None:
        super().__init__(potential, mass, kT)
        register(self, "pressure", pressure, finite=True, single=True)
        register(self, "tau", tau, positive=True, single=True)
        self.axes, self.tail = axes, tail

    def validate(self) -> None:
        """Refuse settings, a potential and a pressure that the constructor would refuse."""
        if self.axes not in ("isotropic", "each"):
            raise ValueError(f'axes must be "isotropic" or "each"; got {self.axes!r}.')
        if isinstance(self.potential, ForceField):
            raise TypeError(
                f"{type(self.potential).__name__} is a force without an energy, and the pressure "
                "follows from an energy."
            )
        if not has_box(self.potential):
            raise ValueError(
                f"constant pressure needs a periodic box, and {type(self.potential).__name__} has "
                "none: make it, or its nonbonded parts, with box=."
            )
        box = self.reference_box
        if len(box) == 1:
            raise ValueError("constant pressure needs two or three dimensions; the box has one.")
        parts = (self.potential, *terms_of(self.potential))
        correction = next((x for x in parts if getattr(x, "corrects_tail", False)), None)
        if self.tail and correction is not None:
            raise ValueError(
                "tail=True would count pairs beyond the cutoff twice: the correction of a "
                f"{type(correction).__name__} follows the box. Leave tail out."
            )
        if self.tail and not tailed_parts(self.potential):
            raise ValueError(
                "tail=True adds the pressure of pairs beyond a cutoff, and no part of "
                f"{type(self.potential).__name__} is a pair potential with a cutoff, of atoms "
                "without virtual sites. With sites let OpenMM's force correct for them, by "
                "setUseDispersionCorrection(True)."
            )
        pressure = float(self.pressure.detach())
        in_ev = any(getattr(x, "energy_unit", None) == "eV" for x in parts)
        if in_ev and abs(pressure) > LARGEST_PRESSURE:
            raise ValueError(
                f"pressure is {pressure:g} eV/angstrom^3, which is "
                f"{pressure / LARGEST_PRESSURE:.3g} million bar. Is it in another unit? "
                "1 bar is ase.units.bar = 6.24e-7 eV/angstrom^3."
            )

    @property
    def motion(self) -> dict[str, Term[Any]]:
        """The terms of all pistons: A (stream), B (kick), V (piston kick) and S (dilation)."""
        return {
            "A": Stream(self.masses),
            "B": StrainedKick(self.masses, self.potential),
            "V": PistonKick(self.masses, self.piston, self.potential),
            "S": Dilation(self.masses, self.piston),
        }

    @property
    def reference_box(self) -> Tensor:
        """The box of the potential, which a state stretches."""
        return reference_box(self.potential)

    @property
    def piston(self) -> Piston:
        """The piston, and the box that it moves."""
        tail = self.potential if self.tail else None
        return Piston(self.pressure, self.kT, self.tau, self.reference_box, tail)

    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        position: PositionsLike,
        momentum: PositionsLike | None = None,
        box: Array | None = None,
        generator: Seed = None,
    ) -> Any:
        """Make a start at a position and a box, and draw the momenta that are not given.

        Args:
            position: ``(*batch, atoms, dim)``; integers become float64.
            momentum: of the same shape; then the piston is at rest.
            box: the box of each system, ``(*batch, dim)`` lengths or ``(*batch, dim, dim)`` rows,
                which strains alone take from that of the potential; None: that of the potential.
            generator: a generator, or a seed, which may also be that of the run.
        """
        at, p = as_start(position, momentum)
        state = self.state_type._make(self.started(at, p, generator, box))
        self.check(state)
        return state

    def started(
        self, position: Tensor, p: Tensor | None, generator: Seed, box: Array | None = None
    ) -> tuple[Tensor, ...]:
        at, batch = position, position.shape[:-2]
        strain = at.new_zeros((*batch, 1, self._axes))
        if box is not None:
            # A box of a float32 state is rounded, and its strain is computed in float64.
            rtol = max(1e-9, 16 * torch.finfo(at.dtype).eps)
            found = self._strain_of(as_box(box).to(at.device), rtol).to(at)
            if found.shape[:-2] not in ((), batch):
                raise ValueError(
                    f"box is of {tuple(found.shape[:-2])} systems, and position of {tuple(batch)}."
                )
            strain = found.expand_as(strain).clone()
        rate = torch.zeros_like(strain)
        if p is None:
            p = self.thermal_momentum(at, self.kT, generator)
            drawn = standard_normal(rate, generator, NoiseStream.PISTON)
            rate = self.piston.thermal(PistonState(at, p, strain, rate)) * drawn
        return (at, p, strain, rate, *self.bath_at_rest(at))

    def bath_at_rest(self, position: Tensor) -> tuple[Tensor, ...]:
        """Return the further fields of a start."""
        return ()

    def _strain_of(self, box: Tensor, rtol: float) -> Tensor:
        """Compute the strain that takes the box of the potential to another one."""
        own = self.reference_box.to(box)
        if box.shape[-own.ndim :] != own.shape:
            raise ValueError(
                f"box has shape {tuple(box.shape)}; it must be (*batch, "
                f"{', '.join(map(str, own.shape))}), as that of the potential."
            )
        ratio = box / own if own.ndim == 1 else box.norm(dim=-1) / own.norm(dim=-1)
        ratio = (ratio if self.axes == "each" else ratio.mean(-1, keepdim=True)).unsqueeze(-2)
        same = Strain.of(own, torch.log(ratio)).stretched(own)
        if not bool(((same - box.reshape(same.shape)).abs() <= rtol * own.abs().max()).all()):
            raise ValueError(
                "box has another shape than that of the potential, and a strain of axes="
                f'"{self.axes}" keeps the shape.'
            )
        return torch.log(ratio)

    def drift(self, t: Any, state: Any) -> Any:
        # Continuous solvers check no states between those that they save.
        if self.limit is not None and not is_tracing() and not in_transform():
            self.limit.refuse(state, float(t))
        return super().drift(t, state)

    def box(self, state: InBox) -> Tensor:
        """Return the boxes of systems, ``(*batch, dim)`` lengths or ``(*batch, dim, dim)`` rows."""
        own = self.reference_box
        box = Strain.of(own, state.strain).stretched(own)
        return box.squeeze(-2) if own.ndim == 1 else box

    def volume(self, state: InBox) -> Energies:
        """Compute the volume of each system, ``(*batch,)``."""
        base = volume(self.reference_box).to(state.strain)
        return volume_at(base, state.strain, state.position.shape[-1])[..., 0, 0]

    def density(self, state: InBox) -> Energies:
        """Compute the mass of all atoms over the volume, ``(*batch,)``."""
        mass = self.masses(state.momentum).expand(state.momentum.shape[-2], 1).sum()
        return mass / self.volume(state)

    def potential_energy(self, state: Any) -> Energies:
        """Compute ``U + P V``, with the energy of the tail's pressure, ``(*batch,)``."""
        at, limit = cast(InBox, state), self.limit
        if limit is not None and not is_tracing() and not in_transform():
            limit.refuse(cast(AnyState, at), 0.0)
        strain = Strain.of(self.reference_box, at.strain)
        energy = strained_energy(self.potential, at.position, strain)
        return energy + self.piston.work(at)

    def enthalpy(self, state: InBox) -> Energies:
        """Compute the enthalpy ``K + U + P V``, with the energy of the tail's pressure."""
        return self.masses.kinetic_energy(state.momentum) + self.potential_energy(state)

    def invariant(self, state: InBox) -> Energies:
        """Compute the enthalpy with that of the piston, which is conserved without friction."""
        piston = state.strain_momentum**2 / (2 * self.piston.mass(state))
        return self.enthalpy(state) + piston.sum((-1, -2))

    def stationary_density(self) -> Canonical:
        return Canonical(self, {"strain_momentum": self.piston.mass})

    def characteristic_scales(self, t: float, state: Any, time: float) -> dict[str, Tensor]:
        rate = self.piston.thermal(state)
        strain = torch.full_like(state.strain, 1.0)
        piston = {"strain_momentum": rate.expand_as(strain), "strain": strain}
        return super().characteristic_scales(t, state, time) | piston

    @property
    def limit(self) -> BoxLimit | None:
        parts = [x for x in self.potential.modules() if isinstance(x, Periodic)]
        cutoffs = [(x.image_cutoff, x.image_box) for x in parts if x.image_box is not None]
        known = [(cutoff, box) for cutoff, box in cutoffs if cutoff is not None]
        if not known:
            return None
        cutoff, box = max(known, key=itemgetter(0))
        return BoxLimit(box, cutoff, self.reference_box)

    def check(self, state: AnyState) -> None:
        super().check(state)
        position = state[0]
        batch, dim = position.shape[:-2], position.shape[-1]
        if len(self.reference_box) != dim:
            raise ValueError(f"box has {len(self.reference_box)} dimensions and position {dim}.")
        for name in ("strain", "strain_momentum"):
            check_shape(state, name, (*batch, 1, self._axes))
        if bool(torch.isinf(self.mass.detach()).any()):
            raise ValueError(
                "an infinite mass pins an atom to a point, which a box that moves does not keep: "
                "give every atom a finite mass."
            )
        if not in_transform():
            if self.limit is not None:
                self.limit.refuse(state, 0.0)
            first: Any = type(state)._make(x[(0,) * len(batch)].detach() for x in state)
            kT = float(self.kT.detach())
            refuse_unfollowing(self.potential, self.reference_box, first.position, first.strain, kT)

    @property
    def _axes(self) -> int:
        return len(self.reference_box) if self.axes == "each" else 1
