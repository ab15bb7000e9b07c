"""Pairs of atoms that do not interact, such as those that a bond holds together."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.contents import bytes_of
from adjsim.core.derived import has_numbers
from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of
from adjsim.core.state import in_transform
from adjsim.core.typing import Array


def checked_exclusions(value: Array) -> Tensor | None:
    """Convert excluded pairs to ``(n, 2)`` int64: i < j, sorted, each once; None without any."""
    given = as_tensor("exclusions", value).detach()
    if given.numel() == 0:
        return None
    if given.ndim != 2 or given.shape[1] != 2:
        raise ValueError(
            "exclusions must be (n, 2), the numbers of two atoms in each row; got shape "
            f"{tuple(given.shape)}."
        )
    for wrong, rule in (
        (~torch.isfinite(given) | (given != given.round()), "must be integers"),
        (given < 0, "must be the numbers of atoms, from 0"),
        ((given[:, :1] == given[:, 1:]), "must pair two different atoms"),
    ):
        rows = wrong.any(-1).nonzero()
        if len(rows):
            k = int(rows[0])
            i, j = given[k].tolist()
            raise ValueError(f"exclusions {rule}; row {k} is ({i:g}, {j:g}).")
    return torch.unique(given.long().sort(-1).values, dim=0)


def digest_of(numbers: Tensor | None) -> str | None:
    """Return what is equal for equal integers, such as exclusions and species.

    Integers that a transform hides are equal to themselves alone.
    """
    if numbers is None:
        return None
    if in_transform() or not has_numbers(numbers):
        return f"tensor {id(numbers)}"
    return hashlib.blake2b(bytes_of(numbers.detach()).data, digest_size=16).hexdigest()


def check_exclusions(exclusions: Tensor, atoms: int) -> None:
    """Refuse exclusions of atoms that a position does not have."""
    beyond = ((exclusions >= atoms) | (exclusions < 0)).any(-1).nonzero()
    if len(beyond):
        i, j = exclusions[int(beyond[0])].tolist()
        raise ValueError(
            f"exclusions have the pair ({i}, {j}), and position has {atoms} atoms, from 0 to "
            f"{atoms - 1}."
        )


def interacting(exclusions: Tensor, position: Tensor) -> Tensor:
    """Return which pairs ``(atoms, atoms)`` interact: different atoms that are not excluded."""
    atoms = position.shape[-2]
    if not is_tracing():
        return _matrix(exclusions, atoms, torch.bool)
    # A compiled loop over pairs reads numbers of one type. It is faster with atoms side by side in
    # vectors than with the neighbours of one atom, and is made so where memory is read in that
    # order. The matrix is symmetric.
    return torch.ops.adjsim.interacting(exclusions.detach(), atoms, position.dtype).mT > 0


def _matrix(exclusions: Tensor, atoms: int, dtype: torch.dtype) -> Tensor:
    """Return 1 for the pairs that interact and 0 for others, see :func:`interacting`."""
    if not torch.compiler.is_compiling():
        check_exclusions(exclusions, atoms)
    i, j = exclusions.unbind(-1)
    own = torch.arange(atoms, device=exclusions.device)
    found = torch.ones(atoms, atoms, dtype=dtype, device=exclusions.device)
    rows, columns = torch.cat([i, j, own]), torch.cat([j, i, own])
    return found.index_put((rows, columns), found.new_zeros(()))


matrix = operator("interacting")(_matrix)


@shapes_of(matrix)
def _(exclusions: Tensor, atoms: int, dtype: torch.dtype) -> Tensor:
    return exclusions.new_empty((atoms, atoms), dtype=dtype)
