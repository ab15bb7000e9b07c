"""Pairs of atoms that do not interact, such as those that a bond holds together."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim._inputs import as_tensor
from adjsim._layout import is_tracing
from adjsim._typing import Array


def checked_exclusions(value: Array) -> Tensor | None:
    """Convert a list of excluded pairs to ``(n, 2)`` int64: i < j, sorted, each once.

    An empty list is None.

    Raises:
        TypeError: no numbers.
        ValueError: another shape, fractions, negative numbers, or an atom paired with itself.
    """
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


def check_exclusions(exclusions: Tensor, atoms: int) -> None:
    """Refuse exclusions of atoms that a position does not have.

    Raises:
        ValueError: names the pair and the number of atoms.
    """
    beyond = (exclusions >= atoms).any(-1).nonzero()
    if len(beyond):
        i, j = exclusions[int(beyond[0])].tolist()
        raise ValueError(
            f"exclusions have the pair ({i}, {j}), and position has {atoms} atoms, from 0 to "
            f"{atoms - 1}."
        )


def interacting(exclusions: Tensor, atoms: int) -> Tensor:
    """Return which pairs of atoms interact: different atoms without exclusion.

    The matrix is ``(atoms, atoms)`` and symmetric.

    Raises:
        ValueError: exclusions of atoms that there are not.
    """
    if not is_tracing() and not torch.compiler.is_compiling():
        check_exclusions(exclusions, atoms)
    i, j = exclusions.unbind(-1)
    own = torch.arange(atoms, device=exclusions.device)
    found = torch.ones(atoms, atoms, dtype=torch.bool, device=exclusions.device)
    rows, columns = torch.cat([i, j, own]), torch.cat([j, i, own])
    return found.index_put((rows, columns), torch.zeros_like(rows, dtype=torch.bool))
