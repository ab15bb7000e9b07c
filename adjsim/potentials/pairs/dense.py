"""Sums over all pairs by torch operations.

With ``s_ij = |q_i - q_j|^2`` and ``U = sum over i<j of u(s_ij)``, every derivative that the adjoint
needs follows from u' and u'' elementwise, with d_ij = q_i - q_j and, for a vector v of the shape of
q, w_ij = v_i - v_j::

    F_i           = sum_j -2 u'(s_ij) d_ij
    (dF/dq v)_i   = sum_j -4 u''(s_ij) (d_ij . w_ij) d_ij - 2 u'(s_ij) w_ij    (symmetric)
    v . dF/dtheta = sum_ij -(d_ij . w_ij) du'(s_ij)/dtheta

so that no automatic differentiation passes through the geometry. Excluded pairs (an atom with
itself, pairs beyond the cutoff, exclusions) get a safe distance before any division, so that values
and gradients stay finite, and contribute nothing: the difference of an atom with itself is zero,
and the others are masked. Coordinates come first, so that the last axis is long and vectorises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from adjsim.core.box import differences, nearest_image
from adjsim.core.layout import is_tracing, materialise_contiguous, memory_order, packed, unpacked
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.kernels.exclusions import interacting
from adjsim.potentials.products import DeferredVJP, Pullback, Tensors


def energy(pair: PairFormula, position: Positions) -> Energies:
    """Compute the energy."""
    return _energy(pair, *geometry(pair, position)[1:])


def strained_energy(pair: PairFormula, position: Positions, strain: Strain) -> Energies:
    """Compute the energy at a strain."""
    return _energy(pair, *_strained_geometry(pair, position, strain)[1:])


def _energy(pair: PairFormula, s: Tensor, included: Tensor) -> Energies:
    energies = pair.truncated_energy(s)
    if energies.numel() > 1 and energies.shape[-2:] != s.shape[-2:]:
        raise ValueError(
            f"the energy of a pair of {type(pair).__name__} must be elementwise in the squared "
            f"distances; for shape {tuple(s.shape)} it has shape {tuple(energies.shape)}."
        )
    return 0.5 * torch.where(included, energies, 0.0).sum((-1, -2))


def force(pair: PairFormula, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
    """Compute the force, differentiable."""
    d, s, included = geometry(pair, position)
    return _sum_pairs(-2 * _masked(pair, pair.truncated_slope(s), included), d, rounding)


def force_vjp(
    pair: PairFormula, position: Positions, parameters: Tensors, rounding: Rounding
) -> tuple[Tensor, Pullback]:
    """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta), for any parameters."""
    with torch.no_grad():
        d, s, included = geometry(pair, position)
        weight = -2 * _masked(pair, pair.truncated_slope(s), included)
        value = _sum_pairs(weight, d, rounding)
        weight = weight.unsqueeze(-3)

    def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
        with torch.no_grad():
            w = split_coordinates(differences(v))
            dw = sum_coordinates([x * y for x, y in zip(d, w, strict=True)])
            dw = _masked(pair, dw, included)
            curvature = (-4 * pair.truncated_curvature(s) * dw).unsqueeze(-3)
            rows = [(curvature * x + weight * y).sum(-1) for x, y in zip(d, w, strict=True)]
            return join_coordinates(rows), DeferredVJP(pair, pair.truncated_slope, -dw, s)

    return value, pullback


def virial(pair: PairFormula, position: Positions) -> Tensor:
    """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``."""
    d, s, included = geometry(pair, position)
    weight = -_masked(pair, pair.truncated_slope(s), included)
    vectors = torch.cat(d, -3)
    return torch.einsum("...ij,...aij,...bij->...ab", weight, vectors, vectors)


def strained_force(
    pair: PairFormula, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
) -> tuple[Tensor, Tensor]:
    """Compute the force F and the force along the strain, W, differentiable."""
    d, s, included = _strained_geometry(pair, position, strain)
    weight = -2 * _masked(pair, pair.truncated_slope(s), included)
    force = _sum_pairs(weight, d, roundings.force)
    return force, _virial(strain, d, [weight.unsqueeze(-3) * x for x in d], roundings.virial)


def strained_vjp(
    pair: PairFormula, position: Positions, strain: Strain, roundings: Roundings
) -> tuple[tuple[Tensor, Tensor], Callable[[Tensor, Tensor], tuple[Tensor, Tensor, DeferredVJP]]]:
    """Compute :func:`strained_force`, and its product with cotangents v and c.

    With w_ij = v_i - v_j + c d_ij, of which the part in c is by coordinate along rows, the product
    is that of :func:`force_vjp`, and the work along rows of what a pair adds to it on d_ij.
    """
    with torch.no_grad():
        d, s, included = _strained_geometry(pair, position, strain)
        weight = (-2 * _masked(pair, pair.truncated_slope(s), included)).unsqueeze(-3)
        force = _sum_pairs(weight.squeeze(-3), d, roundings.force)
        virial = _virial(strain, d, [weight * x for x in d], roundings.virial)

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, DeferredVJP]:
        with torch.no_grad():
            moved = split_coordinates(differences(v))
            w = list(map(add, moved, _multiplied(d, strain.matrix(c, v.shape[-1]))))
            dw = sum_coordinates([x * y for x, y in zip(d, w, strict=True)])
            dw = _masked(pair, dw, included)
            curvature = (-4 * pair.truncated_curvature(s) * dw).unsqueeze(-3)
            parts = [curvature * x + weight * y for x, y in zip(d, w, strict=True)]
            along = join_coordinates([part.sum(-1) for part in parts])
            deferred = DeferredVJP(pair, pair.truncated_slope, -dw, s)
            return along, _virial(strain, d, parts, UNROUNDED), deferred

    return (force, virial), pullback


def geometry(
    pair: PairFormula, position: Positions, box: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Compute differences by coordinate, squared distances, and the mask of included pairs.

    The boxes of systems take the place of that of the potential.
    """
    parts = split_coordinates(differences(position))
    box = pair.image_box if box is None else box
    if box is not None:
        parts = nearest_image(parts, box.to(position), exact=pair.cutoff is None)
    s = sum_coordinates([x * x for x in parts])
    excluded = pair.exclusions
    included = distinct(position) if excluded is None else interacting(excluded, position)
    if pair.cutoff is not None:
        # A comparison of numbers is faster than two masks, which compiled loops would widen.
        s = torch.where(included, s, torch.finfo(s.dtype).max)
        included = s < pair.cutoff**2
    return parts, torch.where(included, s, pair.safe_distance(s)), included


def distinct(position: Tensor) -> Tensor:
    """Return which pairs ``(atoms, atoms)`` are of two atoms, which may be at one position."""
    # Indices are compared in the dtype of positions and read from memory, so that a compiled loop
    # over pairs does not convert them.
    index = torch.arange(position.shape[-2], dtype=position.dtype, device=position.device)
    index = materialise_contiguous(index) if is_tracing() else index
    return index.unsqueeze(-1) != index


def split_coordinates(d: Tensor) -> list[Tensor]:
    """Split ``(*batch, dim, atoms, atoms)`` by coordinate if the step is traced.

    The compiler then makes one loop over pairs for all coordinates, and computes common terms once.
    """
    return list(d.split(1, -3)) if is_tracing() else [d]


def sum_coordinates(parts: Sequence[Tensor]) -> Tensor:
    """Sum over coordinates, to ``(*batch, atoms, atoms)``."""
    return parts[0].sum(-3) if len(parts) == 1 else reduce(add, parts).squeeze(-3)


def _masked(pair: PairFormula, x: Tensor, included: Tensor) -> Tensor:
    """Set excluded pairs to zero; that of an atom with itself needs no mask."""
    everything = pair.cutoff is None and pair.exclusions is None
    return x if everything else torch.where(included, x, 0.0)


def _sum_pairs(weight: Tensor, d: Sequence[Tensor], rounding: Rounding = UNROUNDED) -> Tensor:
    return join_coordinates([rounding.round(weight.unsqueeze(-3) * x).sum(-1) for x in d])


def _strained_geometry(
    pair: PairFormula, position: Tensor, strain: Strain
) -> tuple[list[Tensor], Tensor, Tensor]:
    assert pair.image_box is not None
    return geometry(pair, position, strain.stretched(pair.image_box))


def _virial(
    strain: Strain, d: Sequence[Tensor], forces: Sequence[Tensor], rounding: Rounding
) -> Tensor:
    """Compute the work of the forces of all pairs on their differences along the strain."""
    if strain.full:
        rows = [x * y for x in _planes(d) for y in _planes(forces)]
    else:
        rows = [x * y for x, y in zip(d, forces, strict=True)]
    sums = join_coordinates([rounding.round(row).sum(-1) for row in rows])
    return 0.5 * strain.contracted(sums.sum(-2, keepdim=True))


def _multiplied(d: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """Multiply differences by a matrix from the right, or by coordinate, see ``Strain.matrix``."""
    if matrix.shape[-2] == 1:
        factors = split_coordinates(matrix.transpose(-1, -2)[..., None])
        return [x * y for x, y in zip(d, factors, strict=True)]
    columns = matrix[..., None, None, None].unbind(-4)
    rows = [
        reduce(add, [x * y for x, y in zip(_planes(d), column.unbind(-4), strict=True)])
        for column in columns
    ]
    return rows if len(d) > 1 else [torch.cat(rows, -3)]


def _planes(d: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split differences by coordinate."""
    return d[0].split(1, -3) if len(d) == 1 else d


def join_coordinates(rows: Sequence[Tensor]) -> Tensor:
    """Join separate coordinates ``(*batch, dim, atoms)`` to ``(*batch, atoms, dim)``."""
    if len(rows) == 1:
        return rows[0].transpose(-1, -2)
    axes, batch = rows[0].ndim, rows[0].shape[:-2]
    dim = memory_order(axes, len(batch), batch.numel()).index(axes - 1)
    return unpacked(torch.cat([packed(row.transpose(-1, -2), batch) for row in rows], dim), batch)
