"""Pairs of atoms within a distance, and the closest pair, found by a tree."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.box import nearest_image, perpendicular_widths, rows_of


def pairs_within(q: Tensor, cell: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
    """Find the pairs i<j whose nearest images are within a radius of any size.

    The search runs on the CPU, in float64.

    Args:
        q: positions ``(atoms, dim)``, finite. Atoms may be outside the box.
        cell: a box from :func:`~adjsim.core.box.checked_box`; None: no box.
        radius: the largest distance.

    Returns:
        i and j, on the device of the position, ordered by i and then by j.
    """
    points = q.detach().double().cpu().numpy()
    if cell is not None:
        # No nearest image is farther than the sum of the edges.
        radius = min(radius, float(rows_of(cell).norm(dim=1).sum()))
    if cell is None:
        pairs = _tree(points).query_pairs(radius, output_type="ndarray")
    elif cell.ndim == 1:
        lengths = cell.cpu().numpy()
        wrapped = points - lengths * np.floor(points / lengths)
        # Rounding takes a coordinate near a face beyond it, which the tree refuses.
        wrapped[(wrapped < 0) | (wrapped >= lengths)] = 0.0
        tree = _tree(wrapped, boxsize=lengths)
        pairs = tree.query_pairs(radius, output_type="ndarray")
    else:
        i, j, _ = _with_images(points, cell, radius)
        pairs = np.stack([i, j], 1)[i < j]
    numbers = np.sort(pairs[:, 0] * len(points) + pairs[:, 1])
    # In a tilted cell several images of a pair may be within a radius beyond half the width.
    numbers = numbers[np.diff(numbers, prepend=-1) > 0]
    i, j = torch.from_numpy(np.stack(np.divmod(numbers, len(points)))).to(q.device)
    return i, j


def images_within(q: Tensor, cell: Tensor | None, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """Find all pairs of atoms within a radius of any size, with every periodic image of each.

    A pair occurs in both orders. An atom is paired with its own images, and two atoms once for each
    image that is near. The search runs on the CPU, in float64.

    Args:
        q: positions ``(atoms, dim)``, finite. Atoms may be outside the box.
        cell: a box from :func:`~adjsim.core.box.checked_box`; None: no box.
        radius: the largest distance.

    Returns:
        i, j ``(pairs,)`` and the integers n ``(pairs, dim)`` with ``|q_j + n cell - q_i|`` at most
        the radius, on the device of the position, sorted by i, j and n.
    """
    i, j, n = _with_images(q.detach().double().cpu().numpy(), cell, radius)
    other = (i != j) | (n != 0).any(1)
    i, j, n = i[other], j[other], n[other]
    order = np.lexsort((*n.T[::-1], j, i))
    i, j, n = (torch.from_numpy(x[order]).to(q.device) for x in (i, j, n))
    return i, j, n


def closest_atoms(q: Tensor, cell: Tensor | None) -> tuple[int, int, float]:
    """Find the two closest atoms of one system ``(atoms, dim)``, for an error message.

    In a periodic cell the search is in fractions of the cell. Atoms at one place are always found.
    """
    points, size = q.detach().double().cpu().numpy(), None
    if cell is not None:
        points, size = points @ np.linalg.inv(rows_of(cell).cpu().numpy()), 1.0
        points = points - np.floor(points)
        # Rounding takes a small negative coordinate to the upper face, which the tree refuses.
        points[points >= 1] = 0.0
    found = _tree(points, boxsize=size).query(points, k=2)
    distances, others = (np.asarray(part) for part in found)
    i = int(distances[:, 1].argmin())
    j = next(int(k) for k in others[i].tolist() if k != i)
    d = (q[i] - q[j]).detach().double().cpu().reshape(-1, 1, 1)
    if cell is not None:
        (d,) = nearest_image([d], cell.cpu())
    return min(i, j), max(i, j), float(d.norm())


def _with_images(points: np.ndarray, cell: Tensor | None, radius: float) -> list[np.ndarray]:
    """Find i, j and n of all pairs, also of atoms with themselves, by a tree of the images."""
    whole = np.zeros_like(points)
    if cell is None:
        images, owners, offsets = points, np.arange(len(points)), whole
    else:
        rows = rows_of(cell).cpu().numpy()
        fractions = points @ np.linalg.inv(rows)
        whole = np.floor(fractions)
        margin = radius / perpendicular_widths(cell).cpu().numpy()
        near, owners, offsets = _images(fractions - whole, margin)
        points, images = (fractions - whole) @ rows, near @ rows
    found = _tree(points).sparse_distance_matrix(_tree(images), radius, output_type="ndarray")
    i, image = found["i"], found["j"]
    j = owners[image]
    return [i, j, np.rint(offsets[image] + whole[i] - whole[j]).astype(np.int64)]


def _images(fractions: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, ...]:
    """Repeat atoms of a cell, in fractions of it, up to a margin around it.

    Returns:
        The images, the atom of each, and the integers by which it is moved.
    """
    found: list[tuple[np.ndarray, ...]] = []
    for offset in product(*(range(-math.ceil(x), math.ceil(x) + 1) for x in margin)):
        moved = fractions + np.array(offset, dtype=np.float64)
        # A small excess keeps images that rounding would put beyond the margin.
        near = ((moved >= -margin - 1e-9) & (moved <= 1 + margin + 1e-9)).all(1)
        atoms = np.flatnonzero(near)
        found.append((moved[near], atoms, np.tile(offset, (len(atoms), 1))))
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _tree(points: np.ndarray, boxsize: Any = None) -> Any:
    from scipy.spatial import KDTree

    return KDTree(points, boxsize=boxsize)
