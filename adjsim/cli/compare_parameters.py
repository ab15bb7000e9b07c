"""The options of the command ``compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adjsim.cli.job import ADJOINTS, ESTIMATORS
from adjsim.cli.models import SCHEMES
from adjsim.cli.options import SEED, STORE, SWITCH_START, TAU, TRUNCATION, output
from adjsim.cli.parameters import option
from adjsim.cli.quantities import QUANTITIES


@dataclass(frozen=True)
class CompareParameters:
    """The options of the command ``compare``."""

    estimators: list[str] | None = option(
        None,
        f"Estimators to compare: all, or some of {', '.join(ESTIMATORS)} (repeat the option, or "
        "separate names by commas). They estimate the gradient of the mean over the second half of "
        "the run with respect to epsilon and sigma.",
        show_default="none: adjoints are compared",
    )
    observable: str = option("energy", f"Observable: {', '.join(QUANTITIES)}.")
    structure_file: Path | None = option(
        None,
        "Start from this structure (any file ASE reads: xyz, extxyz, pdb, cif) instead of the "
        "13-atom cluster. Its cell, if it has one, is the periodic box. Units are then eV, "
        "angstrom, amu, fs and K.",
        "--structure",
        metavar="FILE",
    )
    epsilon: float | None = option(
        None, "Lennard-Jones well depth. Values for Ne, Ar, Kr and Xe are built in."
    )
    sigma: float | None = option(
        None, "Lennard-Jones diameter. Values for Ne, Ar, Kr and Xe are built in."
    )
    cutoff: float | None = option(
        None,
        "Cutoff distance.",
        show_default="none; in a box the smaller of 3 sigma and half its width",
    )
    truncation: str = TRUNCATION
    switch_start: float | None = SWITCH_START
    skin: float | None = option(
        None,
        "How far the neighbour list reaches beyond the cutoff. It changes the time, and no number.",
        show_default="chosen by the library",
    )
    distance: float | None = option(
        None, "Distance at which the observable rdf is taken.", show_default="2^(1/6) sigma"
    )
    dynamics: str | None = option(
        None,
        "hamiltonian (constant energy), nose-hoover (constant temperature), langevin, generalised "
        "(Langevin with a memory kernel), overdamped, or a thermostat: bussi, andersen, berendsen "
        "or velocity-rescale.",
        show_default="hamiltonian, or langevin with --estimators",
    )
    scheme: str | None = option(
        None,
        "Splitting scheme; for overdamped, EulerMaruyama or LeimkuhlerMatthews.",
        show_default=", ".join(f"{scheme} for {name}" for name, scheme in SCHEMES.items()),
    )
    exact: bool = option(
        False,
        "Run the steps on a fixed-point lattice, where they are reversed bit for bit, and compare "
        "with reversal in floating point (plain). By default the cluster then starts hotter and "
        "runs longer.",
        "--exact",
    )
    dt: float | None = option(
        None, "Time step.", show_default="0.005 (overdamped 0.0005), 4 fs for a structure"
    )
    horizon: list[str] | None = option(
        None,
        "Length of the run, a time that is a multiple of dt. Several horizons (repeat the option, "
        "or separate them by commas) are the x-axis of the figure.",
        show_default="1,2,4 (overdamped 0.1,0.2,0.4,0.8; exact 5,10,20,40), or 200,400,800 fs "
        "for a structure; with --estimators 10 (overdamped 0.4), or 400 fs",
    )
    temperature: float | None = option(
        None,
        "Temperature of the initial momenta and of the thermostat.",
        show_default="0.1 epsilon/kB (exact 0.8), or 85 K for a structure",
    )
    tau: float | None = TAU
    friction: float | None = option(
        None,
        "Decay rate of momenta, 1/time; for generalised the integral of the memory kernel, and for "
        "andersen the rate of collisions. For overdamped the friction coefficient is the mass "
        "times this rate.",
        show_default="1, or 0.001/fs for a structure",
    )
    rates: str | None = option(
        None,
        "Decay rates of the memory kernel of generalised, 1/time, separated by commas.",
        show_default="5 times friction",
    )
    strengths: str | None = option(
        None,
        "Strengths of the memory kernel, one for each rate, 1/time^2.",
        show_default="friction times rate, over the number of rates",
    )
    adjoint: list[str] | None = option(
        None,
        f"Adjoints to compare, of {', '.join(ADJOINTS)} (repeat the option, or separate names by "
        "commas). The first is the reference.",
        show_default="all that apply to the dynamics",
    )
    replicas: list[str] | None = option(
        None,
        "Number of replicas to average over, each with its own momenta and noise. Several numbers "
        "(repeat the option, or separate them by commas) are the x-axis of the figure instead of "
        "the horizon.",
        show_default="1; with --estimators 64",
    )
    compile_runs: bool = option(
        False,
        "Compile the runs of all methods that support it: the adjoints direct, checkpoint and "
        "reversible, and the estimators pathwise, finite-difference, score-function and "
        "reweighting. Each compiles for a few seconds at the first horizon and reads the compiled "
        "code from a cache at the others. The seconds in the table include neither.",
        "--compile",
    )
    store: Path | None = STORE
    seed: int = SEED
    output: Path = output("adjsim-compare")
