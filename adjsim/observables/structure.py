"""Structure of fluids, and moments of the distributions of mass and charge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive, as_tensor, as_whole, wrong_shape
from adjsim.core.box import checked_box, volume
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Energies, Number, PositionsLike
from adjsim.observables.members import (
    atom_weights,
    centred,
    positions,
    root,
    shares,
)
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
    """Compute the distances of pairs i<j to nearest images, ``(*batch, atoms (atoms - 1) / 2)``."""
    return all_pairs(as_tensor("position", position), optional_box(box)).distance


def nearest_neighbour_distance(position: PositionsLike, box: Array | None = None) -> Energies:
    """Compute the distance to the nearest neighbour, averaged over atoms, ``(*batch,)``.

    Its gradient is that of the nearest pairs, and has a jump where another atom becomes the
    nearest.
    """
    q = positions("nearest_neighbour_distance", position, atoms=2)
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
    q, limit = as_tensor("position", position), as_positive("distance", distance)
    width = as_positive("width", width)
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
        raise wrong_shape("wavevectors", f"(n, {q.shape[-1]}) for this position", k)
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
    q, limit = positions("bond_order", position, dim=3), as_positive("distance", distance)
    width, degree = as_positive("width", width), as_whole("degree", degree)
    if degree < 0 or degree % 2:
        raise ValueError(f"degree must be even, since a bond has no direction; got {degree}.")
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
    """Compute an associated Legendre function over (1 - z^2)^(m/2), ``diagonal`` at l = m."""
    before, now = torch.zeros_like(z), torch.full_like(z, diagonal)
    for n in range(m + 1, degree + 1):
        before, now = now, ((2 * n - 1) * z * now - (n + m - 1) * before) / (n - m)
    return now


def gyration_tensor(position: PositionsLike, mass: Number = 1.0) -> Tensor:
    """Compute the gyration tensor, ``(*batch, dim, dim)``, length^2::

        S = sum_i m_i (q_i - c) (q_i - c)^T / sum_i m_i,  c the centre of mass

    The root of its trace is the radius of gyration. Positions are not wrapped into a box. The
    masses are ``(atoms,)``; with one number all atoms have the same weight.

    Raises:
        ValueError: a mass of another size, masses that are negative or all zero.
    """
    q = positions("gyration_tensor", position)
    return _gyration(q, shares("mass", mass, q))


def principal_moments(position: PositionsLike, mass: Number = 1.0) -> Tensor:
    """Compute the principal moments of inertia, in ascending order, ``(*batch, 3)``::

        I = sum_i m_i (|x_i|^2 - x_i x_i^T),  x_i = q_i - centre of mass

    Its eigenvalues are those of ``M (trace(S) - S)``, with S the :func:`gyration_tensor` and M the
    total mass.

    Where two moments coincide, as in a linear or a symmetric molecule, a single moment has a kink,
    and its gradient is one of several. The gradient of a symmetric function of the moments, such as
    their sum or the sum of their squares, is right there. Second derivatives are infinite or NaN
    where moments coincide: use :func:`straightness`, or the tensor itself, which are polynomials.
    Arguments, in three dimensions, and errors are those of :func:`gyration_tensor`.
    """
    q = positions("principal_moments", position, dim=3)
    m = atom_weights("mass", mass, q)
    total = m.sum()
    s = _gyration(q, m / total)
    trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    inertia = total * (trace * torch.eye(3, dtype=s.dtype).to(s) - s)
    # NaN has no eigenvalues, and its system alone becomes NaN.
    finite = inertia.detach().isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    moments = torch.linalg.eigvalsh(torch.where(finite, inertia, 0.0))
    return torch.where(finite.squeeze(-1), moments, math.nan)


def straightness(position: PositionsLike, mass: Number = 1.0) -> Energies:
    """Compute the relative shape anisotropy, ``(*batch,)``, 1 of a straight line of atoms::

        kappa^2 = (dim trace(S^2) / trace(S)^2 - 1) / (dim - 1)

    S is the :func:`gyration_tensor`. In three dimensions with eigenvalues a, b, c it is
    ``1 - 3 (a b + b c + c a) / (a + b + c)^2`` (Theodorou and Suter, Macromolecules 18, 1206
    (1985)). It is 1/4 for a planar and symmetric molecule, and 0 for a cube or a sphere. Its
    derivatives of every order are right where eigenvalues coincide. Where all atoms coincide, up to
    16 rounding errors of the positions, it is taken as zero, without a gradient. Arguments, in two
    dimensions or more, and errors are those of :func:`gyration_tensor`.
    """
    q = positions("straightness", position, least=2)
    dim, share = q.shape[-1], shares("mass", mass, q)
    s = _gyration(q, share)
    trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)
    rounding = 16 * torch.finfo(q.dtype).eps
    point = trace <= rounding**2 * (share * q.detach() ** 2).sum((-1, -2))
    shape = s / torch.where(point, 1.0, trace)[..., None, None]
    kappa = (dim * (shape * shape).sum((-1, -2)) - 1) / (dim - 1)
    return torch.where(point, 0.0, kappa)


def dipole(position: PositionsLike, charge: Array) -> Tensor:
    """Compute the dipole moment ``sum_i charge_i q_i``, charge x length, ``(*batch, dim)``.

    It depends on the origin unless the charges, ``(atoms,)``, sum to zero. They may carry a
    gradient. In a periodic box the positions are those of whole molecules, not wrapped atom by
    atom.

    Raises:
        ValueError: charges of another size.
    """
    q = positions("dipole", position)
    with outside_tracing():
        c = as_tensor("charge", charge)
    if tuple(c.shape) not in ((q.shape[-2],), (q.shape[-2], 1)):
        raise wrong_shape("charge", f"({q.shape[-2]},), one for each atom", c)
    return (c.to(q).reshape(-1, 1) * q).sum(-2)


def density(mass: Array, box: Array) -> Tensor:
    """Compute the density ``sum_i mass_i / volume`` of a periodic box, a scalar.

    In amu and angstrom, one unit is 1.66053907 g/cm^3. The masses, ``(atoms,)``, may carry a
    gradient.

    Raises:
        ValueError: one number in place of all masses, negative masses, a box without a volume.
    """
    with outside_tracing():
        m, cell = as_tensor("mass", mass), checked_box(box, None)
    if m.ndim == 0 or m.numel() != len(m):
        raise ValueError(
            f"mass of density must be (atoms,), one for each atom; got shape {tuple(m.shape)}. "
            "Of equal atoms give torch.full((atoms,), mass)."
        )
    return atom_weights("mass", m, m.reshape(-1, 1)).sum() / volume(cell).to(m)


def _gyration(q: Tensor, share: Tensor) -> Tensor:
    x = centred(q, share)
    return (share * x).transpose(-1, -2) @ x
