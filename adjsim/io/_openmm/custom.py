"""Custom bonded forces and harmonic external forces of an ``openmm.System``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.library import (
    ENERGY,
    LENGTH,
    box_of_system,
    forces,
    masses_of,
    plain,
)
from adjsim.io._openmm.tables import read_tables, write_tables
from adjsim.io._openmm.types import Names, Types, types_of
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.centroids import CustomCentroid
from adjsim.potentials.bonded.compound import CustomCompound
from adjsim.potentials.bonded.custom import CustomAngle, CustomBond, CustomTerm, CustomTorsion


class Custom(NamedTuple):
    """A custom force of OpenMM, its word for a term, the potential, and the name of its part.

    ``listed``: a term has its members in a list. ``grouped``: its members are groups of atoms.
    ``units``: the arguments of the potential that are units, beside that of energy.
    """

    force: str
    term: str
    potential: type[CustomTerm]
    part: str
    listed: bool = False
    grouped: bool = False
    units: Mapping[str, float] = {}


OF_LENGTHS = {"length_unit": LENGTH}
CUSTOM = (
    Custom("CustomBondForce", "Bond", CustomBond, "custom_bonds", units=OF_LENGTHS),
    Custom("CustomAngleForce", "Angle", CustomAngle, "custom_angles"),
    Custom("CustomTorsionForce", "Torsion", CustomTorsion, "custom_torsions"),
    Custom(
        "CustomCompoundBondForce",
        "Bond",
        CustomCompound,
        "custom_compounds",
        listed=True,
        units=OF_LENGTHS,
    ),
    Custom(
        "CustomCentroidBondForce",
        "Bond",
        CustomCentroid,
        "custom_centroids",
        listed=True,
        grouped=True,
        units=OF_LENGTHS,
    ),
)


def read_custom(
    system: Any, names: Names, shared: dict[str, nn.Parameter]
) -> dict[str, tuple[BondedPotential, Types]]:
    """Read the custom bonded forces of a system, by the names of their parts.

    Global numbers, which the forces of a system share, are added to ``shared``.
    """
    found: dict[str, tuple[BondedPotential, Types]] = {}
    for custom, force, part in _customs(system):
        atoms, numbers = _terms(force, custom)
        groups = _groups(system, force, custom)
        # The numbers of groups are none of atoms.
        labels = tuple("-".join(f"group {k}" for k in term) for term in atoms)
        types = Types(numbers, None, labels) if groups else types_of(atoms, numbers, names)
        each = _names(force, custom)
        values: dict[str, Any] = {name: types.parameter(k) for k, name in enumerate(each)}
        values |= global_parameters(force, shared)
        arguments: list[Any] = [torch.tensor(atoms), force.getEnergyFunction(), values]
        make: Any = custom.potential
        potential = make(
            *([groups[0], *arguments] if groups else arguments),
            tables=read_tables(force),
            unit=ENERGY,
            **({"weights": groups[1]} if groups else {}),
            **custom.units,
            types=types.index if each else None,
            box=box_of_system(system) if force.usesPeriodicBoundaryConditions() else None,
        )
        found[part] = potential, types
    return found


def write_custom(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of custom bonded parts into the forces of a system."""
    for custom, force, part in _customs(system):
        atoms, _ = _terms(force, custom)
        potential = same_terms(parts.get(part), atoms, part)
        columns = [of_each(potential, name) for name in _names(force, custom)]
        set_term = getattr(force, f"set{custom.term}Parameters")
        for k, term in enumerate(atoms):
            set_term(
                k, *([term] if custom.listed else term), [float(column[k]) for column in columns]
            )
        write_global(potential, force)
        write_tables(potential, force)


def write_global(part: nn.Module, force: Any) -> None:
    """Write the global numbers of a part into a force."""
    for k, (name, _) in enumerate(global_numbers(force)):
        force.setGlobalParameterDefaultValue(k, one_number(part, name))


def one_number(part: nn.Module, name: str) -> float:
    """Return a number of a part that is one number in OpenMM."""
    value = getattr(part, name).detach()
    if value.numel() != 1:
        raise ValueError(
            f"{name} is a global number of its force in the system, and the potential has "
            f"{tuple(value.shape)} numbers: make it one number, or make it a number of each term "
            "in the system."
        )
    return value.item()


def _customs(system: Any) -> list[tuple[Custom, Any, str]]:
    """Return the custom bonded forces, each with the name of its part."""
    return [
        (custom, force, part)
        for custom in CUSTOM
        for force, part in numbered(
            [x for x in forces(system, custom.force) if getattr(x, f"getNum{custom.term}s")()],
            custom.part,
        )
    ]


def numbered(found: Sequence[Any], part: str) -> list[tuple[Any, str]]:
    """Return forces with the names of their parts; the second one is ``part_2``."""
    return [(force, part if k == 0 else f"{part}_{k + 1}") for k, force in enumerate(found)]


def _groups(
    system: Any, force: Any, custom: Custom
) -> tuple[list[list[int]], list[list[float]]] | None:
    """Return the atoms and the weights of groups, None of a force without groups."""
    if not custom.grouped:
        return None
    masses = masses_of(system)
    rows = [force.getGroupParameters(k) for k in range(force.getNumGroups())]
    groups = [list(atoms) for atoms, _ in rows]
    weights = [list(given) if len(given) else [masses[k] for k in atoms] for atoms, given in rows]
    return groups, weights


def _terms(force: Any, custom: Custom) -> tuple[list[list[int]], np.ndarray]:
    """Return the atoms of all terms, and their numbers in OpenMM's units."""
    count = getattr(force, f"getNum{custom.term}s")()
    rows = [getattr(force, f"get{custom.term}Parameters")(k) for k in range(count)]
    atoms = [[int(x) for x in (row[0] if custom.listed else row[:-1])] for row in rows]
    numbers = [[plain(x) for x in row[-1]] for row in rows]
    return atoms, np.array(numbers, dtype=np.float64).reshape(count, -1)


def _names(force: Any, custom: Custom) -> list[str]:
    count = getattr(force, f"getNumPer{custom.term}Parameters")()
    return [getattr(force, f"getPer{custom.term}ParameterName")(k) for k in range(count)]


def global_parameters(force: Any, shared: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the global numbers of a force, which forces of one system share by their names."""
    for name, value in global_numbers(force):
        known = shared.setdefault(name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))
        if float(known.detach()) != value:
            raise ValueError(
                f"forces of the system have the global number {name} with the defaults "
                f"{float(known.detach()):g} and {value:g}: set one value in all of them."
            )
    return {name: shared[name] for name, _ in global_numbers(force)}


def global_numbers(force: Any) -> list[tuple[str, float]]:
    """Return the names and the values of the global numbers of a force."""
    count = force.getNumGlobalParameters()
    return [
        (force.getGlobalParameterName(k), force.getGlobalParameterDefaultValue(k))
        for k in range(count)
    ]


def of_each(part: Any, name: str) -> np.ndarray:
    """Return a number of each term."""
    value = getattr(part, name).detach().cpu().double()
    if value.numel() > 1 and part.types is not None:
        value = value[part.types.cpu()]
    return value.expand(len(part.index)).numpy()


def same_terms(part: nn.Module | None, atoms: Sequence[Sequence[int]], name: str) -> Any:
    if not isinstance(part, BondedPotential) or part.index.tolist() != [list(x) for x in atoms]:
        raise ValueError(
            f"the terms of {name!r} in the potential are not those of the system: give the system "
            "that the potential was read from."
        )
    return part
