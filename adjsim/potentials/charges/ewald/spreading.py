"""Spreading of charges to a mesh, and gathering of a potential from it.

Positions u are in units of the spacing of the mesh. With W(u - g) the product of three splines,
one for each axis::

    spread:  Q(g) = sum over atoms of c W + c_x dW/dx + c_y dW/dy + c_z dW/dz
    gather:  sum over points of phi(g) W, and of its derivatives

On the CPU an operator in C++ does both (:mod:`adjsim.potentials.charges.ewald.operator`), and torch
operations where a derivative is recorded. Sums have a fixed order, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim.potentials.charges.ewald import splines
from adjsim.potentials.charges.ewald.operator import operator_of

# Of the derivatives of W by axis: the value, the slope, the curvature (xx xy xz yy yz zz).
ORDERS = (
    (0, 0, 0),
    (1, 0, 0), (0, 1, 0), (0, 0, 1),
    (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 2, 0), (0, 1, 1), (0, 0, 2),
)  # fmt: skip
COLUMNS = (1, 4, 10)


def spread(u: Tensor, coefficients: Tensor, shape: Sequence[int], order: int) -> Tensor:
    """Spread charges, or charges and dipoles.

    Args:
        u: ``(systems, atoms, 3)``.
        coefficients: ``(systems, atoms, 1)`` c, or ``(systems, atoms, 4)`` c, c_x, c_y, c_z.
        shape: the number of points along each axis.
        order: of the splines.

    Returns:
        ``(systems, *shape)``.
    """
    operator = operator_of(order, u, coefficients)
    if operator is not None:
        return operator.spread(u, coefficients, shape)
    base = u.detach().floor()
    x, y, z = splines.derivatives(order, u - base, min(coefficients.shape[-1] - 1, 1)).unbind(-3)
    c = coefficients.unsqueeze(-1)
    plane = _outer(c[..., 0, :] * x[..., 0, :], y[..., 0, :])
    if coefficients.shape[-1] == 1:
        cube = plane.unsqueeze(-1) * z[..., None, None, 0, :]
    else:
        plane = plane + _outer(c[..., 1, :] * x[..., 1, :], y[..., 0, :])
        plane = plane + _outer(c[..., 2, :] * x[..., 0, :], y[..., 1, :])
        other = _outer(c[..., 3, :] * x[..., 0, :], y[..., 0, :])
        cube = plane.unsqueeze(-1) * z[..., None, None, 0, :]
        cube = cube + other.unsqueeze(-1) * z[..., None, None, 1, :]
    index = _points(base, shape, order)
    mesh = torch.zeros(len(u) * shape[0] * shape[1] * shape[2], dtype=u.dtype, device=u.device)
    return mesh.index_add(0, index.reshape(-1), cube.reshape(-1)).reshape(len(u), *shape)


def gather(u: Tensor, mesh: Tensor, degree: int, order: int) -> Tensor:
    """Gather a mesh and its derivatives up to a degree of at most 2.

    Args:
        u: ``(systems, atoms, 3)``.
        mesh: ``(systems, *shape)``.
        degree: 0, 1 or 2.
        order: of the splines.

    Returns:
        ``(systems, atoms, columns)``, with the columns of :data:`ORDERS`.
    """
    operator = operator_of(order, u, mesh)
    if operator is not None:
        return operator.gather(u, mesh, COLUMNS[degree])
    base = u.detach().floor()
    x, y, z = splines.derivatives(order, u - base, degree).unbind(-3)
    local = mesh.reshape(-1)[_points(base, mesh.shape[1:], order)]
    by_z = torch.einsum("...abc,...kc->...abk", local, z)
    by_yz = torch.einsum("...abk,...jb->...ajk", by_z, y)
    by_xyz = torch.einsum("...ajk,...ia->...ijk", by_yz, x)
    columns = [by_xyz[..., i, j, k] for i, j, k in ORDERS[: COLUMNS[degree]]]
    return torch.stack(columns, -1)


def _points(base: Tensor, shape: Sequence[int], order: int) -> Tensor:
    """Compute the numbers of the points of each atom, ``(systems, atoms, p, p, p)``."""
    offsets = torch.arange(order, device=base.device)
    along = [
        (base[..., axis].long().unsqueeze(-1) - offsets) % points
        for axis, points in enumerate(shape)
    ]
    system = torch.arange(len(base), device=base.device)[:, None, None]
    first = (system * shape[0] + along[0])[..., None, None]
    return (first * shape[1] + along[1][..., None, :, None]) * shape[2] + along[2][
        ..., None, None, :
    ]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)
