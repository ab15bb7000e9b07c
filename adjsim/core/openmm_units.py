"""Conversion of OpenMM's quantities to the units of :func:`adjsim.io.from_openmm`.

These are eV, angstrom, amu, elementary charges and radians, and angstrom sqrt(amu/eV) for time. The
module imports OpenMM when it converts a quantity, which only OpenMM makes.
"""

from __future__ import annotations

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

    powers = {d.name: float(power) for d, power in quantity.unit.iter_base_dimensions()}
    if powers.get("temperature", 0.0) != 0:
        raise ValueError(
            f"{name} is {quantity}, and temperatures are energies here: multiply it by "
            "openmm.unit.MOLAR_GAS_CONSTANT_R."
        )
    mass, length, time, amount = (
        powers.get(kind, 0.0) for kind in ("mass", "length", "time", "amount")
    )
    # OpenMM's units are nm, ps, and gram or gram/mol; amu nm^2/ps^2 is kJ/mol.
    energy = units.kJ / units.mol
    factor = LENGTH ** (length + time) * energy ** (-time / 2)
    value = quantity.value_in_unit_system(unit.md_unit_system)
    # Powers of a mole are exact where they cancel, as in kJ/mol.
    factor *= units.mol ** (mass + amount)
    found = factor * np.asarray(value, dtype=np.float64)
    return float(found) if found.ndim == 0 else found
