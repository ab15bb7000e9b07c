"""The parts of generalised Born: Born radii, descreening, and polarisation of the solvent."""

from __future__ import annotations

import torch
from torch import Tensor

# Model II of Onufriev, Bashford and Case ("OBC2").
ALPHA, BETA, GAMMA = 1.0, 0.8, 4.85


class BornRadii:
    """Born radii B of atoms and their derivatives, elementwise.

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
        """Compute dB/dradius, and its derivative where psi and B have the derivatives given."""
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

    Without it (``contained`` is False), dH/dr has in addition ``1/L^2`` inside of sphere j, and
    dH/dt has ``-1/L^2``, and dH/drho is 0 there. H of pairs that are not ``included`` is zero.
    """

    def __init__(
        self, r: Tensor, rho: Tensor, t: Tensor, included: Tensor, *, contained: bool
    ) -> None:
        self.r, self.rho, self.t, self.contained = r, rho, t, contained
        outer, self.gap = r + t, (r - t).abs()
        inner = torch.maximum(self.gap, rho)
        # One comparison instead of two masks, which compiled loops would widen.
        self.counts = torch.where(included, outer, 0.0) > rho
        self.far, self.near, self.inverse = 1 / outer, 1 / inner, 1 / r
        self.squares = self.far * self.far - self.near * self.near
        self.log = torch.log(inner * self.far)

    def value(self) -> Tensor:
        """Compute H."""
        skew = self.r - self.t * self.t * self.inverse
        value = self.near - self.far + 0.25 * skew * self.squares + 0.5 * self.inverse * self.log
        value = 0.5 * value
        if self.contained:
            value = value + torch.where(self._inside(), 1 / self.rho - self.near, 0.0)
        return self._masked(value)

    def slope(self) -> Tensor:
        """Compute dH/ds."""
        return self._masked(0.25 * self.inverse * self._along())

    def curvature(self) -> Tensor:
        """Compute d2H/ds2."""
        square, cube = self.inverse * self.inverse, self.near * self.near * self.near
        second = (
            0.25 * (1 + self.t * self.t * square) * self._change_of_squares()
            - self.inverse * square * (0.5 * self.t * self.t * self.squares - self.log)
            - 0.5 * square * (self._moved() * self.near - self.far)
        )
        if not self.contained:
            second = second + torch.where(self._inside(), 4 * cube, 0.0)
        return self._masked(0.125 * square * (second - self.inverse * self._along()))

    def by_other(self) -> tuple[Tensor, Tensor]:
        """Compute dH/dt and d2H/dt ds."""
        ratio = 0.25 * self.t * self.inverse
        value = -ratio * self.squares
        along = ratio * (self.inverse * self.squares - self._change_of_squares())
        if not self.contained:
            square = self.near * self.near
            value = value - torch.where(self._inside(), square, 0.0)
            along = along - torch.where(self._inside(), 2 * square * self.near, 0.0)
        return self._masked(value), self._masked(0.5 * self.inverse * along)

    def by_own(self) -> tuple[Tensor, Tensor]:
        """Compute dH/drho and d2H/drho ds."""
        near, i, square = self.near, self.inverse, self.t * self.t
        crossing = self.gap < self.rho
        value = 0.5 * near * (0.5 * (self.r - square * i) * near * near + 0.5 * i - near)
        along = 0.125 * i * near * ((1 + square * i * i) * near * near - i * i)
        value = torch.where(crossing, value, 0.0)
        if self.contained:
            value = torch.where(self._inside(), -1 / (self.rho * self.rho), value)
        return self._masked(value), self._masked(torch.where(crossing, along, 0.0))

    def _along(self) -> Tensor:
        """Compute 2 dH/dr."""
        square = self.inverse * self.inverse
        value = 0.25 * (1 + self.t * self.t * square) * self.squares - 0.5 * square * self.log
        if not self.contained:
            value = value + torch.where(self._inside(), 2 * self.near * self.near, 0.0)
        return value

    def _moved(self) -> Tensor:
        """Compute dL/dr."""
        return torch.where(self.gap > self.rho, torch.sign(self.r - self.t), 0.0)

    def _change_of_squares(self) -> Tensor:
        """Compute the derivative of 1/U^2 - 1/L^2 with respect to r."""
        cube = self.near * self.near * self.near
        return 2 * (cube * self._moved() - self.far * self.far * self.far)

    def _inside(self) -> Tensor:
        return self.r + self.rho < self.t

    def _masked(self, x: Tensor) -> Tensor:
        return torch.where(self.counts, x, 0.0)


class Polarisation:
    """G of pairs of unit charges, and its derivatives with respect to s and P, elementwise.

    With s the squared distance and P = B_i B_j the product of Born radii::

        G = -constant (1/solute - exp(-kappa f)/solvent) / f
        y = f^2 = s + P exp(-x)        x = s / (4 P)

        dy/ds = 1 - exp(-x)/4      d2y/ds2 = exp(-x) / (16 P)      d2y/ds dP = -x exp(-x) / (4 P)
        dy/dP = (1 + x) exp(-x)    d2y/dP2 = x^2 exp(-x) / P

    ``inside`` is constant / solute, and ``outside`` constant / solvent.
    """

    def __init__(
        self, s: Tensor, product: Tensor, inside: Tensor, outside: Tensor, kappa: float
    ) -> None:
        self.reach = 1 / product
        self.x = 0.25 * s * self.reach
        self.decay = torch.exp(-self.x)
        square = s + product * self.decay
        self.inverse = torch.rsqrt(square)
        self.inside, self.outside, self.kappa = inside, outside, kappa
        if kappa:
            self.path = kappa * square * self.inverse
            self.screening = torch.exp(-self.path)

    def energy(self) -> Tensor:
        """Compute G."""
        outside = self.outside * self.screening if self.kappa else self.outside
        return (outside - self.inside) * self.inverse

    def slope(self) -> Tensor:
        """Compute dG/dy."""
        return self.slope_by_inside() * self.inside - self.slope_by_outside() * self.outside

    def slope_by_inside(self) -> Tensor:
        """Compute the derivative of dG/dy with respect to ``inside``."""
        return 0.5 * self.inverse * self.inverse * self.inverse

    def slope_by_outside(self) -> Tensor:
        """Compute minus the derivative of dG/dy with respect to ``outside``."""
        cube = self.slope_by_inside()
        return cube * self.screening * (1 + self.path) if self.kappa else cube

    def curvature(self) -> Tensor:
        """Compute d2G/dy2."""
        square = self.inverse * self.inverse
        value = -1.5 * self.slope()
        if self.kappa:
            value = value + self.outside * 0.25 * self.kappa * self.path * square * self.screening
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
