"""The options of the command line's ``fit``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from adjsim.cli.curve import UNITS
from adjsim.cli.density import ROOM, UNITS as DENSITY_UNITS
from adjsim.cli.fit_runs import BURN_IN, PATH, STEPS
from adjsim.cli.models import SCHEMES
from adjsim.cli.options import SEED, STORE, SWITCH_START, TAU, TRUNCATION, output
from adjsim.cli.parameters import option

BATHS = [name for name in SCHEMES if name != "hamiltonian"]
# Of the kernel of g(r), in units of sigma. It lowers the first peak of liquid argon by 0.6 %.
WIDTH = 0.01


@dataclass(frozen=True)
class FitParameters:
    """The options of the command ``fit``."""

    structure_file: Path = option(
        MISSING,
        "Start from this structure with a periodic cell (any file ASE reads: xyz, extxyz, pdb, "
        "cif). Units are eV, angstrom, amu, fs and K.",
        "--structure",
        metavar="FILE",
    )
    target: Path | None = option(
        None,
        "A measured g(r): columns of distance in angstrom, g(r), and, if known, its standard "
        "error, which then weights the fit.",
        metavar="CSV",
    )
    density: str | None = option(
        None,
        "A measured density, or a text file with columns of temperature in kelvin, density and, if "
        "known, its standard error. Runs are then at constant pressure, one for each temperature, "
        "and g(r) is that of the boxes of the run at --temperature. The loss is the sum of all "
        "squared differences, each in units of its standard error.",
        metavar="NUMBER|FILE",
    )
    density_unit: str = option("g/cm3", f"Unit of the density: {', '.join(DENSITY_UNITS)}.")
    density_error: float = option(
        0.001, "Standard error of densities without a column of errors, as a share of each."
    )
    pressure: float = option(1.0, "Pressure of the measured densities, bar.")
    piston_tau: float = option(1000.0, "Period of the piston that moves the box, fs.")
    target_error: float | None = option(
        None,
        "Standard error of a g(r) without a column of errors, which weights it beside --density.",
        show_default="with --target alone, from the scatter about the fit",
    )
    target_unit: str = option("angstrom", f"Unit of the target's distances: {', '.join(UNITS)}.")
    target_density: float | None = option(
        None,
        "Atoms per cubic angstrom of the measured liquid, to compare with the structure, or with "
        "--density.",
        show_default="from a comment of the file: number density ... per cubic angstrom",
    )
    melt: bool | None = option(
        None,
        "Melt the structure at 3 epsilon (or three times the temperature, if that is higher) and "
        "cool it, once for each replica.",
        "--melt/--no-melt",
        show_default="melt a structure with long-range order",
    )
    estimator: str = option(
        "reweighting",
        "Estimator of the gradient: reweighting (of the mean at equilibrium), or pathwise (by the "
        "reversible adjoint, of the mean over short runs after the burn-in), which is slower and "
        "has larger errors.",
    )
    epsilon: float | None = option(
        None,
        "Lennard-Jones well depth to start from, eV. Values for Ne, Ar, Kr and Xe are built in.",
    )
    sigma: float | None = option(
        None,
        "Lennard-Jones diameter to start from, angstrom. Values for Ne, Ar, Kr and Xe are built "
        "in.",
    )
    parameters: str = option(
        "epsilon,sigma", "Numbers that are fitted, epsilon, sigma or both; the other one is held."
    )
    cutoff: float | None = option(
        None,
        "Cutoff distance, held fixed.",
        show_default="the smaller of 3 sigma and half the width of the box, with --density "
        f"{ROOM} of it",
    )
    truncation: str = TRUNCATION
    switch_start: float | None = SWITCH_START
    r_min: float = option(0.0, "Leave out distances of the target below this one.")
    r_max: float | None = option(
        None,
        "Leave out distances of the target above this one, at most half the box, with --density "
        f"{ROOM} of it.",
        show_default="none are left out",
    )
    width: float | None = option(
        None,
        "Standard deviation of the kernel that smooths the simulated g(r).",
        show_default=f"{WIDTH} sigma",
    )
    dynamics: str = option(
        "langevin", f"Thermostat: {', '.join(BATHS)}; with --density langevin, of the piston too."
    )
    temperature: float = option(
        85.0, "Temperature of the measurement; a file of densities has its own."
    )
    friction: float = option(
        0.001, "Decay rate of momenta, 1/fs; for andersen the rate of collisions."
    )
    tau: float | None = TAU
    dt: float = option(4.0, "Time step.")
    steps: int | None = option(
        None,
        "Steps of each run, with those of the burn-in.",
        show_default=f"{STEPS[0]}, with --density {STEPS[1]}; for pathwise {PATH} more than the "
        "burn-in",
    )
    burn_in: int | None = option(
        None,
        "Steps at the start that are left out.",
        show_default=f"{BURN_IN[0]}, with --density {BURN_IN[1]}",
    )
    replicas: int = option(8, "Number of runs, each with its own momenta and noise.")
    iterations: int = option(10, "The largest number of steps of the fit, each with its runs.")
    compile_runs: bool = option(
        True,
        "Run in compiled loops, which takes a C++ compiler, and some seconds once.",
        "--compile/--no-compile",
    )
    store: Path | None = STORE
    seed: int = SEED
    output: Path = output("adjsim-fit")
