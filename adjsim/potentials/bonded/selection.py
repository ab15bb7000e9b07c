"""Numbers of terms from numbers of atoms or types, and sums over terms, without scatter.

A sum over the terms of an atom reads them through a fixed table, a row for each atom. So sums have
a fixed order, and compiled loops can contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, wrong_shape
from adjsim.core.typing import Array

# Entries of a row of a table. The sum of more entries is a sum of sums.
WIDTH = 32


class Selection(nn.Module):
    """The linear map x -> x[index] along the last axis, of length ``count``, and its transpose."""

    index: Tensor

    def __init__(self, index: Tensor, count: int) -> None:
        super().__init__()
        self.count = count
        # They follow from the arguments of the potential, and are not part of its saved state.
        self.register_buffer("index", index, persistent=False)
        for k, table in enumerate(_tables(index, count)):
            self.register_buffer(f"table{k}", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Select ``(*batch, entries)`` from ``(*batch, count)``."""
        return self._mapped(x, False)

    def transpose(self, x: Tensor, length: int | None = None) -> Tensor:
        """Sum ``(*batch, entries)`` to ``(*batch, count)``, with zeros behind up to a length."""
        total, rest = self._mapped(x, True), 0 if length is None else length - self.count
        if rest <= 0:
            return total
        none = torch.zeros_like(total[..., :1]).expand(*total.shape[:-1], rest)
        return torch.cat([total, none], -1)

    def _mapped(self, x: Tensor, sums: bool) -> Tensor:
        # The index and the tables are all buffers of the module.
        tensors = [x for x in self._buffers.values() if x is not None]
        return (_Linear.apply if torch.is_grad_enabled() else _map)(x, sums, *tensors)


def as_members(
    name: str,
    index: Any,
    columns: int,
    atoms: int,
    distinct: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Convert the indices of atoms, ``(n, columns)``.

    The atoms of a row are different, or those of each set of distinct columns.
    """
    found = as_indices(name, index)
    if found.ndim != 2 or found.shape[1] != columns or len(found) == 0:
        raise wrong_shape(name, f"(n, {columns}) indices of atoms with n at least 1", found)
    check_range(name, found, atoms)
    for places in distinct or [range(columns)]:
        part = found[:, list(places)]
        ordered = part.sort(-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
        if bool(twice.any()):
            row = int(twice.nonzero()[0])
            raise ValueError(f"{name}[{row}] names an atom twice: {part[row].tolist()}.")
    return found


def check_range(name: str, index: Tensor, count: int, noun: str = "atom") -> None:
    """Refuse indices that are not those of a noun, of which there is a count."""
    outside = (index < 0) | (index >= count)
    if bool(outside.any()):
        raise ValueError(
            f"{name}[{int(outside.nonzero()[0, 0])}] names {noun} {int(index[outside][0])}, "
            f"and {noun}s are counted from 0 to {count - 1}."
        )


def as_vertices(index: Array, name: str = "index") -> Tensor:
    """Convert the numbers of vertices that a force acts on."""
    found = as_indices(name, index)
    if found.ndim != 1 or len(found) == 0 or int(found.min()) < 0:
        raise ValueError(
            f"{name} must be (vertices,) integers from 0, at least one; got shape "
            f"{tuple(found.shape)}{f' with {int(found.min())}' if found.numel() else ''}."
        )
    return found


def _map(x: Tensor, sums: bool, index: Tensor, *tables: Tensor) -> Tensor:
    """Compute the selection, or its transpose."""
    if not sums:
        return x.index_select(-1, index)
    for table in tables:
        # Zeros that do not depend on x leave a concatenation before without another reader.
        zero = torch.zeros((*x.shape[:-1], 1), dtype=x.dtype, device=x.device)
        x = torch.cat([x, zero], -1)[..., table].sum(-2)
    return x


class _Linear(torch.autograd.Function):
    """The selection or its transpose; each is the derivative of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, sums: bool, *tensors: Tensor) -> Tensor:
        return _map(x, sums, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.sums, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        found = _Linear.apply(cotangents[0], not ctx.sums, *tensors)
        return found, None, *(None for _ in tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Linear.apply(tangents[0], ctx.sums, *ctx.saved_tensors)


def _tables(index: Tensor, count: int) -> list[Tensor]:
    """Make tables of the entries of each number, by which sums read them.

    Each table is ``(at most WIDTH, rows)``. An empty place is the index behind the last entry.
    """
    tables: list[Tensor] = []
    while True:
        order = torch.argsort(index, stable=True)
        counts = torch.bincount(index, minlength=count)
        start = torch.cumsum(counts, 0) - counts
        rank = torch.empty_like(index)
        rank[order] = torch.arange(len(index), device=index.device) - start[index[order]]
        parts = (counts + WIDTH - 1).div(WIDTH, rounding_mode="floor").clamp(min=1)
        first = torch.cumsum(parts, 0) - parts
        row = first[index] + rank.div(WIDTH, rounding_mode="floor")
        width = min(WIDTH, max(1, int(counts.max())))
        table = torch.full((int(parts.sum()), width), len(index), device=index.device)
        table[row, rank % WIDTH] = torch.arange(len(index), device=index.device)
        tables.append(table.T.contiguous())
        if len(table) == count:
            return tables
        index = torch.repeat_interleave(torch.arange(count, device=index.device), parts)
