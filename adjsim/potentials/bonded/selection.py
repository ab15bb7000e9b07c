"""Numbers of terms from numbers of atoms or types, and sums over terms, without scatter.

A sum over the terms of an atom reads them through a fixed table, a row for each atom. So sums have
a fixed order, and compiled loops can contain them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Entries of a row of a table. The sum of more entries is a sum of sums.
WIDTH = 32


class Selection(nn.Module):
    """The linear map x -> x[index] along the last axis, and its transpose.

    Args:
        index: ``(entries,)`` int64, from 0 to count - 1.
        count: length of the axis.
    """

    index: Tensor

    def __init__(self, index: Tensor, count: int) -> None:
        super().__init__()
        self.count = count
        # They follow from the arguments of the potential, and are not part of its saved state.
        self.register_buffer("index", index, persistent=False)
        self.tables: list[str] = []
        for table in _tables(index, count):
            self.tables.append(f"table{len(self.tables)}")
            self.register_buffer(self.tables[-1], table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Select ``(*batch, entries)`` from ``(*batch, count)``."""
        return x.index_select(-1, self.index)

    def transpose(self, x: Tensor) -> Tensor:
        """Sum ``(*batch, entries)`` to ``(*batch, count)``."""
        for name in self.tables:
            table: Tensor = getattr(self, name)
            x = torch.cat([x, torch.zeros_like(x[..., :1])], -1)[..., table].sum(-1)
        return x


def _tables(index: Tensor, count: int) -> list[Tensor]:
    """Make tables of the entries of each number, by which sums read them.

    Each table is ``(rows, at most WIDTH)``. An empty place is the index behind the last entry.
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
        tables.append(table)
        if len(table) == count:
            return tables
        index = torch.repeat_interleave(torch.arange(count, device=index.device), parts)
