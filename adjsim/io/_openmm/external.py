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
from adjsim.potentials.bonded.restraints import FlatBottomRestraint, PositionRestraint

KIND = "CustomExternalForce"
# Distances from a point, which become # in the text of a restraint.
SQUARES = r"\(\(x-(\w+)\)\^2\+\(y-(\w+)\)\^2\+\(z-(\w+)\)\^2\)"
PERIODIC = r"periodicdistance\(x,y,z,(\w+),(\w+),(\w+)\)"
DISTANCES = {rf"sqrt{SQUARES}": "#", PERIODIC: "#", SQUARES: "#^2"}
# Restraints as they are usually written: a factor, the stiffness and the square of the distance, or
# of what the distance exceeds a radius by.
FACTOR = r"(?:(0\.5|1/2)\*)?(?:\(?(\w+)/2\)?|(\w+))\*"
EXCESS = r"\(?max\((?:0,#-(\w+)|#-(\w+),0)\)\)?\^2|step\(#-(\w+)\)\*\(#-\w+\)\^2"
RESTRAINT = re.compile(rf"{FACTOR}(?:#\^2|{EXCESS})")


class Restraint(NamedTuple):
    """The names of a restraint's numbers, and our k for a stiffness of one."""

    k: str
    points: tuple[str, ...]
    factor: float
    radius: str | None

    def numbers(self) -> dict[str, tuple[str, float]]:
        """Return our names of the numbers but the points, and their units, by their names."""
        found = {self.k: ("k", self.factor * ENERGY / LENGTH**2)}
        return found if self.radius is None else {**found, self.radius: ("radius", LENGTH)}


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
            points = potential.position.detach().cpu().double().numpy() / LENGTH
            numbers |= dict(zip(restraint.points, points.T, strict=True))
            for name, (own, unit) in restraint.numbers().items():
                _write_number(force, name, of_each(potential, own) / unit, numbers)
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


def _write_number(force: Any, name: str, values: np.ndarray, numbers: dict[str, Any]) -> None:
    """Write a number of each particle, or the global number that it is of all."""
    if name in numbers:
        numbers[name] = values
    elif (values != values[0]).any():
        own = f"{name}_of_each"
        force.addPerParticleParameter(own)
        force.setEnergyFunction(re.sub(rf"\b{name}\b", own, force.getEnergyFunction()))
        numbers[own] = values
    else:
        index = [x for x, _ in global_numbers(force)].index(name)
        force.setGlobalParameterDefaultValue(index, float(values[0]))


def _restraint(force: Any, names: Restraint, box: np.ndarray | None) -> BondedPotential:
    """Read a restraint of atoms to points, or to balls around them."""
    atoms, numbers = _particles(force)
    given = {**numbers, **dict(global_numbers(force))}
    values = {
        own: nn.Parameter(torch.as_tensor(given[name], dtype=torch.float64) * unit)
        for name, (own, unit) in names.numbers().items()
    }
    position = np.stack([numbers[x] for x in names.points], 1) * LENGTH
    make: Any = PositionRestraint if names.radius is None else FlatBottomRestraint
    return make(
        torch.tensor(atoms), position=nn.Parameter(torch.from_numpy(position)), box=box, **values
    )


def _names_of_restraint(system: Any, force: Any) -> Restraint | None:
    """Return the names of a restraint to points of each particle, None of another force.

    A stiffness or a radius that other forces share is a number of an expression, as theirs.
    """
    text, *definitions = re.sub(r"\s", "", force.getEnergyFunction()).strip(";").split(";")
    for definition in definitions:
        name, _, value = definition.partition("=")
        text = re.sub(rf"\b{re.escape(name)}\b", f"({value})", text)
    places = set[tuple[str, ...]]()
    for pattern, short in DISTANCES.items():
        places |= {x.groups() for x in re.finditer(pattern, text)}
        text = re.sub(pattern, short, text)
    text = text.replace("(#)", "#")
    found = RESTRAINT.fullmatch(text)
    if found is None or len(places) != 1 or len(set(re.findall(r"#-(\w+)", text))) > 1:
        return None
    half, halved, whole, *radii = found.groups()
    (points,), k = places, halved or whole
    radius = next((x for x in radii if x), None)
    of_particles, numbers = per_particle_names(force), [k] if radius is None else [k, radius]
    known = dict(global_numbers(force))
    single = {name for name in numbers if name in known and not _is_shared(system, name)}
    if not set(numbers) <= {*of_particles, *single} or not set(points) <= set(of_particles):
        return None
    if len({*numbers, *points}) < len(numbers) + 3:
        return None
    return Restraint(k, points, 2.0 / 2 ** ((half is not None) + (halved is not None)), radius)


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
