"""Pairs of atoms within a distance, and their vectors.

Small systems take all pairs, in operations that torch can record and transform. Large systems take
the pairs that a tree finds within the range of the observable. Gradients pass through the vectors
of its pairs, which are computed from the positions again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor
from adjsim.core.box import checked_box, differences, nearest_image
from adjsim.core.layout import is_tracing, outside_tracing
from adjsim.core.neighbour_list import pairs_within
from adjsim.core.state import in_transform
from adjsim.core.typing import Array, PositionsLike

# Atoms from which the tree is used. In a liquid it is faster from 110 atoms (smooth radial
# distribution), 250 (bond order) and 500 (coordination number, histogram).
LARGE = 300


class PairVectors(NamedTuple):
    """Vectors q_i - q_j of pairs i<j to the nearest image, ``(*batch, dim, pairs)``.

    ``found`` holds i and j, ``(2, pairs)``; None: all pairs, row by row.
    """

    vector: Tensor
    atoms: int
    found: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        return (self.vector * self.vector).sum(-2).sqrt()

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return i and j, which are constants."""
        if self.found is None:
            return np.triu_indices(self.atoms, k=1)
        i, j = self.found.cpu().numpy()
        return i, j


def neighbour_pairs(
    position: PositionsLike, box: Array | None, radius: float | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the pairs of atoms within a distance, without building all pairs.

    The vector of a pair to its nearest image is differentiable in the position::

        d = q[i] - q[j] - shift

    The time is proportional to the number of atoms and of pairs found. The search runs on the CPU,
    in float64. For small systems, and for a radius near half the box, all pairs
    (:func:`adjsim.pair_distances`) are faster.

    Args:
        position: ``(atoms, dim)``, one system, finite. Atoms may be outside the box.
        box: ``(dim,)`` lengths or ``(dim, dim)`` rows; None: no periodic box.
        radius: the largest distance, at most half the smallest perpendicular width of the box.

    Returns:
        i and j, ``(pairs,)`` int64 with i<j, ordered by i and then by j, and the shift
        ``(pairs, dim)``, a vector of the lattice, without a graph.

    Raises:
        ValueError: a position of another shape, a radius out of range.
    """
    q, reach = as_tensor("position", position).detach(), as_number("radius", radius)
    if q.ndim != 2:
        raise ValueError(
            f"position must be (atoms, dim), one system; got shape {tuple(q.shape)}. Call "
            "neighbour_pairs for each system of a batch."
        )
    if not 0 < reach < math.inf:
        raise ValueError(f"radius must be positive and finite; got {reach}.")
    cell = None if box is None else checked_box(box, reach).to(q.device)
    i, j = _search(q, cell, reach)
    return i, j, _shifts(q, i, j, cell)


def _search(q: Tensor, cell: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
    """Find the pairs i<j whose nearest images are within a radius of any size, in order."""
    if not bool(torch.isfinite(q).all()):
        raise ValueError("position has NaN or infinite entries, which have no neighbours.")
    if cell is not None and cell.shape[0] != q.shape[-1]:
        raise ValueError(f"box has {cell.shape[0]} dimensions and position {q.shape[-1]}.")
    return pairs_within(q, cell, radius)


def _shifts(q: Tensor, i: Tensor, j: Tensor, cell: Tensor | None) -> Tensor:
    """Compute the lattice vectors that take q_i - q_j to the nearest image, ``(pairs, dim)``."""
    d = (q[i] - q[j]).double()
    if cell is None:
        return torch.zeros_like(d).to(q)
    (near,) = nearest_image([d.T.unsqueeze(-1)], cell)
    rows = torch.diag(cell) if cell.ndim == 1 else cell
    # The difference is a lattice vector up to rounding errors, which are removed.
    return (torch.round((d - near.squeeze(-1).T) @ torch.linalg.inv(rows)) @ rows).to(q)


def refuse_not_finite(q: Tensor, name: str = "position") -> Tensor:
    """Return numbers, and refuse NaN and infinity, which a histogram would leave out."""
    if not values_unknown() and not bool(torch.isfinite(q).all()):
        raise ValueError(f"{name} has NaN or infinite entries.")
    return q


def optional_box(box: Array | None, reach: float | None = None) -> Tensor | None:
    """Check a box that may be None, also while torch records the observable."""
    with outside_tracing():
        return None if box is None else checked_box(box, reach)


def sum_over_pairs(
    q: Tensor,
    cell: Tensor | None,
    radius: float,
    function: Callable[[PairVectors], Tensor],
    large: int = LARGE,
) -> Tensor:
    """Evaluate a function of the pairs of each system: ``(*batch, ...)``.

    The function sums over the pairs. Those beyond the radius must not change its sum by more than
    rounding errors. Systems of ``large`` atoms or more are evaluated one after another, with the
    pairs within the radius alone.
    """
    batch, atoms = q.shape[:-2], q.shape[-2]
    if atoms < large or q.numel() == 0 or values_unknown():
        return function(all_pairs(q, cell))
    values = [function(_near_pairs(x, cell, radius)) for x in q.reshape(-1, *q.shape[-2:])]
    return torch.stack(values).reshape(batch + values[0].shape)


def values_unknown() -> bool:
    """Return whether torch records or transforms this code, so that it cannot read a tensor."""
    return in_transform() or is_tracing() or torch.compiler.is_compiling()


def _near_pairs(q: Tensor, cell: Tensor | None, radius: float) -> PairVectors:
    cell = None if cell is None else cell.to(q.device)
    # The nearest image is found in float64, the distance in the dtype of the position.
    i, j = _search(q.detach(), cell, radius * (1 + 1e-5))
    # index_select accumulates its gradient several times faster than indexing.
    d = q.index_select(0, i) - q.index_select(0, j) - _shifts(q.detach(), i, j, cell)
    return PairVectors(d.T, len(q), torch.stack([i, j]))


def all_pairs(q: Tensor, cell: Tensor | None) -> PairVectors:
    """Compute the vectors of all pairs i<j of each system."""
    atoms = q.shape[-2]
    with outside_tracing():
        i, j = torch.triu_indices(atoms, atoms, offset=1, device=q.device)
    return PairVectors(pair_matrix(q, cell)[..., i, j], atoms)


def pair_matrix(q: Tensor, cell: Tensor | None) -> Tensor:
    """Compute q_i - q_j of all i and j, to the nearest image, ``(*batch, dim, atoms, atoms)``."""
    d = differences(q)
    return d if cell is None else nearest_image([d], cell.to(q))[0]


def refuse_no_neighbours(weight: Tensor, what: str, distance: float) -> None:
    """Refuse weights of neighbours that sum to zero; unknown values give NaN instead."""
    if not values_unknown() and not bool((weight.detach() > 1e-9).all()):
        raise ValueError(
            f"{what} found no neighbours within {distance:g} in a system: use a larger distance, "
            "such as the first minimum of radial_distribution."
        )
