"""Rounding to multiples of a power of two, on which float64 sums are exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# The largest multiple that can safely be added to another: sums of two stay below 2^53.
LARGEST = 2.0**51


class Rounding:
    """Rounding to the multiples of ``spacing``, a power of two.

    A tensor of spacings broadcasts over a batch. :data:`UNROUNDED` leaves numbers as they are.
    """

    rounds = True

    def __init__(self, spacing: Tensor) -> None:
        self.spacing = spacing
        # Adding this number removes all bits below the spacing.
        self._shift = spacing * (1.5 * 2.0**52)

    def link(self, link: int | None) -> Rounding:
        """Return the rounding of one link of a field."""
        if link is None or not self.rounds:
            return self
        return Rounding(self.spacing.select(-3, link))

    def round(self, x: Tensor) -> Tensor:
        """Round to the nearest multiples, with the derivative of the identity."""
        if x.requires_grad:
            return straight_through(x, (x.detach() + self._shift) - self._shift)
        return (x + self._shift) - self._shift

    def used_fraction(self, x: Tensor) -> float:
        """Return the largest entry as a share of the limit, infinity for NaN."""
        share = float((x.detach().abs() / self.spacing).amax()) / LARGEST
        return share if share == share else float("inf")

    @property
    def limit(self) -> float:
        """The largest number that can be added safely."""
        return float(self.spacing.max()) * LARGEST


class _Unrounded(Rounding):
    rounds = False

    def __init__(self) -> None:
        pass

    def round(self, x: Tensor) -> Tensor:
        return x


UNROUNDED = _Unrounded()


class Roundings(NamedTuple):
    """The roundings of contributions to forces, and to forces along a strain."""

    force: Rounding = UNROUNDED
    virial: Rounding = UNROUNDED


UNROUNDED_BOTH = Roundings()


def power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below x."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def straight_through(smooth: Tensor, value: Tensor) -> Tensor:
    """Return ``value``, a rounding of ``smooth``, with the derivative of ``smooth``."""
    return _StraightThrough.apply(smooth, value)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, smooth: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0], None
