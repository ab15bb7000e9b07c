"""Distances between groups of atoms, such as residues."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adjsim.core.arguments import as_indices
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Number, PositionsLike
from adjsim.observables.members import atom_weights, length, nearest, positions, positive
from adjsim.observables.neighbours import optional_box, pair_matrix, values_unknown


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
        position: ``(*batch, atoms, dim)``.
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
    q, smooth = positions("closest_distances", position), positive("width", width)
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
            raise ValueError(
                f"groups must be ({q.shape[-2]},), the group of each atom; got shape "
                f"{tuple(group.shape)}."
            )
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
