"""Times at which each column of a solution is read, and the steps in which they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adjsim.ivp.column_steps import interpolate

# For each column the number of a time (batch,), and whether this time is read (batch,).
Row = tuple[Tensor, Tensor]
# The times and states before a step, the times after, and a function that returns the coefficients
# of its interpolant.
InterpolatedStep = tuple[Tensor, Tensor, Tensor, Callable[[], Sequence[Tensor]]]


class ColumnReads:
    """The times at which a solution in columns is read.

    Args:
        times: the times ``(times, batch)``, sorted in the direction of each column.
        direction: 1 where a column is integrated forward in time, -1 where backward, ``(batch,)``.
    """

    def __init__(self, times: Tensor, direction: Tensor) -> None:
        self.times, self.direction = times, direction
        self._sorted = (direction * times).T.contiguous()
        self._columns = torch.arange(times.shape[1], device=times.device)

    def between(self, begin: Tensor, end: Tensor) -> list[Row]:
        """Return the rows of times after ``begin`` and up to ``end``, both ``(batch,)``."""
        first, last = self._passed(begin), self._passed(end)
        rows: list[Row] = []
        for k in range(int((last - first).max())):
            number = first + k
            rows.append((number.clamp(max=len(self.times) - 1), number < last))
        return rows

    def up_to(self, begin: Tensor) -> list[Row]:
        """Return the rows of times that are not after ``begin``."""
        return self.between(-torch.inf * self.direction, begin)

    def _passed(self, t: Tensor) -> Tensor:
        return torch.searchsorted(self._sorted, (self.direction * t)[:, None], right=True)[:, 0]

    def write(self, states: Tensor, step: InterpolatedStep) -> None:
        """Write the states of one step into the states at all times ``(n, times, batch)``."""
        begin, y, end, polynomial = step
        rows = self.between(begin, end)
        coefficients = polynomial() if rows else ()
        for number, due in rows:
            x = self._fraction(number, due, begin, end - begin)
            found = interpolate(y, coefficients, x)
            states[:, number[due], self._columns[due]] = found[:, due]

    def cotangents(
        self, cotangents: Tensor, rows: Sequence[Row], t: Tensor, h: Tensor, degree: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the cotangents of the start of a step, and of the coefficients of its interpolant.

        Args:
            cotangents: the cotangents of the states at all times ``(n, times, batch)``.
            rows: the rows that lie in the step.
            t, h: the times at the start of the step, and the step sizes.
            degree: the number of coefficients.
        """
        n, _, batch = cotangents.shape
        found = [cotangents.new_zeros(n, batch) for _ in range(degree + 1)]
        for number, due in rows:
            x = self._fraction(number, due, t, h)
            power = torch.where(due, cotangents[:, number, self._columns], 0.0)
            for total in found:
                total += power
                power = power * x
        return found[0], found[1:]

    def _fraction(self, number: Tensor, due: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return torch.where(due, (self.times[number, self._columns] - t) / h, 0.0)
