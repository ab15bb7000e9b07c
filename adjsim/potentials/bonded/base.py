"""Sums over listed groups of atoms: the base of bonds, angles, torsions and pairs of a molecule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, outside_inference_mode, wrong_shape
from adjsim.core.box import Periodic, nearest_image
from adjsim.core.coordinates import Coordinate, Distance, Vector, combined, scaled, subtracted
from adjsim.core.declared import Declaring
from adjsim.core.layout import is_tracing
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.base import ClosedForm
from adjsim.potentials.bonded.selection import Selection, as_members
from adjsim.potentials.pairs.strained_sums import StrainedProduct, with_strain
from adjsim.potentials.products import (
    DeferredVJP,
    Elementwise,
    ParameterVJP,
    Pullback,
    with_fewer_axes,
)
from adjsim.potentials.strained import Forced, StrainedPullback

# Atoms of the largest system, which bounds the tables of atoms.
MOST_ATOMS = 2**26


class BondedPotential(Declaring, Elementwise, Periodic, ClosedForm, inherits_forces=True):
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
        distinct: places in a term whose atoms differ; None: all.
        steps: the places in a term, first and last, of each displacement, by default from atom 0 to
            atom 1; -1 is a fixed point.
        coordinate: the internal coordinate of these displacements, by default the distance, see
            :mod:`adjsim.core.coordinates`.

    Raises:
        ValueError: an index of another shape, negative or too large, a term that names an atom
            twice, types or parameters of other lengths. At evaluation: a term that names an atom
            that the position does not have.
    """

    members: ClassVar[int] = 2
    distinct: ClassVar[tuple[tuple[int, ...], ...] | None] = None
    steps: ClassVar[tuple[tuple[int, int], ...]] = ((0, 1),)
    coordinate: ClassVar[type[Coordinate]] = Distance
    dim: ClassVar[int | None] = None
    within_molecules = True

    index: Tensor
    types: Tensor | None
    box: Tensor | None

    shapes_of_declared = "a number, one for each term or one for each type"

    def __init__(
        self,
        index: Array,
        *values: Number,
        types: Array | None = None,
        box: Array | None = None,
        **named: Number,
    ) -> None:
        numbers = self.given(values, named)
        super().__init__()
        with outside_inference_mode():
            given = as_indices("index", index)
            column = self.members == 1 and given.ndim == 1
            found = given.unsqueeze(-1) if column else given
            found = as_members("index", found, self.members, MOST_ATOMS, self.distinct)
            # Tables are made of index and types, so these are not part of the saved state.
            self.register_buffer("index", found, persistent=False)
            self.register_buffer(
                "types", None if types is None else _checked_types(types, found), persistent=False
            )
            self.register_box(box)
            self._most = int(found.max())
            self.by_type = nn.ModuleDict()
            self._columns: dict[str, tuple[int, ...]] = {}
            # The middle atom of an angle has no part in a spring between the ends.
            self.used = sorted({p for step in self.steps for p in step if p >= 0})
            self.atoms = Selection(found[:, self.used].T.flatten(), self._most + 1)
        self.store(numbers, self.register_term_parameter)

    def forward(self, position: Positions) -> Energies:
        return self.element(self.geometry(position).value).sum((-1, -2))

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        x = self.geometry(position)
        slope = self.slope(x.value)

        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            rate, changes = self._changes(x, slope, self.differences(v))
            return self._join(changes, v), self.parameter_vjp(x, rate, position, v)

        return self._join(self._pulls(x, slope, rounding), position), product

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        if self.box is None:
            return super().strained_energy(position, strain)
        return self.element(self.coordinate(*self._stretched(position, strain)).value).sum((-1, -2))

    def strained_force(
        self,
        position: Positions,
        strain: Strain,
        rounding: Rounding = UNROUNDED,
        virial_rounding: Rounding = UNROUNDED,
    ) -> Forced:
        if self.box is None:
            return super().strained_force(position, strain, rounding, virial_rounding)
        return self._in_boxes(position, strain, rounding, virial_rounding)[0]

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Sequence[Tensor],
        rounding: Rounding = UNROUNDED,
        virial_rounding: Rounding = UNROUNDED,
    ) -> tuple[Forced, StrainedPullback]:
        if self.box is None:
            return super().strained_vjp(position, strain, parameters, rounding, virial_rounding)
        with torch.no_grad():
            values, product = self._in_boxes(position, strain, rounding, virial_rounding)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            with torch.no_grad():
                return with_strain(position, strain, values, v, c, product)

        return values, pullback

    def _in_boxes(
        self, position: Tensor, strain: Strain, rounding: Rounding, virial_rounding: Rounding
    ) -> tuple[Forced, StrainedProduct]:
        """Compute F and W in boxes of systems, with a graph.

        A strain moves each displacement b_k by c b_k, by coordinate along rows, so the product is
        that of the force along ``v_j - v_i + c b_k``, see
        :func:`~adjsim.potentials.pairs.strained_sums.with_strain`.
        """
        b = self._stretched(position, strain)
        x = self.coordinate(*b)
        slope = self.slope(x.value)
        pulls = self._pulls(x, slope, rounding)

        def product(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, DeferredVJP]:
            w = [
                list(map(add, move, _like(strain.dilated(whole(side).mT, c).mT, move)))
                for move, side in zip(self.differences(v), b, strict=True)
            ]
            rate, changes = self._changes(x, slope, w)
            along, rest = self._join(changes, v), self.parameter_vjp(x, rate, position, v)
            return along, _along(strain, changes, b, UNROUNDED), rest

        values = self._join(pulls, position), _along(strain, pulls, b, virial_rounding)
        return values, product

    def _stretched(self, position: Tensor, strain: Strain) -> list[Vector]:
        """Compute the displacements in boxes of systems."""
        assert self.image_box is not None
        self._check_position(position)
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
        """
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
        self._check_position(position)
        return self._to_nearest(self.differences(position), self.image_box)

    def differences(self, x: Tensor) -> list[Vector]:
        """Compute the differences between the members of each term of any ``x_i``."""
        places = self.members_of(x)
        return [subtracted(places[j], places[i]) for i, j in self.steps]

    def members_of(self, x: Tensor) -> dict[int, Vector]:
        """Return, from ``(*batch, atoms, dim)``, the vectors of each member that is used."""
        columns = x.transpose(-1, -2)[..., : self.atoms.count]
        rows = self.atoms(columns).split(len(self.index), -1)
        # Coordinates apart let a compiled loop compute all of them together.
        return {
            place: list(row.split(1, -2)) if is_tracing() else [row]
            for place, row in zip(self.used, rows, strict=True)
        }

    def _to_nearest(self, vectors: list[Vector], box: Tensor | None) -> list[Vector]:
        if box is None:
            return vectors
        moved = [nearest_image([x.unsqueeze(-2) for x in d], box.to(d[0])) for d in vectors]
        return [[x.squeeze(-2) for x in d] for d in moved]

    def _pulls(self, x: Coordinate, slope: Tensor, rounding: Rounding) -> list[Vector]:
        """Compute minus the energy's slope by displacements, rounded so that sums are exact."""
        pulls, rounding = [scaled(-slope, g) for g in x.gradient], with_fewer_axes(rounding, 1)
        return [[rounding.round(part) for part in pull] for pull in pulls]

    def _join(self, pulls: Sequence[Vector], like: Tensor) -> Tensor:
        """Sum the pulls of displacements on their ends, to ``(*batch, atoms, dim)``."""
        members: dict[int, Tensor] = {}
        for (i, j), pull in zip(self.steps, pulls, strict=True):
            joined = whole(pull)
            members[i] = members[i] - joined if i in members else -joined
            members[j] = members[j] + joined if j in members else joined
        rows = torch.cat([members[place] for place in self.used], -1)
        return self.atoms.transpose(rows, like.shape[-2]).transpose(-1, -2)

    def _check_position(self, position: Tensor) -> None:
        atoms, dim = position.shape[-2:]
        name = type(self).__name__
        if self._most >= atoms:
            term, place = divmod(int(self.index.argmax()), self.members)
            raise ValueError(
                f"term {term} of {name} names atom {int(self.index[term, place])} and position "
                f"has {atoms} atoms, numbered from 0."
            )
        if self.dim is not None and dim != self.dim:
            raise ValueError(f"{name} needs {self.dim} dimensions; position has dim {dim}.")

    def register_term_parameter(
        self, name: str, value: Number, *, columns: tuple[int, ...] = (), **rule: Any
    ) -> None:
        """Store a parameter; ``columns`` is its shape for one term, ``rule`` that of numbers."""
        register(self, name, value, **rule)
        self._columns[name] = columns
        count = self._check_parameter(name)
        if self.types is not None and count > 1:
            # The transpose of a selection depends on the number of types.
            with outside_inference_mode():
                self.by_type[str(count)] = Selection(self.types.clone(), count)

    def validate(self) -> None:
        """Refuse atoms, types or numbers of terms other than those that the tables are made for."""
        super().validate()
        self.check_settings()
        name, types, index = type(self).__name__, self.types, self.index
        if not torch.equal(self.atoms.index.reshape(len(self.used), -1).T, index[:, self.used]):
            raise ValueError(f"the index of {name} has changed since it was made: make it again.")
        made: list[Any] = list(self.by_type.values())
        if not all(types is not None and torch.equal(x.index, types) for x in made):
            raise ValueError(f"the types of {name} have changed since it was made: make it again.")
        for parameter in self._columns:
            count = self._check_parameter(parameter)
            if types is not None and count > 1 and str(count) not in self.by_type._modules:
                raise ValueError(
                    f"{parameter} of {name} is for {count} types, and was for another number when "
                    "it was made: make it again."
                )

    def _check_parameter(self, name: str) -> int:
        """Return for how many terms or types a parameter is, 1 for all; refuse another shape."""
        value: Tensor = getattr(self, name)
        columns, types = self._columns[name], self.types
        lead = value.ndim - len(columns)
        fits = lead in (0, 1) and value.shape[lead:] == columns
        count = len(value) if lead == 1 else 1
        if fits and (count == 1 or str(count) in self.by_type._modules):
            return count
        wanted = len(self.index) if types is None else int(types.max()) + 1
        if fits and (count == wanted or (types is not None and count > wanted)):
            return count
        one = "a number" if not columns else str(columns)
        many = "terms" if types is None else "types"
        counted = f"{wanted} terms" if types is None else f"types up to {wanted - 1}"
        raise ValueError(
            f"{name} must be {one}, or ({', '.join(map(str, (many, *columns)))}"
            f"{',' if not columns else ''}) with {counted}; got shape {tuple(value.shape)}."
        )

    def term_parameter(self, name: str, x: Tensor) -> Tensor:
        """Return a parameter of each term, to broadcast against x."""
        return self._of_terms(getattr(self, name).to(x))

    def term_parameters(self, name: str, x: Tensor) -> list[Tensor]:
        """Return a parameter with several columns, each as :meth:`term_parameter`."""
        value: Tensor = getattr(self, name).to(x)
        return [self._of_terms(column) for column in value.unbind(-1)]

    def _of_terms(self, value: Tensor) -> Tensor:
        if value.numel() == 1:
            return value.reshape(())
        return value if self.types is None else self.by_type[str(len(value))](value)


def whole(vector: Vector) -> Tensor:
    """Join the coordinates of a vector, ``(*batch, dim, terms)``."""
    return vector[0] if len(vector) == 1 else torch.cat(list(vector), -2)


def _like(joined: Tensor, vector: Vector) -> Vector:
    """Split coordinates ``(*batch, dim, terms)`` as those of a vector are."""
    return [joined] if len(vector) == 1 else joined.split(1, -2)


def _along(
    strain: Strain, pulls: Sequence[Vector], b: Sequence[Vector], rounding: Rounding
) -> Tensor:
    """Sum the work of pulls on displacements along the strain."""
    rounding, sides = with_fewer_axes(rounding, 1), zip(pulls, b, strict=True)
    rows = [rounding.round(strain.products(whole(d).mT, whole(f).mT)) for f, d in sides]
    return reduce(add, [row.sum(-2, keepdim=True) for row in rows]).sum_to_size(strain.value.shape)


def _checked_types(types: Array, index: Tensor) -> Tensor:
    found = as_indices("types", types)
    if found.shape != index.shape[:1]:
        raise wrong_shape("types", f"({len(index)},), the type of each term", found)
    if int(found.min()) < 0:
        raise ValueError(f"types must be numbered from 0; got {int(found.min())}.")
    return found
