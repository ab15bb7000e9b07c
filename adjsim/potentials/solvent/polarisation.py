"""The interaction of charges through the solvent that they polarise."""

from __future__ import annotations

import torch
from torch import Tensor


class Polarisation:
    """G of pairs of unit charges, and its derivatives with respect to s and P, elementwise.

    With s the squared distance and P = B_i B_j the product of Born radii::

        G = -constant (1/solute - exp(-kappa f)/solvent) (1/f - shift)
        y = f^2 = s + P exp(-x)        x = s / (4 P)

        dy/ds = 1 - exp(-x)/4      d2y/ds2 = exp(-x) / (16 P)      d2y/ds dP = -x exp(-x) / (4 P)
        dy/dP = (1 + x) exp(-x)    d2y/dP2 = x^2 exp(-x) / P

    ``inside`` is constant / solute, and ``outside`` constant / solvent. The shift, 1/cutoff, is
    that of pairs, and zero for an atom with itself. ``reach`` is 1/P.
    """

    def __init__(
        self,
        s: Tensor,
        product: Tensor,
        reach: Tensor,
        inside: Tensor,
        outside: Tensor,
        kappa: float,
        shift: Tensor | float,
    ) -> None:
        self.reach = reach
        self.x = 0.25 * s * reach
        self.decay = torch.exp(-self.x)
        square = s + product * self.decay
        self.inverse = torch.rsqrt(square)
        self.inside, self.outside, self.kappa, self.shift = inside, outside, kappa, shift
        if kappa:
            f = square * self.inverse
            self.path = kappa * f
            self.held = 1 - shift * f if isinstance(shift, Tensor) else 1.0
            self.screening = torch.exp(-self.path)

    def energy(self) -> Tensor:
        """Compute G."""
        outside = self.outside * self.screening if self.kappa else self.outside
        return (outside - self.inside) * (self.inverse - self.shift)

    def slope(self) -> Tensor:
        """Compute dG/dy."""
        return self.slope_by_inside() * self.inside - self.slope_by_outside() * self.outside

    def slope_by_inside(self) -> Tensor:
        """Compute the derivative of dG/dy with respect to ``inside``."""
        return 0.5 * self.inverse * self.inverse * self.inverse

    def slope_by_outside(self) -> Tensor:
        """Compute minus the derivative of dG/dy with respect to ``outside``."""
        cube = self.slope_by_inside()
        return cube * self.screening * (1 + self.path * self.held) if self.kappa else cube

    def curvature(self) -> Tensor:
        """Compute d2G/dy2."""
        square = self.inverse * self.inverse
        value = -1.5 * self.slope()
        if self.kappa:
            bend = self.kappa * (self.kappa * self.held + 2 * self.shift) * self.inverse
            value = value + self.outside * 0.25 * bend * self.screening
        return square * value

    def by_square(self) -> Tensor:
        """Compute dy/ds."""
        return 1 - 0.25 * self.decay

    def by_product(self) -> Tensor:
        """Compute dy/dP."""
        return self.decay * (1 + self.x)

    def second(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute d2y/ds2, d2y/ds dP and d2y/dP2."""
        unit = self.reach * self.decay
        return 0.0625 * unit, -0.25 * self.x * unit, self.x * self.x * unit
