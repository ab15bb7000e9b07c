"""Pairs of a donor and an acceptor with an expression of the coordinates of their atoms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_positive, outside_inference_mode, wrong_shape
from adjsim.core.coordinates import Distance
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.compound import CompoundTerm
from adjsim.potentials.bonded.selection import Selection, check_range


class CustomHydrogenBond(CompoundTerm):
    """Every donor with every acceptor, with an expression of coordinates of their atoms.

    ``U = sum over donors and acceptors of unit f(coordinates, numbers)``, as OpenMM's
    CustomHbondForce. The points of the expression are the atoms d1, d2, d3 of a donor and a1, a2,
    a3 of an acceptor, in the coordinates ``distance(d1,a1)``, ``angle(d2,d1,a1)`` and
    ``dihedral(d3,d2,d1,a1)`` and the like.

    All pairs are evaluated, without a neighbour list: time and memory grow with donors times
    acceptors. So do not use it for the hydrogen bonds of a liquid. A cutoff leaves out pairs that
    are far apart, where the energy jumps unless the expression vanishes there.

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

    Raises:
        ValueError: see :class:`~adjsim.potentials.CustomCompound`; no pair that is not excluded.
    """

    within_molecules = False
    functions: ClassVar[Mapping[str, int]] = {}
    omitted_arguments = ("index", "types")

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
        **options: Any,
    ) -> None:
        sides = as_indices("donors", donors), as_indices("acceptors", acceptors)
        for name, side in zip(("donors", "acceptors"), sides, strict=True):
            if side.ndim != 2 or not 1 <= side.shape[1] <= 3 or len(side) == 0:
                raise wrong_shape(name, f"({name}, 1 to 3) indices of atoms", side)
        self._widths = sides[0].shape[1], sides[1].shape[1]
        self._counts = {
            **dict.fromkeys(donor_numbers or {}, (0, len(sides[0]))),
            **dict.fromkeys(acceptor_numbers or {}, (1, len(sides[1]))),
        }
        self.cutoff = None if cutoff is None else as_positive("cutoff", cutoff)
        pairs = _pairs(len(sides[0]), len(sides[1]), exclusions)
        index = torch.cat([side[k] for side, k in zip(sides, pairs, strict=True)], 1)
        given = [*(numbers or {}), *(donor_numbers or {}), *(acceptor_numbers or {})]
        if len(set(given)) < len(given):
            raise ValueError(f"a number is given twice, among {', '.join(given)}.")
        super().__init__(
            index,
            expression,
            {**(numbers or {}), **(donor_numbers or {}), **(acceptor_numbers or {})},
            **options,
        )
        with outside_inference_mode():
            self.donor_of, self.acceptor_of = (
                Selection(k, len(side)) for side, k in zip(sides, pairs, strict=True)
            )

    def validate(self) -> None:
        """Refuse a cutoff that the constructor would refuse, or that it was not given."""
        super().validate()
        if self.cutoff is not None:
            as_positive("cutoff", self.cutoff)
        if not set(self.further_steps()) <= set(self.steps):
            raise ValueError(
                "CustomHydrogenBond was made without a cutoff: make it again with one."
            )

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
        if self.cutoff is None:
            return found
        place = self.steps.index((0, self._widths[0]))
        return torch.where(Distance(self._vectors(x)[place]).value < self.cutoff, found, 0.0)

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


def _pairs(donors: int, acceptors: int, exclusions: Array | None) -> tuple[Tensor, Tensor]:
    """Return the donor and the acceptor of each pair that is not excluded."""
    held = torch.ones(donors, acceptors, dtype=torch.bool)
    if exclusions is not None:
        left_out = as_indices("exclusions", exclusions)
        if left_out.ndim != 2 or left_out.shape[1] != 2:
            raise wrong_shape("exclusions", "(n, 2), a donor and an acceptor each", left_out)
        for column, (noun, count) in enumerate((("donor", donors), ("acceptor", acceptors))):
            check_range("exclusions", left_out[:, column], count, noun)
        held[left_out[:, 0], left_out[:, 1]] = False
    if not bool(held.any()):
        raise ValueError("all pairs of a donor and an acceptor are excluded.")
    first, second = held.nonzero().unbind(-1)
    return first, second
