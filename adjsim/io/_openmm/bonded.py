"""Bonds, angles and torsions of an ``openmm.System``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.io._openmm.library import ENERGY, LENGTH, box_of_system, forces, table
from adjsim.io._openmm.types import Names, Types, types_of
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.bonds_and_angles import HarmonicAngle, HarmonicBond
from adjsim.potentials.bonded.torsions import PeriodicTorsion, RyckaertBellemans


class Family(NamedTuple):
    """A bonded force of OpenMM and its potential.

    ``term`` is OpenMM's word for a term, as in ``getNumBonds``. ``columns`` are the parameter of
    the potential and our unit of each number after the ``potential.members`` atoms of a term.
    """

    force: str
    term: str
    potential: type[BondedPotential]
    columns: tuple[tuple[str, float], ...]


# By the name of the part of the potential.
FAMILIES = {
    "bonds": Family(
        "HarmonicBondForce", "Bond", HarmonicBond, (("length", LENGTH), ("k", ENERGY / LENGTH**2))
    ),
    "angles": Family("HarmonicAngleForce", "Angle", HarmonicAngle, (("angle", 1.0), ("k", ENERGY))),
    "torsions": Family(
        "PeriodicTorsionForce",
        "Torsion",
        PeriodicTorsion,
        (("periodicity", 1.0), ("phase", 1.0), ("k", ENERGY)),
    ),
    "ryckaert_bellemans": Family(
        "RBTorsionForce", "Torsion", RyckaertBellemans, (("coefficients", ENERGY),) * 6
    ),
}


def read_bonded(system: Any, names: Names) -> dict[str, tuple[BondedPotential, Types]]:
    """Read the bonded forces of a system, by the name of their part."""
    parts: dict[str, tuple[BondedPotential, Types]] = {}
    for part, family in FAMILIES.items():
        found = _forces(system, family)
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
        parts[part] = _potential(family, atoms, types, box), types
    return parts


def write_bonded(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of the bonded parts into the forces of a system, whose terms they are."""
    for name, family in FAMILIES.items():
        found, part = _forces(system, family), parts.get(name)
        if part is None and not found:
            continue
        atoms = _terms(found, family)[0] if found else []
        if not isinstance(part, BondedPotential) or part.index.tolist() != atoms:
            raise ValueError(
                f"the terms of {family.force} in the system are not those of {name!r} in the "
                "potential: give the system that the potential was read from."
            )
        rows = iter(_numbers_of(part, family).tolist())
        for force in found:
            write = getattr(force, f"set{family.term}Parameters")
            for k in range(_count(force, family)):
                row = next(rows)
                if family.force == "PeriodicTorsionForce":
                    row[0] = round(row[0])
                write(k, *_get(force, family, k)[: family.potential.members], *row)


def _potential(
    family: Family, atoms: list[list[int]], types: Types, box: np.ndarray | None
) -> BondedPotential:
    names = np.array([name for name, _ in family.columns])
    numbers: dict[str, Any] = {}
    for name in dict.fromkeys(names.tolist()):
        columns = torch.tensor(types.numbers[:, names == name]).contiguous()
        value = columns[:, 0].clone() if columns.shape[1] == 1 else columns
        # A multiplicity is a whole number, which no gradient improves.
        numbers[name] = value if name == "periodicity" else nn.Parameter(value)
    return family.potential(torch.tensor(atoms), **numbers, types=types.index, box=box)


def _terms(found: Sequence[Any], family: Family) -> tuple[list[list[int]], np.ndarray]:
    """Return the atoms of all terms, and their numbers in our units."""
    rows = np.concatenate(
        [table(partial(_get, force, family), _count(force, family)) for force in found]
    )
    width, unit = family.potential.members, np.array([unit for _, unit in family.columns])
    return rows[:, :width].astype(np.int64).tolist(), rows[:, width:] * unit


def _numbers_of(part: BondedPotential, family: Family) -> np.ndarray:
    """Return the numbers of each term in OpenMM's units."""
    columns: list[Tensor] = []
    for name in dict.fromkeys(name for name, _ in family.columns):
        value: Tensor = getattr(part, name).detach().cpu().double()
        value = value if part.types is None else value[part.types.cpu()]
        columns.append(value.reshape(len(part.index), -1))
    return torch.cat(columns, 1).numpy() / np.array([unit for _, unit in family.columns])


def _forces(system: Any, family: Family) -> list[Any]:
    return [force for force in forces(system, family.force) if _count(force, family)]


def _count(force: Any, family: Family) -> int:
    return getattr(force, f"getNum{family.term}s")()


def _get(force: Any, family: Family, k: int) -> list[Any]:
    return list(getattr(force, f"get{family.term}Parameters")(k))
