"""Linear equations and equations of lengths of clusters, by torch and in compiled loops.

The matrix of a cluster is ``A_kl = S_kl (e_k . d_l)`` of :mod:`multipliers`. Row k has the columns
of its window: all of a small cluster, or ``|k - l| <= b`` of a long one, whose constraints are in
an order of small bandwidth b. Elimination without pivots leaves no entry outside of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.compiler import TYPES, Call, Operators, UnprintableError, Value, in_order, pointer_to
from adjsim.core.derived import has_values
from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of, vmap_of
from adjsim.dynamics.constraints.ordering import DENSE
from adjsim.dynamics.constraints.triangles import triangle_multipliers

Store = Callable[..., None]

# Newton's method doubles the digits: three or four iterations are enough for usual steps.
ITERATIONS = 8
# Compiled loops of a GPU eliminate matrices up to this size element by element.
SMALL = 4


def window(x: Tensor, width: int) -> Tensor:
    """Return ``(*batch, m, c, width)``, the entries of ``(*batch, m, c)`` that each row reads.

    Places outside of a cluster have any entry; S is zero there.
    """
    size = x.shape[-1]
    if width == size:
        return x.unsqueeze(-2)
    return x[..., places(size, width).to(x.device)]


def places(size: int, width: int) -> Tensor:
    """Return the columns ``(size, width)`` of the window of each row, kept within the cluster."""
    if width == size:
        return torch.arange(size).expand(size, size)
    columns = torch.arange(size).unsqueeze(-1) + torch.arange(width) - width // 2
    return columns.clamp(0, size - 1)


def products(e: Tensor, d: Tensor, width: int) -> Tensor:
    """Compute e_k . d_l, ``(*batch, m, c, width)``."""
    return (e.unsqueeze(-1) * window(d, width)).sum(-4)


def along(S: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Compute ``sum_l S_kl x_l d_l``, of the shape of d."""
    return (S * window(x.unsqueeze(-3) * d, S.shape[-1])).sum(-1)


def solve(e: Tensor, d: Tensor, S: Tensor, right: Tensor) -> Tensor:
    """Solve ``sum_l S_kl (e_k . d_l) x_l = v_k``; singular systems give infinity or NaN."""
    size, width = S.shape[-2:]
    if size == 1:
        return right / (S * products(e, d, width)).squeeze(-1)
    if width != size and e.device.type != "cpu" and is_tracing():
        raise ValueError(
            f"compile=True on {e.device.type}: {size} constraints form one cluster, whose band is "
            f"solved on the CPU, and at most {DENSE} may. Leave compile=True out, or constrain the "
            "bonds of hydrogen alone."
        )
    if width != size or (is_tracing() and e.device.type == "cpu"):
        return solve_operator(e, d, S, right)
    matrix = S * products(e, d, width)
    if is_tracing() and size <= SMALL:
        return _eliminated(matrix, right)
    return torch.linalg.solve_ex(matrix, right.unsqueeze(-1))[0].squeeze(-1)


def _eliminated(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve element by element, which a GPU does in one kernel, without pivots."""
    rows = list(torch.cat([matrix, right.unsqueeze(-1)], -1).unbind(-2))
    for k in range(len(rows)):
        rows[k] = rows[k] / rows[k][..., k : k + 1]
        for j in range(len(rows)):
            if j != k:
                rows[j] = rows[j] - rows[j][..., k : k + 1] * rows[k]
    return torch.stack([row[..., -1] for row in rows], -1)


@operator("constraint_solve")
def solve_operator(e: Tensor, d: Tensor, S: Tensor, right: Tensor) -> Tensor:
    """Solve the systems of clusters; see :func:`solve`."""
    size, width = S.shape[-2:]
    if width == size:
        return solve(e, d, S, right)
    matrix = S * products(e, d, width)
    bands = diagonals(matrix).reshape(-1, width, size).cpu().numpy()
    given = right.expand(matrix.shape[:-1]).reshape(-1, size).cpu().numpy()
    found = [_solved(band, v) for band, v in zip(bands, given, strict=True)]
    return torch.from_numpy(np.stack(found)).to(right).reshape(matrix.shape[:-1])


def _solved(band: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve one system with a band, by diagonals; NaN for a singular one."""
    from scipy.linalg import LinAlgError, solve_banded

    try:
        return solve_banded((len(band) // 2, len(band) // 2), band, right, check_finite=False)
    except LinAlgError:
        return np.full_like(right, np.nan)


@shapes_of(solve_operator)
def _(e: Tensor, d: Tensor, S: Tensor, right: Tensor) -> Tensor:
    return torch.empty(right.shape).to(right)


@vmap_of(solve_operator)
def _(info: Any, dims: Any, *values: Tensor) -> tuple[Tensor, int]:
    axes = max(x.ndim - (dim is not None) for x, dim in zip(values, dims, strict=True))
    moved = []
    for x, dim, fewer in zip(values, dims, (0, 0, 0, 1), strict=True):
        first = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
        # The axis is before those of the batch, which S has not.
        ones = [1] * (axes - fewer - first.ndim + 1)
        moved.append(first.reshape(len(first), *ones, *first.shape[1:]))
    return solve_operator(*moved), 0


def diagonals(matrix: Tensor) -> Tensor:
    """Convert rows of windows to the diagonals ``(..., width, size)`` of LAPACK, by columns."""
    size, width = matrix.shape[-2:]
    number = torch.arange(width).unsqueeze(-1)
    rows = torch.arange(size) + number - width // 2
    inside = (rows >= 0) & (rows < size)
    found = matrix[..., rows.clamp(0, size - 1), width - 1 - number]
    return torch.where(inside.to(matrix.device), found, 0.0)


def newton(u: Tensor, d: Tensor, S: Tensor, length: Tensor, near: Tensor | None = None) -> Tensor:
    """Solve ``|e_k| = L_k`` by Newton's method from x = 0, or from a closed form of x."""
    x = torch.zeros_like(u[..., 0, :, :]) if near is None else near
    squares, readable = length**2, has_values()
    solved = torch.zeros_like(x, dtype=torch.bool)
    # The iteration after the one that finds half of the digits finds the others.
    enough = torch.finfo(u.dtype).eps ** 0.5
    for _ in range(ITERATIONS if near is None or readable else 1):
        e = u + along(S, x, d)
        excess = (e * e).sum(-3) - squares
        change = solve(e, d, S, excess / 2)
        if readable:
            # A cluster that is solved rests, so that it does not depend on the others. Where values
            # cannot be read, all take the same number of iterations.
            change = torch.where(solved.all(-1, keepdim=True), 0.0, change)
        x, solved = x - change, excess.abs() <= enough * squares
        if readable and bool(solved.all()):
            return x
    if readable:
        raise FloatingPointError(_unsolved(u, length, solved))
    return torch.where(solved, x, torch.nan)


def quadratic_root(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
    """Solve ``|u + S x d| = L`` of clusters with one constraint, a quadratic equation::

        x = (L^2 - |u|^2) / (S (u.d + sqrt((u.d)^2 + |d|^2 (L^2 - |u|^2))))

    It is the root with e . d > 0, of which x is zero where u has the length. Without cancellation
    it has the digits of L^2 - |u|^2.
    """
    product, missing = (u * d).sum(-3), length**2 - (u * u).sum(-3)
    x = missing / (S.squeeze(-1) * (product + torch.sqrt(product**2 + (d * d).sum(-3) * missing)))
    if has_values() and not bool(x.isfinite().all()):
        raise FloatingPointError(_unsolved(u, length, x.isfinite()))
    return x


def _unsolved(u: Tensor, length: Tensor, solved: Tensor) -> str:
    """Describe the first constraint without a solution."""
    place = tuple((~solved).nonzero()[0].tolist())
    found, wanted = u.norm(dim=-3)[place], length.expand(solved.shape)[place]
    return (
        f"constraints: no multipliers were found that hold two atoms at the distance {wanted:g}; "
        f"without them the distance would be {found:g}. Use a smaller dt, start from a "
        "configuration with smaller forces, or check that the lengths of a cluster do not "
        "contradict each other."
    )


@operator("constraint_lengths")
def lengths_operator(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
    """Solve for the multipliers of lengths; see :func:`newton`."""
    return newton(u, d, S, length)


@operator("constraint_triangles")
def triangles_operator(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
    """Solve for the multipliers of triangles; see :mod:`triangles`."""
    return newton(u, d, S, length, triangle_multipliers(u, d, S, length))


@shapes_of(lengths_operator)
@shapes_of(triangles_operator)
def _(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
    return torch.empty(u[..., 0, :, :].shape).to(u)


class ClustersCall(Call):
    """A call for the clusters of one size in all systems of a batch."""

    function: str

    def __init__(self, values: Sequence[Value], outputs: Sequence[Tensor], store: Store) -> None:
        first, _, S, _ = values
        if not first.dtype.is_floating_point or len(S.shape) != 3:
            raise UnprintableError("constraints with masses of replicas")
        self.shape, self.dtype, self.width = first.shape, first.dtype, S.shape[-1]
        self.inputs = tuple(in_order(value, store) for value in values)
        self.outputs = tuple(map(self.output, outputs))
        self.declarations = _declarations()

    def lines(self, functions: Sequence[str]) -> list[str]:
        *batch, dim, clusters, size = self.shape
        template = f"{TYPES[self.dtype]}, {size}, {self.width}, {dim}"
        counts = f"{torch.Size(batch).numel()}, {clusters}"
        pointers = ", ".join(map(pointer_to, (*self.inputs, *self.outputs)))
        return [f"constraints::{self.function}<{template}>({counts}, {pointers});"]


class SolveCall(ClustersCall):
    """The solution of linear systems."""

    function = "solve"


class LengthsCall(ClustersCall):
    """Newton's method."""

    function = "lengths"


class TrianglesCall(ClustersCall):
    """Newton's method from the closed form of triangles."""

    function = "triangles"


@cache
def _declarations() -> str:
    text = files("adjsim.dynamics.constraints").joinpath("clusters.cpp").read_text()
    return text.replace("ITERATIONS", str(ITERATIONS))


CONSTRAINT_OPERATORS = Operators(
    {
        solve_operator: SolveCall,
        lengths_operator: LengthsCall,
        triangles_operator: TrianglesCall,
    }
)
