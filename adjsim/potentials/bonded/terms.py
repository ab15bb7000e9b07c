"""Listed groups of atoms with numbers of their own or of their types, as of bonds and sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, outside_inference_mode, wrong_shape
from adjsim.core.coordinates import Vector, subtracted
from adjsim.core.declared import Declaring
from adjsim.core.layout import is_tracing
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.selection import Selection, as_members

# Atoms of the largest system, which bounds the tables of atoms.
MOST_ATOMS = 2**26


class Terms(Declaring, nn.Module):
    """Listed groups of atoms, each with numbers of its own or of its type.

    Args:
        index: ``(terms, members)`` integers, the atoms of each term.
        types: ``(terms,)`` integers, the type of each term. None: terms have parameters of their
            own.

    Attributes:
        members: the number of atoms of a term, by default 2.
        distinct: places in a term whose atoms differ; None: all.
        steps: the places in a term, first and last, of each displacement, by default from atom 0 to
            atom 1; -1 is a fixed point.
        dim: the dimensions that the terms need, None for any.
    """

    members: int = 2
    distinct: ClassVar[tuple[tuple[int, ...], ...] | None] = None
    steps: tuple[tuple[int, int], ...] = ((0, 1),)
    dim: int | None = None

    index: Tensor
    types: Tensor | None

    shapes_of_declared = "a number, one for each term or one for each type"

    def __init__(
        self, index: Array, *values: Number, types: Array | None = None, **named: Number
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
            self._most = int(found.max())
            self.by_type = nn.ModuleDict()
            self._columns: dict[str, tuple[int, ...]] = {}
            # The middle atom of an angle has no part in a spring between the ends.
            self.used = sorted({p for step in self.steps for p in step if p >= 0})
            self.atoms = Selection(found[:, self.used].T.flatten(), self._most + 1)
        self.store(numbers, self.register_term_parameter)

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

    def sums(
        self, members: Mapping[int, Tensor], like: Tensor, rounding: Rounding = UNROUNDED
    ) -> Tensor:
        """Sum vectors ``(*batch, dim, terms)`` of members to those of atoms, of the shape given.

        The vectors are rounded already; the rounding is for shares of them.
        """
        rows = torch.cat([members[place] for place in self.used], -1)
        return self.atoms.transpose(rows, like.shape[-2]).transpose(-1, -2)

    def check_position(self, position: Tensor) -> None:
        """Refuse a position without the atoms of a term, or of other dimensions."""
        atoms, dim = position.shape[-2:]
        name = type(self).__name__
        if self._most >= atoms:
            term, place = divmod(int(self.index.argmax()), self.members)
            raise ValueError(
                f"term {term} of {name} names atom {int(self.index[term, place])} and position "
                f"has {atoms} atoms, numbered from 0."
            )
        self.check_dim(dim)

    def check_dim(self, dim: int) -> None:
        """Refuse a position of other dimensions than the terms need."""
        if self.dim is not None and dim != self.dim:
            name = type(self).__name__
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


def split_like(joined: Tensor, vector: Vector) -> Vector:
    """Split coordinates ``(*batch, dim, terms)`` as those of a vector are."""
    return [joined] if len(vector) == 1 else joined.split(1, -2)


def _checked_types(types: Array, index: Tensor) -> Tensor:
    found = as_indices("types", types)
    if found.shape != index.shape[:1]:
        raise wrong_shape("types", f"({len(index)},), the type of each term", found)
    if int(found.min()) < 0:
        raise ValueError(f"types must be numbered from 0; got {int(found.min())}.")
    return found
