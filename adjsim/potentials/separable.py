"""Potentials that are sums over coordinates of a function of one coordinate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.products import DeferredVJP, Pullback, derivative


class SeparablePotential(Potential):
    """A potential ``U = sum over atoms and dimensions of u(q)``.

    ``element`` is u, ``slope`` is u' and ``curvature`` is u'', elementwise.
    """

    def element(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no element(x).")

    def slope(self, x: Tensor) -> Tensor:
        return derivative(self.element, x)

    def curvature(self, x: Tensor) -> Tensor:
        return derivative(self.slope, x)

    def forward(self, position: Positions) -> Energies:
        return self.element(position).sum((-1, -2))

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return -self.slope(position)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            value = -self.slope(position)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            with torch.no_grad():
                return -self.curvature(position) * v, DeferredVJP(self, self.slope, -v, position)

        return value, pullback
