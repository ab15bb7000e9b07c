"""Born radii and their derivatives.

With psi = rho I, where I is the sum of H over all other atoms, and T = tanh(p)::

    p    = psi - 0.8 psi^2 + 4.85 psi^3
    1/B  = 1/rho - T/radius
    K    = (1 - T^2) dp/dpsi / radius

    dB/dpsi          = B^2 K
    dK/dpsi          = (1 - T^2) (d2p/dpsi2 - 2 T (dp/dpsi)^2) / radius
    d2B/dpsi2        = 2 B^3 K^2 + B^2 dK/dpsi
    dB/dradius at fixed I = B^2 M,    M = 1/rho^2 + K I - T/radius^2

The last one includes that rho = radius - offset moves with the radius.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Model II of Onufriev, Bashford and Case ("OBC2").
ALPHA, BETA, GAMMA = 1.0, 0.8, 4.85


class BornRadii:
    """The Born radii of atoms, and their derivatives, elementwise.

    Args:
        psi: rho times the descreening sum.
        radius, rho: the intrinsic radius, and the same less the offset.
    """

    def __init__(self, psi: Tensor, radius: Tensor, rho: Tensor) -> None:
        self.psi, self.radius, self.rho = psi, radius, rho
        self.tanh = torch.tanh(((GAMMA * psi - BETA) * psi + ALPHA) * psi)
        self.value = 1 / (1 / rho - self.tanh / radius)
        self.rate = ALPHA + (3 * GAMMA * psi - 2 * BETA) * psi
        self.rest = 1 - self.tanh * self.tanh
        self.bend = self.rest * self.rate / radius

    def slope(self) -> Tensor:
        """Compute dB/dpsi."""
        return self.value * self.value * self.bend

    def curvature(self) -> Tensor:
        """Compute d2B/dpsi2."""
        square = self.value * self.value
        return square * (2 * self.value * self.bend * self.bend + self._change())

    def by_radius(self, psi_along: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        """Compute dB/dradius, and its derivative along a direction.

        Args:
            psi_along: the derivative of psi along the direction.
            along: the derivative of B.
        """
        share = 1 / self.rho
        value = share * share + share * self.bend * self.psi - self.tanh / self.radius.square()
        change = share * (self._change() * self.psi + self.bend) * psi_along
        change = change - self.rest * self.rate / self.radius.square() * psi_along
        square = self.value * self.value
        return square * value, 2 * self.value * along * value + square * change

    def _change(self) -> Tensor:
        """Compute dK/dpsi."""
        bend = 6 * GAMMA * self.psi - 2 * BETA - 2 * self.tanh * self.rate * self.rate
        return self.rest * bend / self.radius
