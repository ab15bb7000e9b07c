"""Pairs of near atoms found on the device that holds the positions, by a grid of cells.

Atoms are sorted by the cells in which they lie. Cells are at least as wide as the reach where the
box is, so the partners of an atom lie in its own cell and in the cells around it. In a smaller box
the search goes through images of the cells. The host reads how many candidates and how many pairs
there are, and no position.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from adjsim.core.box import perpendicular_widths, rows_of

# The candidates whose distances are computed at once, at about 200 bytes each.
CANDIDATES = 2**22
# The most cells for each atom, in a gas that fills little of its space.
CELLS = 8
# Cells are wider than the reach by this share, since fractions of the box are rounded.
MARGIN = 1e-9


def pairs_in_cells(
    q: Tensor, box: Tensor | None, reach: float, allowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find i, j and n of pairs with ``|q_j + n box - q_i|`` at most the reach, in no order.

    A pair is found in both orders, and an atom is a pair with itself.

    Args:
        q: ``(systems, atoms, dim)``, finite. Atoms are numbered one system after another.
        box: from :func:`~adjsim.core.box.checked_box`; None: no box, and n is zero.
        allowed: ``(systems,)``, which systems have pairs.
    """
    systems, atoms, dim = q.shape
    q = q.detach().double()
    if box is None:
        low, widths = _extent(q)
        cell = torch.tensor(widths, dtype=q.dtype, device=q.device).diag()
        fractions, whole = (q - low) / cell.diagonal(), torch.zeros_like(q)
    else:
        cell, widths = rows_of(box).to(q), perpendicular_widths(box).tolist()
        fractions = q @ torch.linalg.inv(cell)
        whole = fractions.floor()
        fractions = fractions - whole
    counts = _counts(widths, reach, CELLS * max(atoms, CELLS))
    number = torch.tensor(counts, device=q.device)
    place = (fractions * number).long().clamp_(min=torch.zeros_like(number), max=number - 1)
    own = torch.arange(systems, device=q.device)[:, None].expand(systems, atoms)

    def numbered(at: Tensor) -> Tensor:
        """Number the cells of all systems."""
        found = own
        for axis, count in enumerate(counts):
            found = found * count + at[..., axis]
        return found

    cells, order = numbered(place).flatten().sort()
    first = torch.searchsorted(
        cells, torch.arange(systems * math.prod(counts) + 1, device=q.device)
    )
    points, moves = (fractions @ cell).reshape(-1, dim), whole.reshape(-1, dim).long()
    spans = [math.ceil(reach * n / w) for n, w in zip(counts, widths, strict=True)]
    if box is None:
        spans = [min(span, n - 1) for span, n in zip(spans, counts, strict=True)]
    around = list(product(*(range(-span, span + 1) for span in spans)))
    # The cells of one offset have about as many candidates as there are pairs within cells.
    each = max(1, int(first.diff().square().sum()))
    found = [(order[:0], order[:0], moves[:0])]
    for offsets in torch.tensor(around, device=q.device).split(max(1, CANDIDATES // each)):
        near = place + offsets[:, None, None]
        image = near.div(number, rounding_mode="floor")
        at, searched = numbered(near - image * number), allowed.reshape(-1, 1)
        if box is None:
            searched = searched & (image == 0).all(-1)
        length = ((first[at + 1] - first[at]) * searched).flatten()
        row = torch.repeat_interleave(length)
        begin = first[at].flatten() - (length.cumsum(0) - length)
        j = order[begin[row] + torch.arange(len(row), device=q.device)]
        i, n = row % (systems * atoms), image.reshape(-1, dim)[row]
        # The difference of the points comes first, so both orders have the same distance.
        shift = (n.to(q.dtype)[..., None] * cell).sum(-2)
        distance = (points[j] - points[i] + shift).square().sum(-1)
        kept = (distance <= reach**2).nonzero().squeeze(-1)
        i, j, n = i[kept], j[kept], n[kept]
        found.append((i, j, n + moves[i] - moves[j]))
    i, j, n = map(torch.cat, zip(*found, strict=True))
    return i, j, n


def _extent(q: Tensor) -> tuple[Tensor, list[float]]:
    """Return the lowest corner of all positions, and their extents."""
    points = q.flatten(0, 1)
    low = points.amin(0)
    extent: list[float] = (points.amax(0) - low).tolist()
    # A plane of atoms has one layer of cells.
    least = MARGIN * max(extent) or 1.0
    return low, [max(x, least) for x in extent]


def _counts(widths: list[float], reach: float, most: float) -> list[int]:
    """Choose the number of cells along each axis, at most ``most`` in all."""
    wanted = [max(1.0, width / (reach * (1 + MARGIN)) // 1) for width in widths]
    found = [1] * len(wanted)
    for done, axis in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        found[axis] = max(1, math.floor(min(wanted[axis], most ** (1 / (len(wanted) - done)))))
        most /= found[axis]
    return found
