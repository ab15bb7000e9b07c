"""Structural observables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor, as_whole
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Energies, PositionsLike
from adjsim.observables.members import positive, root
from adjsim.observables.neighbours import (
    PairVectors,
    all_pairs,
    optional_box,
    pair_matrix,
    refuse_no_neighbours,
    sum_over_pairs,
)

# Widths beyond the distance at which a logistic weight is below the rounding error of float64.
TAIL = 36.0


def radius_of_gyration(position: PositionsLike) -> Energies:
    """Compute ``sqrt(sum |q_i - q_mean|^2 / atoms)``, length, ``(*batch,)``.

    All atoms have the same weight, and positions must not be wrapped into a box.
    """
    q = as_tensor("position", position)
    centered = q - q.mean(-2, keepdim=True)
    return root((centered**2).sum(-1).mean(-1))


def pair_distances(position: PositionsLike, box: Array | None = None) -> Tensor:
    """Compute the distances of all pairs i<j, to the nearest image in a box.

    The result is ``(*batch, atoms (atoms - 1) / 2)``.
    """
    cell = optional_box(box)
    return all_pairs(as_tensor("position", position), cell).distance


def nearest_neighbour_distance(position: PositionsLike, box: Array | None = None) -> Energies:
    """Compute the distance to the nearest neighbour, averaged over atoms, ``(*batch,)``.

    Its gradient is that of the nearest pairs, and has a jump where another atom becomes the
    nearest.
    """
    q = as_tensor("position", position)
    if q.shape[-2] < 2:
        raise ValueError("distances need at least two atoms; position has one.")
    s = (pair_matrix(q, optional_box(box)) ** 2).sum(-3)
    same = torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
    # The root of zero has no derivative, so the diagonal is replaced before it.
    return torch.where(same, math.inf, torch.where(same, 1.0, s).sqrt()).amin(-1).mean(-1)


def coordination_number(
    position: PositionsLike, distance: float, *, width: float, box: Array | None = None
) -> Energies:
    """Compute the number of neighbours of an atom, averaged over atoms, ``(*batch,)``::

        n = 1/atoms sum over i != j of 1 / (1 + exp((r_ij - distance) / width))

    The distance is at most half the smallest perpendicular width of the box. The gradient is large
    where the width is small.
    """
    q, limit = as_tensor("position", position), positive("distance", distance)
    width = positive("width", width)
    cell = optional_box(box, limit)

    def neighbours(pairs: PairVectors) -> Tensor:
        weight = torch.sigmoid((limit - pairs.distance) / width)
        return 2 / pairs.atoms * weight.sum(-1)

    return sum_over_pairs(q, cell, limit + TAIL * width, neighbours)


def structure_factor(position: PositionsLike, wavevectors: Array) -> Tensor:
    """Compute the structure factor ``S(k) = |sum_j exp(i k q_j)|^2 / atoms``, ``(*batch, n)``.

    In a periodic box only vectors k of the reciprocal lattice have a meaning: integer combinations
    of the columns of ``2 pi inv(box)``. The wavevectors are ``(n, dim)``.
    """
    q = as_tensor("position", position)
    with outside_tracing():
        k = as_tensor("wavevectors", wavevectors)
    if k.ndim != 2 or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"wavevectors must be (n, {q.shape[-1]}) for this position; got shape {tuple(k.shape)}."
        )
    phase = q @ k.to(q).T
    return (phase.cos().sum(-2) ** 2 + phase.sin().sum(-2) ** 2) / q.shape[-2]


def bond_order(
    position: PositionsLike,
    distance: float,
    *,
    width: float,
    degree: int = 6,
    box: Array | None = None,
) -> Energies:
    """Compute the global bond-orientational order Q_l of Steinhardt, ``(*batch,)``::

        Q_l = sqrt(4 pi / (2 l + 1) sum_m |q_lm|^2),  q_lm = sum_ij w_ij Y_lm(r_ij) / sum_ij w_ij

    With w_ij = 1 / (1 + exp((r_ij - distance) / width)). See Steinhardt, Nelson and Ronchetti,
    Phys. Rev. B 28, 784 (1983). With l = 6 and nearest neighbours it is 0.575 in a perfect fcc
    crystal, 0.511 in bcc (14 neighbours), 0.485 in hcp, and near zero in a liquid, where it falls
    with the number of bonds. Where it is zero it has a kink, and its gradient is given as zero.

    The degree is l, even. Distance and width are those of :func:`coordination_number`.

    Raises:
        ValueError: an odd degree, a distance or width out of range, or a system without bonds.
    """
    q, limit = as_tensor("position", position), positive("distance", distance)
    width, degree = positive("width", width), as_whole("degree", degree)
    if degree < 0 or degree % 2:
        raise ValueError(f"degree must be even, since a bond has no direction; got {degree}.")
    if q.shape[-1] != 3:
        raise ValueError(f"bond_order is for three dimensions; position has {q.shape[-1]}.")
    cell = optional_box(box, limit)

    def order(pairs: PairVectors) -> Tensor:
        r = pairs.distance
        weight = torch.sigmoid((limit - r) / width)
        refuse_no_neighbours(weight.sum(-1), "bond_order", limit)
        return _bond_order(pairs.vector / r.unsqueeze(-2), weight, degree)

    return sum_over_pairs(q, cell, limit + TAIL * width, order)


def _bond_order(direction: Tensor, weight: Tensor, degree: int) -> Tensor:
    """Compute Q_l of bonds with directions ``(*batch, 3, bonds)`` and weights."""
    x, y, z = direction.unbind(-2)
    total = torch.zeros_like(weight[..., 0])
    real, imaginary, diagonal = torch.ones_like(x), torch.zeros_like(x), 1.0
    for m in range(degree + 1):
        legendre = _legendre(z, degree, m, diagonal)
        # 4 pi / (2 l + 1) times the square of the norm of Y_lm, twice for m and -m.
        norm = math.factorial(degree - m) / math.factorial(degree + m) * (1 if m == 0 else 2)
        for part in (real, imaginary):
            mean = (weight * legendre * part).sum(-1) / weight.sum(-1)
            total = total + norm * mean * mean
        real, imaginary = real * x - imaginary * y, real * y + imaginary * x
        diagonal *= 2 * m + 1
    return root(total)


def _legendre(z: Tensor, degree: int, m: int, diagonal: float) -> Tensor:
    """Compute an associated Legendre function of z, divided by (1 - z^2)^(m/2).

    ``diagonal`` is the value at l = m, from which the recursion in l starts.
    """
    before, now = torch.zeros_like(z), torch.full_like(z, diagonal)
    for n in range(m + 1, degree + 1):
        before, now = now, ((2 * n - 1) * z * now - (n + m - 1) * before) / (n - m)
    return now
