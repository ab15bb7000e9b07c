"""OpenMM itself, imported when it is used, its units in ours, and the systems that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from ase import units

from adjsim.core.openmm_units import LENGTH
from adjsim.io.ase import refuse_not_finite, shortest_box

ENERGY = units.kJ / units.mol
"""kJ/mol, OpenMM's unit of energy, in eV."""
COULOMB = 138.93545764438198 * ENERGY * LENGTH
"""1/(4 pi epsilon_0) in eV angstrom per squared charge, with the constant of OpenMM's kernels, so
that energies agree to rounding. It is within 2e-9 of CODATA's."""

READ = (
    "HarmonicBondForce",
    "HarmonicAngleForce",
    "PeriodicTorsionForce",
    "RBTorsionForce",
    "CMAPTorsionForce",
    "CustomBondForce",
    "CustomAngleForce",
    "CustomTorsionForce",
    "CustomCompoundBondForce",
    "CustomCentroidBondForce",
    "CustomHbondForce",
    "CustomExternalForce",
    "CustomNonbondedForce",
    "NonbondedForce",
    "GBSAOBCForce",
    "CustomGBForce",
)
IGNORED = ("CMMotionRemover", "MonteCarloBarostat")


def openmm() -> Any:
    """Import OpenMM."""
    try:
        import openmm
    except ImportError as missing:
        raise ImportError(
            "systems of OpenMM need the package openmm, which is not installed: "
            "pip install 'adjsim[openmm]'"
        ) from missing
    return openmm


def application() -> Any:
    """Import OpenMM's layer of files and topologies."""
    openmm()
    from openmm import app

    return app


def plain(quantity: Any) -> Any:
    """Return a number, or numbers, in OpenMM's units: nm, ps, kJ/mol, amu, radians."""
    if isinstance(quantity, (float, int)):
        return quantity
    value, unit = getattr(quantity, "_value", None), getattr(quantity, "unit", None)
    if isinstance(value, float):
        return value * _factor(unit)
    tools = openmm().unit
    if not tools.is_quantity(quantity):
        return quantity
    return quantity.value_in_unit_system(tools.md_unit_system)


@cache
def _factor(unit: Any) -> float:
    """Return what takes a number in a unit to OpenMM's units, which OpenMM finds each time."""
    system = openmm().unit.md_unit_system
    return unit.conversion_factor_to(system.express_unit(unit))


def lengths(name: str, value: Any) -> np.ndarray:
    """Return positions or vectors in angstrom, ``(n, 3)``."""
    try:
        found = np.array([tuple(plain(row)) for row in plain(value)], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be (atoms, 3), an openmm Quantity or numbers in nanometres; got "
            f"{type(value).__name__}."
        ) from error
    if found.ndim != 2 or found.shape[1] != 3:
        raise ValueError(f"{name} must be (atoms, 3); got shape {found.shape}.")
    refuse_not_finite(name, found)
    return LENGTH * found


def check_system(system: Any) -> None:
    """Refuse a system with something that has no counterpart here, by name."""
    if not isinstance(system, openmm().System):
        raise TypeError(f"system must be an openmm.System; got {type(system).__name__}.")
    if not system.getNumParticles():
        raise ValueError("the system has no particles.")
    for k, mass in enumerate(masses_of(system)):
        if not (mass > 0 or system.isVirtualSite(k)):
            raise ValueError(
                f"the mass of particle {k} is {mass:g}; every particle "
                "but a virtual site needs a positive mass. To hold an atom, add an "
                "adjsim.PositionRestraint."
            )
    kinds = [kind_of(force) for force in system.getForces()]
    for number, (kind, force) in enumerate(zip(kinds, system.getForces(), strict=True)):
        if kind not in READ + IGNORED:
            has_text = hasattr(force, "getEnergyFunction")
            name = f"{kind} {force.getEnergyFunction()!r}" if has_text else kind
            raise ValueError(f"{name}, force {number} of the system, {_way_out(kind, number)}")
    if kinds.count("NonbondedForce") > 1:
        raise ValueError("the system has more than one NonbondedForce; it may have one.")


def masses_of(system: Any) -> list[float]:
    """Return the masses of all particles."""
    return [plain(system.getParticleMass(k)) for k in range(system.getNumParticles())]


def atoms_of(system: Any) -> dict[int, int]:
    """Return the number among atoms with mass of each particle that is no virtual site."""
    kept = (k for k in range(system.getNumParticles()) if not system.isVirtualSite(k))
    return {k: place for place, k in enumerate(kept)}


def _way_out(kind: str, number: int) -> str:
    remove = f"system.removeForce({number})"
    if kind.endswith("Barostat") or kind == "AndersenThermostat":
        return (
            f"is not a potential: remove it with {remove}, and choose the ensemble by the dynamics "
            "of adjsim."
        )
    if kind == "DrudeForce" or kind.startswith(("Amoeba", "Hippo")):
        return "is polarisable, which is not provided: use a force field with fixed charges."
    return (
        f"has no counterpart in adjsim: use a force field without it, such as amber14, or leave it "
        f"out with {remove} and add a potential of your own."
    )


def kind_of(force: Any) -> str:
    """Return the class of a force in OpenMM, for a subclass in Python too."""
    return next(
        c.__name__ for c in type(force).__mro__ if c.__module__ in ("openmm", "openmm.openmm")
    )


def forces(system: Any, *kinds: str) -> list[Any]:
    """Return the forces of some classes, in their order."""
    return [force for force in system.getForces() if kind_of(force) in kinds]


def cutoff_of(force: Any) -> float | None:
    """Return the cutoff of a nonbonded force in angstrom, None without one."""
    return None if force.getNonbondedMethod() == 0 else LENGTH * plain(force.getCutoffDistance())


def table(row: Callable[[int], Iterable[Any]], count: int) -> np.ndarray:
    """Return the numbers of rows in OpenMM's units, ``(count, columns)``.

    Rows are converted one by one: Python's garbage collector takes as long as all the rest if a
    large system has all its quantities at one time.
    """
    numbers = (plain(x) for k in range(count) for x in row(k))
    return np.fromiter(numbers, np.float64).reshape(count, -1 if count else 0)


def particles_of(force: Any) -> np.ndarray:
    """Return the numbers of all particles of a force in OpenMM's units, ``(atoms, numbers)``."""
    return table(force.getParticleParameters, force.getNumParticles())


def per_particle_names(force: Any) -> list[str]:
    """Return the names of the numbers of each particle of a custom force."""
    count = force.getNumPerParticleParameters()
    return [force.getPerParticleParameterName(k) for k in range(count)]


def barostat_of(system: Any) -> tuple[float | None, float | None]:
    """Return the pressure in bar and the temperature in kelvin of the barostat, None without one.

    Raises:
        ValueError: more than one barostat.
    """
    found = forces(system, "MonteCarloBarostat")
    if len(found) > 1:
        raise ValueError("the system has more than one MonteCarloBarostat; it may have one.")
    if not found:
        return None, None
    unit, barostat = openmm().unit, found[0]
    return (
        barostat.getDefaultPressure().value_in_unit(unit.bar),
        barostat.getDefaultTemperature().value_in_unit(unit.kelvin),
    )


def box_of_system(system: Any) -> np.ndarray | None:
    """Return the box in angstrom: edge lengths, rows if it is tilted, None without one."""
    if not system.usesPeriodicBoundaryConditions():
        return None
    return shortest_box(lengths("box", system.getDefaultPeriodicBoxVectors()))
