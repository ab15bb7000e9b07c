"""Sums over listed groups of atoms: the base of bonds, angles, torsions and pairs of a molecule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from adjsim.core.box import Periodic, nearest_image
from adjsim.core.coordinates import Coordinate, Distance, Vector, combined, scaled
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.bonded.terms import Terms, split_like, whole
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.pairs.strained_sums import StrainedProduct, with_strain
from adjsim.potentials.products import (
    DeferredVJP,
    Elementwise,
    ParameterVJP,
    Pullback,
    with_fewer_axes,
)
from adjsim.potentials.strained import Forced, StrainedPullback


class BondedPotential(Terms, Elementwise, Periodic, ClosedForm, inherits_forces=True):
    """A sum over terms of ``element(x)``, with x an internal coordinate of the atoms of a term.

    Subclasses name the coordinate, and write ``element``; ``slope`` (du/dx) and ``curvature``
    (d2u/dx2) follow from it, or are written too. They are elementwise in x, whose last axis is that
    of terms, and read a parameter by ``self.term_parameter(name, x)``. Sums over the terms of an
    atom have a fixed order; in exact runs forces are rounded to the lattice before.

    A parameter is a number, one for each term, or one for each type if ``types`` says the type of
    each term. The gradient with respect to the parameter of a type is then one number.

    Args:
        index: ``(terms, members)`` integers, the atoms of each term.
        types: ``(terms,)`` integers, the type of each term. None: terms have parameters of their
            own.
        box: ``(dim,)`` edge lengths or ``(dim, dim)`` rows of a periodic cell; each displacement
            between atoms of a term is to the nearest image.

    Attributes:
        members: the number of atoms of a term, by default 2.
        steps: the places in a term, first and last, of each displacement, by default from atom 0 to
            atom 1; -1 is a fixed point.
        coordinate: the internal coordinate of these displacements, by default the distance, see
            :mod:`adjsim.core.coordinates`.
        stretches: whether the displacements stretch with the box.
        fixed_reason: what does not move with the box, in terms whose displacements do not stretch.

    Raises:
        ValueError: an index of another shape, negative or too large, a term that names an atom
            twice, types or parameters of other lengths. At evaluation: a term that names an atom
            that the position does not have.
    """

    coordinate: ClassVar[type[Coordinate]] = Distance
    within_molecules = True
    stretches: bool = True
    fixed_reason: ClassVar[str] = ""

    box: Tensor | None

    def __init__(
        self,
        index: Array,
        *values: Number,
        types: Array | None = None,
        box: Array | None = None,
        **named: Number,
    ) -> None:
        super().__init__(index, *values, types=types, **named)
        self.register_box(box)

    def validate(self) -> None:
        """Refuse a box, or atoms, types or numbers, that the terms were not made for."""
        Periodic.validate(self)
        super().validate()

    def forward(self, position: Positions) -> Energies:
        return self.element(self.geometry(position).value).sum((-1, -2))

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        x = self.geometry(position)
        slope = self.slope(x.value)

        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            rate, changes = self._changes(x, slope, self.differences(v))
            return self._join(changes, v), self.parameter_vjp(x, rate, position, v)

        return self._join(self._pulls(x, slope, rounding), position, rounding), product

    @property
    def follows_box(self) -> bool:
        """Whether there is a box, with which the displacements stretch."""
        return self.box is not None and self.stretches

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        if not self.follows_box:
            return super().strained_energy(position, strain)
        return self.element(self.coordinate(*self._stretched(position, strain)).value).sum((-1, -2))

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        if not self.follows_box:
            return super().strained_force(position, strain, roundings)
        return self._in_boxes(position, strain, roundings)[0]

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Sequence[Tensor],
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        if not self.follows_box:
            return super().strained_vjp(position, strain, parameters, roundings)
        with torch.no_grad():
            values, product = self._in_boxes(position, strain, roundings)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            with torch.no_grad():
                return with_strain(position, strain, values, v, c, product)

        return values, pullback

    def _in_boxes(
        self, position: Tensor, strain: Strain, roundings: Roundings
    ) -> tuple[Forced, StrainedProduct]:
        """Compute F and W in boxes of systems, with a graph.

        A strain moves each displacement b_k by c b_k, by coordinate along rows, so the product is
        that of the force along ``v_j - v_i + c b_k``, see
        :func:`~adjsim.potentials.pairs.strained_sums.with_strain`.
        """
        b = self._stretched(position, strain)
        x = self.coordinate(*b)
        slope = self.slope(x.value)
        pulls = self._pulls(x, slope, roundings.force)

        def product(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, DeferredVJP]:
            w = [
                list(map(add, move, split_like(strain.dilated(whole(side).mT, c).mT, move)))
                for move, side in zip(self.differences(v), b, strict=True)
            ]
            rate, changes = self._changes(x, slope, w)
            along, rest = self._join(changes, v), self.parameter_vjp(x, rate, position, v)
            return along, _along(strain, changes, b, UNROUNDED), rest

        along = _along(strain, pulls, b, roundings.virial)
        return (self._join(pulls, position, roundings.force), along), product

    def _stretched(self, position: Tensor, strain: Strain) -> list[Vector]:
        """Compute the displacements in boxes of systems."""
        assert self.image_box is not None
        self.check_position(position)
        return self._to_nearest(self.differences(position), strain.stretched(self.image_box))

    def _changes(
        self, x: Coordinate, slope: Tensor, moves: Sequence[Vector]
    ) -> tuple[Tensor, list[Vector]]:
        """Compute the derivatives of x and of pulls along changes of the displacements."""
        rate, turned = x.along(*moves)
        second = -self.curvature(x.value) * rate
        return rate, [
            combined(scaled(second, g), -slope, turn)
            for g, turn in zip(x.gradient, turned, strict=True)
        ]

    def parameter_vjp(
        self, x: Coordinate, rate: Tensor, position: Tensor, v: Tensor
    ) -> DeferredVJP:
        """Return v times the force's derivative by parameters; x has the ``rate`` along v."""
        return DeferredVJP(self, self.slope, -rate, x.value)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum of F_k b_k`` over terms and displacements, ``(*batch, dim, dim)``.

        F_k is minus the derivative of the energy with respect to the displacement b_k.

        Raises:
            TypeError: displacements that do not stretch with the box.
        """
        if not self.stretches:
            raise TypeError(f"{type(self).__name__} has no virial(position): {self.fixed_reason}.")
        b = self.displacements(position)
        x = self.coordinate(*b)
        pulls = self._pulls(x, self.slope(x.value), UNROUNDED)
        products = [
            torch.einsum("...at,...bt->...ab", whole(f), whole(d))
            for f, d in zip(pulls, b, strict=True)
        ]
        return torch.stack(products).sum(0)

    def geometry(self, position: Positions) -> Coordinate:
        """Compute the internal coordinate of each term."""
        return self.coordinate(*self.displacements(position))

    def displacements(self, position: Positions) -> list[Vector]:
        """Compute the displacements of each term, to nearest images."""
        self.check_position(position)
        return self._to_nearest(self.differences(position), self.image_box)

    def _to_nearest(self, vectors: list[Vector], box: Tensor | None) -> list[Vector]:
        if box is None:
            return vectors
        moved = [nearest_image([x.unsqueeze(-2) for x in d], box.to(d[0])) for d in vectors]
        return [[x.squeeze(-2) for x in d] for d in moved]

    def _pulls(self, x: Coordinate, slope: Tensor, rounding: Rounding) -> list[Vector]:
        """Compute minus the energy's slope by displacements, rounded so that sums are exact."""
        pulls, rounding = [scaled(-slope, g) for g in x.gradient], with_fewer_axes(rounding, 1)
        return [[rounding.round(part) for part in pull] for pull in pulls]

    def _join(
        self, pulls: Sequence[Vector], like: Tensor, rounding: Rounding = UNROUNDED
    ) -> Tensor:
        """Sum the pulls of displacements on their ends, to ``(*batch, atoms, dim)``."""
        members: dict[int, Tensor] = {}
        for (i, j), pull in zip(self.steps, pulls, strict=True):
            joined = whole(pull)
            members[i] = members[i] - joined if i in members else -joined
            members[j] = members[j] + joined if j in members else joined
        return self.sums(members, like, with_fewer_axes(rounding, 1))


def _along(
    strain: Strain, pulls: Sequence[Vector], b: Sequence[Vector], rounding: Rounding
) -> Tensor:
    """Sum the work of pulls on displacements along the strain."""
    rounding, sides = with_fewer_axes(rounding, 1), zip(pulls, b, strict=True)
    rows = [rounding.round(strain.products(whole(d).mT, whole(f).mT)) for f, d in sides]
    return reduce(add, [row.sum(-2, keepdim=True) for row in rows]).sum_to_size(strain.value.shape)
