"""The correction of an Ewald sum for pairs that do not interact.

The reciprocal part includes every pair. For an excluded pair its share, in the nearest image, is
subtracted: with s the squared distance::

    u(s) = -constant q_i q_j f(s)
    f(s) = erf(alpha r) / r = (2 alpha / sqrt(pi)) F_0(alpha^2 s)

F_n is the function of Boys, ``F_n(x) = integral from 0 to 1 of t^2n exp(-x t^2) dt``, whose
derivative is -F_{n+1}. It is smooth, so two atoms at one place have a finite force and product.
For pairs with 1/r^6 it is, with y = alpha^2 s::

    f(s) = (1 - exp(-y) (1 + y + y^2/2)) / s^3 = (alpha^6 / 2) I_2(y)

and ``I_n(y) = integral from 0 to 1 of t^n exp(-y t) dt`` has the derivative -I_{n+1}.
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

    ``index`` are the first atoms of the n pairs and then the second ones, ``(2 n,)``. ``table`` has
    the places of each atom among them, ``(most, atoms)``, and 2 n for missing ones, so that sums
    over the pairs of an atom have a fixed order.
    """

    index: Tensor
    table: Tensor
    box: Tensor
    alpha: float
    constant: float
    power: int
    strain: Strain | None = None

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        _, s = self._geometry(position)
        return -(self._products(charge) * self._functions(s)[0]).sum(-1)

    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Forces, Product]:
        d, s = self._geometry(position)
        _, first, second = self._functions(s)
        products = self._products(charge)
        weight = (2 * products * first).unsqueeze(-1)
        pulls = weight * d
        force, along_strain = self._joined(pulls, -pulls), self._by_strain(d, pulls)

        def product(v: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            w = self._differences(v)
            if self.strain is not None and c is not None:
                w = w + self.strain.dilated(d, c)
            dw = (d * w).sum(-1)
            change = (4 * products * second * dw).unsqueeze(-1) * d + weight * w
            along, moved = self._joined(change, -change), self._by_strain(d, change)
            rate = 2 * self.constant * first * dw
            mine, other = charge[self.index].unflatten(0, (2, -1))
            found = self._joined((other * rate).unsqueeze(-1), (mine * rate).unsqueeze(-1))
            if self.strain is not None and c is not None:
                along = along + self.strain.pulled_back(force, c)
                moved = moved + c * along_strain
            return along, moved, found.reshape(-1, len(charge)).sum(0)

        return (force, along_strain), product

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        d, s = self._geometry(position)
        weight = 2 * self._products(charge) * self._functions(s)[1]
        return torch.einsum("...i,...ia,...ib->...ab", weight, d, d)

    def _geometry(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute differences ``(*batch, n, 3)`` and squared distances."""
        d = self._differences(position)
        box = self.box if self.strain is None else self.strain.stretched(self.box)
        (near,) = nearest_image([d.mT.unsqueeze(-2)], box)
        d = near.squeeze(-2).mT
        return d, (d * d).sum(-1)

    def _differences(self, x: Tensor) -> Tensor:
        first, second = x[..., self.index, :].chunk(2, -2)
        return first - second

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Sum numbers of the first and the second atom of pairs to those of atoms."""
        both = torch.cat([first, second, torch.zeros_like(first[..., :1, :])], -2)
        return both[..., self.table, :].sum(-3)

    def _by_strain(self, d: Tensor, pulls: Tensor) -> Tensor:
        """Sum what pairs add to W."""
        return d.new_zeros(0) if self.strain is None else self.strain.along(d, pulls)

    def _products(self, charge: Tensor) -> Tensor:
        first, second = charge[self.index].chunk(2)
        return self.constant * first * second

    def _functions(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute f, df/ds and d2f/ds2."""
        square = self.alpha**2
        if self.power == 1:
            factor, (zero, one, two) = 2 * self.alpha / math.sqrt(math.pi), boys(square * s)
        else:
            factor, (zero, one, two) = square**3 / 2, gammas(square * s)
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


def gammas(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the integrals I_2, I_3 and I_4, elementwise."""
    small = y < 1
    below, above = torch.where(small, y, 0.0), torch.where(small, 1.0, y)
    series = torch.zeros_like(y)
    for k in reversed(range(TERMS)):
        series = series * below + (-1) ** k / (math.factorial(k) * (k + 5))
    decay = torch.exp(-below)
    three = (below * series + decay) / 4
    first = ((below * three + decay) / 3, three, series)
    decay = torch.exp(-above)
    value, second = (1 - decay) / above, list[Tensor]()
    for n in (1, 2, 3, 4):
        value = (n * value - decay) / above
        second.append(value)
    two, three, four = (torch.where(small, a, b) for a, b in zip(first, second[1:], strict=True))
    return two, three, four


def places_of(index: Tensor, atoms: int) -> Tensor:
    """List the places of each atom among first and second atoms of pairs, ``(most, atoms)``."""
    if len(index) and int(index.max()) >= atoms:
        raise ValueError(
            f"exclusions name atom {int(index.max())}, and the potential is for {atoms} "
            "atoms, numbered from 0."
        )
    order, counts = index.argsort(stable=True), index.bincount(minlength=atoms)
    rank = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[index[order]]
    table = index.new_full((int(counts.max()) if len(index) else 0, atoms), len(index))
    table[rank, index[order]] = order
    return table
