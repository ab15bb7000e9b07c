"""Structures, trajectories, calculators and force fields, in and out.

Numbers are in ASE's units: eV, angstrom, amu, and angstrom sqrt(amu/eV) for time (``ase.units.fs``
is a femtosecond in this unit).
"""

from adjsim.io.ase import ASECalculator, ASEPotential, Structure, box_of, from_ase, to_ase, write
from adjsim.io.changes import ParameterChanges, parameter_changes
from adjsim.io.force_field_xml import write_force_field
from adjsim.io.openmm import from_openmm, to_openmm
from adjsim.io.trajectories import write_trajectory

__all__ = [
    "ASECalculator",
    "ASEPotential",
    "ParameterChanges",
    "Structure",
    "box_of",
    "from_ase",
    "from_openmm",
    "parameter_changes",
    "to_ase",
    "to_openmm",
    "write",
    "write_force_field",
    "write_trajectory",
]
