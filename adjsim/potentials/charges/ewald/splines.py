"""Cardinal B-splines, by which a mesh takes the charges of atoms.

The spline M_p of order p is positive between 0 and p, and a polynomial of degree p - 1 between
integers, with p - 2 continuous derivatives::

    M_2(x) = 1 - |x - 1|
    M_p(x) = (x M_{p-1}(x) + (p - x) M_{p-1}(x - 1)) / (p - 1)
    dM_p/dx = M_{p-1}(x) - M_{p-1}(x - 1)

An atom at u, in units of the spacing of the mesh, has the weight M_p(u - g) at the point g. See
Essmann et al., J. Chem. Phys. 103, 8577 (1995).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def values(order: int, x: Tensor) -> list[Tensor]:
    """Compute M_p(x + t) for t = 0 ... p - 1 and x in [0, 1), elementwise."""
    found = [x, 1 - x]
    for p in range(3, order + 1):
        padded = [torch.zeros_like(x), *found, torch.zeros_like(x)]
        found = [((x + t) * padded[t + 1] + (p - t - x) * padded[t]) / (p - 1) for t in range(p)]
    return found


def derivatives(order: int, x: Tensor, count: int) -> Tensor:
    """Compute M_p(x + t) and its first derivatives, ``(..., count + 1, p)``."""
    rows: list[Tensor] = []
    for n in range(count + 1):
        row = values(order - n, x)
        for _ in range(n):
            zero = torch.zeros_like(x)
            row = [a - b for a, b in zip([*row, zero], [zero, *row], strict=True)]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def moduli(order: int, points: int) -> Tensor:
    """Compute ``|sum over t of M_p(t + 1) exp(2 pi i m t / points)|^2`` for every m.

    A wave on the mesh is divided by it. With an odd order it is zero at half the number of points,
    where the mean of its neighbours is taken, as OpenMM does.
    """
    at_integers = torch.stack(values(order, torch.zeros((), dtype=torch.float64)))
    m, t = torch.arange(points, dtype=torch.float64), torch.arange(order, dtype=torch.float64)
    phase = 2 * math.pi / points * m.unsqueeze(-1) * t
    found = (at_integers * phase.cos()).sum(-1) ** 2 + (at_integers * phase.sin()).sum(-1) ** 2
    return torch.where(found < 1e-7, (found.roll(1) + found.roll(-1)) / 2, found)
