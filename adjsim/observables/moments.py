"""Moments of the distributions of mass and charge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.box import checked_box, volume
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Energies, Number, PositionsLike
from adjsim.observables.members import atom_weights, centred, positions, shares


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
    q = positions("straightness", position)
    dim = q.shape[-1]
    if dim < 2:
        raise ValueError("straightness is for two dimensions or more; position has one.")
    share = shares("mass", mass, q)
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
        raise ValueError(
            f"charge must be ({q.shape[-2]},), one for each atom; got shape {tuple(c.shape)}."
        )
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
