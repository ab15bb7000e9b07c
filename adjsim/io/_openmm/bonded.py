"""Bonds, angles and torsions of an ``openmm.System``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.io._openmm.library import ENERGY, LENGTH, box_of_system, forces, plain
from adjsim.io._openmm.types import Names, Types, types_of
from adjsim.potentials.bonded.angles import HarmonicAngle
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.bonds import HarmonicBond
from adjsim.potentials.bonded.torsions import PeriodicTorsion, RyckaertBellemans


@dataclass(frozen=True)
class Family:
    """A bonded force of OpenMM and its potential.

    Args:
        part: the name of the potential in the force field.
        force: the class in OpenMM.
        term: what OpenMM calls a term, as in ``getNumBonds``.
        width: atoms in a term.
        columns: the parameter of the potential, and our unit, of each number after the atoms.
        make: takes the index, types and box to the potential.
    """

    part: str
    force: str
    term: str
    width: int
    columns: tuple[tuple[str, float], ...]
    make: Callable[[Tensor, Types, Any], BondedPotential]


def _bonds(index: Tensor, found: Types, box: Any) -> BondedPotential:
    length, k = map(found.parameter, range(2))
    return HarmonicBond(index, k, length, types=found.index, box=box)


def _angles(index: Tensor, found: Types, box: Any) -> BondedPotential:
    angle, k = map(found.parameter, range(2))
    return HarmonicAngle(index, k, angle, types=found.index, box=box)


def _torsions(index: Tensor, found: Types, box: Any) -> BondedPotential:
    # A multiplicity is a whole number, which no gradient improves.
    periodicity = torch.from_numpy(found.numbers[:, 0].copy())
    phase, k = map(found.parameter, (1, 2))
    return PeriodicTorsion(index, k, periodicity, phase, types=found.index, box=box)


def _ryckaert_bellemans(index: Tensor, found: Types, box: Any) -> BondedPotential:
    coefficients = nn.Parameter(torch.from_numpy(found.numbers.copy()))
    return RyckaertBellemans(index, coefficients, types=found.index, box=box)


FAMILIES = (
    Family(
        "bonds",
        "HarmonicBondForce",
        "Bond",
        2,
        (("length", LENGTH), ("k", ENERGY / LENGTH**2)),
        _bonds,
    ),
    Family("angles", "HarmonicAngleForce", "Angle", 3, (("angle", 1.0), ("k", ENERGY)), _angles),
    Family(
        "torsions",
        "PeriodicTorsionForce",
        "Torsion",
        4,
        (("periodicity", 1.0), ("phase", 1.0), ("k", ENERGY)),
        _torsions,
    ),
    Family(
        "ryckaert_bellemans",
        "RBTorsionForce",
        "Torsion",
        4,
        (("coefficients", ENERGY),) * 6,
        _ryckaert_bellemans,
    ),
)


def read_bonded(system: Any, names: Names) -> dict[str, tuple[BondedPotential, Types]]:
    """Read the bonded forces of a system, by the name of their part.

    Raises:
        ValueError: some forces of a kind are periodic and others are not.
    """
    parts: dict[str, tuple[BondedPotential, Types]] = {}
    for family in FAMILIES:
        found = [force for force in forces(system, family.force) if _count(force, family)]
        if not found:
            continue
        periodic = {force.usesPeriodicBoundaryConditions() for force in found}
        if len(periodic) > 1:
            raise ValueError(
                f"the system has a {family.force} that is periodic and another one that is not: "
                "call setUsesPeriodicBoundaryConditions of each with the same value."
            )
        atoms, numbers = _terms(found, family)
        types = types_of(atoms, numbers, names)
        box = box_of_system(system) if periodic == {True} else None
        parts[family.part] = family.make(torch.tensor(atoms), types, box), types
    return parts


def write_bonded(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of the bonded parts into the forces of a system.

    Raises:
        ValueError: the terms of the system are not those of the potential.
    """
    for family in FAMILIES:
        found = [force for force in forces(system, family.force) if _count(force, family)]
        part = parts.get(family.part)
        if part is None and not found:
            continue
        atoms = _terms(found, family)[0] if found else []
        if not isinstance(part, BondedPotential) or part.index.tolist() != atoms:
            raise ValueError(
                f"the terms of {family.force} in the system are not those of {family.part!r} in "
                "the potential: give the system that the potential was read from."
            )
        rows = iter(_numbers_of(part, family).tolist())
        setter = f"set{family.term}Parameters"
        for force in found:
            for k in range(_count(force, family)):
                row = next(rows)
                if family.force == "PeriodicTorsionForce":
                    row[0] = round(row[0])
                members = _get(force, family, k)[: family.width]
                getattr(force, setter)(k, *members, *row)


def _terms(found: Sequence[Any], family: Family) -> tuple[list[list[int]], np.ndarray]:
    """Return the atoms of all terms, and their numbers in our units."""
    rows = [_get(force, family, k) for force in found for k in range(_count(force, family))]
    unit = np.array([unit for _, unit in family.columns])
    numbers = np.array([[plain(x) for x in row[family.width :]] for row in rows], dtype=np.float64)
    return [[int(x) for x in row[: family.width]] for row in rows], numbers * unit


def _numbers_of(part: BondedPotential, family: Family) -> np.ndarray:
    """Return the numbers of each term in OpenMM's units."""
    terms = len(part.index)
    columns: list[Tensor] = []
    for name in dict.fromkeys(name for name, _ in family.columns):
        value: Tensor = getattr(part, name).detach().cpu().double()
        value = value if part.types is None else value[part.types.cpu()]
        columns.append(value.reshape(terms, -1))
    unit = np.array([unit for _, unit in family.columns])
    return torch.cat(columns, 1).numpy() / unit


def _count(force: Any, family: Family) -> int:
    return getattr(force, f"getNum{family.term}s")()


def _get(force: Any, family: Family, k: int) -> list[Any]:
    return list(getattr(force, f"get{family.term}Parameters")(k))
