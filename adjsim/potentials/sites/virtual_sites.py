"""Virtual sites: the map from atoms to all particles, its transpose and its second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_whole, outside_inference_mode
from adjsim.core.coordinates import Vector, added, subtracted
from adjsim.core.layout import materialise
from adjsim.core.rounding import UNROUNDED, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Positions
from adjsim.potentials.bonded.terms import split_like, whole
from adjsim.potentials.products import DeferredVJP, with_fewer_axes
from adjsim.potentials.sites.groups import SiteGroup
from adjsim.potentials.strained import Forced


class Stretch(NamedTuple):
    """A cotangent c of the force along a strain, by which vectors x become c x along the rows."""

    strain: Strain
    factor: Tensor

    def dilated(self, vector: Vector) -> Vector:
        """Multiply vectors by c."""
        return split_like(self.strain.dilated(whole(vector).mT, self.factor).mT, vector)

    def pulled_back(self, vector: Vector) -> Vector:
        """Apply the transpose of :meth:`dilated`."""
        return split_like(self.strain.pulled_back(whole(vector).mT, self.factor).mT, vector)


class VirtualSites(nn.Module):
    """Particles without mass whose places follow from those of atoms, ``x = X(q; w)``.

    A state has the atoms with mass alone. ``sites(position)`` gives all particles, with the sites
    among them in their places, differentiable in positions and in the parameters w of the sites.
    With the Jacobian J of X and the forces F on all particles, the force on the atoms is J^T F.

    Args:
        particles: the number of all particles.
        groups: sites by the name of their kind.

    Raises:
        ValueError: no sites, two sites that are one particle, a site or an atom that is not there.
            At evaluation: a position for another number of atoms.
    """

    order: Tensor
    kept: Tensor

    def __init__(self, particles: int, **groups: SiteGroup) -> None:
        super().__init__()
        self.particles = as_whole("particles", particles)
        for name, group in groups.items():
            self.add_module(name, group)
        with outside_inference_mode():
            order, kept = self._places()
            self.register_buffer("order", order, persistent=False)
            self.register_buffer("kept", kept, persistent=False)

    @property
    def groups(self) -> list[SiteGroup]:
        """The sites of each kind."""
        found: list[Any] = list(self._modules.values())
        return found

    def forward(self, position: Positions) -> Positions:
        """Compute the positions of all particles, ``(*batch, particles, dim)``."""
        return self.placed(position).position

    def placed(self, position: Tensor) -> Placed:
        """Place the sites; refuse a position for other atoms."""
        if position.shape[-2] != len(self.kept):
            raise ValueError(
                f"the position has {position.shape[-2]} atoms, and virtual sites follow "
                f"{len(self.kept)}: give the atoms with mass, without the sites."
            )
        return Placed(self, position)

    def validate(self) -> None:
        """Refuse sites whose particles are not those for which the order was made."""
        if not all(map(torch.equal, self._places(), (self.order, self.kept))):
            raise ValueError("the particles of virtual sites have changed: make the sites again.")

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the place of each particle behind the atoms and the sites, and the atoms."""
        if not self.groups:
            raise ValueError("VirtualSites needs at least one group of sites.")
        site = torch.cat([group.site for group in self.groups])
        found, counts = site.unique(return_counts=True)
        if int(counts.max()) > 1:
            raise ValueError(f"particle {int(found[counts.argmax()])} is a virtual site twice.")
        if int(found[-1]) >= self.particles:
            raise ValueError(
                f"particle {int(found[-1])} is a virtual site, and there are {self.particles} "
                "particles, numbered from 0."
            )
        is_atom = torch.ones(self.particles, dtype=torch.bool, device=site.device)
        is_atom[site] = False
        kept = is_atom.nonzero().squeeze(-1)
        most = max(int(group.index.max()) for group in self.groups)
        if most >= len(kept):
            raise ValueError(
                f"a virtual site follows atom {most}, and there are {len(kept)} atoms with mass, "
                "numbered from 0."
            )
        return torch.cat([kept, site]).argsort(), kept


class _Sites:
    """Sites of one group at a position."""

    def __init__(self, group: SiteGroup, position: Tensor) -> None:
        group.check_position(position)
        self.group = group
        self.first = group.members_of(position)[0]
        self.d = group.differences(position)
        self.offset = group.offset(self.d)

    @property
    def columns(self) -> Tensor:
        """The positions of the sites, ``(*batch, dim, sites)``."""
        return whole(added(self.first, self.offset.value))

    def forces(self, force: Tensor) -> Vector:
        """Select the forces on the sites from those on all particles."""
        found = force.mT.index_select(-1, self.group.site)
        return split_like(found, self.first)

    def changes(self, v: Tensor, stretch: Stretch | None) -> list[Vector]:
        """Compute the changes of the displacements, as atoms move by v and are stretched."""
        found = self.group.differences(v)
        if stretch is None or self.group.linear:
            return found
        return [added(x, stretch.dilated(d)) for x, d in zip(found, self.d, strict=True)]

    def pushed(self, v: Tensor, stretch: Stretch | None) -> Tensor:
        """Compute J (v + c q) - c x, which is J v where the offset is linear."""
        moved = added(self.group.members_of(v)[0], self.offset.push(self.changes(v, stretch)))
        if stretch is not None and not self.group.linear:
            moved = subtracted(moved, stretch.dilated(self.offset.value))
        return whole(moved)

    def pull(self, force: Vector, rounding: Rounding) -> list[Vector]:
        """Compute the forces on the atoms after the first, rounded so that sums are exact."""
        return [[rounding.round(x) for x in pull] for pull in self.offset.pull(force)]

    def on_atoms(self, force: Vector, pulls: Sequence[Vector], position: Tensor) -> Tensor:
        """Sum the forces on the atoms after the first, and the rest on the first one."""
        rest = force
        for pull in pulls:
            rest = subtracted(rest, pull)
        members = {k: whole(vector) for k, vector in enumerate([rest, *pulls])}
        return self.group.sums(members, position)

    def products(
        self, along: Vector, force: Vector, v: Tensor, stretch: Stretch | None
    ) -> tuple[Tensor, DeferredVJP]:
        """Compute the cotangents of the atoms and of the parameters, see :class:`Placed`."""
        changes, given = self.changes(v, stretch), along
        if stretch is not None and not self.group.linear:
            given = subtracted(along, stretch.pulled_back(force))
        pulls = self.offset.pull(given)
        if not self.group.linear:
            pulls = list(map(added, pulls, self.offset.turn(force, changes)))
            if stretch is not None:
                own = map(stretch.pulled_back, self.offset.pull(force))
                pulls = list(map(added, pulls, own))
        x = torch.cat([part for vector in (*self.d, *changes) for part in vector], -2)
        weight = torch.cat([*given, *force], -2)
        deferred = DeferredVJP(self.group, self.group.offset_and_rate, weight, x)
        return self.on_atoms(along, pulls, v), deferred


class Placed:
    """All particles at a position of the atoms, and what the map to them does to forces.

    With cotangents v of the force ``J^T F`` and c of the force along a strain, the cotangents of
    the forces on all particles are ``u = J (v + c q) - c x``. Let ``a`` be the cotangent of x that
    the particles return for u. Then the atoms have

    ``J^T a + d(F . u)/dq``, of which the second part is ``d(J^T F . (v + c q))/dq - J^T c F``,

    and the parameters of the sites ``a . dX/dw + d(F . u)/dw``, with F and v held fixed.
    """

    def __init__(self, sites: VirtualSites, position: Tensor) -> None:
        self.sites, self._atoms = sites, position
        self._groups = [_Sites(group, position) for group in sites.groups]
        columns = torch.cat([position.mT, *(found.columns for found in self._groups)], -1)
        self.position = materialise(columns.index_select(-1, sites.order).mT)

    def on_atoms(self, force: Tensor, rounding: Rounding = UNROUNDED) -> Tensor:
        """Compute the forces on the atoms, J^T F."""
        rounding, total = with_fewer_axes(rounding, 1), self._own(force)
        for found in self._groups:
            given = found.forces(force)
            total = total + found.on_atoms(given, found.pull(given, rounding), self._atoms)
        return total

    def pushed(self, v: Tensor, stretch: Stretch | None = None) -> Tensor:
        """Compute the cotangents u of the forces on all particles."""
        columns = [v.mT, *(found.pushed(v, stretch) for found in self._groups)]
        return torch.cat(columns, -1).index_select(-1, self.sites.order).mT

    def pulled_back(
        self, along: Tensor, force: Tensor, v: Tensor, stretch: Stretch | None = None
    ) -> tuple[Tensor, list[DeferredVJP]]:
        """Compute the cotangents of the atoms and of the parameters of the sites."""
        total, deferred = self._own(along), list[DeferredVJP]()
        for found in self._groups:
            moved, rest = found.products(found.forces(along), found.forces(force), v, stretch)
            total = total + moved
            deferred.append(rest)
        return total, deferred

    def strained_on_atoms(self, values: Forced, strain: Strain, roundings: Roundings) -> Forced:
        """Compute J^T F and W from the forces F on all particles and their W.

        To W comes the work of J^T F on the atoms less that of F on all, as both are stretched. It
        is zero for linear sites, which are stretched with their atoms.
        """
        force, along = values
        rounding = with_fewer_axes(roundings.virial, 1)
        for pull, d in self._excess(force):
            work = rounding.round(strain.products(d.mT, pull.mT)).sum(-2, keepdim=True)
            along = along + work.sum_to_size(strain.value.shape)
        return self.on_atoms(force, roundings.force), along

    def virial(self, force: Tensor) -> Tensor:
        """Compute the virial of J^T F on the atoms less that of F on all particles."""
        zero = force.new_zeros(())
        return sum((f @ d.mT for f, d in self._excess(force)), zero)

    def _excess(self, force: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return forces and vectors of sites that a stretch moves otherwise than their atoms."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for found in self._groups:
            if found.group.linear:
                continue
            given = found.forces(force)
            pulls = [*found.offset.pull(given), [-x for x in given]]
            pairs += zip(map(whole, pulls), map(whole, [*found.d, found.offset.value]), strict=True)
        return pairs

    def _own(self, x: Tensor) -> Tensor:
        """Select the vectors of the atoms from those of all particles."""
        return x.mT.index_select(-1, self.sites.kept).mT
