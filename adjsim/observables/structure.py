"""Where the atoms are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim._box import checked_box, differences, nearest_image
from adjsim._typing import Energies, Positions


def radius_of_gyration(position: Positions) -> Energies:
    """``sqrt(sum |q_i - q_mean|^2 / atoms)``, length, ``(*batch,)``: equal masses, no periodic cell."""
    centered = position - position.mean(-2, keepdim=True)
    return (centered**2).sum(-1).mean(-1).sqrt()


def pair_distances(position: Positions, box: Tensor | Sequence[float] | None = None) -> Tensor:
    """Distances of all pairs i<j, to the nearest image in a box: ``(*batch, atoms (atoms - 1) / 2)``."""
    d = differences(position)
    if box is not None:
        d = nearest_image(d, checked_box(box, None).to(position))
    i, j = torch.triu_indices(position.shape[-2], position.shape[-2], offset=1, device=position.device)
    return (d[..., i, j] ** 2).sum(-2).sqrt()


def radial_distribution(position: Positions, edges: Tensor, box: Tensor | Sequence[float]) -> Tensor:
    """The radial distribution function g(r) in a three-dimensional periodic box, averaged over the batch.

    ::

        g(r) = (pairs in the shell) / (atoms (atoms - 1) / 2) * V / (shell volume)

    A histogram: it has no gradient. Valid for r up to half the smallest perpendicular width of the box.

    Args:
        position: ``(*batch, atoms, 3)``; frames and replicas are averaged alike.
        edges: ``(bins + 1,)``, increasing distances.
        box: ``(3,)`` or ``(3, 3)``.

    Returns:
        ``(bins,)``, 1 where the fluid has no structure.
    """
    cell = checked_box(box, float(edges[-1]))
    frames = position.detach().reshape(-1, *position.shape[-2:])
    counts = torch.zeros(len(edges) - 1, dtype=torch.float64)
    for frame in frames:
        counts += torch.histogram(pair_distances(frame, cell).double().cpu(), edges.double().cpu()).hist
    volume = float(cell.prod() if cell.ndim == 1 else torch.linalg.det(cell).abs())
    atoms = position.shape[-2]
    shells = 4 / 3 * math.pi * (edges[1:].double() ** 3 - edges[:-1].double() ** 3).cpu()
    return counts / len(frames) / (atoms * (atoms - 1) / 2) * volume / shells
