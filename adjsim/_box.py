"""Periodic cells: ``(dim,)`` edge lengths of an orthogonal cell, or ``(dim, dim)`` rows of a tilted one.

One lattice has many cells, and distances between images belong to the lattice. Rounding fractional coordinates to the nearest
whole numbers finds the nearest image if that is closer than w/2, w the smallest distance between opposite faces of the cell
that is rounded in: each fractional coordinate of such a difference d is ``|d . n_i| / w_i < 1/2``, n_i the normal of a face.
The w of skewed rows may be arbitrarily small. So tilted cells are reduced first, to the rows whose smallest width is the
largest that the lattice has. These are the rows dual to a Minkowski-reduced basis of the reciprocal lattice: 1/w_i is the
length of a reciprocal vector, and the longest of a Minkowski-reduced basis is as short as it can be in up to three dimensions
(Nguyen and Stehle, ACM Trans. Algorithms 5, 46 (2009)).
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from adjsim._inputs import as_tensor
from adjsim._typing import Array


def differences(x: Tensor) -> Tensor:
    """q_i - q_j of all pairs, coordinates first: ``(*batch, atoms, dim)`` to ``(*batch, dim, atoms, atoms)``."""
    columns = x.transpose(-1, -2)
    return columns.unsqueeze(-1) - columns.unsqueeze(-2)


def perpendicular_widths(box: Tensor) -> Tensor:
    """The distances between opposite faces of a cell, ``(dim,)``."""
    return box if box.ndim == 1 else 1 / torch.linalg.inv(box).norm(dim=0)


def checked_box(box: Array, cutoff: float | None) -> Tensor:
    """A cell in float64, tilted ones reduced: their rows may be others than those given, for the same lattice.

    Raises:
        ValueError: a shape that is no cell, no volume, a cutoff above half the smallest perpendicular width of the reduced
            cell. Below it, rounding finds the nearest image of every pair that the cutoff lets count, and no atom meets two
            images of another, since no vector of the lattice is shorter than that width.
    """
    cell = as_tensor("box", box).to(torch.float64)
    if cell.requires_grad:
        raise ValueError("box cannot require grad: gradients with respect to the cell are not provided.")
    if cell.ndim not in (1, 2) or (cell.ndim == 2 and cell.shape[0] != cell.shape[1]):
        raise ValueError(f"box must be (dim,) lengths or (dim, dim) rows; got shape {tuple(cell.shape)}.")
    volume = cell.prod() if cell.ndim == 1 else torch.linalg.det(cell)
    if not bool(torch.isfinite(cell).all()) or float(volume.abs()) == 0 or (cell.ndim == 1 and float(cell.min()) <= 0):
        raise ValueError(f"box must have positive lengths and a volume; got {cell.tolist()}.")
    if cell.ndim == 2:
        if len(cell) > 3:
            raise ValueError(f"a tilted box has one to three dimensions; got {len(cell)}. Give (dim,) lengths.")
        cell = _reduced(cell)
    width = float(perpendicular_widths(cell).min())
    if cutoff is not None and cutoff > width / 2 * (1 + 1e-12):
        raise ValueError(
            f"cutoff {cutoff:g} is above half the smallest perpendicular width of the box, {width / 2:g}: an atom would meet "
            "two images of another. Use a smaller cutoff or a larger box."
        )
    return cell


def _reduced(cell: Tensor) -> Tensor:
    """The rows of the same lattice whose smallest perpendicular width is the largest."""
    rows = cell.cpu().numpy()
    shortest = _minkowski(np.linalg.inv(rows).T)
    # Whole numbers that make the reduced reciprocal vectors of the given ones, and the rows dual to them of the given rows.
    whole = np.rint(np.linalg.inv(np.rint(shortest @ rows.T)).T)
    if bool((np.abs(whole).sum(1) == 1).all()):
        return cell
    return torch.from_numpy(whole @ rows).to(cell.device)


def _minkowski(rows: np.ndarray) -> np.ndarray:
    """A Minkowski-reduced basis, shortest row first, in up to three dimensions: no row can be made shorter by adding or
    subtracting shorter ones."""
    while True:
        rows = rows[np.argsort((rows * rows).sum(1), kind="stable")]
        for k in range(1, len(rows)):
            row, shorter = rows[k], rows[:k]
            # Multiples of one row, which very tilted cells take many of; then every sum of shorter rows.
            candidates = [row - np.rint(row @ other / (other @ other)) * other for other in shorter]
            candidates += [row + np.array(signs) @ shorter for signs in product((-1.0, 0.0, 1.0), repeat=k)]
            best = min(candidates, key=lambda x: float(x @ x))
            if best @ best < row @ row * (1 - 1e-12):
                rows = np.concatenate([shorter, best[None], rows[k + 1 :]])
                break
        else:
            return rows


def nearest_image(d: Tensor, box: Tensor, *, exact: bool = True) -> Tensor:
    """Differences ``(*batch, dim, ...)``, coordinates third from the end, to the nearest image.

    The box is one of :func:`checked_box`. In a tilted cell rounding finds the nearest image only within half the smallest
    width, which a cutoff guarantees; ``exact`` searches the images around it too, which in a reduced cell are enough.
    """
    if box.shape[0] != d.shape[-3]:
        raise ValueError(f"box has {box.shape[0]} dimensions and position {d.shape[-3]}.")
    if box.ndim == 1:
        length = box[:, None, None]
        return d - length * torch.round(d.detach() / length)
    rows = d.detach().movedim(-3, -1)
    shift = -torch.round(rows @ torch.linalg.inv(box)) @ box
    if exact:
        near = rows + shift
        best, extra = (near * near).sum(-1), torch.zeros_like(near)
        for offset in product((-1.0, 0.0, 1.0), repeat=box.shape[0]):
            step = torch.tensor(offset, dtype=box.dtype, device=box.device) @ box
            distance = ((near + step) ** 2).sum(-1)
            closer = distance < best
            best = torch.where(closer, distance, best)
            extra = torch.where(closer.unsqueeze(-1), step, extra)
        shift = shift + extra
    return d + shift.movedim(-1, -3)
