"""Force fields with virtual sites, whose forces act on the atoms with mass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.force_field import ForceFieldPotential
from adjsim.potentials.products import ParameterVJP, Pullback, Tensors, VJPSum
from adjsim.potentials.sites.virtual_sites import Stretch, VirtualSites
from adjsim.potentials.strained import Forced, StrainedPullback


class SitedForceField(ForceFieldPotential):
    """A force field of all particles, some of which are virtual sites, ``U(q) = V(X(q; w))``.

    Positions, forces and states are those of the atoms with mass. The parts of the sum are given
    all particles, so their parameters, such as charges, have numbers of sites too. Each part keeps
    its closed forms and its neighbour lists. The parameters w of the sites have names that begin
    with ``sites``, such as ``sites.three_particle_average.weight``.

    With the Jacobian J of X, the force is J^T F. Its product with a cotangent v is ``J^T H J v``
    plus the second derivative of ``F . X`` along v, with the derivative H of F. Along a strain
    atoms and box are stretched, and sites follow their atoms:

    ``W = W_all + (work of J^T F on the stretched atoms) - (work of F on all, stretched)``.

    The difference is zero for averages of atoms, and in closed form for all sites. In exact runs
    each force of a site on an atom is rounded, and the first atom has the rest, so sums are exact.

    Args:
        sites: the virtual sites.
        labels, parts: see :class:`~adjsim.potentials.ForceFieldPotential`.
    """

    sites: VirtualSites

    def __init__(
        self,
        sites: VirtualSites,
        labels: Mapping[str, Sequence[str]] | None = None,
        **parts: nn.Module,
    ) -> None:
        super().__init__(labels, **parts)
        self.sites = sites

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The parts, which take the positions of all particles."""
        return tuple(part for name, part in self.named_children() if name != "sites")

    @property
    def corrects_tail(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(getattr(part, "corrects_tail", False) for part in self.parts)

    def terms(self) -> list[nn.Module]:
        # A part alone has no energy of the positions of the atoms.
        return [self]

    def evaluated_parts(self, position: Tensor) -> tuple[list[nn.Module], Tensor]:
        return list(self.parts), self.sites(position)

    def forward(self, position: Positions) -> Energies:
        return super().forward(self.sites(position))

    def virial(self, position: Positions) -> Tensor:
        placed = self.sites.placed(position)
        found = super().virial(placed.position)
        return found + placed.virial(super().force(placed.position))

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        placed = self.sites.placed(position)
        return placed.on_atoms(super().force(placed.position, rounding), rounding)

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            placed = self.sites.placed(position)
            force, product = super().force_vjp(placed.position, parameters, rounding)
            value = placed.on_atoms(force, rounding)

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            with torch.no_grad():
                along, rest = product(placed.pushed(v))
                found, deferred = placed.pulled_back(along, force, v)
            return found, VJPSum((rest, *deferred))

        return value, pullback

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        return super().strained_energy(self.sites(position), strain)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        placed = self.sites.placed(position)
        values = super().strained_force(placed.position, strain, roundings)
        return placed.strained_on_atoms(values, strain, roundings)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Tensors,
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        with torch.no_grad():
            placed = self.sites.placed(position)
            values, product = super().strained_vjp(placed.position, strain, parameters, roundings)
            found = placed.strained_on_atoms(values, strain, roundings)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            with torch.no_grad():
                stretch = Stretch(strain, c)
                along, moved, rest = product(placed.pushed(v, stretch), c)
                atoms, deferred = placed.pulled_back(along, values[0], v, stretch)
            return atoms, moved, VJPSum((rest, *deferred))

        return found, pullback
