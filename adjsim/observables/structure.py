"""Structural observables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim._box import checked_box, differences, nearest_image
from adjsim._inputs import as_tensor
from adjsim._typing import Array, Energies, PositionsLike


def radius_of_gyration(position: PositionsLike) -> Energies:
    """Compute ``sqrt(sum |q_i - q_mean|^2 / atoms)``, length, ``(*batch,)``.

    All atoms have the same weight, and positions must not be wrapped into a box.
    """
    q = as_tensor("position", position)
    centered = q - q.mean(-2, keepdim=True)
    return (centered**2).sum(-1).mean(-1).sqrt()


def pair_distances(position: PositionsLike, box: Array | None = None) -> Tensor:
    """Compute the distances of all pairs i<j, to the nearest image in a box.

    The result is ``(*batch, atoms (atoms - 1) / 2)``.
    """
    q = as_tensor("position", position)
    d = differences(q)
    if box is not None:
        (d,) = nearest_image([d], checked_box(box, None).to(q))
    i, j = torch.triu_indices(q.shape[-2], q.shape[-2], offset=1, device=q.device)
    return (d[..., i, j] ** 2).sum(-2).sqrt()


def radial_distribution(position: PositionsLike, edges: Array, box: Array) -> Tensor:
    """Compute the radial distribution function g(r) in a periodic box, averaged over the batch::

        g(r) = (pairs in the shell) / (atoms (atoms - 1) / 2) * V / (shell volume)

    It is a histogram and has no gradient. The box is three-dimensional, and g(r) is valid for r up
    to half the smallest perpendicular width of the box.

    Args:
        position: ``(*batch, atoms, 3)``; frames and replicas are averaged alike.
        edges: ``(bins + 1,)``, increasing distances.
        box: ``(3,)`` or ``(3, 3)``.

    Returns:
        ``(bins,)``, 1 where the fluid has no structure.
    """
    q, bounds = (
        as_tensor("position", position).detach(),
        as_tensor("edges", edges).detach().double().cpu(),
    )
    if bounds.ndim != 1 or len(bounds) < 2 or not bool((bounds[1:] > bounds[:-1]).all()):
        raise ValueError(
            f"edges must be at least two increasing distances; got shape {tuple(bounds.shape)}."
        )
    cell = checked_box(box, float(bounds[-1]))
    frames = q.reshape(-1, *q.shape[-2:])
    counts = torch.zeros(len(bounds) - 1, dtype=torch.float64)
    for frame in frames:
        counts += torch.histogram(pair_distances(frame, cell).double().cpu(), bounds).hist
    volume = float(cell.prod() if cell.ndim == 1 else torch.linalg.det(cell).abs())
    atoms = q.shape[-2]
    shells = 4 / 3 * math.pi * (bounds[1:] ** 3 - bounds[:-1] ** 3)
    return counts / len(frames) / (atoms * (atoms - 1) / 2) * volume / shells
