"""The custom external forces of an ``openmm.System``; harmonic ones are restraints."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.custom import (
    global_numbers,
    global_parameters,
    numbered,
    of_each,
    same_terms,
    write_global,
)
from adjsim.io._openmm.library import (
    ENERGY,
    LENGTH,
    box_of_system,
    forces,
    per_particle_names,
    plain,
)
from adjsim.io._openmm.types import Names, Types
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.compound import CustomExternal
from adjsim.potentials.bonded.restraints import PositionRestraint

KIND = "CustomExternalForce"
# Harmonic restraints, as they are usually written: a factor, the stiffness and the distance.
SQUARES = r"\(\(x-(\w+)\)\^2\+\(y-(\w+)\)\^2\+\(z-(\w+)\)\^2\)"
PERIODIC = r"periodicdistance\(x,y,z,(\w+),(\w+),(\w+)\)\^2"
RESTRAINT = re.compile(rf"(?:(0\.5|1/2)\*|)(?:\(?(\w+)/2\)?|(\w+))\*(?:{SQUARES}|{PERIODIC})")


class Restraint(NamedTuple):
    """The names of stiffness and points of a restraint, and our k for a stiffness of one."""

    k: str
    points: tuple[str, ...]
    factor: float


def read_external(
    system: Any, names: Names, shared: dict[str, nn.Parameter]
) -> dict[str, tuple[BondedPotential, Types]]:
    """Read the custom external forces of a system, by the names of their parts."""
    found: dict[str, tuple[BondedPotential, Types]] = {}
    for force, part, restraint in _parts(system):
        atoms, numbers = _particles(force)
        box = box_of_system(system) if force.usesPeriodicBoundaryConditions() else None
        if restraint is None:
            given = {name: nn.Parameter(torch.from_numpy(x.copy())) for name, x in numbers.items()}
            potential = CustomExternal(
                torch.tensor(atoms),
                force.getEnergyFunction(),
                given | global_parameters(force, shared),
                unit=ENERGY,
                length_unit=LENGTH,
                box=box,
            )
        else:
            potential = _restraint(force, restraint, box)
        columns = np.stack(list(numbers.values()), 1) if numbers else np.zeros((len(atoms), 0))
        found[part] = potential, Types(columns, None, tuple(map(names.label, atoms)))
    return found


def write_external(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of restraints and external terms into the forces of a system."""
    for force, part, restraint in _parts(system):
        atoms, numbers = _particles(force)
        potential = same_terms(parts.get(part), atoms, part)
        if restraint is None:
            numbers = {name: of_each(potential, name) for name in numbers}
            write_global(potential, force)
        else:
            stiffness = of_each(potential, "k") * LENGTH**2 / ENERGY / restraint.factor
            points = potential.position.detach().cpu().double().numpy() / LENGTH
            numbers |= dict(zip(restraint.points, points.T, strict=True))
            if restraint.k in numbers:
                numbers[restraint.k] = stiffness
            elif (stiffness != stiffness[0]).any():
                own, text = f"{restraint.k}_of_each", force.getEnergyFunction()
                force.addPerParticleParameter(own)
                force.setEnergyFunction(re.sub(rf"\b{restraint.k}\b", own, text))
                numbers[own] = stiffness
            else:
                index = [name for name, _ in global_numbers(force)].index(restraint.k)
                force.setGlobalParameterDefaultValue(index, float(stiffness[0]))
        for row, (atom,) in enumerate(atoms):
            force.setParticleParameters(row, atom, [float(x[row]) for x in numbers.values()])


def _parts(system: Any) -> list[tuple[Any, str, Restraint | None]]:
    """Return the forces that have particles, the names of their parts, and those of restraints."""
    found = [x for x in forces(system, KIND) if x.getNumParticles()]
    kinds = [(force, _names_of_restraint(system, force)) for force in found]
    restraints = numbered([force for force, names in kinds if names], "restraints")
    others = numbered([force for force, names in kinds if not names], "custom_externals")
    part_of = {id(force): part for force, part in (*restraints, *others)}
    return [(force, part_of[id(force)], names) for force, names in kinds]


def _restraint(force: Any, names: Restraint, box: np.ndarray | None) -> PositionRestraint:
    """Read a harmonic restraint of atoms to points."""
    atoms, numbers = _particles(force)
    given = dict(global_numbers(force))
    unit = names.factor * ENERGY / LENGTH**2
    stiffness = given[names.k] if names.k in given else numbers[names.k]
    position = np.stack([numbers[x] for x in names.points], 1)
    return PositionRestraint(
        torch.tensor(atoms),
        nn.Parameter(torch.as_tensor(stiffness, dtype=torch.float64) * unit),
        nn.Parameter(torch.from_numpy(position * LENGTH)),
        box=box,
    )


def _names_of_restraint(system: Any, force: Any) -> Restraint | None:
    """Return the names of a harmonic restraint to points of each particle, None of another force.

    A stiffness that other forces share is a number of an expression, as theirs.
    """
    text = re.sub(r"\s", "", force.getEnergyFunction())
    found = RESTRAINT.fullmatch(text)
    if found is None:
        return None
    k, *points = (x for x in found.groups()[1:] if x)
    of_particles = per_particle_names(force)
    single = k in dict(global_numbers(force)) and not _is_shared(system, k)
    if not (k in of_particles or single) or not set(points) <= set(of_particles):
        return None
    halves = (found[1] is not None) + (found[2] is not None)
    if len({k, *points}) < 4:
        return None
    return Restraint(k, tuple(points), 2.0 / 2**halves)


def _is_shared(system: Any, name: str) -> bool:
    """Whether several forces of a system have a global number of this name."""
    found = [x for x in system.getForces() if hasattr(x, "getNumGlobalParameters")]
    return sum(name in dict(global_numbers(x)) for x in found) > 1


def _particles(force: Any) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Return the atoms, and their numbers by name."""
    rows = [force.getParticleParameters(k) for k in range(force.getNumParticles())]
    names = per_particle_names(force)
    columns = np.array([[plain(x) for x in row[1]] for row in rows], dtype=np.float64)
    return [[int(row[0])] for row in rows], dict(
        zip(names, columns.reshape(len(rows), len(names)).T, strict=True)
    )
