"""Bonded terms whose energies are expressions, as those of OpenMM's custom forces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from adjsim.core.arguments import as_positive
from adjsim.core.coordinates import Angle, Dihedral
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.tabulated import TabulatedFunction
from adjsim.potentials.expressions import Expression, place_of


class CustomTerm(BondedPotential):
    """A sum over terms of an expression of an internal coordinate and named numbers.

    ``U = sum over terms of unit f(x, numbers)``, with angles in radians.

    Force, product and gradients are derivatives of the expression. A force of min, max, abs, step
    or select is that of the branch. Use a term of the library where there is one: its derivatives
    are written out, and finite where an expression divides zero by zero.

    Args:
        index: ``(terms, members)``, the atoms of each term.
        expression: see :class:`~adjsim.potentials.Expression`; the coordinate is ``r`` or
            ``theta``.
        numbers: the other names of the expression: each a number, one for each term or one for each
            type. They are attributes of the potential, by the same names.
        tables: functions that the expression calls, by name, see
            :class:`~adjsim.potentials.TabulatedFunction`. They are attributes too.
        unit: the unit of energy of the expression.
        types, box: see :class:`~adjsim.potentials.BondedPotential`.

    Raises:
        ValueError: an expression that cannot be read, a name without a number, a number whose name
            the potential, its coordinate or a table has already, a table with another number of
            arguments.
    """

    variable: ClassVar[str] = "r"
    points: tuple[str, ...] = ()
    functions: ClassVar[Mapping[str, int]] = {}

    def __init__(
        self,
        index: Array,
        expression: str,
        numbers: Mapping[str, Number] | None = None,
        *,
        tables: Mapping[str, TabulatedFunction] | None = None,
        unit: float = 1.0,
        **options: Any,
    ) -> None:
        counts = {name: table.count for name, table in (tables or {}).items()}
        found = Expression(expression, self.points, {**self.functions, **counts})
        self.arrange(found)
        super().__init__(index, **options)
        self.expression = found
        self.unit = as_positive("unit", unit)
        if both := (numbers or {}).keys() & (tables or {}).keys():
            raise ValueError(
                f"{min(both)!r} is a number and a table: rename one of them in the expression "
                f"{expression!r}, which has the name at place {place_of(min(both), expression)}."
            )
        for name, value in {**(numbers or {}), **(tables or {})}.items():
            if hasattr(self, name) or name in self.coordinate_names():
                raise ValueError(
                    f"the number {name!r} has the name of an attribute or of the coordinate of "
                    f"{type(self).__name__}: rename it in the expression {expression!r}, which has "
                    f"the name at place {place_of(name, expression)}."
                )
            if isinstance(value, TabulatedFunction):
                self.add_module(name, value)
            else:
                self.register_term_parameter(name, value)
        self.numbers, self.tables = tuple(numbers or ()), tuple(tables or ())
        self.validate()

    def arrange(self, expression: Expression) -> None:
        """Choose the displacements that an expression reads, before tables of atoms are made."""

    def validate(self) -> None:
        """Refuse an expression, a unit and numbers that the constructor would refuse."""
        super().validate()
        as_positive("unit", self.unit)
        known = {*self.numbers, *self.coordinate_names()}
        self.expression.refuse_names(known, f"numbers has {', '.join(self.numbers) or 'none'}")

    def element(self, x: Tensor) -> Tensor:
        values = self.coordinates_of(x)
        values |= {name: self.term_parameter(name, x) for name in self.numbers}
        found = self.expression(values, self.functions_of(x))
        return (self.unit * found).expand_as(x[..., :1, :])

    def coordinate_names(self) -> Collection[str]:
        """Return the names of the coordinates that an expression may have."""
        return (self.variable,)

    def coordinates_of(self, x: Tensor) -> dict[str, Tensor]:
        """Return the coordinates by name, in the units of the expression."""
        return {self.variable: self.variable_of(x)}

    def functions_of(self, x: Tensor) -> dict[str, Callable[..., Tensor]]:
        """Return the functions that an expression may call beside those of all expressions."""
        return {name: getattr(self, name) for name in self.tables}

    def variable_of(self, x: Tensor) -> Tensor:
        """Return the coordinate in the unit of the expression."""
        return x


class CustomBond(CustomTerm):
    """Bonds with an expression of their length ``r`` in a ``length_unit``; see :class:`CustomTerm`.

    The other arguments are those of :class:`CustomTerm`.
    """

    def __init__(self, *arguments: Any, length_unit: float = 1.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.length_unit = as_positive("length_unit", length_unit)

    def variable_of(self, x: Tensor) -> Tensor:
        return x / self.length_unit


class CustomAngle(CustomTerm):
    """Angles with an expression of ``theta``, from 0 to pi, see :class:`CustomTerm`."""

    members = 3
    steps = ((0, 1), (1, 2))
    coordinate = Angle
    variable = "theta"


class CustomTorsion(CustomTerm):
    """Torsions with an expression of ``theta``, from -pi to pi, see :class:`CustomTerm`."""

    members = 4
    steps = ((0, 1), (1, 2), (2, 3))
    coordinate = Dihedral
    dim = 3
    variable = "theta"
