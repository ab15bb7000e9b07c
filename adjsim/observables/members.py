"""Atoms and groups of a molecule, named by their indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor, wrong_shape
from adjsim.core.box import nearest_image
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, Number, PositionsLike
from adjsim.observables.neighbours import values_unknown
from adjsim.potentials.bonded.selection import as_members


def points(name: str, value: Array, what: str) -> Tensor:
    """Convert the numbers ``(n,)`` at which a distribution is evaluated."""
    with outside_tracing():
        at = as_tensor(name, value)
    if at.ndim != 1 or len(at) == 0:
        raise ValueError(f"{name} must be (n,) {what}; got shape {tuple(at.shape)}.")
    return at


def positions(
    what: str, position: PositionsLike, dim: int | None = None, *, atoms: int = 1, least: int = 1
) -> Tensor:
    """Convert positions ``(*batch, atoms, dim)``; refuse too few atoms or another dimension."""
    q = as_tensor("position", position)
    if q.ndim < 2 or q.shape[-2] < atoms or q.shape[-1] < least:
        raise ValueError(
            f"position of {what} must be (*batch, atoms, dim) with atoms >= {atoms} and dim >= "
            f"{least}; got shape {tuple(q.shape)}."
        )
    if dim is not None and q.shape[-1] != dim:
        raise ValueError(f"{what} is for {dim} dimensions; position has {q.shape[-1]}.")
    return q


def reference_like(q: Tensor, reference: Array) -> Tensor:
    """Convert a reference structure ``(atoms, dim)``, or one for each system of the batch."""
    with outside_tracing():
        y = as_tensor("reference", reference)
    batch = zip(reversed(y.shape[:-2]), reversed(q.shape[:-2]), strict=False)
    fits = 2 <= y.ndim <= q.ndim and y.shape[-2:] == q.shape[-2:]
    if not fits or any(a not in (1, b) for a, b in batch):
        raise ValueError(
            f"reference must be {tuple(q.shape[-2:])} or one such for each system of a position "
            f"of shape {tuple(q.shape)}; got shape {tuple(y.shape)}."
        )
    return y.to(q)


def atom_weights(name: str, value: Number, q: Tensor) -> Tensor:
    """Convert masses or weights, one number or one for each atom, to ``(atoms, 1)``."""
    with outside_tracing():
        w = as_tensor(name, value)
    atoms = q.shape[-2]
    if w.ndim > 0 and tuple(w.shape) not in ((atoms,), (atoms, 1)):
        raise wrong_shape(name, f"one number or ({atoms},), one for each atom", w)
    if not values_unknown() and not bool((w.isfinite() & (w >= 0)).all() & (w > 0).any()):
        raise ValueError(
            f"{name} must be zero or positive, and not all zero; got {w.detach().tolist()}."
        )
    return (w.reshape(-1, 1) if w.ndim else w.expand(atoms, 1)).to(q)


def shares(name: str, value: Number | None, q: Tensor) -> Tensor:
    """Convert masses or weights, or None for equal ones, to ``(atoms, 1)`` with a sum of one."""
    w = atom_weights(name, 1.0 if value is None else value, q)
    return w / w.sum()


def centred(x: Tensor, share: Tensor) -> Tensor:
    """Subtract the centre of positions with these shares."""
    return x - (share * x).sum(-2, keepdim=True)


def members(name: str, index: Any, columns: int, q: Tensor) -> Tensor:
    """Convert the indices of atoms, ``(n, columns)``; the atoms of a row are different."""
    with outside_tracing():
        return as_members(name, index, columns, q.shape[-2]).to(q.device)


def vectors(q: Tensor, start: Tensor, end: Tensor, cell: Tensor | None) -> Tensor:
    """Compute the vectors from atoms to atoms, to the nearest image, ``(*batch, n, dim)``."""
    return nearest(q.index_select(-2, end) - q.index_select(-2, start), cell)


def nearest(d: Tensor, cell: Tensor | None) -> Tensor:
    """Move differences ``(*batch, n, dim)`` to the nearest image."""
    if cell is None:
        return d
    (near,) = nearest_image([d.transpose(-1, -2).unsqueeze(-1)], cell.to(d))
    return near.squeeze(-1).transpose(-1, -2)


def length(d: Tensor) -> Tensor:
    """Compute the lengths of vectors ``(..., dim)``; those of length zero have no gradient."""
    return root((d * d).sum(-1))


def root(squares: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Compute the root of a sum of squares, zero without a gradient where it is ``noise`` at most.

    The derivative of the root of rounding errors is a vector of length one in a random direction.
    """
    zero = squares <= noise
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())
