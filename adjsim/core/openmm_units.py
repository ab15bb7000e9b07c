"""Conversion of OpenMM's quantities to the units of :func:`adjsim.io.from_openmm`.

These are eV, angstrom, amu, elementary charges and radians, and angstrom sqrt(amu/eV) for time. The
module imports OpenMM when it converts a quantity, which only OpenMM makes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

# A nanometre in angstrom.
LENGTH = 10.0


def is_quantity(value: Any) -> bool:
    """Return whether a value is an ``openmm.unit.Quantity``."""
    return hasattr(value, "value_in_unit_system")


def converted(name: str, quantity: Any) -> Any:
    """Convert a quantity to a float or an array in eV, angstrom and amu."""
    from ase import units
    from openmm import unit

    powers = defaultdict[str, float](float)
    powers.update((d.name, float(power)) for d, power in quantity.unit.iter_base_dimensions())
    if powers["temperature"] != 0:
        raise ValueError(
            f"{name} is {quantity}, and temperatures are energies here: multiply it by "
            "openmm.unit.MOLAR_GAS_CONSTANT_R."
        )
    # OpenMM's units are nm, ps, and gram or gram/mol; amu nm^2/ps^2 is kJ/mol.
    energy, time = units.kJ / units.mol, powers["time"]
    factor = LENGTH ** (powers["length"] + time) * energy ** (-time / 2)
    value = quantity.value_in_unit_system(unit.md_unit_system)
    # Powers of a mole are exact where they cancel, as in kJ/mol.
    factor *= units.mol ** (powers["mass"] + powers["amount"])
    found = factor * np.asarray(value, dtype=np.float64)
    return float(found) if found.ndim == 0 else found
