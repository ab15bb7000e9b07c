"""The implicit solvents of an ``openmm.System``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adjsim.io._openmm.custom import numbered
from adjsim.io._openmm.custom_solvent import read_custom_solvent, write_custom_solvent
from adjsim.io._openmm.library import forces
from adjsim.io._openmm.solvent import read_solvent, write_solvent
from adjsim.potentials.solvent import CustomSolvent, GeneralizedBorn


def read_solvents(
    system: Any, charge: Tensor | None, shared: dict[str, nn.Parameter]
) -> dict[str, GeneralizedBorn | CustomSolvent]:
    """Read the implicit solvents of a system, by the names of their parts.

    A CustomGBForce of the form of OpenMM's files is a :class:`~adjsim.GeneralizedBorn`.
    """
    return {
        part: read_solvent(system, force, charge) or read_custom_solvent(system, force, shared)
        for force, part in _parts(system)
    }


def write_solvents(parts: dict[str, nn.Module], system: Any) -> None:
    """Write the numbers of solvents into the forces of a system."""
    kinds = GeneralizedBorn, CustomSolvent
    named = {name for name, part in parts.items() if isinstance(part, kinds)}
    found = _parts(system)
    if named != {part for _, part in found}:
        raise ValueError(
            f"the potential has the implicit solvents {sorted(named)}, and the system has "
            f"{len(found)}: give the system that the potential was read from."
        )
    for force, name in found:
        part: Any = parts[name]
        if isinstance(part, CustomSolvent):
            write_custom_solvent(part, force)
        else:
            write_solvent(part, force)


def _parts(system: Any) -> list[tuple[Any, str]]:
    """Return the forces with an energy, and the names of their parts."""
    found = forces(system, "GBSAOBCForce", "CustomGBForce")
    return numbered(
        [x for x in found if not hasattr(x, "getNumEnergyTerms") or x.getNumEnergyTerms()],
        "solvent",
    )
