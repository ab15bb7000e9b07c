"""The method of Dormand and Prince, order 5(4), for many columns at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from scipy.integrate import RK45
from torch import Tensor

from adjsim.core.tableaus import TABLEAUS
from adjsim.ivp.column_steps import Rate, Step, combine

_PAIR = TABLEAUS["dormand-prince"]
_ERROR = tuple(_PAIR.error or ())
# The nodes of the tableau are sums of its rows, which differ in the last bit.
_TIMES: list[float] = RK45.C.tolist()
_POLYNOMIAL: list[list[float]] = RK45.P.T.tolist()


class DormandPrince(Step):
    r"""A step of every column by the explicit method, with the interpolant of SciPy's RK45.

    With :math:`k_i = f(t + c_i h, y + h \sum_{j<i} a_{ij} k_j)` the result is :math:`y' = y + h
    \sum_i b_i k_i`. The last stage of a step is the first one of the next.
    """

    name, error_order = "RK45", 4

    def __init__(self, rate: Rate, t: Tensor, h: Tensor, y: Tensor, first: Tensor | None) -> None:
        self._rate, self._t, self._h = rate, t, h
        self._rates = [rate(t, y) if first is None else first]
        for c, row in zip(_TIMES[1:], _PAIR.a[1:], strict=True):
            self._rates.append(rate(t + c * h, y + h * self._sum(row)))
        self.end = y + h * self._sum(_PAIR.b)

    @cached_property
    def _last(self) -> Tensor:
        return self._rate(self._t + self._h, self.end)

    def _sum(self, weights: Sequence[float], *more: Tensor) -> Tensor:
        rates = [*self._rates, *more]
        return combine(rates[0] * weights[0], weights[1:], rates[1:])

    def error(self) -> Tensor:
        return self._h * self._sum(_ERROR, self._last)

    def next_rate(self) -> Tensor:
        return self._last

    def polynomial(self) -> list[Tensor]:
        return [self._h * self._sum(weights, self._last) for weights in _POLYNOMIAL]
