"""A ``CustomGBForce`` of an ``openmm.System`` that is none of the solvents of OpenMM's files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adjsim.io._openmm.custom import global_parameters, write_global
from adjsim.io._openmm.library import (
    ENERGY,
    LENGTH,
    box_of_system,
    cutoff_of,
    particles_of,
    per_particle_names,
)
from adjsim.io._openmm.tables import read_tables, write_tables
from adjsim.potentials.solvent.custom import CustomSolvent, Stage


def read_custom_solvent(system: Any, force: Any, shared: dict[str, nn.Parameter]) -> CustomSolvent:
    """Read the stages and terms of a force as they are."""
    exclusions = [force.getExclusionParticles(k) for k in range(force.getNumExclusions())]
    columns = zip(per_particle_names(force), particles_of(force).T, strict=True)
    periodic = force.usesPeriodicBoundaryConditions()
    values, energies = _stages(force)
    return CustomSolvent(
        values,
        energies,
        {
            **{name: nn.Parameter(torch.from_numpy(x.copy())) for name, x in columns},
            **global_parameters(force, shared),
        },
        tables=read_tables(force),
        unit=ENERGY,
        length_unit=LENGTH,
        cutoff=cutoff_of(force),
        box=box_of_system(system) if periodic else None,
        exclusions=torch.tensor(exclusions) if exclusions else None,
    )


def write_custom_solvent(part: CustomSolvent, force: Any) -> None:
    """Write the numbers of a solvent into the force that it was read from."""
    values, energies = _stages(force) if hasattr(force, "getNumEnergyTerms") else ({}, [])
    if (part.values, part.energies) != (tuple(values.items()), tuple(energies)):
        raise ValueError(
            "the expressions of a CustomGBForce of the system are not those of the potential: give "
            "the system that the potential was read from."
        )
    names, rows = per_particle_names(force), particles_of(force)
    for column, name in enumerate(names):
        rows[:, column] = getattr(part, name).detach().cpu().double().numpy()
    for k, row in enumerate(rows.tolist()):
        force.setParticleParameters(k, row)
    write_global(part, force)
    write_tables(part, force)


def _stages(force: Any) -> tuple[dict[str, Stage], list[Stage]]:
    """Return the computed values and the terms of the energy."""

    def stage(text: str, kind: int) -> Stage:
        return Stage(text, kind != force.SingleParticle, kind == force.ParticlePair)

    values = [force.getComputedValueParameters(k) for k in range(force.getNumComputedValues())]
    terms = [force.getEnergyTermParameters(k) for k in range(force.getNumEnergyTerms())]
    return {name: stage(*rest) for name, *rest in values}, [stage(*term) for term in terms]
