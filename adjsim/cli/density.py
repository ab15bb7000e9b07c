"""Measured densities, and the runs at constant pressure that are fitted to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ase import units

from adjsim.cli.curve import Columns
from adjsim.cli.job import Job, checked
from adjsim.dynamics import LangevinPiston
from adjsim.io.systems import System
from adjsim.solvers import Splitting

# The largest cutoff and distance of g(r), as a share of half the width of the box at the start,
# since a liquid may contract.
ROOM = 0.9
LARGEST_PRESSURE = 1e6
# Units of density, in amu per cubic angstrom.
UNITS = {"g/cm3": 1000 * units.kg / units.m**3, "kg/m3": units.kg / units.m**3}
# The largest ratio of the densities of a liquid and of the structure that it starts from.
RATIO = 30.0


@dataclass(frozen=True)
class Density:
    """A measured density at a temperature, and its standard error, in a unit."""

    temperature: float
    value: float
    stderr: float
    unit: str

    @property
    def scale(self) -> float:
        """The unit, in amu per cubic angstrom."""
        return UNITS[self.unit]


def read_densities(text: str, temperature: float, unit: str, error: float) -> list[Density]:
    """Read a density at a temperature, or a file of temperature, density and optional error.

    Without errors in the file, they are the share ``error`` of the densities.
    """
    if unit not in UNITS:
        raise ValueError(f"unknown density unit '{unit}'; choose one of {', '.join(UNITS)}.")
    try:
        rows = [[temperature, float(text)]]
    except ValueError:
        if not Path(text).is_file():
            raise ValueError(
                f"density '{text}' is neither a number nor a file; give a density in {unit}, or a "
                "text file of temperature and density."
            ) from None
        columns = Columns("density", "temperature and density", "temperature")
        rows = columns.read(Path(text))[0].tolist()
    for _, value, *_ in rows:
        if not 0 < value < math.inf:
            raise ValueError(f"density '{text}': a density must be positive; got {value:g}.")
    return [Density(at, x, own[0] if own else error * x, unit) for at, x, *own in rows]


def refuse_massless(system: System) -> None:
    """Refuse a system without the masses that a density needs."""
    # ASE gives an atom of no element, X, a mass of one.
    unknown = "X" in system.species and bool((system.mass == 1.0).any())
    if unknown or not bool((system.mass > 0).all()):
        raise ValueError(
            f"{system.name} has atoms without a mass, and a density needs masses: name their "
            "elements, or give the file a column of masses."
        )


def refuse_other_unit(system: System, densities: list[Density], volume: float) -> None:
    """Refuse densities in a unit in which the structure, of this volume, is another matter."""
    own = float(system.mass.mean()) * len(system.position) / volume
    for density in densities:
        if not own / RATIO < density.value * density.scale < own * RATIO:
            raise ValueError(
                f"--density {density.value:g} {density.unit} is not that of a liquid like "
                f"{system.name}, which has {own / density.scale:.3g} {density.unit}: correct it, "
                f"or give --density-unit, {' or '.join(UNITS)}."
            )


def piston_job(
    system: System,
    temperature: float,
    friction: float,
    dt: float,
    pressure: float,
    tau: float,
    seed: int,
) -> Job:
    """Return the runs of a system at constant pressure, in the units of the command line."""
    if not abs(pressure) < LARGEST_PRESSURE:
        raise ValueError(f"--pressure must be below a million bar; got {pressure:g}.")
    kT, time = temperature * system.temperature, system.time
    # Numbers that are no parameters are not fitted.
    model = LangevinPiston(
        system.potential,
        system.mass,
        kT,
        friction / time,
        pressure * units.bar,
        tau * time,
        tail=True,
    )
    scheme = model.scheme
    solver = Splitting(scheme, dt * time)
    return checked(Job(system, model, scheme, solver, temperature, seed))
