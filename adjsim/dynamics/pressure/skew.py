"""The shears that take vectors in a tilted box to their coordinates along its rows."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from adjsim.dynamics.moves import ColumnShear, Move


class Skew:
    """The coordinates of vectors along the rows A of a box, up to a factor and order of columns.

    With the decomposition A = P L D U, of a permutation, triangular matrices with ones on their
    diagonals, and a diagonal matrix::

        x A^-1 = x U^-1 (D^-1 L^-1 D) D^-1 P^T          position
        p A^T  = p U^T (D L^T D^-1) D P^T               momentum

    So two shears of columns take positions, or momenta, to numbers that a stretch of the rows
    scales, and their inverses take them back. Each is exact on a lattice. In a box of lower
    triangular rows U is the unit matrix.

    Attributes:
        order: the row that each column belongs to after the shears.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.detach()

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """P, D^-1 L D, U."""
        P, L, upper = torch.linalg.lu(self.rows)
        D = upper.diagonal()
        return P, L * D / D.unsqueeze(-1), upper / D.unsqueeze(-1)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(self._parts[0].argmax(0).tolist())

    def matrices(self) -> dict[str, Tensor]:
        """Return the matrices of the shears, by the names of coefficients."""
        _, lower, upper = self._parts
        columns = lower.transpose(-1, -2), upper.transpose(-1, -2)
        inverses = (torch.linalg.inv(x) for x in (upper, lower))
        return {
            **{f"position {k}": x for k, x in enumerate(inverses)},
            **{f"momentum {k}": x for k, x in enumerate(columns[::-1])},
        }

    def around(self, name: str, scale: Move) -> list[Move]:
        """Put the shears of a field, and their inverses, around a scale."""
        _, _, upper = self._parts
        # Without U, the first shear does nothing.
        used = [0, 1] if bool((upper.triu(1) != 0).any()) else [1]
        # The shears of positions are upper and lower triangular, and those of momenta transposed.
        lower = {0: name != "position", 1: name == "position"}
        there = [ColumnShear(name, f"{name} {k}", lower[k]) for k in used]
        back = [ColumnShear(x.field, x.coefficient, x.lower, inverse=True) for x in reversed(there)]
        return [*there, scale, *back]
