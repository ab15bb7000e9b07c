"""Types: terms of a force field that have one set of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from ase.data import atomic_masses, chemical_symbols
from torch import Tensor, nn


class Names(NamedTuple):
    """The element of each atom, "X" without one, and its residue and name in a topology."""

    symbols: tuple[str, ...]
    names: tuple[tuple[str, str], ...] | None

    @classmethod
    def of(cls, masses: Sequence[float], topology: Any) -> Names:
        """Take the names of a topology; without one, elements by mass."""
        if topology is None:
            return cls(tuple(map(_symbol_of, masses)), None)
        atoms = list(topology.atoms())
        if len(atoms) != len(masses):
            raise ValueError(
                f"the topology has {len(atoms)} atoms and the system {len(masses)}: give the "
                "topology that the system was made from."
            )
        symbols = tuple("X" if atom.element is None else atom.element.symbol for atom in atoms)
        return cls(symbols, tuple((atom.residue.name, atom.name) for atom in atoms))

    def label(self, atoms: Sequence[int]) -> str:
        """Write the atoms of a term, such as "ALA N-CA"; the residue is that of the first."""
        if self.names is None:
            return "-".join(map(str, atoms))
        return f"{self.names[atoms[0]][0]} {'-'.join(self.names[k][1] for k in atoms)}"

    def pattern(self, atoms: Sequence[int]) -> tuple[str, ...]:
        """Return the elements of a term, the same for both directions."""
        symbols = tuple(self.symbols[k] for k in atoms)
        return min(symbols, symbols[::-1])


@dataclass(frozen=True)
class Types:
    """Numbers ``(types, columns)``, and the type of each term; None: each has one of its own.

    The labels name the first term of each type.
    """

    numbers: np.ndarray
    index: Tensor | None
    labels: tuple[str, ...]

    def parameter(self, column: int) -> nn.Parameter:
        return nn.Parameter(torch.from_numpy(self.numbers[:, column].copy()))


def types_of(atoms: Sequence[Sequence[int]], numbers: np.ndarray, names: Names) -> Types:
    """Group terms into types: the same numbers, to the last bit, and the same elements.

    Without a topology each term is a type of its own.
    """
    if names.names is None:
        return Types(numbers, None, tuple(map(names.label, atoms)))
    return grouped(atoms, numbers, [names.pattern(term) for term in atoms], names)


def grouped(
    atoms: Sequence[Sequence[int]], numbers: np.ndarray, patterns: Sequence[Any], names: Names
) -> Types:
    """Group terms that have the same numbers and the same pattern, in order of appearance."""
    keys = list(zip(patterns, map(tuple, numbers.tolist()), strict=True))
    first: dict[Any, int] = {}
    for term, key in enumerate(keys):
        first.setdefault(key, term)
    place, terms = {key: k for k, key in enumerate(first)}, list(first.values())
    labels = tuple(names.label(atoms[term]) for term in terms)
    return Types(numbers[terms], torch.tensor([place[key] for key in keys]), labels)


def _symbol_of(mass: float) -> str:
    """Return the element with the nearest mass, "X" if none is within a tenth of an amu."""
    differences = np.abs(atomic_masses[1:] - mass)
    nearest = int(np.nanargmin(differences))
    return chemical_symbols[nearest + 1] if differences[nearest] < 0.1 else "X"
