"""The part of the solvent around an atom that another atom displaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Descreening:
    """H of pairs of spheres, and its derivatives with respect to s = r^2, rho and t, elementwise.

    Atom i is a sphere of radius rho, atom j one of radius t, at the distance r. The integral of
    ``1 / (4 pi x^4)`` around atom i, over the part of sphere j outside of sphere i, is::

        H = (1/L - 1/U + (r - t^2/r) (1/U^2 - 1/L^2) / 4 + log(L/U) / (2 r)) / 2
        U = r + t        L = max(rho, |r - t|)

    It is zero where sphere i contains sphere j. Where sphere j contains sphere i, ``1/rho - 1/L``
    is added. See Hawkins, Cramer and Truhlar, J. Phys. Chem. 100, 19824 (1996). With this term, the
    partial derivatives of H with respect to U and to L = |r - t| are zero, so that::

        dH/dr   = (1 + t^2/r^2) (1/U^2 - 1/L^2) / 8 - log(L/U) / (4 r^2)
        dH/dt   = -t/r (1/U^2 - 1/L^2) / 4
        dH/drho = -1/rho^2                                                 inside of sphere j
                  (-1/rho^2 + (r - t^2/r) / (2 rho^3) + 1/(2 r rho)) / 2   where the surfaces cross
                  0                                                        outside of sphere j

    The formulas hold for t < 0 too, where H begins at U = rho with a jump. Without the term
    (``contained`` is False), dH/dr has in addition ``1/L^2`` inside of sphere j, and
    dH/dt has ``-1/L^2``, and dH/drho is 0 there. H of pairs that are not ``included`` is zero.
    """

    def __init__(
        self, r: Tensor, rho: Tensor, t: Tensor, included: Tensor, *, contained: bool
    ) -> None:
        self.r, self.rho, self.t, self.contained = r, rho, t, contained
        outer, self.gap = r + t, (r - t).abs()
        self.apart = self.gap > rho
        inner = torch.where(self.apart, self.gap, rho)
        # One comparison instead of two masks, which compiled loops would widen.
        self.counts = torch.where(included, outer, 0.0) > rho
        # A sphere of negative radius has no logarithm where it does not count.
        outer = torch.where(self.counts, outer, inner)
        # One division instead of three, which take longer than all that follows.
        ends = outer * inner
        share = 1 / (r * ends)
        self.far, self.near, self.inverse = r * inner * share, r * outer * share, ends * share
        # Terms that H has in common with its derivatives.
        self.quarter = 0.25 * (self.far * self.far - self.near * self.near)
        self.log = 0.5 * self.inverse * torch.log(inner * self.far)
        image = t * t * self.inverse
        self.image, self.sum, self.skew = image, r + image, r - image

    def value(self) -> Tensor:
        """Compute H."""
        value = 0.5 * (self.near - self.far + self.skew * self.quarter + self.log)
        if self.contained:
            value = value + torch.where(self._inside(), 1 / self.rho - self.near, 0.0)
        return self._masked(value)

    def slope(self) -> Tensor:
        """Compute dH/ds."""
        return self._masked(0.25 * self.inverse * self._along())

    def curvature(self) -> Tensor:
        """Compute d2H/ds2."""
        square, cube = self.inverse * self.inverse, self.near * self.near * self.near
        second = self.inverse * (
            0.25 * self.sum * self._change_of_squares()
            - 2 * self.inverse * (self.image * self.quarter - self.log)
            - 0.5 * self.inverse * (self._moved() * self.near - self.far)
        )
        if not self.contained:
            second = second + torch.where(self._inside(), 4 * cube, 0.0)
        return self._masked(0.125 * square * (second - self.inverse * self._along()))

    def by_other(self) -> tuple[Tensor, Tensor]:
        """Compute dH/dt and d2H/dt ds."""
        ratio = self.t * self.inverse
        value = -ratio * self.quarter
        along = ratio * (self.inverse * self.quarter - 0.25 * self._change_of_squares())
        if not self.contained:
            square = self.near * self.near
            value = value - torch.where(self._inside(), square, 0.0)
            along = along - torch.where(self._inside(), 2 * square * self.near, 0.0)
        return self._masked(value), self._masked(0.5 * self.inverse * along)

    def by_own(self) -> tuple[Tensor, Tensor]:
        """Compute dH/drho and d2H/drho ds."""
        near, i, square = self.near, self.inverse, self.near * self.near
        crossing = self.gap < self.rho
        value = 0.5 * near * (0.5 * (self.skew * square + i) - near)
        along = 0.125 * i * i * near * (self.sum * square - i)
        value = torch.where(crossing, value, 0.0)
        if self.contained:
            value = torch.where(self._inside(), -1 / (self.rho * self.rho), value)
        return self._masked(value), self._masked(torch.where(crossing, along, 0.0))

    def _along(self) -> Tensor:
        """Compute 2 dH/dr."""
        value = self.inverse * (self.sum * self.quarter - self.log)
        if not self.contained:
            value = value + torch.where(self._inside(), 2 * self.near * self.near, 0.0)
        return value

    def _moved(self) -> Tensor:
        """Compute dL/dr."""
        outwards = torch.where(self.r > self.t, 1.0, -torch.ones_like(self.r))
        return torch.where(self.apart, outwards, 0.0)

    def _change_of_squares(self) -> Tensor:
        """Compute the derivative of 1/U^2 - 1/L^2 with respect to r."""
        cube = self.near * self.near * self.near
        return 2 * (cube * self._moved() - self.far * self.far * self.far)

    def _inside(self) -> Tensor:
        return self.r + self.rho < self.t

    def _masked(self, x: Tensor) -> Tensor:
        return torch.where(self.counts, x, 0.0)


class DisplacedVolume(torch.autograd.Function):
    """H of pairs, ``(s, rho, t, contained)``, whose derivatives are closed forms."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:3])
        ctx.contained = given[3]
        return _of_pairs(given[:3], ctx.contained).value()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        found, (g,) = _of_pairs(ctx.saved_tensors, ctx.contained), cotangents
        slope = _Slope.apply(*ctx.saved_tensors, ctx.contained)
        return g * slope, g * found.by_own()[0], g * found.by_other()[0], None


class _Slope(torch.autograd.Function):
    """dH/ds of pairs."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:3])
        ctx.contained = given[3]
        return _of_pairs(given[:3], ctx.contained).slope()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        found, (g,) = _of_pairs(ctx.saved_tensors, ctx.contained), cotangents
        return g * found.curvature(), g * found.by_own()[1], g * found.by_other()[1], None


def _of_pairs(given: Sequence[Tensor], contained: bool) -> Descreening:
    s, rho, t = given
    return Descreening(s.sqrt(), rho, t, s >= 0, contained=contained)
