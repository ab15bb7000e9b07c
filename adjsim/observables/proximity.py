"""Contacts, hydrogen bonds, and distances between groups of atoms such as residues."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adjsim.core.arguments import as_indices, as_number, as_positive, as_tensor, wrong_shape
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Energies, Number, PositionsLike
from adjsim.observables.members import (
    atom_weights,
    length,
    members,
    nearest,
    positions,
    reference_like,
    vectors,
)
from adjsim.observables.neighbours import optional_box, pair_matrix, values_unknown
from adjsim.potentials.bonded.selection import check_range


def contacts(
    position: PositionsLike,
    pairs: Array,
    distance: Number,
    *,
    width: float | int,
    box: Array | None = None,
) -> Energies:
    """Compute the number of listed pairs that are in contact, ``(*batch,)``::

        n = sum over pairs of 1 / (1 + exp((r_ij - distance) / width))

    Args:
        pairs: ``(n, 2)`` indices of atoms. A pair listed twice counts twice.
        distance: the distance up to which a pair is in contact, at most half the smallest
            perpendicular width of the box; one number, or ``(n,)``. It may carry a gradient.
        width: how smooth this limit is, length. The gradient is large where width is small.

    Raises:
        ValueError: an index, a distance or a width out of range, or of another shape.
    """
    q = positions("contacts", position)
    first, second = members("pairs", pairs, 2, q).unbind(-1)
    with outside_tracing():
        limit = as_tensor("distance", distance)
    if limit.ndim > 0 and tuple(limit.shape) != (len(first),):
        raise wrong_shape("distance", f"one number or ({len(first)},), one for each pair", limit)
    cell = _cell(box, limit, known=not isinstance(distance, Tensor))
    return _in_contact(vectors(q, first, second, cell), limit, width).sum(-1)


def native_contacts(
    position: PositionsLike,
    reference: Array,
    pairs: Array,
    *,
    width: float | int,
    tolerance: float | int = 1.8,
    box: Array | None = None,
) -> Energies:
    """Compute the fraction of native contacts, between 0 and 1, ``(*batch,)``::

        Q = mean over pairs of 1 / (1 + exp((r_ij - tolerance r_ij^0) / width))

    r^0 are distances in the reference. The pairs are those in contact in it, such as heavy atoms
    within 4.5 angstrom of each other whose residues are more than three apart; then a width of 0.2
    angstrom and a tolerance of 1.8 are usual (Best, Hummer and Eaton, PNAS 110, 17874 (2013)).

    The box is that of both structures. Arguments and errors are those of :func:`contacts`.
    """
    q = positions("native_contacts", position)
    y, factor = reference_like(q, reference), as_positive("tolerance", tolerance)
    first, second = members("pairs", pairs, 2, q).unbind(-1)
    cell = optional_box(box)
    limit = factor * length(vectors(y, first, second, cell))
    return _in_contact(vectors(q, first, second, _cell(box, limit)), limit, width).mean(-1)


def _cell(box: Array | None, limit: Tensor, known: bool = False) -> Tensor | None:
    """Check the box, and that it has one image within a limit whose value is ``known`` already."""
    if values_unknown() and not known:
        return optional_box(box)
    with outside_tracing():
        if not bool((limit > 0).all()):
            raise ValueError(f"distance must be positive; got {limit.detach().tolist()}.")
        return optional_box(box, float(limit.detach().max()))


def _in_contact(d: Tensor, limit: Tensor, width: float | int) -> Tensor:
    return torch.sigmoid((limit.to(d) - length(d)) / as_positive("width", width))


def hydrogen_bonds(
    position: PositionsLike,
    donors: Array,
    acceptors: Array,
    *,
    distance: float | int,
    width: float | int,
    angle: float | int = math.pi / 6,
    angular_width: float | int = math.pi / 60,
    box: Array | None = None,
) -> Energies:
    """Compute the number of hydrogen bonds, ``(*batch,)``::

        n = sum over donors D-H and acceptors A of s((distance - |DA|) / width)
            s((cos(HDA) - cos(angle)) / (angular_width sin(angle))),   s(x) = 1 / (1 + exp(-x))

    The criterion is that of Luzar and Chandler (Phys. Rev. Lett. 76, 928 (1996)), made smooth: in
    water the oxygens are within 3.5 angstrom and the angle at the donor, between its hydrogen and
    the acceptor, is below 30 degrees. Narrow widths count bonds and have large gradients. An
    acceptor that is the donor itself or its hydrogen is left out, other atoms of the molecule are
    not. Memory is that of ten numbers for each donor and acceptor.

    Args:
        donors: ``(n, 2)`` indices, the donor atom and its hydrogen, a row for each hydrogen.
        acceptors: ``(m,)`` indices.
        distance, width: the largest distance of donor and acceptor, at most half the smallest
            perpendicular width of the box, and how smooth this limit is, length.
        angle, angular_width: the largest angle at the donor, between 0 and pi, and how smooth this
            limit is, radians.

    Raises:
        ValueError: an index out of range, an acceptor listed twice, a number out of range.
    """
    q = positions("hydrogen_bonds", position)
    limit, width = as_positive("distance", distance), as_positive("width", width)
    largest, smooth = as_number("angle", angle), as_positive("angular_width", angular_width)
    if not 0 < largest < math.pi:
        raise ValueError(f"angle must be between 0 and pi, in radians; got {largest}.")
    bonds, cell = members("donors", donors, 2, q), optional_box(box, limit)
    with outside_tracing():
        ends = as_indices("acceptors", acceptors)
        if ends.ndim != 1 or len(ends) == 0:
            raise ValueError(f"acceptors must be (m,) indices; got shape {tuple(ends.shape)}.")
        check_range("acceptors", ends, q.shape[-2])
        if len(ends.unique()) < len(ends):
            raise ValueError(f"acceptors names an atom twice: {ends.tolist()}.")
        ends = ends.to(q.device)
        rows = torch.arange(len(bonds), device=q.device).repeat_interleave(len(ends))
        to = ends.repeat(len(bonds))
        other = (to != bonds[rows, 0]) & (to != bonds[rows, 1])
        rows, to = rows[other], to[other]
        donor, hydrogen = bonds[rows].unbind(-1)
    d, h = vectors(q, donor, to, cell), vectors(q, donor, hydrogen, cell)
    r, bond = length(d), length(h)
    sizes = r * bond
    cosine = (d * h).sum(-1) / torch.where(sizes == 0, 1.0, sizes)
    straight = (cosine - math.cos(largest)) / (smooth * math.sin(largest))
    return (torch.sigmoid((limit - r) / width) * torch.sigmoid(straight)).sum(-1)


def residue_distances(
    position: PositionsLike,
    groups: Array,
    *,
    mass: Number | None = None,
    box: Array | None = None,
) -> Tensor:
    """Compute the distances between the centres of groups of atoms, ``(*batch, groups, groups)``.

    The matrix is symmetric with a diagonal of zero. The gradient of a distance of zero is taken as
    zero.

    Args:
        groups: ``(atoms,)`` integers, the group of each atom (its residue), from 0; -1 leaves an
            atom out.
        mass: ``(atoms,)`` weights of the centres; None: all atoms have the same weight.
        box: the periodic box, or None. Each group is shorter than half of it, so that its atoms are
            put together by nearest images.

    Raises:
        ValueError: groups of another shape, a number below -1, a group without atoms or mass.
    """
    q = positions("residue_distances", position)
    table, inside = _groups(groups, q)
    m = atom_weights("mass", 1.0 if mass is None else mass, q)[table, 0] * inside.to(q)
    total = m.sum(-1, keepdim=True)
    if not values_unknown() and not bool((total > 0).all()):
        raise ValueError(f"group {int((total <= 0).nonzero()[0, 0])} has no mass.")
    cell = optional_box(box)
    # Atoms of a group relative to its first one, which is added again.
    start = q.index_select(-2, table[:, 0])
    atoms = q.index_select(-2, table.flatten())
    apart = nearest(atoms - start.repeat_interleave(table.shape[1], -2), cell)
    apart = apart.reshape(*q.shape[:-2], *table.shape, q.shape[-1])
    centre = start + ((m / total).unsqueeze(-1) * apart).sum(-2)
    return length(torch.movedim(pair_matrix(centre, cell), -3, -1))


def closest_distances(
    position: PositionsLike, groups: Array, *, width: float | int, box: Array | None = None
) -> Tensor:
    """Compute smooth smallest distances between groups, ``(*batch, groups, groups)``::

        r_ab = -width log(sum over atoms i of a and j of b of exp(-r_ij / width))

    It is below the smallest distance by at most ``width log(number of pairs)``, and equal to it
    for one pair. So a narrow width is exact, but its gradient jumps where another pair becomes the
    closest. The matrix is symmetric with a diagonal of zero. Memory is that of the squares of the
    number of groups and of the atoms of the largest. Arguments and errors are those of
    :func:`residue_distances`, and ``width`` is a positive length.
    """
    q, smooth = positions("closest_distances", position), as_positive("width", width)
    table, inside = _groups(groups, q)
    count, largest = table.shape
    atoms = q.index_select(-2, table.flatten())
    r = length(torch.movedim(pair_matrix(atoms, optional_box(box)), -3, -1))
    both = inside.flatten().unsqueeze(-1) & inside.flatten()
    exponent = torch.where(both, -r / smooth, -math.inf)
    exponent = exponent.reshape(*q.shape[:-2], count, largest, count, largest)
    found = -smooth * torch.logsumexp(exponent, (-3, -1))
    own = torch.eye(count, dtype=torch.bool, device=q.device)
    return torch.where(own, 0.0, found)


def _groups(groups: Array, q: Tensor) -> tuple[Tensor, Tensor]:
    """List the atoms of each group, ``(groups, most atoms)``, and which entries are atoms."""
    with outside_tracing():
        group = as_indices("groups", groups)
        if tuple(group.shape) != (q.shape[-2],):
            raise wrong_shape("groups", f"({q.shape[-2]},), the group of each atom", group)
        if int(group.min()) < -1 or int(group.max()) < 0:
            raise ValueError(f"groups must be counted from 0, or be -1; got {group.tolist()}.")
        lists = [(group == g).nonzero().flatten() for g in range(int(group.max()) + 1)]
        empty = [g for g, atoms in enumerate(lists) if len(atoms) == 0]
        if empty:
            raise ValueError(f"group {empty[0]} has no atoms: number the groups without a gap.")
        table = pad_sequence(lists, batch_first=True, padding_value=-1)
        inside = table >= 0
        # Places without an atom repeat the first one of the group.
        table = torch.where(inside, table, table[:, :1])
        return table.to(q.device), inside.to(q.device)
