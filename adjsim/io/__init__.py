"""Structures, trajectories, calculators and force fields, in and out.

Numbers are in ASE's units: eV, angstrom, amu, and angstrom sqrt(amu/eV) for time (``ase.units.fs``
is a femtosecond in this unit).
"""

from adjsim.io.ase import ASECalculator, ASEPotential, Structure, box_of, from_ase, to_ase, write
from adjsim.io.openmm import from_openmm, to_openmm

__all__ = [
    "ASECalculator",
    "ASEPotential",
    "Structure",
    "box_of",
    "from_ase",
    "from_openmm",
    "to_ase",
    "to_openmm",
    "write",
]
