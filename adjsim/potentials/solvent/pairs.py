"""Sums over pairs of generalised Born: the force, and its derivative along a direction.

With the notation of :class:`~adjsim.GeneralizedBorn`, G of the pair energy (polarisation.py) and H
of the descreening (descreening.py) and the necks (necks.py), s_ij = r_ij^2 and d_ij = q_i - q_j::

    E_i  = dU/dB_i = (sum_j q_i q_j (dG/dP)_ij P_ij - 6 A_i) / B_i     A_i: the area term of atom i
    c_i  = dU/dI_i = E_i rho_i dB_i/dpsi_i                             I_i = sum over j of H_ij
    F_i  = -2 sum_j (q_i q_j dG/ds + c_i dH_ij/ds + c_j dH_ji/ds) d_ij

with P_ij = B_i B_j. The terms of E_i and the first term of F_i are those of a pair in either order,
so that compiled steps compute each pair once. The sum of the second term needs no c_i, and the
third one is a sum over columns, since d_ji = -d_ij. So a force takes three passes over pairs: I and
``sum of dH_ij/ds d_ij``; E and the first term; the third term. The first pass of a compiled step
stores the derivatives of H, so that a pair takes two logarithms and two exponentials.

The force is a derivative, so its Jacobian is symmetric, and ``v^T dF/dq`` is the derivative of F
along v. It takes the same passes, with s' = 2 d_ij . (v_i - v_j) of every pair::

    psi_i' = rho_i sum_j dH_ij/ds s'        B_i' = dB_i/dpsi psi_i'       y' = dy/ds s' + dy/dP P'
    P_ij'  = B_i' B_j + B_i B_j'
    E_i'   = (sum_j q_i q_j (dG/dP P_ij)' + 36 A_i B_i'/B_i - E_i B_i') / B_i
    c_i'   = rho_i (E_i' dB_i/dpsi + E_i d2B_i/dpsi2 psi_i')

and ``v^T dF/dtheta = -dU'/dtheta``, where dU/dtheta is a sum over pairs whose terms have
derivatives along v as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import differences, nearest_image
from adjsim.core.layout import materialise
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.potentials.pairs.dense import (
    distinct,
    join_coordinates,
    split_coordinates,
    sum_coordinates,
)
from adjsim.potentials.solvent.descreening import Descreening
from adjsim.potentials.solvent.necks import NeckPairs
from adjsim.potentials.solvent.polarisation import Polarisation
from adjsim.potentials.solvent.radii import BornRadii

# What can be trained.
SHAPE = ("alpha", "beta", "gamma")
NUMBERS = ("charge", "radius", "scale", "solute", "solvent", "surface", "offset", *SHAPE, "neck")
# Descreening sums are dimensionless, and rarely above ten. On multiples of this spacing they are
# exact up to 128, and each contribution is rounded by at most 1e-14.
SPACING = 2.0**-46
# The largest matrix of pairs that a compiled step stores, 32 megabytes of float64.
STORED = 2**22


def area_of(radius: Tensor, probe: float, born: Tensor) -> Tensor:
    """Compute the area of every atom, ``(*batch, atoms)``."""
    return 4 * math.pi * (radius + probe).square() * (radius / born).pow(6)


class BornPairs:
    """The pairs and radii of one position, from which a GeneralizedBorn has energy and force."""

    def __init__(self, numbers: Any, position: Tensor, rounding: Rounding = UNROUNDED) -> None:
        atoms = len(numbers.charge)
        if position.shape[-2] != atoms:
            raise ValueError(f"charge is for {atoms} atoms and position has {position.shape[-2]}.")
        self.rounding, self.cutoff = rounding, numbers.cutoff
        self.pure = Rounding(position.new_full((), SPACING)) if rounding.rounds else UNROUNDED
        given: list[Tensor] = [getattr(numbers, name).to(position) for name in NUMBERS]
        self.charge, self.radius, self.scale, self.solute, self.solvent, self.surface = given[:6]
        offset, self.alpha, self.beta, self.gamma, self.neck = given[6:]
        self.rho, self.probe = self.radius - offset, numbers.probe
        self.inside = numbers.constant / self.solute
        self.outside = numbers.constant / self.solvent
        self.d = split_coordinates(differences(position))
        if numbers.image_box is not None:
            box, exact = numbers.image_box.to(position), self.cutoff is None
            self.d = nearest_image(self.d, box, exact=exact)
        self.s = sum_coordinates([x * x for x in self.d])
        included = distinct(position)
        if self.cutoff is not None:
            included = torch.where(included, self.s, math.inf) < self.cutoff**2
        r = torch.where(included, self.s, 1.0).sqrt()
        self.descreening = Descreening(
            r,
            self.rho.unsqueeze(-1),
            self.scale * self.rho,
            included,
            contained=numbers.contained,
        )
        self.necks = None
        if numbers.necks is not None:
            self.necks = NeckPairs(
                numbers.necks,
                r,
                self.descreening.inverse,
                numbers.necks.depth.to(r),
                numbers.necks.place.to(r),
                self.radius.unsqueeze(-1) + self.radius,
                included,
            )
        h = self.displaced(Descreening.value, NeckPairs.value)
        psi = self.summed(self.rho.unsqueeze(-1) * h, self.pure)
        self.born = BornRadii(
            psi, self.radius, self.rho, (self.alpha, self.beta, self.gamma), numbers.bounded
        )
        shift = 0.0
        if self.cutoff is not None:
            shift = distinct(position).to(position) / self.cutoff
        born, inverse = self.born.value, 1 / self.born.value
        self.product = born.unsqueeze(-1) * born.unsqueeze(-2)
        self.polarisation = Polarisation(
            self.s,
            self.product,
            inverse.unsqueeze(-1) * inverse.unsqueeze(-2),
            self.inside,
            self.outside,
            numbers.kappa,
            shift,
        )

    def displaced(
        self, of_spheres: Callable[[Descreening], Tensor], of_necks: Callable[[NeckPairs], Tensor]
    ) -> Tensor:
        """Compute H with its necks, or a derivative of it."""
        found = of_spheres(self.descreening)
        if self.necks is not None:
            found = found + self.neck * of_necks(self.necks)
        return stored(found)

    def areas(self) -> Tensor:
        """Compute the area of every atom, ``(*batch, atoms)``."""
        return area_of(self.radius, self.probe, self.born.value)

    def force(self) -> Tensor:
        """Compute the force."""
        self.hs = self.displaced(Descreening.slope, NeckPairs.slope)
        self.charges = self.within(self.charge.unsqueeze(-1) * self.charge)
        gy = self.polarisation.slope()
        self.gs = self.charges * gy * self.polarisation.by_square()
        self.gp = self.charges * gy * self.polarisation.by_product()
        # Of a symmetric matrix, a compiled loop computes one half.
        polar = self.summed(self.gp * self.product, self.rounding.link(0))
        self.by_born = (polar - 6 * self.surface * self.areas()) / self.born.value
        self.c = self.by_born * self.rho * self.born.slope()
        # Times rho^2, the sum of dH/ds d has no unit.
        self.share = self.rho * self.rho
        self.own = self.differences(self.share.unsqueeze(-1) * self.hs, self.pure)
        polar = self.differences(self.gs, self.rounding)
        columns = self.differences(self.c.unsqueeze(-1) * self.hs, self.rounding, -2)
        factor = (self.c / self.share).unsqueeze(-2)
        return join_coordinates(
            [
                2 * (third - first - factor * second)
                for first, second, third in zip(polar, self.own, columns, strict=True)
            ]
        )

    def virial(self) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, which has the weights of :meth:`force`."""
        self.force()
        weight = self.gs + 2 * self.c.unsqueeze(-1) * self.hs
        vectors = torch.cat(self.d, -3)
        return -torch.einsum("...ij,...aij,...bij->...ab", weight, vectors, vectors)

    def within(self, x: Tensor) -> Tensor:
        """Set pairs beyond the cutoff to zero."""
        return x if self.cutoff is None else torch.where(self.s < self.cutoff**2, x, 0.0)

    def summed(self, x: Tensor, rounding: Rounding) -> Tensor:
        """Sum over the other atoms."""
        return rounding.round(x).sum(-1)

    def differences(self, weight: Tensor, rounding: Rounding, axis: int = -1) -> list[Tensor]:
        """Sum weighted differences over the second atom of pairs, or the first, by coordinate."""
        return [rounding.round(weight.unsqueeze(-3) * x).sum(axis) for x in self.d]


class BornTangent:
    """The derivative along v of a force that has been computed, and gradients of parameters."""

    def __init__(self, pairs: BornPairs, v: Tensor) -> None:
        self.pairs, self.w = pairs, split_coordinates(differences(v))
        born, polarisation = pairs.born, pairs.polarisation
        self.s = 2 * sum_coordinates([x * y for x, y in zip(pairs.d, self.w, strict=True)])
        self.psi = (pairs.rho.unsqueeze(-1) * pairs.hs * self.s).sum(-1)
        self.born = born.slope() * self.psi
        mixed = self.born.unsqueeze(-1) * born.value.unsqueeze(-2)
        product = mixed + born.value.unsqueeze(-1) * self.born.unsqueeze(-2)
        ys, yp = polarisation.by_square(), polarisation.by_product()
        ss, sp, pp = polarisation.second()
        self.y = ys * self.s + yp * product
        slope = pairs.charges * polarisation.slope()
        bend = pairs.charges * polarisation.curvature() * self.y
        self.gs = bend * ys + slope * (ss * self.s + sp * product)
        gp = bend * yp + slope * (sp * self.s + pp * product)
        polar = (gp * pairs.product + pairs.gp * product).sum(-1)
        area = 36 * pairs.surface * pairs.areas() * self.born / born.value
        self.by_born = (polar + area - pairs.by_born * self.born) / born.value
        first, second = born.slope(), born.curvature()
        self.c = pairs.rho * (self.by_born * first + pairs.by_born * second * self.psi)

    def force(self) -> Tensor:
        """Compute the derivative of the force."""
        pairs, c, along = self.pairs, self.pairs.c, self.c
        bend = pairs.displaced(Descreening.curvature, NeckPairs.curvature) * self.s
        own = self._sums(pairs.share.unsqueeze(-1) * bend, pairs.share.unsqueeze(-1) * pairs.hs)
        polar = self._sums(self.gs, pairs.gs)
        weight = along.unsqueeze(-1) * pairs.hs + c.unsqueeze(-1) * bend
        columns = self._sums(weight, c.unsqueeze(-1) * pairs.hs, -2)
        c, along = (c / pairs.share).unsqueeze(-2), (along / pairs.share).unsqueeze(-2)
        return join_coordinates(
            [
                2 * (last - first - along * before - c * after)
                for last, first, before, after in zip(columns, polar, pairs.own, own, strict=True)
            ]
        )

    def weights(self, names: Sequence[str]) -> Tensor:
        """Compute ``v^T dF/dtheta`` of the named numbers, one after the other.

        The gradients of numbers of atoms are ``(*batch, atoms)``, those of others ``(*batch, 1)``.
        """
        return -torch.cat([getattr(self, f"_by_{name}")() for name in names], -1)

    def _by_charge(self) -> Tensor:
        along = self.pairs.within(self.pairs.polarisation.slope() * self.y)
        return (self.pairs.charge * along).sum(-1)

    def _by_radius(self) -> Tensor:
        pairs = self.pairs
        born = self._through_born(*pairs.born.by_radius(self.psi, self.born))
        area = -6 * pairs.surface * pairs.areas() * self.born / pairs.born.value
        area = area * (2 / (pairs.radius + pairs.probe) + 6 / pairs.radius)
        return self._by_rho() + born + area

    def _by_offset(self) -> Tensor:
        return -self._by_rho().sum(-1, keepdim=True)

    def _by_rho(self) -> Tensor:
        pairs = self.pairs
        rho, along = pairs.descreening.by_own()
        own = self.c * rho.sum(-1) + pairs.c * (along * self.s).sum(-1)
        born = self._through_born(*pairs.born.by_rho(self.psi, self.born))
        return own + born + pairs.scale * self._by_sphere()

    def _through_born(self, born: Tensor, along: Tensor) -> Tensor:
        """Compute the gradient with respect to a number on which Born radii depend."""
        return self.by_born * born + self.pairs.by_born * along

    def _by_alpha(self) -> Tensor:
        return self._by_power(1)

    def _by_beta(self) -> Tensor:
        return -self._by_power(2)

    def _by_gamma(self) -> Tensor:
        return self._by_power(3)

    def _by_power(self, power: int) -> Tensor:
        found = self._through_born(*self.pairs.born.by_power(power, self.psi, self.born))
        number = getattr(self.pairs, SHAPE[power - 1])
        return found if number.ndim else found.sum(-1, keepdim=True)

    def _by_neck(self) -> Tensor:
        necks, (c, along) = self.pairs.necks, (self.pairs.c, self.c)
        if necks is None:
            return torch.zeros_like(c[..., :1])
        each = along * necks.value().sum(-1) + c * (necks.slope() * self.s).sum(-1)
        return each.sum(-1, keepdim=True)

    def _by_scale(self) -> Tensor:
        return self.pairs.rho * self._by_sphere()

    def _by_sphere(self) -> Tensor:
        """Compute the gradient with respect to the radius with which an atom displaces solvent."""
        # They are computed with H, of which they have most terms, and not again where c is known.
        value, along = self.pairs.descreening.by_other()
        value, along = stored(value), stored(along * self.s)
        return (self.c.unsqueeze(-1) * value + self.pairs.c.unsqueeze(-1) * along).sum(-2)

    def _by_solute(self) -> Tensor:
        total = (self.pairs.charges * self.pairs.polarisation.slope_by_inside() * self.y).sum(-1)
        factor = -0.5 * self.pairs.inside / self.pairs.solute
        return factor * total.sum(-1, keepdim=True)

    def _by_solvent(self) -> Tensor:
        total = (self.pairs.charges * self.pairs.polarisation.slope_by_outside() * self.y).sum(-1)
        factor = 0.5 * self.pairs.outside / self.pairs.solvent
        return factor * total.sum(-1, keepdim=True)

    def _by_surface(self) -> Tensor:
        areas = -6 * self.pairs.areas() * self.born / self.pairs.born.value
        return areas.sum(-1, keepdim=True)

    def _sums(self, weight: Tensor, steady: Tensor, axis: int = -1) -> list[Tensor]:
        """Sum the derivatives of weighted differences, by coordinate."""
        weight, steady = weight.unsqueeze(-3), steady.unsqueeze(-3)
        pairs = zip(self.pairs.d, self.w, strict=True)
        return [(weight * x + steady * y).sum(axis) for x, y in pairs]


def stored(x: Tensor) -> Tensor:
    """Make a compiled step compute a matrix of pairs once, and write it to memory."""
    # Rows of neighbours stay together in memory, as in the tables of the necks.
    return materialise(x.mT).mT if x.numel() <= STORED else x
