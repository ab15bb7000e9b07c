"""Functions of one to three arguments that are given by tables of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import add, mul
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_flag, as_number
from adjsim.core.derived import derived
from adjsim.core.parameters import Shape, register
from adjsim.core.typing import Number
from adjsim.potentials.bonded.maps import SPLINE
from adjsim.potentials.bonded.torsions import polynomial

SHAPES: tuple[Shape, ...] = (("n",), ("n", "m"), ("n", "m", "l"))
# Places in a table are counted by floats, which float32 can do up to here.
MOST = 2**24


class TabulatedFunction(nn.Module):
    """A function of one to three arguments, given by an array ``values`` with an axis for each."""

    least: ClassVar[int] = 1
    values: Tensor

    def __init__(self, values: Number) -> None:
        super().__init__()
        register(self, "values", values, finite=True, shapes=SHAPES)
        self.validate()

    def validate(self) -> None:
        """Refuse a table with too few values."""
        if min(self.values.shape) < self.least:
            raise ValueError(
                f"values must have at least {self.least} entries along each axis; got shape "
                f"{tuple(self.values.shape)}."
            )
        if self.values.numel() > MOST:
            raise ValueError(
                f"values may have {MOST} entries; got {self.values.numel()} of shape "
                f"{tuple(self.values.shape)}."
            )

    @property
    def count(self) -> int:
        """The number of arguments."""
        return self.values.ndim

    @property
    def coefficients(self) -> Tensor:
        """The numbers that :meth:`interpolate` reads, ``values`` if the class has no others."""
        return self.values

    def forward(self, *arguments: Tensor) -> Tensor:
        known = self.coefficients.to(arguments[0]).flatten()
        return self.interpolate(arguments, lambda place: known[place.long()])

    def interpolate(
        self, arguments: Sequence[Tensor], coefficient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Evaluate the function by the coefficients at places, in the order of ``coefficients``.

        Places are whole numbers of the type of the arguments, and within the coefficients even
        where arguments are not finite.
        """
        raise TypeError(f"{type(self).__name__} has no interpolate(arguments, coefficient).")


class DiscreteFunction(TabulatedFunction):
    """A table by whole numbers, ``f(i, j, k) = values[i, j, k]`` at the nearest whole numbers.

    An argument outside of the table gives NaN. The derivative by an argument is zero. These are
    OpenMM's Discrete1DFunction, Discrete2DFunction and Discrete3DFunction.

    Args:
        values: ``(n,)``, ``(n, m)`` or ``(n, m, l)``.
    """

    def interpolate(
        self, arguments: Sequence[Tensor], coefficient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        shape = self.values.shape
        near = [torch.floor(x.detach() + 0.5) for x in arguments]
        held = [(x >= 0) & (x < n) for x, n in zip(near, shape, strict=True)]
        places = [torch.where(inside, x, 0.0) for x, inside in zip(near, held, strict=True)]
        found = coefficient(_flat(places, shape))
        return torch.where(reduce(torch.logical_and, held), found, torch.nan)


class ContinuousFunction(TabulatedFunction):
    r"""The cubic spline through values on a regular grid, with continuous second derivatives.

    With the B-splines :math:`\beta` at the places ``u = (x - low) / spacing``, and coefficients c
    that follow from the values by a linear map along each axis::

        f(x, y, ..) = sum over a, b, .. of beta(u - a) beta(v - b) .. c[a, b, ..]
        (c[a-1] + 4 c[a] + c[a+1]) / 6 = values[a]              along each axis

    Along an axis the second derivative is zero at both ends (a natural spline), or the spline is
    periodic. A natural spline is zero outside of its range, where it jumps. These are OpenMM's
    Continuous1DFunction, Continuous2DFunction and Continuous3DFunction.

    Args:
        values: ``(n,)``, ``(n, m)`` or ``(n, m, l)``, at least two along each axis, on the grid
            from ``low`` to ``high``. Periodic ones are those of one period, without the values at
            ``high``, which are those at ``low``.
        low, high: a number, or one for each argument.
        periodic: whether the function has the period ``high - low`` along each axis.

    Raises:
        ValueError: fewer values, or ``high`` that is not above ``low``; other numbers of them than
            of arguments.
    """

    least = 2

    def __init__(
        self,
        values: Number,
        low: float | Sequence[float],
        high: float | Sequence[float],
        *,
        periodic: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.low, self.high = (_ends(name, x) for name, x in (("low", low), ("high", high)))
        self.periodic = as_flag("periodic", periodic)
        super().__init__(values)

    def validate(self) -> None:
        """Refuse a table with too few values, or a range without length."""
        super().validate()
        for name, ends in (("low", self.low), ("high", self.high)):
            if len(ends) not in (1, self.count):
                raise ValueError(
                    f"{name} must be a number, or one for each of the {self.count} arguments; got "
                    f"{len(ends)}."
                )
        for axis in range(self.count):
            low, high = self._range(axis)
            if not low < high:
                raise ValueError(f"high must be above low; got {high:g} and {low:g}.")

    def interpolate(
        self, arguments: Sequence[Tensor], coefficient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        outside: list[Tensor] = []
        first: list[Tensor] = []
        weights: list[list[Tensor]] = []
        for axis, x in enumerate(arguments):
            low, high = self._range(axis)
            cells = self._cells(axis)
            place = (x - low) * (cells / (high - low))
            if not self.periodic:
                beyond = (x < low) | (x > high)
                outside.append(beyond)
                place = torch.where(beyond, 0.0, place)
            cell = torch.floor(place.detach())
            if not self.periodic:
                cell = cell.clamp(0, cells - 1)
            # The index of a place that is not finite would be none of the table.
            whole = torch.where(cell.abs() < torch.inf, cell, 0.0)
            if self.periodic:
                whole = (whole - cells * torch.floor(whole / cells)).clamp(0, cells - 1)
            first.append(whole)
            weights.append([polynomial(place - cell, row) for row in SPLINE])
        sizes = [self._cells(axis) + 3 for axis in range(self.count)]

        def total(places: list[Tensor]) -> Tensor:
            axis = len(places)
            if axis == len(sizes):
                return coefficient(_flat(places, sizes))
            rows = [total([*places, first[axis] + k]) for k in range(4)]
            return reduce(add, map(mul, weights[axis], rows))

        found = total([])
        return reduce(lambda f, beyond: torch.where(beyond, 0.0, f), outside, found)

    @derived("values", "periodic")
    def _splines(self) -> Tensor:
        """The coefficients of the B-splines, along each axis three more than cells."""
        c = self.values
        for axis in range(self.count):
            spline = torch.from_numpy(_spline(c.shape[axis], self.periodic)).to(c)
            c = (c.movedim(axis, -1) @ spline.T).movedim(-1, axis)
        return c

    @property
    def coefficients(self) -> Tensor:
        """The coefficients of the B-splines."""
        return self._splines

    def _cells(self, axis: int) -> int:
        return self.values.shape[axis] - (not self.periodic)

    def _range(self, axis: int) -> tuple[float, float]:
        return self.low[axis % len(self.low)], self.high[axis % len(self.high)]


@cache
def _spline(size: int, periodic: bool) -> np.ndarray:
    """Compute the matrix from values along an axis to coefficients."""
    if periodic:
        ring = np.eye(size)
        c = np.linalg.inv((4 * ring + np.roll(ring, 1, 0) + np.roll(ring, -1, 0)) / 6)
        return c[np.arange(-1, size + 2) % size]
    middle, end = np.array([[1, 4, 1], [6, -12, 6]]) / 6
    rows = np.zeros((size + 2, size + 2))
    for k in range(size):
        rows[k + 1, k : k + 3] = middle
    rows[0, :3] = rows[-1, -3:] = end
    return np.ascontiguousarray(np.linalg.inv(rows)[:, 1:-1])


def _flat(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the places in a flat table."""
    flat = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        flat = flat * size + place
    return flat


def _ends(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    values = value if isinstance(value, Sequence) else (value,)
    return tuple(as_number(name, x) for x in values)
