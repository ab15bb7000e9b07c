"""The custom nonbonded forces of an ``openmm.System``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.custom import global_numbers, global_parameters, numbered
from adjsim.io._openmm.library import (
    ENERGY,
    LENGTH,
    box_of_system,
    cutoff_of,
    forces,
    particles_of,
    per_particle_names,
    plain,
)
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.custom import CustomPairs
from adjsim.potentials.pairs.long_range import LongRangeCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Truncation, Unshifted

KIND = "CustomNonbondedForce"


def read_custom_pairs(system: Any, shared: dict[str, nn.Parameter]) -> dict[str, Potential]:
    """Read the custom nonbonded forces of a system, by the names of their parts."""
    found: dict[str, Potential] = {}
    for force, part in numbered(forces(system, KIND), "custom_pairs"):
        found[part] = pairs = _read(system, force, shared)
        if pairs.box is not None and force.getUseLongRangeCorrection():
            name = part.replace("custom_pairs", "long_range")
            found[name] = LongRangeCorrection(pairs, system.getNumParticles())
    return found


def write_custom_pairs(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of custom pairs into the forces of a system."""
    for force, part in numbered(forces(system, KIND), "custom_pairs"):
        pairs = parts.get(part)
        if not isinstance(pairs, CustomPairs):
            raise ValueError(
                f"the potential has no {part!r}, and the system has a {KIND}: give the system that "
                "the potential was read from."
            )
        values = {
            name: getattr(pairs, name).detach().cpu().double().numpy() for name in pairs.numbers
        }
        for k, (name, _) in enumerate(global_numbers(force)):
            force.setGlobalParameterDefaultValue(k, float(values[name]))
        for name, (k, shape) in _tables(force).items():
            table = force.getTabulatedFunction(k)
            table.setFunctionParameters(*shape, values[name].flatten().tolist())
        names, rows = per_particle_names(force), particles_of(force)
        for column, name in enumerate(names):
            if name in values:
                rows[:, column] = values[name]
        for k, row in enumerate(rows.tolist()):
            force.setParticleParameters(k, row)


def _read(system: Any, force: Any, shared: dict[str, nn.Parameter]) -> CustomPairs:
    if force.getNumComputedValues():
        raise ValueError(
            f"the {KIND} has computed values, which are not provided: write them into its energy."
        )
    periodic = force.usesPeriodicBoundaryConditions()
    values: dict[str, Any] = {}
    columns = dict(zip(per_particle_names(force), particles_of(force).T, strict=True))
    text, tables = force.getEnergyFunction(), _tables(force)
    species = None
    for name, (k, shape) in tables.items():
        found = re.search(rf"\b{name}\s*\(\s*(\w+)1\s*,\s*(\w+)2\s*\)", text)
        if found is None or found[1] != found[2] or found[1] not in columns:
            raise ValueError(
                f"the table {name} of the {KIND} is no function of a number of both atoms, such as "
                f"{name}(type1, type2): {text!r}."
            )
        index = columns[found[1]]
        if species is not None and not np.array_equal(species, index):
            raise ValueError(f"the tables of the {KIND} are of different types of atoms.")
        species = index
        if re.search(rf"\b{name}\b(?!\s*\()", text):
            raise ValueError(
                f"the {KIND} has a table and another number of the name {name}: rename one of them."
            )
        text = re.sub(rf"\b{name}\s*\(\s*{found[1]}1\s*,\s*{found[1]}2\s*\)", name, text)
        _, _, entries = force.getTabulatedFunction(k).getFunctionParameters()
        values[name] = np.array(entries, dtype=np.float64).reshape(shape)
    # A number that stands for a type alone is no number of the energy.
    used = re.findall(r"[A-Za-z_]\w*", text)
    values |= {name: x for name, x in columns.items() if {f"{name}1", f"{name}2"} & set(used)}
    exclusions = [force.getExclusionParticles(k) for k in range(force.getNumExclusions())]
    truncation: Truncation = Unshifted()
    cutoff = cutoff_of(force)
    if cutoff is not None and force.getUseSwitchingFunction():
        truncation = SwitchedDistance(LENGTH * plain(force.getSwitchingDistance()))
    return CustomPairs(
        text,
        {
            **global_parameters(force, shared),
            **{name: nn.Parameter(torch.from_numpy(x.copy())) for name, x in values.items()},
        },
        species=None if species is None else torch.tensor(species.astype(np.int64)),
        groups=_groups(force),
        unit=ENERGY,
        length_unit=LENGTH,
        exclusions=torch.tensor(exclusions) if exclusions else None,
        **({} if cutoff is None else {"cutoff": cutoff, "truncation": truncation}),
        box=box_of_system(system) if periodic else None,
    )


def _groups(force: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the two sets of each interaction group, as booleans of all particles."""
    atoms, found = np.arange(force.getNumParticles()), []
    for k in range(force.getNumInteractionGroups()):
        one, other = (
            torch.from_numpy(np.isin(atoms, list(members)))
            for members in force.getInteractionGroupParameters(k)
        )
        found.append((one, other))
    return found


def _tables(force: Any) -> dict[str, tuple[int, tuple[int, int]]]:
    """Return the place and the shape of each table of two types, by name."""
    found: dict[str, tuple[int, tuple[int, int]]] = {}
    for k in range(force.getNumTabulatedFunctions()):
        name, table = force.getTabulatedFunctionName(k), force.getTabulatedFunction(k)
        if type(table).__name__ != "Discrete2DFunction":
            text = force.getEnergyFunction()
            call = re.search(rf"\b{name}\s*\(", text)
            calls = f"calls it at place {call.start()}" if call else "does not call it: remove it"
            raise ValueError(
                f"the table {name} of the {KIND} is a {type(table).__name__}, and pairs have a "
                f"Discrete2DFunction of their types alone. The expression {text!r} {calls}."
            )
        rows, columns, _ = table.getFunctionParameters()
        found[name] = k, (rows, columns)
    return found
