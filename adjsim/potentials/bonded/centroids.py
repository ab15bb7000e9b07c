"""Terms whose energy is an expression of the centres of groups of atoms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_tensor, outside_inference_mode
from adjsim.core.coordinates import Vector
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array
from adjsim.potentials.bonded.compound import CompoundTerm
from adjsim.potentials.bonded.selection import Selection, check_range
from adjsim.potentials.bonded.terms import MOST_ATOMS


class CustomCentroid(CompoundTerm):
    """Groups of atoms with an expression of the coordinates of their centres.

    ``U = sum over terms of unit f(coordinates, numbers)``, as OpenMM's CustomCentroidBondForce. The
    points of :class:`~adjsim.potentials.CustomCompound` are called g1, g2, ... here, and are the
    centres of groups, with the weights w of their atoms::

        g = sum of w_i q_i / sum of w_i                   F_i = F_g w_i / sum of w_i

    A group has to be whole in a periodic box; displacements between centres are to nearest images.

    Args:
        groups: the atoms of each group, ``[[0, 1, 2], [5, 6]]``.
        index: ``(terms, points)``, the groups of each term, counted from 0.
        weights: of the atoms of each group, such as their masses, in the form of ``groups``. They
            are no parameters. None: equal weights.
        expression, numbers, tables, unit, length_unit, types, box: see
            :class:`~adjsim.potentials.CustomCompound`.

    Raises:
        ValueError: see :class:`~adjsim.potentials.CustomCompound`; groups without atoms, a group
            that is not there, weights that are negative or of other lengths.
    """

    within_molecules = False
    shares: Tensor
    is_not_first: Tensor
    letter = "g"

    def __init__(
        self,
        groups: Sequence[Array],
        index: Array,
        *arguments: Any,
        weights: Sequence[Array] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(index, *arguments, **options)
        with outside_inference_mode():
            atoms = [as_indices("groups", group) for group in groups]
            given = [torch.ones(len(group)) for group in atoms] if weights is None else weights
            rows = [as_tensor("weights", row).double() for row in given]
            if [x.shape for x in rows] != [x.shape for x in atoms] or not all(map(len, atoms)):
                raise ValueError(
                    "groups must have at least one atom each, and weights one number for each; got "
                    f"groups of {[len(x) for x in atoms]} and weights of {[len(x) for x in rows]}."
                )
            joined, sizes = torch.cat(atoms), torch.tensor([len(x) for x in atoms])
            check_range("groups", joined, MOST_ATOMS)
            check_range("index", self.index, len(atoms), "group")
            if any(x.requires_grad or not (x.sum() > 0 and x.min() >= 0) for x in rows):
                raise ValueError(
                    "weights must not be negative, nor all zero in a group, nor require grad."
                )
            shares = torch.cat([x / x.sum() for x in rows])
            self.group_of = Selection(
                torch.repeat_interleave(torch.arange(len(atoms)), sizes), len(atoms)
            )
            self.atom_of = Selection(joined, int(joined.max()) + 1)
            self.register_buffer("shares", shares, persistent=False)
            is_not_first = torch.ones(len(joined))
            is_not_first[sizes.cumsum(0) - sizes] = 0.0
            self.register_buffer("is_not_first", is_not_first, persistent=False)

    def check_position(self, position: Tensor) -> None:
        if position.shape[-2] < self.atom_of.count:
            raise ValueError(
                f"groups of {type(self).__name__} have atom {self.atom_of.count - 1} and position "
                f"has {position.shape[-2]} atoms, numbered from 0."
            )
        self.check_dim(position.shape[-1])

    def members_of(self, x: Tensor) -> dict[int, Vector]:
        columns = x.transpose(-1, -2)[..., : self.atom_of.count]
        weighted = self.atom_of(columns) * self.shares.to(x)
        return super().members_of(self.group_of.transpose(weighted).transpose(-1, -2))

    def sums(
        self, members: Mapping[int, Tensor], like: Tensor, rounding: Rounding = UNROUNDED
    ) -> Tensor:
        rows = torch.cat([members[place] for place in self.used], -1)
        forces = self.atoms.transpose(rows, self.group_of.count)
        parts = self.group_of(forces) * self.shares.to(forces)
        if rounding.rounds:
            # The first atom of a group has the rest, so that sums are exact.
            parts = rounding.round(parts) * self.is_not_first.to(forces)
            rest = forces - self.group_of.transpose(parts)
            parts = parts + self.group_of(rest) * (1 - self.is_not_first.to(forces))
        return self.atom_of.transpose(parts, like.shape[-2]).transpose(-1, -2)
