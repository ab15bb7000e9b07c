"""Maps of two torsions (CMAP) of an ``openmm.System``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.library import ENERGY, box_of_system, forces
from adjsim.io._openmm.types import Names, Types
from adjsim.potentials.bonded.maps import TorsionMap


def read_maps(system: Any, names: Names) -> dict[str, tuple[TorsionMap, Types]]:
    """Read the maps of a system, which are the types of their terms."""
    force = _force(system)
    if force is None:
        return {}
    terms = np.array([force.getTorsionParameters(k) for k in range(force.getNumTorsions())])
    used, index = np.unique(terms[:, 0], return_inverse=True)
    maps = [_values(force, int(k)) for k in used]
    sizes = {len(values) for values in maps}
    if len(sizes) > 1:
        raise ValueError(
            f"the CMAPTorsionForce has maps of the sizes {sorted(sizes)}; they must be of one size."
        )
    box = box_of_system(system) if force.usesPeriodicBoundaryConditions() else None
    part = TorsionMap(
        torch.tensor(terms[:, 1:]),
        nn.Parameter(torch.tensor(np.stack(maps)).contiguous()),
        types=torch.tensor(index),
        box=box,
    )
    firsts = terms[np.unique(index, return_index=True)[1]]
    # Four atoms of phi, and the last one of psi.
    labels = tuple(names.label([*row[1:5], row[8]]) for row in firsts.tolist())
    return {"maps": (part, Types(np.stack(maps), part.types, labels))}


def write_maps(part: nn.Module | None, system: Any) -> None:
    """Write the values of maps into the force of a system, whose maps they are."""
    force = _force(system)
    if part is None and force is None:
        return
    terms: list[list[int]] = []
    if force is not None:
        terms = [list(force.getTorsionParameters(k)) for k in range(force.getNumTorsions())]
    if (
        force is None
        or not isinstance(part, TorsionMap)
        or part.index.tolist() != [row[1:] for row in terms]
    ):
        raise ValueError(
            "the terms of CMAPTorsionForce in the system are not those of 'maps' in the potential: "
            "give the system that the potential was read from."
        )
    used = sorted({row[0] for row in terms})
    for k, values in zip(used, part.energy.detach().cpu().double().numpy(), strict=True):
        force.setMapParameters(k, len(values), (values.T / ENERGY).flatten().tolist())


def _force(system: Any) -> Any:
    found = [force for force in forces(system, "CMAPTorsionForce") if force.getNumTorsions()]
    if len(found) > 1:
        raise ValueError("the system has more than one CMAPTorsionForce; it may have one.")
    return found[0] if found else None


def _values(force: Any, k: int) -> np.ndarray:
    """Return a map by its first and its second angle. In OpenMM the first one runs fastest."""
    values = map_values(force, k)
    size = math.isqrt(len(values))
    return np.array(values, dtype=np.float64).reshape(size, size).T * ENERGY


def map_values(force: Any, k: int) -> list[float]:
    """Return the values of a map as OpenMM stores them, in its units."""
    return [getattr(x, "_value", x) for x in force.getMapParameters(k)[1]]
