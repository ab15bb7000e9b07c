"""The multipliers of rigid triangles in closed form, as of every rigid water.

The three differences d_k of a triangle go around it and add up to zero. Its torque-free turn is
SETTLE's (Miyamoto and Kollman, J. Comput. Chem. 13, 952 (1992)), here for any three masses, of
which one may be infinite. Multipliers move atoms along the old plane and keep their centre. So the
heights above it are known, and with the components w_k of the differences u_k in the plane, the new
triangle has there the sides

    |b_k|^2 = L_k^2 - (|u_k|^2 - |w_k|^2)

which give b_k up to a turn by an angle t. The pulls along d_k, with the components a_k, have no
torque. The inertia of a triangle is that of three differences with the weights
``c_k = m_i m_j / sum m``, which is ``-S_lm / det`` for the others l and m::

    sum_k c_k a_k x (R(t) b_k - w_k) = 0    gives sin t and cos t

    x_k = a_{k+1} x (c_{k+1} v_{k+1} - c_k v_k) / (a_1 x a_2)    with v_k = R(t) b_k - w_k
"""

from __future__ import annotations

import torch
from torch import Tensor


def triangle_multipliers(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
    """Solve ``|u_k + sum_l S_kl x_l d_l| = L_k`` for triangles; NaN where there is no solution.

    Lengths have the error of rounding over the square of the smallest angle. A single iteration of
    Newton's method takes it out.

    Args:
        u: differences without multipliers, ``(*batch, dim, m, 3)``.
        d: differences along which atoms move, of the same shape.
        S: the metric, ``(m, 3, 3)``.
        length: the sides, ``(m, 3)``.
    """
    a, a_up = _sides((d * d).sum(-3))
    p, q, r = a[..., :1], a[..., 1:2], a_up[..., 1:2]
    w = (d[..., :1] * u).sum(-3) / p
    w_up = ((d[..., 1:2] * u).sum(-3) - q * w) / r
    b, b_up = _sides(length**2 - (u * u).sum(-3) + w * w + w_up * w_up)
    weight = -torch.stack([S[..., 1, 2], S[..., 2, 0], S[..., 0, 1]], -1)
    m, m_up = weight * a, weight * a_up
    # cos(t) cross + sin(t) dot = torque
    dot = (m * b + m_up * b_up).sum(-1, keepdim=True)
    cross = (m * b_up - m_up * b).sum(-1, keepdim=True)
    torque = (m * w_up - m_up * w).sum(-1, keepdim=True)
    square = dot * dot + cross * cross
    # The metric of the inverse of a drift is negative. The turn is the one near zero.
    root = (square - torque * torque).sqrt() * dot.sign()
    cos, sin = (cross * torque + dot * root) / square, (dot * torque - cross * root) / square
    pull = weight * (cos * b - sin * b_up - w)
    pull_up = weight * (sin * b + cos * b_up - w_up)
    change, change_up = pull.roll(-1, -1) - pull, pull_up.roll(-1, -1) - pull_up
    area = p * r * (S[..., 0, 0] * S[..., 1, 1] - S[..., 0, 1] ** 2).unsqueeze(-1)
    return (a.roll(-1, -1) * change_up - a_up.roll(-1, -1) * change) / area


def _sides(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both components of the sides of a triangle, of which the first is along an axis."""
    first, second, third = squares.split(1, -1)
    p = first.sqrt()
    q = (third - first - second) / (2 * p)
    r = (second - q * q).sqrt()
    return torch.cat([p, q, -(p + q)], -1), torch.cat([torch.zeros_like(r), r, -r], -1)
