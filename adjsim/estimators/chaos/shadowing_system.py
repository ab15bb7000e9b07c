"""The least-squares problem of shadowing: a block-tridiagonal system."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The sums over K segments of R trajectories, with M basis cotangents and m observables.

    Attributes:
        metric: C_i, the integral of ``W^T W``, ``(K, R, M, M)``.
        mixed: d_i, the integral of ``W^T v``, ``(K, m, R, M)``.
        triangles: R_i of the orthonormalisation at the start of segment i, ``(K, R, M, M)``.
        removed: b_i, the components taken from v there, ``(K, m, R, M)``.
    """

    metric: Tensor
    mixed: Tensor
    triangles: Tensor
    removed: Tensor


def solve_segments(segments: Segments, penalty: float) -> Tensor:
    """Minimise the size of the combined cotangent along the trajectory.

    ::

        min  sum_i a_i^T C_i a_i / 2 + d_i^T a_i        with  a_{i-1} = R_i a_i + b_i

    With the constraints as E a = b the multipliers solve
    ``(E C^-1 E^T + penalty I) mu = -b - E C^-1 d``, a block-tridiagonal system with K - 1 blocks of
    size M, and ``a = -C^-1 (d + E^T mu)``, ``(K, m, R, M)``.
    """
    metric, d, r, b = segments
    count = len(metric)
    inverse = torch.linalg.inv(metric)
    # Vectors are columns from here on, with the observables as columns beside each other.
    d, b = (x.movedim(1, -1) for x in (d, b))
    unit = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    carried = r @ inverse
    pivots, sides = list[Tensor](), list[Tensor]()
    for i in range(1, count):
        pivot = inverse[i - 1] + carried[i] @ r[i].mT + penalty * unit
        side = -b[i] - inverse[i - 1] @ d[i - 1] + carried[i] @ d[i]
        if i > 1:
            # The block between the rows i - 1 and i is -R_{i-1} C_{i-1}^-1.
            factor = torch.linalg.solve(pivots[-1], -carried[i - 1]).mT
            pivot = pivot + factor @ carried[i - 1]
            side = side - factor @ sides[-1]
        pivots.append(pivot)
        sides.append(side)
    multipliers = [torch.zeros_like(d[0])] * (count + 1)
    for i in range(count - 1, 0, -1):
        multipliers[i] = torch.linalg.solve(
            pivots[i - 1], sides[i - 1] + carried[i] @ multipliers[i + 1]
        )
    found = [
        -inverse[i] @ (d[i] + multipliers[i + 1] - r[i].mT @ multipliers[i]) for i in range(count)
    ]
    return torch.stack(found).movedim(-1, 1)
