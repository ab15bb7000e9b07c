"""Periodic cells, orthogonal or tilted.

An orthogonal cell is given by ``(dim,)`` edge lengths, a tilted one by ``(dim, dim)`` rows. Many
cells describe one lattice, and the distances between images depend on the lattice alone. Rounding
fractional coordinates to integers finds the nearest image if the image is closer than w/2.
Here w is the smallest distance between opposite faces of the cell: each fractional coordinate of a
difference d shorter than w/2 has the size ``|d . n_i| / w_i < 1/2``, with n_i the unit normal of a
pair of faces and w_i their distance. For skewed rows w may be arbitrarily small. So tilted cells
are reduced first, to the rows of the lattice with the largest possible w. These rows are dual to a
Minkowski-reduced basis of the reciprocal lattice: 1/w_i is the length of a reciprocal vector, and
in up to three dimensions the longest vector of a Minkowski-reduced basis is as short as possible
(Nguyen and Stehle, ACM Trans. Algorithms 5, 46 (2009)).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from adjsim._inputs import as_tensor
from adjsim._typing import Array


def differences(x: Tensor) -> Tensor:
    """Compute q_i - q_j of all pairs, of shape ``(*batch, dim, atoms, atoms)``."""
    columns = x.transpose(-1, -2)
    return columns.unsqueeze(-1) - columns.unsqueeze(-2)


def perpendicular_widths(box: Tensor) -> Tensor:
    """Compute the distances between opposite faces of a cell, ``(dim,)``."""
    return box if box.ndim == 1 else 1 / torch.linalg.inv(box).norm(dim=0)


def volume(box: Tensor) -> Tensor:
    """Compute the volume of a cell."""
    return box.prod() if box.ndim == 1 else torch.linalg.det(box).abs()


def checked_box(box: Array, cutoff: float | None) -> Tensor:
    """Convert a cell to float64, check it, and reduce it if it is tilted.

    The rows of a tilted cell may change; its lattice does not.

    Raises:
        ValueError: a shape that is not a cell, no volume, a cutoff above half the smallest
            perpendicular width of the reduced cell. With a cutoff of at most half this width,
            rounding finds the nearest image of every pair within the cutoff, and no atom interacts
            with two images of another, since no vector of the lattice is shorter than the width.
    """
    cell = as_tensor("box", box).to(torch.float64)
    if cell.requires_grad:
        raise ValueError(
            "box cannot require grad: gradients with respect to the cell are not provided."
        )
    if cell.ndim not in (1, 2) or (cell.ndim == 2 and cell.shape[0] != cell.shape[1]):
        raise ValueError(
            f"box must be (dim,) lengths or (dim, dim) rows; got shape {tuple(cell.shape)}."
        )
    size = volume(cell)
    if (
        not bool(torch.isfinite(cell).all())
        or float(size) == 0
        or (cell.ndim == 1 and float(cell.min()) <= 0)
    ):
        raise ValueError(f"box must have positive lengths and a volume; got {cell.tolist()}.")
    if cell.ndim == 2:
        if len(cell) > 3:
            raise ValueError(
                f"a tilted box has one to three dimensions; got {len(cell)}. Give (dim,) lengths."
            )
        cell = _reduced(cell)
    width = float(perpendicular_widths(cell).min())
    if cutoff is not None and cutoff > width / 2 * (1 + 1e-12):
        raise ValueError(
            f"cutoff {cutoff:g} is above half the smallest perpendicular width of the box, "
            f"{width / 2:g}: an atom would interact with two images of another. Use a smaller "
            "cutoff or a larger box."
        )
    return cell


def _reduced(cell: Tensor) -> Tensor:
    """Find rows of the same lattice whose smallest perpendicular width is as large as possible."""
    rows = cell.cpu().numpy()
    shortest = _minkowski(np.linalg.inv(rows).T)
    # An integer matrix takes the given reciprocal vectors to the reduced ones. The transpose of its
    # inverse takes the given rows to the dual rows.
    integers = np.rint(np.linalg.inv(np.rint(shortest @ rows.T)).T)
    if bool((np.abs(integers).sum(1) == 1).all()):
        return cell
    return torch.from_numpy(integers @ rows).to(cell.device)


def _minkowski(rows: np.ndarray) -> np.ndarray:
    """Find a Minkowski-reduced basis, shortest row first, in up to three dimensions.

    No row of it can be made shorter by adding or subtracting shorter rows.
    """
    while True:
        rows = rows[np.argsort((rows * rows).sum(1), kind="stable")]
        for k in range(1, len(rows)):
            row, shorter = rows[k], rows[:k]
            # Multiples of one row come first, since very tilted cells need many; then every sum of
            # shorter rows.
            candidates = [row - np.rint(row @ other / (other @ other)) * other for other in shorter]
            candidates += [
                row + np.array(signs) @ shorter for signs in product((-1.0, 0.0, 1.0), repeat=k)
            ]
            best = min(candidates, key=lambda x: float(x @ x))
            if best @ best < row @ row * (1 - 1e-12):
                rows = np.concatenate([shorter, best[None], rows[k + 1 :]])
                break
        else:
            return rows


def nearest_image(parts: Sequence[Tensor], box: Tensor, *, exact: bool = True) -> list[Tensor]:
    """Move differences to the nearest image.

    The differences are one tensor ``(*batch, dim, ...)`` with the coordinates third from the end,
    or one tensor ``(*batch, 1, ...)`` for each coordinate. The box comes from :func:`checked_box`.
    In a tilted cell rounding finds the nearest image only within half the smallest width, which a
    cutoff guarantees. ``exact`` also searches the neighbouring images, which are enough in a
    reduced cell.
    """
    dim = sum(part.shape[-3] for part in parts)
    if box.shape[0] != dim:
        raise ValueError(f"box has {box.shape[0]} dimensions and position {dim}.")
    if box.ndim == 1:
        lengths = [box[:, None, None]] if len(parts) == 1 else list(box)
        return [
            d - x * torch.round(d.detach() * (1 / x)) for d, x in zip(parts, lengths, strict=True)
        ]
    planes = parts[0].split(1, -3) if len(parts) == 1 else parts
    moved = [
        d + shift
        for d, shift in zip(planes, _shifts([d.detach() for d in planes], box, exact), strict=True)
    ]
    return [torch.cat(moved, -3)] if len(parts) == 1 else moved


def _shifts(d: Sequence[Tensor], box: Tensor, exact: bool) -> list[Tensor]:
    """Compute the shifts of differences to their nearest image in a tilted cell, by coordinate.

    They are written in scalar entries of the cell, so that a compiled loop over pairs can contain
    them.
    """
    rows = [row.unbind(0) for row in box.unbind(0)]
    integers = [-torch.round(_dot(d, fraction)) for fraction in _fractions(rows)]
    shift = [_dot(integers, column) for column in zip(*rows, strict=True)]
    if not exact:
        return shift
    near = [x + y for x, y in zip(d, shift, strict=True)]
    best, extra = _dot(near, near), [torch.zeros_like(x) for x in near]
    for offset in product((-1.0, 0.0, 1.0), repeat=len(rows)):
        step = [
            sum(n * x for n, x in zip(offset, column, strict=True))
            for column in zip(*rows, strict=True)
        ]
        other = [x + y for x, y in zip(near, step, strict=True)]
        distance = _dot(other, other)
        closer = distance < best
        best = torch.where(closer, distance, best)
        extra = [torch.where(closer, y, x) for x, y in zip(extra, step, strict=True)]
    return [x + y for x, y in zip(shift, extra, strict=True)]


def _fractions(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Invert a cell: a difference times the i-th column is its i-th fractional coordinate."""
    if len(rows) == 1:
        return [[1 / rows[0][0]]]
    if len(rows) == 2:
        normals = [[rows[1][1], -rows[1][0]], [-rows[0][1], rows[0][0]]]
    else:
        normals = [_cross(rows[1], rows[2]), _cross(rows[2], rows[0]), _cross(rows[0], rows[1])]
    size = _dot(rows[0], normals[0])
    return [[x / size for x in normal] for normal in normals]


def _cross(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total
