"""Solvents, and other sums over atoms and pairs in stages, whose formulas are expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive, outside_inference_mode
from adjsim.core.box import differences, nearest_image
from adjsim.core.declared import POSITIVE
from adjsim.core.derived import derived
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.bonded.tabulated import TabulatedFunction
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.expressions import Expression
from adjsim.potentials.pairs.custom import check_exchange
from adjsim.potentials.pairs.dense import (
    distinct,
    join_coordinates,
    split_coordinates,
    sum_coordinates,
)
from adjsim.potentials.pairs.kernels.exclusions import checked_exclusions, interacting
from adjsim.potentials.pairs.term_sums import Neighbours, StagedSums, printable, virial_of
from adjsim.potentials.products import (
    DeferredVJP,
    Pullback,
    Tensors,
    derivative,
    derived_force,
    energy_vjp,
    with_fewer_axes,
)
from adjsim.potentials.solvent.terms import terms_of

AXES = "xyz"
# Sums a formula of pairs over the neighbours of each atom, for the known numbers.
Total = Callable[["Stage", Expression, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Stage:
    """A formula of one atom, or one that is summed over pairs of atoms.

    Attributes:
        expression: see :class:`~adjsim.potentials.Expression`.
        pairs: whether it is a formula of pairs.
        exclusions: whether excluded pairs are left out.
    """

    expression: str
    pairs: bool = False
    exclusions: bool = True


class CustomSolvent(StagedSums, ClosedForm, inherits_forces=True):
    """An energy of numbers of atoms that expressions compute in stages::

        V_i = f(numbers_i, V of stages before)                                  of atoms
        V_i = sum over j != i of f(r_ij, numbers_i, numbers_j, V before)        of pairs
        U   = unit (sum over i of e(V_i, ..) + sum over i<j of p(r_ij, V_i, V_j, ..) + ...)

    This is OpenMM's CustomGBForce, so any generalised Born solvent, and other energies in which
    the neighbourhood of an atom decides, such as that of embedded atoms in a metal.

    =================== ===========================================================================
    a formula of pairs  r, one number by its name, a number or V of either atom by its name and 1
                        or 2: atom 1 of V is the atom whose V is computed
    a formula of atoms  x, y, z, and numbers and V by their names
    =================== ===========================================================================

    Distances and coordinates are in the ``length_unit``. Exchanging the atoms must not change an
    energy of pairs. Terms that read x, y or z do not follow a box that moves.

    Large systems with a cutoff take the pairs of a neighbour list, in time that is linear in the
    number of atoms. Others sum all pairs: without a cutoff, with tables, on a GPU, at constant
    pressure. Force, product and gradients are derivatives of the expressions.
    Use :class:`~adjsim.GeneralizedBorn` where it fits; its derivatives are written out.

    Args:
        values: the stages, by name, in their order.
        energies: the terms of the energy.
        numbers: the other names of the expressions, each a number or ``(atoms,)``. They are
            attributes, by the same names.
        tables: functions that expressions call, by name, see
            :class:`~adjsim.potentials.TabulatedFunction`. They are attributes too.
        unit, length_unit: the units of energy and length of the expressions.
        cutoff: pairs beyond it are left out, in stages and energies; the energy jumps there, unless
            the expressions vanish.
        box, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: an expression that cannot be read, a name without a number, a name given twice,
            an energy of pairs that exchanging the atoms changes, positions of another number of
            atoms.
    """

    exclusions: Tensor | None

    def __init__(
        self,
        values: Mapping[str, Stage],
        energies: Sequence[Stage],
        numbers: Mapping[str, Number],
        *,
        tables: Mapping[str, TabulatedFunction] | None = None,
        unit: float = 1.0,
        length_unit: float = 1.0,
        cutoff: float | None = None,
        box: Array | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__()
        self.unit = as_positive("unit", unit)
        self.length_unit = as_positive("length_unit", length_unit)
        self.cutoff = None if cutoff is None else POSITIVE("cutoff", cutoff)
        with outside_inference_mode():
            self.register_box(box)
            pairs = None if exclusions is None else checked_exclusions(exclusions)
            self.register_buffer("exclusions", pairs)
        self.values, self.energies = tuple(values.items()), tuple(energies)
        self.numbers, self.tables = tuple(numbers), tuple(tables or ())
        if not energies:
            raise ValueError("CustomSolvent needs at least one energy.")
        names = (*values, *self.numbers, *self.tables)
        for name in names:
            if names.count(name) > 1 or hasattr(self, name) or name in (*AXES, "r"):
                raise ValueError(
                    f"the name {name!r} of a value, number or table is that of another one, of an "
                    "attribute of CustomSolvent or of a coordinate: rename it in the expressions "
                    f"{self._texts()}."
                )
        for name, value in chain(numbers.items(), (tables or {}).items()):
            if isinstance(value, TabulatedFunction):
                self.add_module(name, value)
            else:
                register(self, name, value, finite=True, shapes=((), ("atoms",)))
        self.validate()

    def validate(self) -> None:
        """Refuse a box, numbers and names that the constructor would refuse."""
        if self.cutoff is not None:
            POSITIVE("cutoff", self.cutoff)
        super().validate()
        given: dict[str, Tensor] = {name: getattr(self, name).detach() for name in self.numbers}
        of_atoms = [name for name, x in given.items() if x.ndim]
        if len(counts := {len(given[name]) for name in of_atoms}) > 1:
            raise ValueError(f"numbers are of {' and '.join(map(str, sorted(counts)))} atoms.")
        for k, (stage, expression) in enumerate(zip(self._stages(), self.expressions, strict=True)):
            known, kind = {*given, *AXES}, "atoms"
            if stage.pairs:
                ends = {f"{name}{end}" for name in of_atoms for end in "12"}
                others = {"r", *given} - {*of_atoms}
                known, kind = others | ends, "pairs"
                if both := sorted(others & ends & expression.names):
                    raise ValueError(
                        f"{both[0]} in the expression {stage.expression!r} is a number and one of "
                        "an atom: rename one of them."
                    )
            expression.refuse_names(
                known,
                f"formulas of {kind} have {', '.join(sorted(known))}. In pairs a number of an atom "
                "ends in 1 or 2",
            )
            if k < len(self.values):
                name, _ = self.values[k]
                # Typical computed values.
                given[name] = torch.linspace(0.1, 1.3, 8, dtype=torch.float64)
                of_atoms.append(name)
            elif stage.pairs:
                check_exchange(expression, self._functions(), given, of_atoms)

    @property
    def counts(self) -> dict[str, int]:
        """The number of arguments of each table."""
        return {name: getattr(self, name).count for name in self.tables}

    @derived("values", "energies", "counts")
    def expressions(self) -> tuple[Expression, ...]:
        """The expressions of values and energies."""
        return tuple(Expression(x.expression, (), self.counts) for x in self._stages())

    @derived("expressions")
    def reads_coordinates(self) -> bool:
        """Whether a formula reads x, y or z."""
        rows = zip(self._stages(), self.expressions, strict=True)
        return any(expression.names & {*AXES} for stage, expression in rows if not stage.pairs)

    def _stages(self) -> Sequence[Stage]:
        return (*(stage for _, stage in self.values), *self.energies)

    def _texts(self) -> str:
        return ", ".join(repr(stage.expression) for stage in self._stages())

    def _functions(self) -> dict[str, Callable[..., Tensor]]:
        return {name: getattr(self, name) for name in self.tables}

    def forward(self, position: Positions) -> Energies:
        if self.is_listed(position):
            return self._listed_energy(position)
        return self._energy(self._variables(position)[1])

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        if self.is_listed(position):
            return derived_force(self, position, rounding)
        return super().force(position, rounding)

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        if self.is_listed(position):
            return energy_vjp(self, position, parameters, rounding)
        return super().force_vjp(position, parameters, rounding)

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        d, x = self._variables(position)
        slope = self._slope(x)

        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            w = split_coordinates(differences(v))
            rate = self._joined(2 * sum_coordinates([x * y for x, y in zip(d, w, strict=True)]), v)
            change = derivative(lambda y: self._slope(y) * rate, x)
            rows = zip(self._pulls(change, d), self._pulls(slope, w), strict=True)
            along = join_coordinates([(x + y).sum(-1) for x, y in rows])
            return self._with_own(along, change), DeferredVJP(self, self._slope, -rate, x)

        sums = [rounding.round(part).sum(-1) for part in self._pulls(slope, d)]
        value = self._with_own(join_coordinates(sums), slope, with_fewer_axes(rounding, 1))
        return value, product

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain.

        Raises:
            TypeError: formulas that read coordinates.
        """
        if self.reads_coordinates:
            raise TypeError(
                f"CustomSolvent has no virial(position): its expressions {self._texts()} read "
                "coordinates, which do not move with the box."
            )
        if self.is_listed(position):
            return virial_of(self._listed_energy, position)
        d, x = self._variables(position)
        vectors = torch.cat(d, -3)
        return torch.einsum("...ij,...aij,...bij->...ab", -2 * self._slope(x), vectors, vectors)

    def _variables(self, position: Tensor) -> tuple[list[Tensor], Tensor]:
        """Compute the differences of all pairs by coordinate, and the variables of the energy.

        These are the squared distances, ``(*batch, atoms, atoms)``, and below them the coordinates,
        if a formula reads them.
        """
        self._check(position)
        d = split_coordinates(differences(position))
        if self.image_box is not None:
            d = nearest_image(d, self.image_box.to(position), exact=self.cutoff is None)
        return d, self._joined(sum_coordinates([x * x for x in d]), position)

    def _check(self, position: Tensor) -> None:
        """Refuse positions of another number of atoms or of dimensions."""
        atoms, dim = position.shape[-2:]
        for name in self.numbers:
            value: Tensor = getattr(self, name)
            if value.ndim and len(value) != atoms:
                raise ValueError(f"{name} is for {len(value)} atoms and position has {atoms}.")
        if self.reads_coordinates and dim != len(AXES):
            raise ValueError(
                f"the expressions {self._texts()} read coordinates of three dimensions; position "
                f"has dim {dim}."
            )

    def is_listed(self, position: Tensor, compiled: bool | None = None) -> bool:
        return super().is_listed(position, compiled) and self._printable

    @derived("expressions", "numbers", "tables", "length_unit")
    def _printable(self) -> bool:
        """Whether kernels can compute the formulas of pairs and their derivatives."""
        known: dict[str, Tensor] = {name: getattr(self, name) for name in self.numbers}
        known |= {name: torch.zeros(1) for name, _ in self.values}
        rows = zip(self._stages(), self.expressions, strict=True)
        of_pairs = [expression for stage, expression in rows if stage.pairs]
        found = [terms_of(expression, known, self.length_unit) for expression in of_pairs]
        return not self.tables and all(printable(terms, len(names)) for names, terms in found)

    def _listed_energy(self, position: Tensor, stretch: Tensor | None = None) -> Energies:
        """Compute the energy by sums over a neighbour list."""
        self._check(position)

        def total(stage: Stage, expression: Expression, known: dict[str, Tensor]) -> Tensor:
            near = Neighbours(
                self, position, self.exclusions if stage.exclusions else None, stretch
            )
            names, terms = terms_of(expression, known, self.length_unit)
            return near.sums(terms, [known[name] for name in names])[0]

        return self._staged(position[..., 0], position.unbind(-1), total)

    def _joined(self, pairs: Tensor, position: Tensor) -> Tensor:
        """Join numbers of pairs and vectors of atoms as the variables of the energy are."""
        return torch.cat([pairs, position.mT], -2) if self.reads_coordinates else pairs

    def _pulls(self, slope: Tensor, d: Sequence[Tensor]) -> list[Tensor]:
        """Compute the forces of pairs, by coordinate, from a slope along the squared distances."""
        pairs = slope[..., : slope.shape[-1], :]
        weight = -2 * (pairs + pairs.mT).unsqueeze(-3)
        return [weight * x for x in d]

    def _with_own(self, force: Tensor, slope: Tensor, rounding: Rounding = UNROUNDED) -> Tensor:
        """Add the forces of formulas of coordinates."""
        if not self.reads_coordinates:
            return force
        return force - rounding.round(slope[..., slope.shape[-1] :, :].mT)

    def _slope(self, x: Tensor) -> Tensor:
        return derivative(self._energy, x)

    def _energy(self, x: Tensor) -> Tensor:
        """Compute the energy from the variables of :meth:`_variables`."""
        atoms = x.shape[-1]
        s, rows = x[..., :atoms, :], x[..., atoms:, :].unbind(-2)
        kinds = {stage.exclusions for stage in self._stages() if stage.pairs}
        of_pairs = {kind: self._distances(s, kind) for kind in kinds}

        def total(stage: Stage, expression: Expression, known: dict[str, Tensor]) -> Tensor:
            r, included = of_pairs[stage.exclusions]
            of_both = {"r": r}
            for name, number in known.items():
                if number.ndim:
                    of_both |= {f"{name}1": number.unsqueeze(-1), f"{name}2": number.unsqueeze(-2)}
                else:
                    of_both[name] = number
            found = expression(of_both, self._functions())
            return torch.where(included, found, 0.0).sum(-1)

        return self._staged(x[..., 0, :], rows, total)

    def _staged(self, like: Tensor, rows: Sequence[Tensor], total: Total) -> Tensor:
        """Compute the energy from coordinates and the sums of formulas of pairs.

        ``like`` has the shape ``(*batch, atoms)`` of the numbers.
        """
        known: dict[str, Tensor] = {
            "": torch.zeros_like(like),
            **{name: row / self.length_unit for name, row in zip(AXES, rows, strict=False)},
            **{name: getattr(self, name).to(like) for name in self.numbers},
        }

        def value(stage: Stage, expression: Expression) -> Tensor:
            if stage.pairs:
                return total(stage, expression, known)
            return expression(known, self._functions()) + known[""]

        stages = list(zip(self._stages(), self.expressions, strict=True))
        for (name, _), row in zip(self.values, stages, strict=False):
            known[name] = value(*row)
        terms = [
            (0.5 if x.pairs else 1.0) * value(x, f).sum(-1) for x, f in stages[len(self.values) :]
        ]
        return self.unit * reduce(add, terms)

    def _distances(self, s: Tensor, exclusions: bool) -> tuple[Tensor, Tensor]:
        """Compute distances in the unit of the expressions, and which pairs are included.

        The others get a distance at which the expressions are finite.
        """
        excluded = self.exclusions if exclusions else None
        included = distinct(s) if excluded is None else interacting(excluded, s)
        safe = self.length_unit
        if self.cutoff is not None:
            s, safe = torch.where(included, s, torch.finfo(s.dtype).max), 0.5 * self.cutoff
            included = s < self.cutoff**2
        return torch.where(included, s, safe**2).sqrt() / self.length_unit, included
