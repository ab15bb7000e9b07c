"""Structural observables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim._box import checked_box, differences, nearest_image, volume
from adjsim._inputs import as_number, as_tensor, as_whole
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
    d = _pair_vectors(q, box)
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
    _check_three_dimensions("radial_distribution", q)
    cell = checked_box(box, float(bounds[-1]))
    frames = q.reshape(-1, *q.shape[-2:])
    counts = torch.zeros(len(bounds) - 1, dtype=torch.float64)
    for frame in frames:
        counts += torch.histogram(pair_distances(frame, cell).double().cpu(), bounds).hist
    size, atoms = float(volume(cell)), q.shape[-2]
    shells = 4 / 3 * math.pi * (bounds[1:] ** 3 - bounds[:-1] ** 3)
    return counts / len(frames) / (atoms * (atoms - 1) / 2) * size / shells


def smooth_radial_distribution(
    position: PositionsLike, r: Array, box: Array, *, width: float
) -> Tensor:
    """Compute a differentiable radial distribution function in a periodic box::

        g(r) = V / (atoms (atoms - 1) / 2) * sum over i<j of K(r - r_ij) / (4 pi r_ij^2)

    K is a Gaussian of standard deviation ``width``. So g is the true function convolved with K. To
    leading order the convolution adds ``width^2/2 g''(r)`` to the true function: a tenth of the
    width of the first peak is a good choice. :func:`radial_distribution` is the exact histogram.

    Args:
        position: ``(*batch, atoms, 3)``.
        r: ``(n,)`` distances, up to half the smallest perpendicular width of the box.
        box: ``(3,)`` or ``(3, 3)``.
        width: standard deviation of the kernel, length.

    Returns:
        ``(*batch, n)``, one function for each system. Memory is that of n numbers for each pair.
    """
    q, at = as_tensor("position", position), as_tensor("r", r)
    width = as_number("width", width)
    if at.ndim != 1 or len(at) == 0:
        raise ValueError(f"r must be (n,) distances; got shape {tuple(at.shape)}.")
    if not width > 0:
        raise ValueError(f"width must be positive; got {width}.")
    _check_three_dimensions("smooth_radial_distribution", q)
    cell = checked_box(box, float(at.detach().max()))
    distance = pair_distances(q, cell)
    x = (at.to(distance) - distance.unsqueeze(-1)) / width
    kernel = torch.exp(-0.5 * x * x) / (width * math.sqrt(2 * math.pi))
    shell = 4 * math.pi * distance.unsqueeze(-1) ** 2
    return float(volume(cell)) * (kernel / shell).mean(-2)


def nearest_neighbour_distance(position: PositionsLike, box: Array | None = None) -> Energies:
    """Compute the distance to the nearest neighbour, averaged over atoms, ``(*batch,)``.

    Its gradient is that of the nearest pairs, and has a jump where another atom becomes the
    nearest.
    """
    return _distance_matrix(position, box, own=math.inf).amin(-1).mean(-1)


def coordination_number(
    position: PositionsLike, distance: float, *, width: float, box: Array | None = None
) -> Energies:
    """Compute the number of neighbours of an atom, averaged over atoms, ``(*batch,)``::

        n = 1/atoms sum over i != j of 1 / (1 + exp((r_ij - distance) / width))

    Args:
        position: ``(*batch, atoms, dim)``.
        distance: the distance up to which an atom is a neighbour.
        width: how smooth this limit is, length. The gradient is large where width is small.
        box: the periodic box, if there is one.
    """
    limit, width = as_number("distance", distance), as_number("width", width)
    if not width > 0:
        raise ValueError(f"width must be positive; got {width}.")
    r = _distance_matrix(position, box, own=math.inf)
    return torch.sigmoid((limit - r) / width).sum(-1).mean(-1)


def structure_factor(position: PositionsLike, wavevectors: Array) -> Tensor:
    """Compute the structure factor ``S(k) = |sum_j exp(i k q_j)|^2 / atoms``.

    Args:
        position: ``(*batch, atoms, dim)``.
        wavevectors: ``(n, dim)``. In a periodic box only vectors of the reciprocal lattice have a
            meaning: integer combinations of the columns of ``2 pi inv(box)``.

    Returns:
        ``(*batch, n)``, real and differentiable.
    """
    q, k = as_tensor("position", position), as_tensor("wavevectors", wavevectors)
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
    with the number of bonds.

    Args:
        position: ``(*batch, atoms, 3)``.
        distance: the distance up to which two atoms are bonded.
        width: how smooth this limit is, length.
        degree: l, even.
        box: the periodic box, if there is one.
    """
    q, width = as_tensor("position", position), as_number("width", width)
    limit, degree = as_number("distance", distance), as_whole("degree", degree)
    if degree < 0 or degree % 2:
        raise ValueError(f"degree must be even, since a bond has no direction; got {degree}.")
    if not width > 0:
        raise ValueError(f"width must be positive; got {width}.")
    _check_three_dimensions("bond_order", q)
    d = _pair_vectors(q, box)
    i, j = torch.triu_indices(q.shape[-2], q.shape[-2], offset=1, device=q.device)
    d = d[..., i, j]
    r = (d * d).sum(-2).sqrt()
    weight = torch.sigmoid((limit - r) / width)
    x, y, z = (d / r.unsqueeze(-2)).unbind(-2)
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
    return total.sqrt()


def _legendre(z: Tensor, degree: int, m: int, diagonal: float) -> Tensor:
    """Compute an associated Legendre function of z, divided by (1 - z^2)^(m/2).

    ``diagonal`` is the value at l = m, from which the recursion in l starts.
    """
    before, now = torch.zeros_like(z), torch.full_like(z, diagonal)
    for n in range(m + 1, degree + 1):
        before, now = now, ((2 * n - 1) * z * now - (n + m - 1) * before) / (n - m)
    return now


def _check_three_dimensions(what: str, q: Tensor) -> None:
    if q.shape[-1] != 3:
        raise ValueError(f"{what} is for three dimensions; position has {q.shape[-1]}.")


def _pair_vectors(q: Tensor, box: Array | None) -> Tensor:
    """Compute differences of all pairs, to the nearest image, ``(*batch, dim, atoms, atoms)``."""
    d = differences(q)
    if box is None:
        return d
    (nearest,) = nearest_image([d], checked_box(box, None).to(q))
    return nearest


def _distance_matrix(position: PositionsLike, box: Array | None, own: float) -> Tensor:
    """Compute all distances, ``(*batch, atoms, atoms)``; that of an atom to itself is ``own``."""
    q = as_tensor("position", position)
    if q.shape[-2] < 2:
        raise ValueError("distances need at least two atoms; position has one.")
    s = (_pair_vectors(q, box) ** 2).sum(-3)
    same = torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
    # The root of zero has no derivative, so the diagonal is replaced before it.
    return torch.where(same, own, torch.where(same, 1.0, s).sqrt())
