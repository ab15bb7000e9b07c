"""The correction of an Ewald sum for pairs that do not interact.

The reciprocal part includes every pair. For an excluded pair its share, in the nearest image, is
subtracted: with s the squared distance::

    u(s) = -constant q_i q_j f(s)
    f(s) = erf(alpha r) / r = (2 alpha / sqrt(pi)) F_0(alpha^2 s)

F_n is the function of Boys, ``F_n(x) = integral from 0 to 1 of t^2n exp(-x t^2) dt``, whose
derivative is -F_{n+1}. It is smooth, so two atoms at one place have a finite force and product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adjsim.core.box import nearest_image
from adjsim.core.strain import Strain
from adjsim.potentials.charges.ewald.autograd import ChargeSum, Forces, Product

# Below x = 1 the alternating series of 20 terms is exact to the last bit, since its first missing
# term is 1 / (20! 45). Above, F_2 follows from F_0 with a loss of at most a digit.
TERMS = 20


@dataclass(frozen=True)
class ExcludedPairs(ChargeSum):
    """The energy and force of the correction.

    ``partners`` are ``(atoms, most)`` the atoms that do not interact with each, and the atom itself
    in place of missing ones. Sums gather, so that their order is fixed.
    """

    partners: Tensor
    box: Tensor
    alpha: float
    constant: float
    strain: Strain | None = None

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        _, s = self._geometry(position)
        itself = torch.arange(len(charge), device=charge.device).unsqueeze(-1)
        f = torch.where(self.partners == itself, 0.0, self._functions(s)[0])
        return -0.5 * (self._products(charge) * f).sum((-1, -2))

    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Forces, Product]:
        d, s = self._geometry(position)
        _, first, second = self._functions(s)
        products = self._products(charge)
        weight = (2 * products * first).unsqueeze(-1)
        pulls = weight * d
        force, along_strain = pulls.sum(-2), self._by_strain(d, pulls)

        def product(v: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            w = v.unsqueeze(-2) - v[..., self.partners, :]
            if self.strain is not None and c is not None:
                w = w + self.strain.dilated(d.flatten(-3, -2), c).reshape(d.shape)
            dw = (d * w).sum(-1)
            change = (4 * products * second * dw).unsqueeze(-1) * d + weight * w
            along, moved = change.sum(-2), self._by_strain(d, change)
            found = (2 * self.constant * charge[self.partners] * first * dw).sum(-1)
            if self.strain is not None and c is not None:
                along = along + self.strain.pulled_back(force, c)
                moved = moved + c * along_strain
            return along, moved, found.reshape(-1, len(charge)).sum(0)

        return (force, along_strain), product

    def _by_strain(self, d: Tensor, pulls: Tensor) -> Tensor:
        """Sum what pairs add to W; each pair is listed twice."""
        if self.strain is None:
            return d.new_zeros(0)
        return 0.5 * self.strain.along(d.flatten(-3, -2), pulls.flatten(-3, -2))

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        d, s = self._geometry(position)
        weight = self._products(charge) * self._functions(s)[1]
        return torch.einsum("...ij,...ija,...ijb->...ab", weight, d, d)

    def _geometry(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute differences ``(*batch, atoms, most, 3)`` and squared distances."""
        d = position.unsqueeze(-2) - position[..., self.partners, :]
        box = self.box if self.strain is None else self.strain.stretched(self.box)
        (near,) = nearest_image([d.movedim(-1, -3)], box)
        d = near.movedim(-3, -1)
        return d, (d * d).sum(-1)

    def _products(self, charge: Tensor) -> Tensor:
        return self.constant * charge.unsqueeze(-1) * charge[self.partners]

    def _functions(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute f, df/ds and d2f/ds2."""
        factor, square = 2 * self.alpha / math.sqrt(math.pi), self.alpha**2
        zero, one, two = boys(square * s)
        return factor * zero, -factor * square * one, factor * square**2 * two


def boys(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the functions of Boys F_0, F_1 and F_2, elementwise."""
    small = x < 1
    # Either branch gets an argument at which it is finite, so that gradients are finite too.
    below, above = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = torch.zeros_like(x)
    for k in reversed(range(TERMS)):
        series = series * below + (-1) ** k / (math.factorial(k) * (2 * k + 5))
    decay = torch.exp(-below)
    one = (2 * below * series + decay) / 3
    first = (2 * below * one + decay, one, series)
    root, decay = above.sqrt(), torch.exp(-above)
    zero = 0.5 * math.sqrt(math.pi) * torch.erf(root) / root
    one = (zero - decay) / (2 * above)
    second = (zero, one, (3 * one - decay) / (2 * above))
    zero, one, two = (torch.where(small, a, b) for a, b in zip(first, second, strict=True))
    return zero, one, two


def partners_of(exclusions: Tensor, atoms: int) -> Tensor:
    """List the excluded partners of each atom, ``(atoms, most)``, filled up with itself."""
    if exclusions.numel() and int(exclusions.max()) >= atoms:
        raise ValueError(
            f"exclusions name atom {int(exclusions.max())}, and charge is for {atoms} atoms, "
            "numbered from 0."
        )
    found: list[set[int]] = [set() for _ in range(atoms)]
    for i, j in exclusions.tolist():
        found[i].add(j)
        found[j].add(i)
    most = max(map(len, found))
    rows = [sorted(row) + [i] * (most - len(row)) for i, row in enumerate(found)]
    return torch.tensor(rows, dtype=torch.int64, device=exclusions.device)
