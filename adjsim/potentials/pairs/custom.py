"""Pairs whose energy is an expression, as that of OpenMM's custom nonbonded force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_positive, outside_inference_mode
from adjsim.core.derived import derived
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.potentials.expressions import Expression
from adjsim.potentials.pairs.formula import check_symmetric
from adjsim.potentials.pairs.radial import RadialPotential


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

    Args:
        expression: see :class:`~adjsim.potentials.Expression`; the distance is ``r``.
        numbers: the other names of the expression.
        species: ``(atoms,)`` integers, for tables of numbers.
        unit, length_unit: the units of energy and length of the expression.
        cutoff, box, truncation, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: an expression that cannot be read, a name without a number, a number whose name
            the potential or the distance has already, a table that is not symmetric or has no
            species, an expression that exchanging the two atoms changes.
    """

    def __init__(
        self,
        expression: str,
        numbers: Mapping[str, Number],
        *,
        species: Array | None = None,
        unit: float = 1.0,
        length_unit: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.text = expression
        self.unit = as_positive("unit", unit)
        self.length_unit = as_positive("length_unit", length_unit)
        for name, value in numbers.items():
            if hasattr(self, name) or name == "r":
                raise ValueError(
                    f"the number {name!r} has the name of an attribute of CustomPairs or of the "
                    "distance: rename it in the expression."
                )
            register(self, name, value, finite=True)
        self.numbers = tuple(numbers)
        with outside_inference_mode():
            index = None if species is None else as_indices("species", species)
            self.register_buffer("species", index)
        self.validate()

    @derived("text")
    def expression(self) -> Expression:
        """The expression, of ``r``, numbers, and numbers of both atoms."""
        return Expression(self.text)

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
        self._check_exchange()

    def _check_exchange(self) -> None:
        """Refuse an expression that exchanging the two atoms changes."""
        values = {name: getattr(self, name).detach() for name in self.numbers}
        if not any(x.ndim == 1 for x in values.values()):
            return
        drawn = torch.Generator().manual_seed(0)
        forth = {"r": torch.rand(16, generator=drawn, dtype=torch.float64) + 0.1}
        back = dict(forth)
        for name, value in values.items():
            # Numbers of the size of those given, since a power may need them positive or whole.
            first, second = (
                value.double().cpu().flatten()[torch.randint(value.numel(), (16,), generator=drawn)]
                for _ in range(2)
            )
            if value.ndim == 1:
                forth |= {f"{name}1": first, f"{name}2": second}
                back |= {f"{name}1": second, f"{name}2": first}
            else:
                forth[name] = back[name] = first
        one, other = self.expression(forth), self.expression(back)
        if not torch.allclose(one, other, rtol=1e-9, atol=0, equal_nan=True):
            raise ValueError(
                f"exchanging the two atoms changes the expression {self.text!r}: write it such "
                "that their numbers, such as q1 and q2, may change places."
            )

    def _is_of_atoms(self, name: str) -> bool:
        """Whether a number is one for each atom; kernels give its values for pairs instead."""
        if self._operands is None:
            return getattr(self, name).ndim == 1
        return isinstance(self._operands[name], tuple)

    def radial_energy(self, r: Tensor) -> Tensor:
        values = {"r": r / self.length_unit}
        for name in self.numbers:
            if self._is_of_atoms(name):
                values[f"{name}1"], values[f"{name}2"] = self.atom_parameter(name, r)
            else:
                values[name] = self.pair_parameter(name, r)
        return (self.unit * self.expression(values)).expand_as(r)
