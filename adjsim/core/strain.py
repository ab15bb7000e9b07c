"""The strain of periodic cells, and what a stretch of a cell does to vectors in it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.core.box import inverse

# The step of strain in which the reach of a list in a box without strain grows.
STEP = 0.02


class Strain(NamedTuple):
    """The logarithm e of the rows of a cell over those of a reference, for each system.

    With A the rows of the reference, a stretch takes its rows to exp(e) A, and positions and the
    rows of any lattice in the cell from x to ``x A^-1 exp(e) A``: their coordinates along the rows
    are multiplied by exp(e).

    Attributes:
        value: e, ``(*batch, 1, 1)`` where all rows are stretched alike, or ``(*batch, 1, dim)``.
        rows: A, ``(dim, dim)``, in a tilted cell whose rows are stretched each; None where the
            coordinates along the rows are those of vectors, or where the stretch is one number.
    """

    value: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, box: Tensor, value: Tensor) -> Strain:
        """Return the strain of a cell, ``(dim,)`` lengths or ``(dim, dim)`` rows."""
        return cls(value, box.to(value) if box.ndim == 2 and value.shape[-1] > 1 else None)

    @property
    def full(self) -> bool:
        """Whether a virial is needed whole, and not its diagonal alone."""
        return self.rows is not None

    def to(self, dtype: torch.dtype) -> Strain:
        """Convert the strain to another precision."""
        return Strain(self.value.to(dtype), None if self.rows is None else self.rows.to(dtype))

    def stretched(self, box: Tensor) -> Tensor:
        """Stretch a box, ``(*batch, 1, dim)`` lengths or ``(*batch, dim, dim)`` rows.

        The box is the reference, or has other rows of the same lattice.
        """
        return self.dilated(box.to(self.value), torch.exp(self.value))

    def dilated(self, x: Tensor, factor: Tensor) -> Tensor:
        """Multiply the coordinates of vectors along the rows by factors of the shape of e."""
        if self.rows is None:
            return x * factor
        return ((x @ inverse(self.rows)) * factor) @ self.rows

    def at_rest(self, x: Tensor, distance: float) -> tuple[Tensor, float]:
        """Return positions in the box without strain, and what no shorter distance was there.

        This reach grows in steps, so that it is the same in many steps of a run.
        """
        back = torch.exp(-self.value)
        contraction = math.log(self.longest(back.nan_to_num(1, 1, 1), x.shape[-1]))
        return self.dilated(x, back), distance * math.exp(STEP * math.ceil(contraction / STEP))

    def pulled_back(self, force: Tensor, factor: Tensor) -> Tensor:
        """Apply the transpose of :meth:`dilated`, which takes forces."""
        if self.rows is None:
            return force * factor
        return ((force @ self.rows.transpose(-1, -2)) * factor) @ _columns(self.rows)

    def along(self, x: Tensor, force: Tensor) -> Tensor:
        """Sum the work of forces on vectors ``(*batch, n, dim)`` along each row, of the shape of e.

        ``sum_i (x_i A^-1)_a (F_i A^T)_a``, which is minus the derivative of an energy by e_a as the
        vectors are stretched.
        """
        return self.products(x, force).sum(-2, keepdim=True).sum_to_size(self.value.shape)

    def products(self, x: Tensor, force: Tensor) -> Tensor:
        """Multiply forces and vectors by coordinate along rows, ``(*batch, n, dim)``."""
        if self.rows is None:
            return x * force
        return (x @ inverse(self.rows)) * (force @ self.rows.transpose(-1, -2))

    def contracted(self, virial: Tensor) -> Tensor:
        """Compute :meth:`along` from a sum of products of vectors and forces.

        The sum is ``(*batch, 1, dim)``, of the products by coordinate, or where :attr:`full`
        ``(*batch, 1, dim dim)``, of each coordinate of a vector with those of a force.
        """
        if self.rows is not None:
            products = virial.unflatten(-1, self.rows.shape).squeeze(-3)
            virial = ((_columns(self.rows) @ products) * self.rows).sum(-1).unsqueeze(-2)
        return virial.sum_to_size(self.value.shape)

    def longest(self, factor: Tensor, dim: int) -> float:
        """Compute the largest factor by which :meth:`dilated` makes any vector longer."""
        matrix = self.matrix(factor.detach(), dim)
        return float((torch.linalg.matrix_norm(matrix, 2) if self.full else matrix).max())

    def matrix(self, factor: Tensor, dim: int) -> Tensor:
        """Return what :meth:`dilated` multiplies vectors by, for factors of the shape of e.

        It is ``(*batch, 1, dim)``, for each coordinate, or where :attr:`full`
        ``(*batch, dim, dim)``.
        """
        if self.rows is None:
            return factor.expand(*factor.shape[:-1], dim)
        return (inverse(self.rows) * factor) @ self.rows


def _columns(rows: Tensor) -> Tensor:
    return inverse(rows).transpose(-1, -2)
