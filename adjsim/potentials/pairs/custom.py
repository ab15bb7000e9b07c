"""Pairs whose energy is an expression, as that of OpenMM's custom nonbonded force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_positive, outside_inference_mode
from adjsim.core.derived import derived
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.tabulated import TabulatedFunction
from adjsim.potentials.expressions import Expression
from adjsim.potentials.pairs.formula import check_symmetric, read_at
from adjsim.potentials.pairs.radial import RadialPotential

# The pairs of atoms that are drawn to see whether exchanging them changes an expression.
EXCHANGED = 512


class CustomPairs(RadialPotential):
    """A sum over pairs i<j of an expression of their distance and named numbers.

    ``U = sum over i<j of unit f(r / length_unit, numbers)``. The numbers are attributes of the
    potential, by their names:

    ============================ ==================================================================
    one number                   ``k`` in the expression is this number
    ``(atoms,)``                 ``k1`` and ``k2`` are those of the two atoms
    ``(species, species)``       ``k`` is that of the two species; symmetric
    ============================ ==================================================================

    Exchanging the two atoms must not change the expression. Force and product are derivatives of
    the expression, and pairs run in kernels generated from it. Use a pair potential of the library
    where there is one: its derivatives are written out.

    The expression may call functions of tables, as in ``"f(r) + k(type1, type2)"``. Kernels read
    their coefficients, and sum gradients with respect to these, so a step takes as long with a
    large table as with a small one.

    Without ``groups`` all pairs interact. With them a pair interacts once for each group of two
    sets that has one atom in its first set and the other one in its second set, as in OpenMM. Where
    these pairs are few, a neighbour list holds them alone, without a cutoff too.

    Args:
        expression: see :class:`~adjsim.potentials.Expression`; the distance is ``r``.
        numbers: the other names of the expression.
        tables: functions that the expression calls, by name, see
            :class:`~adjsim.potentials.TabulatedFunction`. They are attributes too.
        species: ``(atoms,)`` integers, for tables of numbers.
        groups: pairs of sets, each ``(atoms,)`` booleans that say which atoms belong to it.
        unit, length_unit: the units of energy and length of the expression.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: an expression that cannot be read, a name without a number, a number whose name
            the potential or the distance has already, a table that is not symmetric or has no
            species, an expression that exchanging the two atoms changes, groups that are not pairs
            of sets of the same atoms.
    """

    def __init__(
        self,
        expression: str,
        numbers: Mapping[str, Number],
        *,
        tables: Mapping[str, TabulatedFunction] | None = None,
        species: Array | None = None,
        groups: Sequence[tuple[Array, Array]] = (),
        unit: float = 1.0,
        length_unit: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.text = expression
        self.unit = as_positive("unit", unit)
        self.length_unit = as_positive("length_unit", length_unit)
        for name, value in chain(numbers.items(), (tables or {}).items()):
            if hasattr(self, name) or name == "r":
                raise ValueError(
                    f"the number or table {name!r} has the name of another one, of an attribute of "
                    f"CustomPairs or of the distance: rename it in the expression {expression!r}."
                )
            if isinstance(value, TabulatedFunction):
                self.add_module(name, value)
            else:
                register(self, name, value, finite=True)
        self.numbers, self.tables = tuple(numbers), tuple(tables or ())
        with outside_inference_mode():
            index = None if species is None else as_indices("species", species)
            self.register_buffer("species", index)
            self.groups = self._register_sets(groups)
        self.validate()

    def _register_sets(self, groups: Sequence[tuple[Array, Array]]) -> tuple[tuple[str, str], ...]:
        """Register each set of atoms once, and return the names of the two sets of each group."""
        sets: list[Tensor] = []
        found: list[tuple[str, ...]] = []
        for group in groups:
            names: list[str] = []
            for given in group:
                members = torch.as_tensor(given)
                same = (k for k, x in enumerate(sets) if torch.equal(x, members.double()))
                place = next(same, len(sets))
                if place == len(sets):
                    if members.dtype != torch.bool or members.ndim != 1:
                        raise ValueError(
                            "each set of groups is (atoms,) booleans; got shape "
                            f"{tuple(members.shape)} of {members.dtype}."
                        )
                    sets.append(members.double())
                    self.register_buffer(f"set_{place}", sets[-1])
                names.append(f"set_{place}")
            found.append(tuple(names))
        if any(len(names) != 2 for names in found) or len({len(x) for x in sets}) > 1:
            raise ValueError(
                "groups are pairs of sets, each (atoms,) booleans for the same atoms; got "
                f"{[len(names) for names in found]} sets of {[len(x) for x in sets]} atoms."
            )
        return tuple((first, second) for first, second in found)

    @property
    def memberships(self) -> Tensor | None:
        """Whether each atom is in each set, ``(sets, atoms)``; None without groups."""
        names = sorted({name for group in self.groups for name in group})
        sets = [getattr(self, name).detach() for name in names]
        return torch.stack(sets) if sets else None

    @derived("memberships")
    def classes(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The class of each atom; atoms of a class are in the same sets."""
        sets = self.memberships
        return None if sets is None else torch.unique(sets, dim=1, return_inverse=True)[1]

    @derived("memberships", "groups")
    def partners(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which classes interact, ``(classes, classes)`` of 0 and 1."""
        if self.classes is None:
            return None
        first, second = (
            torch.stack([self._of_classes(group[side]) for group in self.groups]) for side in (0, 1)
        )
        forth = first.T @ second
        return (forth + forth.T > 0).long()

    def _of_classes(self, name: str) -> Tensor:
        """Return whether each class is in a set."""
        assert self.classes is not None
        members = getattr(self, name).detach().double()
        found = members.new_zeros(int(self.classes.max()) + 1)
        return found.scatter(0, self.classes, members)

    @derived("classes", "partners")
    def pair_share(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The share of all pairs that interact at some distance."""
        if self.classes is None or self.partners is None:
            return 1.0
        count = torch.bincount(self.classes).double()
        return float(count @ self.partners.double() @ count) / len(self.classes) ** 2

    @property
    def counts(self) -> dict[str, int]:
        """The number of arguments of each table."""
        return {name: self._table(name).count for name in self.tables}

    @derived("text", "counts")
    def expression(self) -> Expression:
        """The expression, of ``r``, numbers, and numbers of both atoms."""
        return Expression(self.text, (), self.counts)

    def _table(self, name: str) -> TabulatedFunction:
        return cast(TabulatedFunction, getattr(self, name))

    def validate(self) -> None:
        """Refuse an expression and numbers that the constructor would refuse."""
        super().validate()
        known = {"r"}
        for name in self.numbers:
            value: Tensor = getattr(self, name)
            known |= {f"{name}1", f"{name}2"} if value.ndim == 1 else {name}
            if value.ndim == 2:
                check_symmetric(name, value)
                if self.species is None or not 0 <= int(self.species.max()) < len(value):
                    raise ValueError(
                        f"{name} is a table of {len(value)} species: give species=, indices from 0 "
                        f"to {len(value) - 1}, of each atom."
                    )
        given = f"numbers give {', '.join(sorted(known))}. A number of an atom ends in 1 or 2"
        self.expression.refuse_names(known, given)
        values = {name: getattr(self, name).detach() for name in self.numbers}
        of_atoms = [name for name, x in values.items() if x.ndim == 1]
        functions = {name: self._table(name) for name in self.tables}
        check_exchange(self.expression, functions, values, of_atoms)

    def _is_of_atoms(self, name: str) -> bool:
        """Whether a number is one for each atom; kernels give its values for pairs instead."""
        if self._operands is None:
            return getattr(self, name).ndim == 1
        return isinstance(self._operands[name], tuple)

    def _times(self, r: Tensor) -> Tensor:
        """Count the groups in which pairs interact."""
        total = torch.zeros_like(r)
        for names in self.groups:
            # One atom is in the first set and the other one in the second set, or the reverse.
            forth, back = (
                self.atom_parameter(first, r)[0] * self.atom_parameter(second, r)[1]
                for first, second in (names, names[::-1])
            )
            total = total + (forth + back - forth * back)
        return total

    def _interacting(self, s: Tensor) -> Tensor:
        """Replace the squared distances of pairs in no group by one at which u is finite.

        Atoms that do not interact may be at one place, where the expression has no value.
        """
        return torch.where(self._times(s) > 0, s, self.length_unit**2) if self.groups else s

    def pair_energy(self, s: Tensor) -> Tensor:
        return super().pair_energy(self._interacting(s))

    def pair_slope(self, s: Tensor) -> Tensor:
        return super().pair_slope(self._interacting(s))

    def pair_curvature(self, s: Tensor) -> Tensor:
        return super().pair_curvature(self._interacting(s))

    def _functions(self, r: Tensor) -> dict[str, Callable[..., Tensor]]:
        """Return the functions of tables by name."""

        def function(name: str) -> Callable[..., Tensor]:
            # Kernels read coefficients by themselves.
            operand = None if self._operands is None else self._operands[name]
            read = read_at(self.pair_table(name).to(r)) if operand is None else operand
            return lambda *x: self._table(name).interpolate(x, cast(Any, read))

        return {name: function(name) for name in self.tables}

    def radial_energy(self, r: Tensor) -> Tensor:
        values = {"r": r / self.length_unit}
        for name in self.numbers:
            if self._is_of_atoms(name):
                values[f"{name}1"], values[f"{name}2"] = self.atom_parameter(name, r)
            else:
                values[name] = self.pair_parameter(name, r)
        energy = self.unit * self.expression(values, self._functions(r))
        if self.groups:
            energy = self._times(r) * energy
        return energy.expand(torch.broadcast_shapes(energy.shape, r.shape))


def check_exchange(
    expression: Expression,
    functions: Mapping[str, Callable[..., Tensor]],
    values: Mapping[str, Tensor],
    of_atoms: Collection[str],
) -> None:
    """Refuse an expression that exchanging the two atoms changes.

    Numbers are drawn from those given, since a power may need them positive or whole, and half of
    them are the smallest and the largest ones, which few atoms may have, such as a flag. Distances
    are of any unit, and some are beyond those at which a step of the expression may be.
    """
    if not of_atoms:
        return
    drawn, count = torch.Generator().manual_seed(0), (EXCHANGED,)
    forth = {"r": 0.1 * 200 ** torch.rand(count, generator=drawn, dtype=torch.float64)}
    back = dict(forth)
    for name, value in values.items():
        flat = value.double().cpu().flatten()
        known = torch.stack([flat.min(), flat.max()])
        first, second = (
            torch.where(
                torch.rand(count, generator=drawn) < 0.5,
                known[torch.randint(2, count, generator=drawn)],
                flat[torch.randint(len(flat), count, generator=drawn)],
            )
            for _ in range(2)
        )
        if name in of_atoms:
            forth |= {f"{name}1": first, f"{name}2": second}
            back |= {f"{name}1": second, f"{name}2": first}
        else:
            forth[name] = back[name] = first
    one, other = expression(forth, functions), expression(back, functions)
    # Products of another order differ in all digits where they are denormal.
    if not torch.allclose(one, other, rtol=1e-9, atol=1e-280, equal_nan=True):
        raise ValueError(
            f"exchanging the two atoms changes the expression {expression.text!r}: write it such "
            "that their numbers, such as q1 and q2, may change places."
        )
