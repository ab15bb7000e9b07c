"""The options of the command ``compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from adjsim.cli.job import ADJOINTS
from adjsim.cli.models import SCHEMES
from adjsim.cli.options import SwitchStartOption, TruncationOption, observable_names
from adjsim.cli.presets import ESTIMATORS, presets


@dataclass(frozen=True)
class CompareParameters:
    """The options of the command ``compare``."""

    preset: Annotated[
        str,
        typer.Argument(
            metavar="[PRESET]",
            help="lj13 (a Lennard-Jones cluster, or the system of --structure), or a test problem "
            "with an exact answer, on which estimators are compared: "
            f"{', '.join(presets())}.",
        ),
    ] = "lj13"
    estimators: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Estimators to compare: all, or some of {', '.join(ESTIMATORS)} (repeat the "
            "option, or separate names by commas). With lj13 they estimate the gradient of the "
            "mean over the second half of the run with respect to epsilon and sigma.",
            show_default="all; for lj13 none: adjoints are compared",
        ),
    ] = None
    observable: Annotated[
        str | None,
        typer.Option(help=f"Observable: {observable_names()}.", show_default="the first"),
    ] = None
    structure_file: Annotated[
        Path | None,
        typer.Option(
            "--structure",
            metavar="FILE",
            help="Start from this structure (any file ASE reads: xyz, extxyz, pdb, cif) instead of "
            "the 13-atom cluster. Its cell, if it has one, is the periodic box. Units are then eV, "
            "angstrom, amu, fs and K.",
        ),
    ] = None
    epsilon: Annotated[
        float | None,
        typer.Option(help="Lennard-Jones well depth. Values for Ne, Ar, Kr and Xe are built in."),
    ] = None
    sigma: Annotated[
        float | None,
        typer.Option(help="Lennard-Jones diameter. Values for Ne, Ar, Kr and Xe are built in."),
    ] = None
    cutoff: Annotated[
        float | None,
        typer.Option(
            help="Cutoff distance.",
            show_default="none; in a box the smaller of 3 sigma and half its width",
        ),
    ] = None
    truncation: TruncationOption = "shifted"
    switch_start: SwitchStartOption = None
    skin: Annotated[
        float | None,
        typer.Option(
            help="How far the neighbour list reaches beyond the cutoff. It changes the time, and "
            "no number.",
            show_default="chosen by the library",
        ),
    ] = None
    distance: Annotated[
        float | None,
        typer.Option(
            help="Distance at which the observable rdf is taken.", show_default="2^(1/6) sigma"
        ),
    ] = None
    dynamics: Annotated[
        str | None,
        typer.Option(
            help="hamiltonian (constant energy), nose-hoover (constant temperature), langevin, "
            "generalised (Langevin with a memory kernel), overdamped, or a thermostat: bussi, "
            "andersen, berendsen or velocity-rescale.",
            show_default="hamiltonian, or langevin with --estimators",
        ),
    ] = None
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Splitting scheme; for overdamped, EulerMaruyama or LeimkuhlerMatthews.",
            show_default=", ".join(f"{scheme} for {name}" for name, scheme in SCHEMES.items()),
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Run the steps on a fixed-point lattice, where they are reversed bit for bit, and "
            "compare with reversal in floating point (plain). By default the cluster then starts "
            "hotter and runs longer.",
        ),
    ] = False
    dt: Annotated[
        float | None,
        typer.Option(
            help="Time step.", show_default="0.005 (overdamped 0.0005), 4 fs for a structure"
        ),
    ] = None
    horizon: Annotated[
        list[str] | None,
        typer.Option(
            help="Length of the run, a time that is a multiple of dt. Several horizons (repeat the "
            "option, or separate them by commas) are the x-axis of the figure.",
            show_default="1,2,4 (overdamped 0.1,0.2,0.4,0.8; exact 5,10,20,40), or 200,400,800 fs "
            "for a structure; with --estimators 10 (overdamped 0.4), or 400 fs; or the preset's",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of the initial momenta and of the thermostat.",
            show_default="0.1 epsilon/kB (exact 0.8), or 85 K for a structure",
        ),
    ] = None
    tau: Annotated[
        float | None,
        typer.Option(
            help="Relaxation time of nose-hoover, bussi and berendsen.", show_default="50 dt"
        ),
    ] = None
    friction: Annotated[
        float | None,
        typer.Option(
            help="Decay rate of momenta, 1/time; for generalised the integral of the memory "
            "kernel, and for andersen the rate of collisions. For overdamped the friction "
            "coefficient is the mass times this rate.",
            show_default="1, or 0.001/fs for a structure",
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            help="Decay rates of the memory kernel of generalised, 1/time, separated by commas.",
            show_default="5 times friction",
        ),
    ] = None
    strengths: Annotated[
        str | None,
        typer.Option(
            help="Strengths of the memory kernel, one for each rate, 1/time^2.",
            show_default="friction times rate, over the number of rates",
        ),
    ] = None
    adjoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Adjoints to compare, of {', '.join(ADJOINTS)} (repeat the option, or separate "
            "names by commas). The first is the reference.",
            show_default="all that apply to the dynamics",
        ),
    ] = None
    replicas: Annotated[
        list[str] | None,
        typer.Option(
            help="Number of replicas to average over, each with its own momenta and noise. Several "
            "numbers (repeat the option, or separate them by commas) are the x-axis of the figure "
            "instead of the horizon.",
            show_default="1; with --estimators 64; for a preset 4096",
        ),
    ] = None
    compile_runs: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the runs of all methods that support it: the adjoints direct, checkpoint "
            "and reversible, and the estimators pathwise, finite-difference, score-function and "
            "reweighting. Each compiles for a few seconds at the first horizon and reads the "
            "compiled code from a cache at the others. The seconds in the table include neither.",
        ),
    ] = False
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps finished parts. Called again with the same options, the "
            "command reads these and computes the rest."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of momenta and noise.")] = 0
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path(
        "adjsim-compare"
    )

    @property
    def from_file(self) -> bool:
        """Whether the system is that of a file."""
        return self.structure_file is not None
