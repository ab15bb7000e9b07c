"""Pairs of atoms within a distance, found by a tree."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

from adjsim._box import perpendicular_widths


def pairs_within(q: Tensor, cell: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
    """Find the pairs i<j whose nearest images are within a radius of any size.

    The search runs on the CPU, in float64.

    Args:
        q: positions ``(atoms, dim)``, finite. Atoms may be outside the box.
        cell: a box from :func:`~adjsim._box.checked_box`; None: no box.
        radius: the largest distance.

    Returns:
        i and j, on the device of the position, ordered by i and then by j.
    """
    points = q.detach().double().cpu().numpy()
    if cell is not None:
        rows = torch.diag(cell) if cell.ndim == 1 else cell
        # No nearest image is farther than the sum of the edges.
        radius = min(radius, float(rows.norm(dim=1).sum()))
    if cell is None:
        pairs = KDTree(points).query_pairs(radius, output_type="ndarray")
    elif cell.ndim == 1:
        lengths = cell.cpu().numpy()
        wrapped = points - lengths * np.floor(points / lengths)
        # Rounding takes a coordinate near a face beyond it, which the tree refuses.
        wrapped[(wrapped < 0) | (wrapped >= lengths)] = 0.0
        tree = KDTree(wrapped, boxsize=lengths)
        pairs = tree.query_pairs(radius, output_type="ndarray")
    else:
        pairs = _with_images(points, cell, radius)
    numbers = np.sort(pairs[:, 0] * len(points) + pairs[:, 1])
    # In a tilted cell several images of a pair may be within a radius beyond half the width.
    numbers = numbers[np.diff(numbers, prepend=-1) > 0]
    i, j = torch.from_numpy(np.stack(np.divmod(numbers, len(points)))).to(q.device)
    return i, j


def _with_images(points: np.ndarray, cell: Tensor, radius: float) -> np.ndarray:
    """Find the pairs i<j of a tilted cell, by a tree of the atoms and their images around it."""
    rows = cell.cpu().numpy()
    fractions = points @ np.linalg.inv(rows)
    fractions -= np.floor(fractions)
    margin = radius / perpendicular_widths(cell).cpu().numpy()
    cells = [range(-math.ceil(x), math.ceil(x) + 1) for x in margin]
    images: list[np.ndarray] = []
    atoms: list[np.ndarray] = []
    for offset in product(*cells):
        moved = fractions + np.array(offset, dtype=np.float64)
        # A small excess keeps images that rounding would put beyond the margin.
        near = ((moved >= -margin - 1e-9) & (moved <= 1 + margin + 1e-9)).all(1)
        images.append(moved[near])
        atoms.append(np.flatnonzero(near))
    tree = KDTree(np.concatenate(images) @ rows)
    found = KDTree(fractions @ rows).sparse_distance_matrix(tree, radius, output_type="ndarray")
    pairs = np.stack([found["i"], np.concatenate(atoms)[found["j"]]], 1)
    return pairs[pairs[:, 0] < pairs[:, 1]]
