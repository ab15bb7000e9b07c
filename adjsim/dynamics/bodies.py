"""Bodies, of which the centres of mass are scaled: clusters of atoms, or single atoms.

A body c of mass M_c has its centre at ``Q_c = sum_i m_i q_i / M_c`` and the momentum
``P_c = sum_i p_i``. A scale of centres and momenta by f leaves the places of atoms about their
centre, and their velocities about that of the body, as they are::

    q_i' = q_i + (f - 1) Q_c             p_i' = p_i + (f - 1) (m_i/M_c) P_c

With an atom r of each body, it is a scale of the rows r between shears of rows, each of which adds
to some rows a function of the others. So it is exact on a lattice too::

    d_i = q_i - q_r        Q = q_r + sum_i (m_i/M) d_i      Q' = f Q        and back
    P = p_r + sum_i p_i    s_i = p_i - (m_i/M) P            P' = f P        and back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.state import State
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, replace_field
from adjsim.dynamics.sources import Coefficients, MoveContext
from adjsim.potentials.bonded.selection import Selection

# The coefficient m_i/M_c, ``(atoms, 1)``.
SHARE = "m/M"


class Atoms:
    """Atoms that are bodies, each by itself."""

    joined = False

    def count(self, atoms: int) -> int:
        """Count the bodies of a system."""
        return atoms

    def coefficients(self, masses: Masses, like: Tensor) -> dict[str, Tensor]:
        """Compute the share of each atom in the mass of its body."""
        return {}

    def centres(self, c: Coefficients, q: Tensor) -> Tensor:
        """Compute the centre of the body of each atom, ``(*batch, atoms, dim)``."""
        return q

    def carried(self, c: Coefficients, p: Tensor) -> Tensor:
        """Compute each atom's part of the momentum of its body; the transpose of the centres."""
        return p

    def around(self, scaling: Sequence[Move]) -> list[Move]:
        """Put shears of rows around moves that scale the rows of a field, and their inverses."""
        return list(scaling)

    def rows(self, of: Callable[[Tensor], Tensor], atoms: int) -> Callable[[Tensor], Tensor]:
        """Return a factor as a factor for each row between the shears, one for rows that stay."""
        return of


class Bodies(nn.Module, Atoms):
    """Bodies of several atoms, each named by one of them; other atoms are bodies by themselves.

    Args:
        label: for each of the first atoms of a system, the number of the atom r of its body.
    """

    joined = True
    other: Tensor

    def __init__(self, label: Tensor) -> None:
        super().__init__()
        self.members = Selection(label, len(label))
        other = label != torch.arange(len(label))
        self.register_buffer("other", other[:, None], persistent=False)
        self.joints = int(other.sum())

    def count(self, atoms: int) -> int:
        return atoms - self.joints

    def coefficients(self, masses: Masses, like: Tensor) -> dict[str, Tensor]:
        mass = masses(like).expand(like.shape[-2], 1)
        return {SHARE: mass / self.summed(mass)}

    def centres(self, c: Coefficients, q: Tensor) -> Tensor:
        return self.summed(c[SHARE] * q)

    def carried(self, c: Coefficients, p: Tensor) -> Tensor:
        return c[SHARE] * self.summed(p)

    def around(self, scaling: Sequence[Move]) -> list[Move]:
        there: list[RowShear] = []
        if scaling[0].writes == ("position",):
            there += [RowShear("position", self, False, None, -1)]
            there += [RowShear("position", self, True, SHARE, 1)]
        else:
            there += [RowShear("momentum", self, True, None, 1)]
            there += [RowShear("momentum", self, False, SHARE, -1)]
        return [*there, *scaling, *(replace(x, sign=-x.sign) for x in reversed(there))]

    def rows(self, of: Callable[[Tensor], Tensor], atoms: int) -> Callable[[Tensor], Tensor]:
        return _OfRows(of, self, atoms)

    def others(self, atoms: int) -> Tensor:
        """Return which rows are not those of the atoms r, ``(atoms, 1)``."""
        single = atoms - len(self.other)
        if single == 0:
            return self.other
        return torch.cat([self.other, self.other.new_zeros(single, 1)])

    def summed(self, x: Tensor) -> Tensor:
        """Sum over the body of each atom, ``(*batch, atoms, dim)``."""
        sums = self.members(self.members.transpose(self._columns(x)))
        if x.shape[-2] > len(self.other):
            sums = torch.cat([sums, x.transpose(-1, -2)[..., len(self.other) :]], -1)
        return sums.transpose(-1, -2)

    def gathered(self, y: Tensor, share: Tensor | float) -> Tensor:
        """Compute ``sum_i share_i y_i`` over the atoms i != r at the rows r, zero elsewhere."""
        columns = self._columns(share * y) * self.other[:, 0]
        return self.members.transpose(columns, y.shape[-2]).transpose(-1, -2)

    def spread(self, y: Tensor, share: Tensor | float) -> Tensor:
        """Compute ``share_i y_r`` at the rows i != r, zero elsewhere; the transpose of gathered."""
        columns = self.members(self._columns(y)) * self.other[:, 0]
        single = y.shape[-2] - len(self.other)
        if single > 0:
            columns = torch.cat([columns, columns.new_zeros(*columns.shape[:-1], single)], -1)
        return share * columns.transpose(-1, -2)

    def _columns(self, x: Tensor) -> Tensor:
        """Return the columns of the atoms that may have a body with others."""
        return x.transpose(-1, -2)[..., : len(self.other)]


ATOMS = Atoms()


class _OfRows(NamedTuple):
    """A factor of the rows r of bodies, one in all others."""

    of: Callable[[Tensor], Tensor]
    bodies: Bodies
    atoms: int

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self.bodies.others(self.atoms), 1.0, self.of(x))


@dataclass(frozen=True)
class RowShear(Move):
    """A shear of rows of a field by other rows, ``y' = y + sign A y`` with ``A A = 0``.

    A sums the rows of each body to the row r (``gathers``), or adds the row r to them. The
    coefficient ``share`` weights the atoms.
    """

    has_lattice_form = True
    field: str
    bodies: Bodies
    gathers: bool
    share: str | None
    sign: int
    rounding: Rounding = UNROUNDED

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    def on_lattice(self, roundings: Mapping[str, Rounding]) -> RowShear:
        return replace(self, rounding=roundings[self.field])

    def flow(self, state: State, context: MoveContext) -> State:
        return self._moved(state, context, self.sign)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        before = self._moved(after, context, -self.sign) if before is None else before
        given, share = cotangents[self.field], self._share(context)
        if isinstance(share, Tensor) and share.requires_grad:
            y = getattr(before, self.field)
            # The product with the weighted row: of the field, or of the cotangent.
            each = y * self.bodies.spread(given, 1.0)
            if not self.gathers:
                each = given * self.bodies.spread(y, 1.0)
            found = (self.sign * each).sum(-1, keepdim=True).sum_to_size(share.shape)
            cotangents.add_coefficient(context.letter, str(self.share), found)
        cotangents[self.field] = given + self.sign * self._added(given, share, True)
        return before

    def _moved(self, state: State, context: MoveContext, sign: int) -> State:
        y: Tensor = getattr(state, self.field)
        added = self.rounding.round(self._added(y, self._share(context), False))
        return replace_field(state, self.field, None, y + sign * added)

    def _added(self, y: Tensor, share: Tensor | float, transposed: bool) -> Tensor:
        gathers = self.gathers != transposed
        return self.bodies.gathered(y, share) if gathers else self.bodies.spread(y, share)

    def _share(self, context: MoveContext) -> Tensor | float:
        return 1.0 if self.share is None else context.coefficients[self.share]
