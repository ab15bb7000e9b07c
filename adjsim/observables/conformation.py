"""Conformations of chains: distances of ends, dihedral angles and their distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor, as_whole
from adjsim.core.coordinates import Dihedral
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Energies, PositionsLike
from adjsim.observables.members import length, members, points, positions, vectors
from adjsim.observables.neighbours import optional_box, refuse_not_finite


def end_to_end_distance(position: PositionsLike, first: int = 0, last: int = -1) -> Energies:
    """Compute the distance between two atoms of a chain, ``(*batch,)``.

    There is no nearest image, since a chain may be longer than half a box: positions must not be
    wrapped into it. A negative index counts from the end. The gradient of a distance of zero is
    taken as zero.

    Raises:
        ValueError: an index out of range, or two of the same atom.
    """
    q = positions("end_to_end_distance", position)
    atoms = q.shape[-2]
    ends = {"first": as_whole("first", first), "last": as_whole("last", last)}
    for name, i in ends.items():
        if not -atoms <= i < atoms:
            raise ValueError(
                f"{name} must be the index of one of {atoms} atoms, from {-atoms} to {atoms - 1}; "
                f"got {i}."
            )
    one, other = (i % atoms for i in ends.values())
    if one == other:
        raise ValueError(f"first and last are the same atom, {one} of {atoms}.")
    return length(q[..., other, :] - q[..., one, :])


def dihedrals(position: PositionsLike, index: Array, box: Array | None = None) -> Tensor:
    """Compute dihedral angles, radians between -pi and pi, ``(*batch, n)``.

    The angle of atoms i, j, k, l is that between the planes of i, j, k and of j, k, l. It is zero
    in the cis and pi in the trans conformation, and positive if, looking from j to k, the front
    bond turns clockwise to the rear one (IUPAC).

    Angles jump by 2 pi at trans. Average their cosines and sines, or use
    :func:`dihedral_distribution`. Where three atoms are on a line up to rounding errors, the angle
    does not exist: it is given as zero, without a gradient. Near such a line the gradient grows as
    one over the distance from it.

    The indices of atoms are ``(n, 4)``. In a periodic box the nearest image of each bond is taken.

    Raises:
        ValueError: an index out of range, an atom twice in one angle.
    """
    q = positions("dihedrals", position, dim=3)
    i, j, k, m = members("index", index, 4, q).unbind(-1)
    cell = optional_box(box)
    bonds = [vectors(q, x, y, cell) for x, y in ((i, j), (j, k), (k, m))]
    return Dihedral(*[[bond.transpose(-1, -2)] for bond in bonds]).value.squeeze(-2)


def dihedral_distribution(angles: Array, at: Array, *, width: float | int) -> Tensor:
    """Compute a differentiable distribution of angles, per radian, ``(*batch, points)``::

        p(a) = mean over angles of exp(k cos(a - angle)) / (2 pi I_0(k)),  k = 1 / width^2

    The kernel is that of von Mises, the Gaussian of the circle: it has no jump at pi, and the
    integral of p over the circle is one. It multiplies the n-th Fourier coefficient of the
    distribution by ``I_n(k) / I_0(k)``, about ``exp(-n^2 width^2 / 2)``. The exact histogram is
    :func:`dihedral_histogram`.

    Args:
        angles: ``(*batch, n)``, radians, such as those of :func:`dihedrals`; the mean is over n.
            For one angle of many frames give ``(frames,)``.
        at: ``(points,)`` angles. Memory is that of n numbers for each.
        width: width of the kernel, radians, at most pi.
    """
    return _kernels(*_angles("angles", angles, at), width).mean(-2)


def ramachandran(phi: Array, psi: Array, at: Array, *, width: float | int) -> Tensor:
    """Compute a differentiable distribution of pairs of angles, per square radian::

        p(a, b) = mean over pairs of K(a - phi) K(b - psi)

    K is the kernel of :func:`dihedral_distribution`, with ``width``. The integral of p over the
    torus is one. From phi and psi, ``(*batch, n)``, and ``(points,)`` angles of both axes, the
    result is ``(*batch, points, points)``, phi first.
    """
    (first, place), (second, _) = _angles("phi", phi, at), _angles("psi", psi, at)
    if first.shape != second.shape:
        raise ValueError(
            f"phi and psi must have one shape; got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    a, b = _kernels(first, place, width), _kernels(second, place, width)
    return a.transpose(-1, -2) @ b / first.shape[-1]


def dihedral_histogram(angles: Array, bins: int) -> Tensor:
    """Compute the distribution of angles in equal bins from -pi to pi, per radian, ``(bins,)``.

    All axes are averaged, and the integral is one. It has no gradient;
    :func:`dihedral_distribution` has one. Angles may be outside of -pi to pi, and pi itself is in
    the first bin, with -pi.
    """
    x, number = as_tensor("angles", angles).detach().double(), as_whole("bins", bins, 1)
    if x.numel() == 0:
        raise ValueError(f"dihedral_histogram needs an angle; angles have shape {tuple(x.shape)}.")
    refuse_not_finite(x, "angles")
    place = torch.remainder(x + math.pi, 2 * math.pi) * (number / (2 * math.pi))
    counts = torch.bincount(place.long().clamp(max=number - 1).flatten(), minlength=number)
    return counts.double() * (number / (2 * math.pi * x.numel()))


def _angles(name: str, angles: Array, at: Array) -> tuple[Tensor, Tensor]:
    x = as_tensor(name, angles)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name} must be (*batch, n) of at least one; got {tuple(x.shape)}.")
    return x, points("at", at, "angles").to(x)


def _kernels(angles: Tensor, at: Tensor, width: float | int) -> Tensor:
    """Compute the kernels of all angles at all points, ``(*batch, n, points)``."""
    size = as_number("width", width)
    if not 0 < size <= math.pi:
        raise ValueError(f"width must be positive and at most pi radians; got {size}.")
    with outside_tracing():
        k = 1 / size**2
        scaled = float(torch.special.i0e(torch.tensor(k, dtype=torch.float64)))
    # exp(k cos(x)) / exp(k) without the cancellation in cos(x) - 1.
    half = torch.sin((at - angles.unsqueeze(-1)) / 2)
    return torch.exp(-2 * k * half * half) / (2 * math.pi * scaled)
