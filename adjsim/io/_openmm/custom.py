"""Custom bonded forces and harmonic external forces of an ``openmm.System``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.library import (
    ENERGY,
    LENGTH,
    box_of_system,
    forces,
    per_particle_names,
    plain,
)
from adjsim.io._openmm.types import Names, Types, types_of
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.custom import CustomAngle, CustomBond, CustomTerm, CustomTorsion
from adjsim.potentials.bonded.restraints import PositionRestraint


class Custom(NamedTuple):
    """A custom force of OpenMM, its word for a term, the potential, and the name of its part."""

    force: str
    term: str
    potential: type[CustomTerm]
    part: str


CUSTOM = (
    Custom("CustomBondForce", "Bond", CustomBond, "custom_bonds"),
    Custom("CustomAngleForce", "Angle", CustomAngle, "custom_angles"),
    Custom("CustomTorsionForce", "Torsion", CustomTorsion, "custom_torsions"),
)
EXTERNAL = "CustomExternalForce"
# Harmonic restraints, as they are usually written: a factor, the stiffness and the distance.
SQUARES = r"\(\(x-(\w+)\)\^2\+\(y-(\w+)\)\^2\+\(z-(\w+)\)\^2\)"
PERIODIC = r"periodicdistance\(x,y,z,(\w+),(\w+),(\w+)\)\^2"
RESTRAINT = re.compile(rf"(?:(0\.5|1/2)\*|)(?:\(?(\w+)/2\)?|(\w+))\*(?:{SQUARES}|{PERIODIC})")


def read_custom(
    system: Any, names: Names, shared: dict[str, nn.Parameter]
) -> dict[str, tuple[BondedPotential, Types]]:
    """Read the custom bonded forces of a system, by the names of their parts.

    Global numbers, which the forces of a system share, are added to ``shared``.
    """
    found: dict[str, tuple[BondedPotential, Types]] = {}
    for custom, force, part in _customs(system):
        atoms, numbers = _terms(force, custom)
        types = types_of(atoms, numbers, names)
        each = _names(force, custom)
        values: dict[str, Any] = {
            name: nn.Parameter(torch.from_numpy(types.numbers[:, k].copy()))
            for k, name in enumerate(each)
        }
        values |= global_parameters(force, shared)
        potential = custom.potential(
            torch.tensor(atoms),
            force.getEnergyFunction(),
            values,
            unit=ENERGY,
            **({"length_unit": LENGTH} if custom.term == "Bond" else {}),
            types=types.index if each else None,
            box=box_of_system(system) if force.usesPeriodicBoundaryConditions() else None,
        )
        found[part] = potential, types
    for force, part in _numbered(system, EXTERNAL, "restraints", "Particles"):
        found[part] = _restraint(system, force, names)
    return found


def write_custom(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of custom bonded parts into the forces of a system."""
    for custom, force, part in _customs(system):
        atoms, _ = _terms(force, custom)
        potential = _same_terms(parts.get(part), atoms, part)
        columns = [_of_each(potential, name) for name in _names(force, custom)]
        set_term = getattr(force, f"set{custom.term}Parameters")
        for k, term in enumerate(atoms):
            set_term(k, *term, [float(column[k]) for column in columns])
        for k, (name, _) in enumerate(global_numbers(force)):
            force.setGlobalParameterDefaultValue(k, float(getattr(potential, name).detach()))
    for force, part in _numbered(system, EXTERNAL, "restraints", "Particles"):
        k, points, factor = _restraint_names(force)
        atoms, numbers = _particles(force)
        potential = _same_terms(parts.get(part), atoms, part)
        stiffness = _of_each(potential, "k") * LENGTH**2 / ENERGY / factor
        place: Any = potential.position
        values = dict(zip(points, (place.detach().cpu().double().numpy() / LENGTH).T, strict=True))
        values |= {} if k in dict(global_numbers(force)) else {k: stiffness}
        for row, (atom,) in enumerate(atoms):
            force.setParticleParameters(
                row, atom, [float(values.get(name, numbers[name])[row]) for name in numbers]
            )
        if k not in values:
            index = [name for name, _ in global_numbers(force)].index(k)
            force.setGlobalParameterDefaultValue(index, float(stiffness[0]))


def _customs(system: Any) -> list[tuple[Custom, Any, str]]:
    """Return the custom bonded forces, each with the name of its part."""
    return [
        (custom, force, part)
        for custom in CUSTOM
        for force, part in _numbered(system, custom.force, custom.part, f"{custom.term}s")
    ]


def _numbered(system: Any, kind: str, part: str, terms: str) -> list[tuple[Any, str]]:
    """Return the forces of a class that have terms; the second one is ``part_2``."""
    found = [x for x in forces(system, kind) if getattr(x, f"getNum{terms}")()]
    return [(force, part if k == 0 else f"{part}_{k + 1}") for k, force in enumerate(found)]


def _terms(force: Any, custom: Custom) -> tuple[list[list[int]], np.ndarray]:
    """Return the atoms of all terms, and their numbers in OpenMM's units."""
    count = getattr(force, f"getNum{custom.term}s")()
    rows = [getattr(force, f"get{custom.term}Parameters")(k) for k in range(count)]
    atoms = [[int(x) for x in row[:-1]] for row in rows]
    numbers = [[plain(x) for x in row[-1]] for row in rows]
    return atoms, np.array(numbers, dtype=np.float64).reshape(count, -1)


def _names(force: Any, custom: Custom) -> list[str]:
    count = getattr(force, f"getNumPer{custom.term}Parameters")()
    return [getattr(force, f"getPer{custom.term}ParameterName")(k) for k in range(count)]


def global_parameters(force: Any, shared: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the global numbers of a force, which forces of one system share by their names."""
    for name, value in global_numbers(force):
        if name not in shared:
            shared[name] = nn.Parameter(torch.tensor(value, dtype=torch.float64))
    return {name: shared[name] for name, _ in global_numbers(force)}


def global_numbers(force: Any) -> list[tuple[str, float]]:
    """Return the names and the values of the global numbers of a force."""
    count = force.getNumGlobalParameters()
    return [
        (force.getGlobalParameterName(k), force.getGlobalParameterDefaultValue(k))
        for k in range(count)
    ]


def _restraint(system: Any, force: Any, names: Names) -> tuple[BondedPotential, Types]:
    """Read a harmonic restraint of atoms to points."""
    k, points, factor = _restraint_names(force)
    atoms, numbers = _particles(force)
    given = dict(global_numbers(force))
    stiffness = np.full(len(atoms), given[k]) if k in given else numbers[k]
    one = k in given
    if k in given and _is_shared(system, k):
        raise ValueError(
            f"the {EXTERNAL} shares its global number {k} with another force, and a restraint has "
            "a stiffness of its own: rename the number in one of them."
        )
    position = np.stack([numbers[x] for x in points], 1)
    value = torch.from_numpy(factor * stiffness * ENERGY / LENGTH**2)
    periodic = "periodicdistance" in force.getEnergyFunction()
    part = PositionRestraint(
        torch.tensor(atoms),
        nn.Parameter(value[0].clone() if one else value),
        nn.Parameter(torch.from_numpy(position * LENGTH)),
        box=box_of_system(system) if periodic else None,
    )
    return part, Types(stiffness[:, None], None, tuple(map(names.label, atoms)))


def _is_shared(system: Any, name: str) -> bool:
    """Whether several forces of a system have a global number of this name."""
    found = [x for x in system.getForces() if hasattr(x, "getNumGlobalParameters")]
    return sum(name in dict(global_numbers(x)) for x in found) > 1


def _restraint_names(force: Any) -> tuple[str, tuple[str, ...], float]:
    """Return the names of stiffness and point, and the k of ours for a stiffness of one."""
    text = re.sub(r"\s", "", force.getEnergyFunction())
    found = RESTRAINT.fullmatch(text)
    of_particles = set(_particles(force)[1])
    names = [] if found is None else [x for x in found.groups()[1:] if x]
    known = of_particles | dict(global_numbers(force)).keys()
    if found is None or names[0] not in known or not set(names[1:]) <= of_particles:
        raise ValueError(
            f"the {EXTERNAL} {force.getEnergyFunction()!r} is no harmonic restraint to points of "
            "each particle, such as 'k*periodicdistance(x,y,z,x0,y0,z0)^2'. Leave it out with "
            "removeForce, and add a potential of your own."
        )
    half = found[1] is not None or found[2] is not None
    return names[0], tuple(names[1:]), 1.0 if half else 2.0


def _particles(force: Any) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Return the restrained atoms, and their numbers by name."""
    rows = [force.getParticleParameters(k) for k in range(force.getNumParticles())]
    names = per_particle_names(force)
    columns = np.array([[plain(x) for x in row[1]] for row in rows], dtype=np.float64)
    return [[int(row[0])] for row in rows], dict(
        zip(names, columns.reshape(len(rows), len(names)).T, strict=True)
    )


def _of_each(part: Any, name: str) -> np.ndarray:
    """Return a number of each term."""
    value = getattr(part, name).detach().cpu().double()
    if value.numel() > 1 and part.types is not None:
        value = value[part.types.cpu()]
    return value.expand(len(part.index)).numpy()


def _same_terms(part: nn.Module | None, atoms: Sequence[Sequence[int]], name: str) -> Any:
    if not isinstance(part, BondedPotential) or part.index.tolist() != [list(x) for x in atoms]:
        raise ValueError(
            f"the terms of {name!r} in the potential are not those of the system: give the system "
            "that the potential was read from."
        )
    return part
