"""The custom hydrogen-bond forces of an ``openmm.System``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.custom import global_parameters, numbered, write_global
from adjsim.io._openmm.library import ENERGY, LENGTH, box_of_system, cutoff_of, forces, plain
from adjsim.io._openmm.tables import read_tables, write_tables
from adjsim.potentials.bonded.hydrogen_bonds import CustomHydrogenBond
from adjsim.potentials.expressions import place_of

KIND = "CustomHbondForce"
SIDES = ("Donor", "Acceptor")


def read_hydrogen_bonds(
    system: Any, positions: torch.Tensor, shared: dict[str, nn.Parameter]
) -> dict[str, CustomHydrogenBond]:
    """Read the custom hydrogen-bond forces of a system, by the names of their parts.

    A list has room for half as many pairs more than there are at these positions.
    """
    found = {part: _read(system, force, shared) for force, part in _parts(system)}
    for part in found.values():
        if part.listed:
            part.capacity = math.ceil(1.5 * part.near_pairs(positions))
    return found


def write_hydrogen_bonds(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of hydrogen bonds into the forces of a system."""
    for force, part in _parts(system):
        potential = parts.get(part)
        sides = [_side(force, side) for side in SIDES]
        if not isinstance(potential, CustomHydrogenBond) or potential.sizes != tuple(
            len(atoms) for atoms, _ in sides
        ):
            raise ValueError(
                f"the donors and acceptors of {part!r} in the potential are not those of the "
                "system: give the system that the potential was read from."
            )
        for side, (atoms, numbers) in zip(SIDES, sides, strict=True):
            columns = [
                getattr(potential, name).detach().cpu().double().expand(len(atoms)).tolist()
                for name in numbers
            ]
            for k, row in enumerate(atoms):
                getattr(force, f"set{side}Parameters")(k, *row, [x[k] for x in columns])
        write_global(potential, force)
        write_tables(potential, force)


def _read(system: Any, force: Any, shared: dict[str, nn.Parameter]) -> CustomHydrogenBond:
    text = force.getEnergyFunction()
    atoms: list[torch.Tensor] = []
    numbers: list[dict[str, nn.Parameter]] = []
    for side in SIDES:
        rows, values = _side(force, side)
        for column in (1, 2):
            name = f"{side[0].lower()}{column + 1}"
            used = place_of(name, text) < len(text)
            for k, row in enumerate(rows):
                if row[column] < 0 and used:
                    raise ValueError(
                        f"{side.lower()} {k} of the {KIND} has no atom {name}, which its "
                        f"expression names at place {place_of(name, text)}: {text!r}."
                    )
                # An atom that no coordinate reads is any atom.
                row[column] = row[0] if row[column] < 0 else row[column]
        atoms.append(torch.tensor(rows))
        numbers.append(
            {name: nn.Parameter(torch.from_numpy(x.copy())) for name, x in values.items()}
        )
    excluded = [force.getExclusionParticles(k) for k in range(force.getNumExclusions())]
    donors, acceptors = atoms
    return CustomHydrogenBond(
        donors,
        acceptors,
        text,
        global_parameters(force, shared),
        donor_numbers=numbers[0],
        acceptor_numbers=numbers[1],
        tables=read_tables(force),
        exclusions=torch.tensor(excluded) if excluded else None,
        cutoff=cutoff_of(force),
        unit=ENERGY,
        length_unit=LENGTH,
        box=box_of_system(system) if force.usesPeriodicBoundaryConditions() else None,
    )


def _parts(system: Any) -> list[tuple[Any, str]]:
    """Return the forces with a pair that is not excluded, and the names of their parts."""
    found = [
        x
        for x in forces(system, KIND)
        if len({tuple(x.getExclusionParticles(k)) for k in range(x.getNumExclusions())})
        < x.getNumDonors() * x.getNumAcceptors()
    ]
    return numbered(found, "hydrogen_bonds")


def _side(force: Any, side: str) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Return the atoms of donors or acceptors, -1 where there is none, and their numbers."""
    get: Callable[[int], Any] = getattr(force, f"get{side}Parameters")
    rows = [get(k) for k in range(getattr(force, f"getNum{side}s")())]
    name = getattr(force, f"getPer{side}ParameterName")
    names = [name(k) for k in range(getattr(force, f"getNumPer{side}Parameters")())]
    values = np.array([[plain(x) for x in row[3]] for row in rows], dtype=np.float64)
    columns = values.reshape(len(rows), len(names)).T
    return [[int(x) for x in row[:3]] for row in rows], dict(zip(names, columns, strict=True))
