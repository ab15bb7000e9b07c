"""Pairs of a donor and an acceptor with an expression of the coordinates of their atoms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import (
    as_indices,
    as_positive,
    as_whole,
    outside_inference_mode,
    wrong_shape,
)
from adjsim.core.coordinates import Distance, Vector
from adjsim.core.declared import NOT_NEGATIVE
from adjsim.core.derived import replaced
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.bonded.compound import CompoundTerm
from adjsim.potentials.bonded.near_pairs import Reach, find_near
from adjsim.potentials.bonded.selection import Selection, check_range
from adjsim.potentials.products import ParameterVJP, Pullback, Tensors
from adjsim.potentials.strained import Forced, StrainedPullback

# The donors times acceptors from which on the pairs within a cutoff are listed. Measured, see
# benchmarks/README.md.
LISTED = 2**13


class CustomHydrogenBond(CompoundTerm, inherits_forces=True):
    """Every donor with every acceptor, with an expression of coordinates of their atoms.

    ``U = sum over donors and acceptors of unit f(coordinates, numbers)``, as OpenMM's
    CustomHbondForce. The points of the expression are the atoms d1, d2, d3 of a donor and a1, a2,
    a3 of an acceptor, in the coordinates ``distance(d1,a1)``, ``angle(d2,d1,a1)`` and
    ``dihedral(d3,d2,d1,a1)`` and the like.

    A cutoff leaves out pairs that are far apart, where the energy jumps unless the expression
    vanishes there. With a cutoff and at least 8,192 donors times acceptors, the near pairs are
    found by a neighbour list, in ascending order, so that exact runs are retraced. A compiled loop
    then needs the ``capacity``. Otherwise all pairs are evaluated: time and memory grow with
    donors times acceptors. So do not use it without a cutoff for the hydrogen bonds of a liquid.

    Args:
        donors: ``(donors, n)`` with n up to 3, the atoms of each donor.
        acceptors: ``(acceptors, n)``, likewise.
        expression, tables, unit, length_unit, box: see
            :class:`~adjsim.potentials.CustomCompound`.
        numbers: names that stand for one number each.
        donor_numbers: names with a number for each donor, or one.
        acceptor_numbers: likewise.
        exclusions: ``(n, 2)``, donors and acceptors, counted from 0, that do not interact.
        cutoff: the distance of d1 and a1 from which on the energy is zero.
        skin: see :class:`PairPotential`.
        capacity: the pairs of each system that a compiled loop holds, such as 1.5 times
            :meth:`near_pairs`. A system with more is an error of the run.

    Raises:
        ValueError: see :class:`~adjsim.potentials.CustomCompound`; no pair that is not excluded; a
            list in a compiled loop without a capacity, on a GPU or with too many pairs, and in a
            transform of ``torch.func``.
    """

    within_molecules = False
    reads_values = True
    functions: ClassVar[Mapping[str, int]] = {}
    omitted_arguments = ("index", "types")

    exclusions: Tensor | None
    # Pairs that fill up the rows of a list, in the copy that is made for an evaluation.
    _absent: Tensor | None = None

    def __init__(
        self,
        donors: Array,
        acceptors: Array,
        expression: str,
        numbers: Mapping[str, Number] | None = None,
        *,
        donor_numbers: Mapping[str, Number] | None = None,
        acceptor_numbers: Mapping[str, Number] | None = None,
        exclusions: Array | None = None,
        cutoff: float | None = None,
        skin: float | None = None,
        capacity: int | None = None,
        **options: Any,
    ) -> None:
        sides = as_indices("donors", donors), as_indices("acceptors", acceptors)
        for name, side in zip(("donors", "acceptors"), sides, strict=True):
            if side.ndim != 2 or not 1 <= side.shape[1] <= 3 or len(side) == 0:
                raise wrong_shape(name, f"({name}, 1 to 3) indices of atoms", side)
        self._widths = sides[0].shape[1], sides[1].shape[1]
        self.sizes = counts = len(sides[0]), len(sides[1])
        self._counts = {
            **dict.fromkeys(donor_numbers or {}, (0, counts[0])),
            **dict.fromkeys(acceptor_numbers or {}, (1, counts[1])),
        }
        self.cutoff = None if cutoff is None else as_positive("cutoff", cutoff)
        self.skin = None if skin is None else NOT_NEGATIVE("skin", skin)
        self.capacity = None if capacity is None else as_whole("capacity", capacity, least=1)
        self.listed = counts[0] * counts[1] >= LISTED and self.cutoff not in (None, math.inf)
        excluded = _checked(exclusions, *counts)
        given = [*(numbers or {}), *(donor_numbers or {}), *(acceptor_numbers or {})]
        if len(set(given)) < len(given):
            raise ValueError(f"a number is given twice, among {', '.join(given)}.")
        super().__init__(
            _side_by_side(sides),
            expression,
            {**(numbers or {}), **(donor_numbers or {}), **(acceptor_numbers or {})},
            **options,
        )
        with outside_inference_mode():
            self.register_buffer("exclusions", excluded if self.listed else None, persistent=False)
            if self.listed:
                self._filling = _first_pair(excluded, *counts)
            else:
                pairs = _pairs(excluded, *counts)
                self.donor_of, self.acceptor_of = map(Selection, pairs, counts)

    def validate(self) -> None:
        """Refuse a cutoff that the constructor would refuse, or that it was not given."""
        super().validate()
        if self.cutoff is not None:
            as_positive("cutoff", self.cutoff)
        if self.skin is not None:
            NOT_NEGATIVE("skin", self.skin)
        if not set(self.further_steps()) <= set(self.steps):
            raise ValueError(
                "CustomHydrogenBond was made without a cutoff: make it again with one."
            )
        if self.listed and self.cutoff in (None, math.inf):
            raise ValueError(
                "CustomHydrogenBond was made with a cutoff, for a list: make it again without one."
            )

    def near_pairs(self, position: Positions) -> int:
        """Count the pairs that a list holds of the system of a batch that has most."""
        return self._at(position).donor_of.index.shape[-1]

    def point_names(self) -> tuple[str, ...]:
        return tuple(
            f"{letter}{k + 1}"
            for letter, width in zip("da", self._widths, strict=True)
            for k in range(width)
        )

    def cartesian(self) -> dict[str, tuple[int, int]]:
        return {}

    def further_steps(self) -> list[tuple[int, int]]:
        return [] if self.cutoff is None else [(0, self._widths[0])]

    def element(self, x: Tensor) -> Tensor:
        found = super().element(x)
        return found if self.cutoff is None else torch.where(self._left_out(x), 0.0, found)

    def coordinates_of(self, x: Tensor) -> dict[str, Tensor]:
        found = super().coordinates_of(x)
        if self.cutoff is None:
            return found
        # Expressions such as sqrt(cutoff - r) are no numbers beyond the cutoff, and their
        # derivatives would be none in spite of the mask.
        safe, out = 0.5 * self.cutoff / self.length_unit, self._left_out(x)
        for name in found.keys() & {"distance(d1,a1)", "distance(a1,d1)"}:
            found[name] = torch.where(out, safe, found[name])
        return found

    def _left_out(self, x: Tensor) -> Tensor:
        """Return which pairs are beyond the cutoff or absent."""
        assert self.cutoff is not None
        place = self.steps.index((0, self._widths[0]))
        # Distances that are not finite keep an energy that is not.
        out = Distance(self._vectors(x)[place]).value >= self.cutoff
        return out if self._absent is None else out | self._absent

    def register_term_parameter(
        self, name: str, value: Number, *, columns: tuple[int, ...] = (), **rule: Any
    ) -> None:
        side = self._counts.get(name)
        shapes = [()] if side is None else [(), (side[1],)]
        register(self, name, value, shapes=shapes, **rule)

    def term_parameter(self, name: str, x: Tensor) -> Tensor:
        value: Tensor = getattr(self, name).to(x)
        if value.numel() == 1:
            return value.reshape(())
        return (self.donor_of, self.acceptor_of)[self._counts[name][0]](value)

    def members_of(self, x: Tensor) -> dict[int, Vector]:
        found = super().members_of(x).items()
        return {
            place: [self._of(place)(row[..., : self._of(place).count]) for row in rows]
            for place, rows in found
        }

    def sums(
        self, members: Mapping[int, Tensor], like: Tensor, rounding: Rounding = UNROUNDED
    ) -> Tensor:
        length = len(self.index)
        by_side = {k: self._of(k).transpose(x, length) for k, x in members.items()}
        return super().sums(by_side, like, rounding)

    def forward(self, position: Positions) -> Energies:
        return super(CustomHydrogenBond, self._at(position)).forward(position)

    def displacements(self, position: Positions) -> list[Vector]:
        return super(CustomHydrogenBond, self._at(position)).displacements(position)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum of F_k b_k``, see :meth:`BondedPotential.virial`."""
        return super(CustomHydrogenBond, self._at(position)).virial(position)

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        return super(CustomHydrogenBond, self._at(position)).linearised(position, rounding)

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        value, product = super().force_vjp(position, parameters, rounding)

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            along, rest = product(v)
            return along, self._taken(rest, parameters)

        return value, pullback

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        here = self._at(position, strain)
        return super(CustomHydrogenBond, here).strained_energy(position, strain)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        here = self._at(position, strain)
        return super(CustomHydrogenBond, here).strained_force(position, strain, roundings)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Sequence[Tensor],
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        here = super(CustomHydrogenBond, self._at(position, strain))
        values, product = here.strained_vjp(position, strain, parameters, roundings)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            along, stretch, rest = product(v, c)
            return along, stretch, self._taken(rest, parameters)

        return values, pullback

    def _taken(self, rest: ParameterVJP, parameters: Tensors) -> ParameterVJP:
        """Take a deferred gradient now if there is a list, of which each step has its own."""
        return rest.gradient(parameters) if self.listed and not isinstance(rest, list) else rest

    def _of(self, place: int) -> Any:
        """Return the map from donors, or from acceptors, to pairs, for a place in a term."""
        return self.donor_of if place < self._widths[0] else self.acceptor_of

    def _at(self, position: Tensor, strain: Strain | None = None) -> CustomHydrogenBond:
        """Return a copy with the pairs that are near at a position, or itself without a list."""
        if not self.listed or self._absent is not None:
            return self
        self.check_position(position)
        assert self.cutoff is not None
        first, second = (
            self.index[:n, k] for n, k in zip(self.sizes, (0, self._widths[0]), strict=True)
        )
        reach = Reach(
            self.cutoff,
            self.list_skin,
            self.image_box,
            self.exclusions,
            self._filling,
            self.capacity,
        )
        donors, acceptors, present = find_near(
            position.index_select(-2, first), position.index_select(-2, second), reach, strain
        )
        twin = replaced(self, {})
        vars(twin).update(donor_of=donors, acceptor_of=acceptors, _absent=~present)
        return twin


def _side_by_side(sides: Sequence[Tensor]) -> Tensor:
    """Join the atoms of donors and acceptors, of which the fewer are repeated."""
    rows = torch.arange(max(map(len, sides)))
    return torch.cat([side[rows % len(side)] for side in sides], 1)


def _checked(exclusions: Array | None, donors: int, acceptors: int) -> Tensor | None:
    """Return the pairs that are left out; refuse that all are."""
    if exclusions is None:
        return None
    left_out = as_indices("exclusions", exclusions)
    if left_out.ndim != 2 or left_out.shape[1] != 2:
        raise wrong_shape("exclusions", "(n, 2), a donor and an acceptor each", left_out)
    for column, (noun, count) in enumerate((("donor", donors), ("acceptor", acceptors))):
        check_range("exclusions", left_out[:, column], count, noun)
    left_out = torch.unique(left_out, dim=0)
    if len(left_out) == donors * acceptors:
        raise ValueError("all pairs of a donor and an acceptor are excluded.")
    return left_out


def _first_pair(excluded: Tensor | None, donors: int, acceptors: int) -> tuple[int, int]:
    """Return the first pair that is not excluded."""
    if excluded is None:
        return 0, 0
    numbers = excluded[:, 0] * acceptors + excluded[:, 1]
    later = (numbers != torch.arange(len(numbers))).nonzero()
    return divmod(int(later[0]) if len(later) else len(numbers), acceptors)


def _pairs(excluded: Tensor | None, donors: int, acceptors: int) -> tuple[Tensor, Tensor]:
    """Return the donor and the acceptor of each pair that is not excluded."""
    numbers = torch.arange(donors * acceptors)
    if excluded is not None:
        numbers = numbers[~torch.isin(numbers, excluded[:, 0] * acceptors + excluded[:, 1])]
    return numbers // acceptors, numbers % acceptors
