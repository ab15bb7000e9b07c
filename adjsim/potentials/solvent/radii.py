"""Born radii of atoms, as functions of what displaces the solvent around them."""

from __future__ import annotations

import torch
from torch import Tensor


class BornRadii:
    """Born radii B of atoms and their derivatives, elementwise.

    With psi = rho I, where I is the sum of H over all other atoms::

        p    = alpha psi - beta psi^2 + gamma psi^3
        1/B  = 1/rho - S(p)/R            S = tanh and R = radius; unbounded: S(p) = p and R = rho
        K    = S' dp/dpsi / R            S' = dS/dp

        dB/dpsi               = B^2 K
        dK/dpsi               = (S'' (dp/dpsi)^2 + S' d2p/dpsi2) / R
        d2B/dpsi2             = 2 B^3 K^2 + B^2 dK/dpsi
        dB/drho at fixed I, R = B^2 (1/rho^2 + K psi/rho)
        dB/dR at fixed psi    = -B^2 S / R^2
        dB/dp at fixed rho, R = B^2 S' / R
    """

    def __init__(
        self,
        psi: Tensor,
        radius: Tensor,
        rho: Tensor,
        shape: tuple[Tensor, Tensor, Tensor],
        bounded: bool,
    ) -> None:
        alpha, beta, gamma = shape
        self.psi, self.rho, self.bounded = psi, rho, bounded
        self.limit = radius if bounded else rho
        p = ((gamma * psi - beta) * psi + alpha) * psi
        self.share = torch.tanh(p) if bounded else p
        self.value = 1 / (1 / rho - self.share / self.limit)
        self.rate = alpha + (3 * gamma * psi - 2 * beta) * psi
        self.turn = 6 * gamma * psi - 2 * beta
        self.rest = 1 - self.share * self.share if bounded else torch.ones_like(p)
        self.bend = self.rest * self.rate / self.limit

    def slope(self) -> Tensor:
        """Compute dB/dpsi."""
        return self.value * self.value * self.bend

    def curvature(self) -> Tensor:
        """Compute d2B/dpsi2."""
        square = self.value * self.value
        return square * (2 * self.value * self.bend * self.bend + self._change())

    def by_rho(self, psi_along: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        """Compute dB/drho, and its derivative where psi and B have the derivatives given."""
        share = 1 / self.rho
        value = share * share + share * self.bend * self.psi
        change = share * (self._change() * self.psi + self.bend) * psi_along
        if not self.bounded:
            value = value - self.share * share * share
            change = change - self.bend * share * psi_along
        return self._of_inverse(value, change, along)

    def by_radius(self, psi_along: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        """Compute dB/dradius at fixed rho, and its derivative likewise; zero if unbounded."""
        if not self.bounded:
            return torch.zeros_like(along), torch.zeros_like(along)
        value = -self.share / self.limit.square()
        change = -self.bend / self.limit * psi_along
        return self._of_inverse(value, change, along)

    def by_power(self, power: int, psi_along: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the derivative of B with respect to the coefficient of a power of psi."""
        term = self.psi**power
        value = self.rest * term / self.limit
        change = self.rest * power * self.psi ** (power - 1)
        if self.bounded:
            change = change - 2 * self.share * self.rest * self.rate * term
        return self._of_inverse(value, change / self.limit * psi_along, along)

    def _of_inverse(self, value: Tensor, change: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        """Return B^2 times a derivative of -1/B, and its derivative."""
        square = self.value * self.value
        return square * value, 2 * self.value * along * value + square * change

    def _change(self) -> Tensor:
        """Compute dK/dpsi."""
        turn = self.turn
        if self.bounded:
            turn = turn - 2 * self.share * self.rate * self.rate
        return self.rest * turn / self.limit
