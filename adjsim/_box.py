"""Periodic cells: ``(dim,)`` edge lengths of an orthogonal cell, or ``(dim, dim)`` rows of a tilted one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor


def differences(x: Tensor) -> Tensor:
    """q_i - q_j of all pairs, coordinates first: ``(*batch, atoms, dim)`` to ``(*batch, dim, atoms, atoms)``."""
    columns = x.transpose(-1, -2)
    return columns.unsqueeze(-1) - columns.unsqueeze(-2)


def perpendicular_widths(box: Tensor) -> Tensor:
    """The distances between opposite faces of a cell, ``(dim,)``."""
    return box if box.ndim == 1 else 1 / torch.linalg.inv(box).norm(dim=0)


def checked_box(box: Tensor | Sequence[float], cutoff: float | None) -> Tensor:
    cell = torch.as_tensor(box, dtype=torch.float64)
    if cell.requires_grad:
        raise ValueError("box cannot require grad: gradients with respect to the cell are not provided.")
    if cell.ndim not in (1, 2) or (cell.ndim == 2 and cell.shape[0] != cell.shape[1]):
        raise ValueError(f"box must be (dim,) lengths or (dim, dim) rows; got shape {tuple(cell.shape)}.")
    volume = cell.prod() if cell.ndim == 1 else torch.linalg.det(cell)
    if not bool(torch.isfinite(cell).all()) or float(volume.abs()) == 0 or (cell.ndim == 1 and float(cell.min()) <= 0):
        raise ValueError(f"box must have positive lengths and a volume; got {cell.tolist()}.")
    width = float(perpendicular_widths(cell).min())
    if cutoff is not None and cutoff > width / 2 * (1 + 1e-12):
        raise ValueError(
            f"cutoff {cutoff:g} is above half the smallest perpendicular width of the box, {width / 2:g}: an atom would meet "
            "two images of another. Use a smaller cutoff or a larger box."
        )
    return cell


def nearest_image(d: Tensor, box: Tensor, *, exact: bool = True) -> Tensor:
    """Differences ``(*batch, dim, ...)``, coordinates third from the end, to the nearest image.

    In a tilted cell rounding finds it only within half the smallest width, which a cutoff guarantees; ``exact`` searches the
    neighbouring images too.
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
