"""The custom nonbonded forces of an ``openmm.System``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.custom import global_parameters, numbered, write_global
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
from adjsim.io._openmm.tables import read_tables, tables_of, write_tables
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.custom import CustomPairs
from adjsim.potentials.pairs.long_range import LongRangeCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Truncation, Unshifted

KIND = "CustomNonbondedForce"
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*\()")
"""A name in an expression that is none of a function."""


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
        write_global(pairs, force)
        for name, (table, _) in _by_types(force).items():
            table.setFunctionParameters(*values[name].shape, values[name].flatten().tolist())
        write_tables(pairs, force)
        names, rows = per_particle_names(force), particles_of(force)
        for column, name in enumerate(names):
            if name in values:
                rows[:, column] = values[name]
        for k, row in enumerate(rows.tolist()):
            force.setParticleParameters(k, row)


def _read(system: Any, force: Any, shared: dict[str, nn.Parameter]) -> CustomPairs:
    periodic = force.usesPeriodicBoundaryConditions()
    columns = dict(zip(per_particle_names(force), particles_of(force).T, strict=True))
    text, by_types = _text(force), _by_types(force)
    values: dict[str, Any] = {}
    species = None
    for name, (table, kind) in by_types.items():
        species = columns[kind]
        if re.search(rf"\b{name}\b(?!\s*\()", text):
            raise ValueError(
                f"the {KIND} has a table and another number of the name {name}: rename one of them "
                f"in {text!r}."
            )
        text = re.sub(_call(name, kind), name, text)
        rows, _, entries = table.getFunctionParameters()
        values[name] = np.array(entries, dtype=np.float64).reshape(rows, rows)
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
        tables={name: x for name, x in read_tables(force).items() if name not in by_types},
        species=None if species is None else torch.tensor(np.floor(species + 0.5).astype(np.int64)),
        groups=_groups(force),
        unit=ENERGY,
        length_unit=LENGTH,
        exclusions=torch.tensor(exclusions) if exclusions else None,
        **({} if cutoff is None else {"cutoff": cutoff, "truncation": truncation}),
        box=box_of_system(system) if periodic else None,
    )


def _text(force: Any) -> str:
    """Return the energy, with the computed values of both atoms as definitions at its end."""
    text, of_atoms = force.getEnergyFunction(), per_particle_names(force)
    for k in range(force.getNumComputedValues()):
        value, formula = force.getComputedValueParameters(k)
        pieces = [piece.rpartition("=") for piece in formula.split(";") if piece.strip()]
        names = [name.strip() for name, _, _ in pieces]
        for end in "12":
            # Names of definitions are those of one value and one atom.
            own = [f"{name}_{value}{end}" if name else f"{value}{end}" for name in names]
            for place, (_, _, piece) in enumerate(pieces):
                # A definition holds for the pieces before it.
                known = {x: f"{x}{end}" for x in of_atoms}
                known |= zip(names[place + 1 :], own[place + 1 :], strict=True)
                text += f";{own[place]}={_renamed(piece, known)}"
    return text


def _renamed(text: str, known: Mapping[str, str]) -> str:
    return NAME.sub(lambda word: known.get(word[0], word[0]), text)


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


def _by_types(force: Any) -> dict[str, tuple[Any, str]]:
    """Return tables by name that are called by one type of both atoms alone, and its name."""
    found: dict[str, tuple[Any, str]] = {}
    text = _text(force)
    for name, table in tables_of(force):
        call = re.search(_call(name, r"\w+"), text)
        if type(table).__name__ != "Discrete2DFunction" or call is None:
            continue
        rows, columns, _ = table.getFunctionParameters()
        calls = (re.findall(x, text) for x in (rf"\b{name}\s*\(", _call(name, call[1])))
        alone = len({len(found) for found in calls}) == 1
        same = {kind for _, kind in found.values()} <= {call[1]}
        if alone and same and rows == columns and call[1] in per_particle_names(force):
            found[name] = table, call[1]
    return found


def _call(name: str, kind: str) -> str:
    """Return the pattern of a call by the numbers of this name of both atoms."""
    return rf"\b{name}\s*\(\s*(?P<kind>{kind})1\s*,\s*(?P=kind)2\s*\)"
