"""Spreading of charges to a mesh, and gathering of a potential from it.

Positions u are in units of the spacing of the mesh. With W(u - g) the product of three splines,
one for each axis::

    spread:  Q(g) = sum over atoms of c W + c_x dW/dx + c_y dW/dy + c_z dW/dz
    gather:  sum over points of phi(g) W, and of its derivatives

The spline M_p of order p is positive between 0 and p, and a polynomial of degree p - 1 between
integers, with p - 2 continuous derivatives::

    M_2(x) = 1 - |x - 1|
    M_p(x) = (x M_{p-1}(x) + (p - x) M_{p-1}(x - 1)) / (p - 1)
    dM_p/dx = M_{p-1}(x) - M_{p-1}(x - 1)

See Essmann et al., J. Chem. Phys. 103, 8577 (1995).

On the CPU an operator in C++ does both, and torch operations where a derivative is recorded. Sums
have a fixed order, whatever the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler import TYPES, CompilerError, compiled
from adjsim.core.layout import is_tracing
from adjsim.core.state import in_transform

# Of the derivatives of W by axis: the value, the slope, the curvature (xx xy xz yy yz zz).
ORDERS = (
    (0, 0, 0),
    (1, 0, 0), (0, 1, 0), (0, 0, 1),
    (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 2, 0), (0, 1, 1), (0, 0, 2),
)  # fmt: skip
COLUMNS = (1, 4, 10)
# Numbers of points to which atoms spread, from which threads are used.
PARALLEL_POINTS = 2**15


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


def spread(u: Tensor, coefficients: Tensor, shape: Sequence[int], order: int) -> Tensor:
    """Spread charges, or charges and dipoles, to ``(systems, *shape)``.

    The coefficients are ``(systems, atoms, 1)`` c, or ``(systems, atoms, 4)`` c, c_x, c_y, c_z.
    """
    library = _library_of(order, u, coefficients)
    if library is not None:
        result = torch.zeros((len(u), *shape), dtype=u.dtype)
        return _call(library.spread, order, u, coefficients.shape[-1], shape, coefficients, result)
    base = u.detach().floor()
    x, y, z = derivatives(order, u - base, min(coefficients.shape[-1] - 1, 1)).unbind(-3)
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
    # On a GPU index_add adds in any order, so its last bits are no function of the position.
    place, share = (index.reshape(-1),), cube.reshape(-1)
    return mesh.index_put(place, share, accumulate=True).reshape(len(u), *shape)


def gather(u: Tensor, mesh: Tensor, degree: int, order: int) -> Tensor:
    """Gather a mesh and its derivatives up to a degree of 2, by columns of :data:`ORDERS`."""
    library = _library_of(order, u, mesh)
    if library is not None:
        result = torch.empty((*u.shape[:-1], COLUMNS[degree]), dtype=u.dtype)
        return _call(library.gather, order, u, COLUMNS[degree], mesh.shape[1:], mesh, result)
    base = u.detach().floor()
    x, y, z = derivatives(order, u - base, degree).unbind(-3)
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


def _call(
    function: Any, order: int, u: Tensor, columns: int, shape: Sequence[int], given: Tensor,
    result: Tensor,
) -> Tensor:  # fmt: skip
    u, given = (x.detach().resolve_neg().contiguous() for x in (u, given))
    atoms, points = u.shape[-2], u.numel() // 3 * order**3
    threads = torch.get_num_threads() if points >= PARALLEL_POINTS else 1
    counts = (ctypes.c_int64(n) for n in (len(u), atoms, columns, threads))
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (u, given, result))
    function(*counts, (ctypes.c_int64 * 3)(*shape), *pointers)
    return result


@functools.cache
def _library(order: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    source = files("adjsim.potentials.charges.ewald").joinpath("spreading.cpp").read_text()
    text = f"#define REAL {TYPES[dtype]}\n#define ORDER {order}\n{source}"
    try:
        return compiled(text, threads=True)
    except CompilerError:
        return None


def _library_of(order: int, *tensors: Tensor) -> ctypes.CDLL | None:
    """Return the library for these tensors; None: torch operations are needed."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    if in_transform() or is_tracing() or torch.compiler.is_compiling():
        return None
    dtype = tensors[0].dtype
    usable = all(
        x.device.type == "cpu" and x.dtype == dtype and type(x) in (Tensor, torch.nn.Parameter)
        for x in tensors
    )
    return _library(order, dtype) if usable and dtype in (torch.float32, torch.float64) else None
