"""The command line's ``fit``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from adjsim.adjoints import CompileError, ReconstructionError
from adjsim.cli.curve import UNITS, Curve, read_curve
from adjsim.cli.fit_report import report_fit
from adjsim.cli.job import Job
from adjsim.cli.melting import (
    Preparation,
    different_density,
    melted,
    melting_temperature,
    order_of,
)
from adjsim.cli.models import SCHEMES, BathSettings, model_of, solver_of
from adjsim.cli.options import check_numbers, line_of, memory_kernel, refuse, refuse_misplaced
from adjsim.cli.radial_fit import BURN_IN, radial_problem
from adjsim.core.box import perpendicular_widths, volume
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.estimators.fit.fit import fit
from adjsim.io.systems import TRUNCATIONS, Cutoff, System, structure

BATHS = [name for name in SCHEMES if name != "hamiltonian"]
# Errors of a run, which are shown in one line.
FAILURES = (ValueError, ReconstructionError, CompileError, RankError)
# Of the kernel of g(r), in units of sigma. It lowers the first peak of liquid argon by 0.6 %.
WIDTH = 0.01


def fit_command(
    context: typer.Context,
    structure_file: Annotated[
        Path,
        typer.Option(
            "--structure",
            metavar="FILE",
            help="Start from this structure with a periodic cell (any file ASE reads: xyz, extxyz, "
            "pdb, cif). Units are eV, angstrom, amu, fs and K.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            metavar="CSV",
            help="The measured g(r): columns of distance in angstrom, g(r), and, if known, its "
            "standard error, which then weights the fit.",
        ),
    ],
    target_unit: Annotated[
        str, typer.Option(help=f"Unit of the target's distances: {', '.join(UNITS)}.")
    ] = "angstrom",
    target_density: Annotated[
        float | None,
        typer.Option(
            help="Atoms per cubic angstrom of the measured liquid, to compare with the structure.",
            show_default="from a comment of the file: number density ... per cubic angstrom",
        ),
    ] = None,
    melt: Annotated[
        bool | None,
        typer.Option(
            "--melt/--no-melt",
            help="Melt the structure at 3 epsilon (or three times the temperature, if that is "
            "higher) and cool it, once for each replica.",
            show_default="melt a structure with long-range order",
        ),
    ] = None,
    estimator: Annotated[
        str,
        typer.Option(
            help="Estimator of the gradient: reweighting (of the mean at equilibrium), or pathwise "
            "(by the reversible adjoint, of the mean over short runs after the burn-in), which is "
            "slower and has larger errors."
        ),
    ] = "reweighting",
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Lennard-Jones well depth to start from, eV. Values for Ne, Ar, Kr and Xe are "
            "built in."
        ),
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(
            help="Lennard-Jones diameter to start from, angstrom. Values for Ne, Ar, Kr and Xe are "
            "built in."
        ),
    ] = None,
    cutoff: Annotated[
        float | None,
        typer.Option(
            help="Cutoff distance, held fixed.",
            show_default="the smaller of 3 sigma and half the width of the box",
        ),
    ] = None,
    truncation: Annotated[
        str,
        typer.Option(help=f"How the energy ends at the cutoff: {', '.join(TRUNCATIONS)}."),
    ] = "shifted",
    switch_start: Annotated[
        float | None,
        typer.Option(
            help="Distance from which --truncation switched switches the energy off.",
            show_default="0.9 of the cutoff",
        ),
    ] = None,
    r_min: Annotated[
        float, typer.Option(help="Leave out distances of the target below this one.")
    ] = 0.0,
    r_max: Annotated[
        float | None,
        typer.Option(
            help="Leave out distances of the target above this one, at most half the box.",
            show_default="none are left out",
        ),
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the kernel that smooths the simulated g(r).",
            show_default=f"{WIDTH} sigma",
        ),
    ] = None,
    dynamics: Annotated[str, typer.Option(help=f"Thermostat: {', '.join(BATHS)}.")] = "langevin",
    temperature: Annotated[float, typer.Option(help="Temperature of the measurement.")] = 85.0,
    friction: Annotated[
        float,
        typer.Option(help="Decay rate of momenta, 1/fs; for andersen the rate of collisions."),
    ] = 0.001,
    tau: Annotated[
        float | None,
        typer.Option(
            help="Relaxation time of nose-hoover, bussi and berendsen.", show_default="50 dt"
        ),
    ] = None,
    dt: Annotated[float, typer.Option(help="Time step.")] = 4.0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of each run, with those of the burn-in.",
            show_default="2500; for pathwise 250 more than the burn-in",
        ),
    ] = None,
    burn_in: Annotated[
        int | None,
        typer.Option(help="Steps at the start that are left out.", show_default="500"),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Number of runs, each with its own momenta and noise.")
    ] = 8,
    iterations: Annotated[
        int, typer.Option(help="The largest number of steps of the fit, each with its runs.")
    ] = 10,
    compile_runs: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Run in compiled loops, which takes a C++ compiler, and some seconds once.",
        ),
    ] = True,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps finished parts. Called again with the same options, the "
            "command reads these and computes the rest."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of momenta and noise.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path(
        "adjsim-fit"
    ),
) -> None:
    """Fit epsilon and sigma of a Lennard-Jones liquid to a measured g(r).

    Runs of the structure at the temperature of the measurement give g(r) and its gradient. Steps of
    Gauss and Newton fit epsilon and sigma, with errors from the spread over replicas.

    Writes fit.png and fit.json into the output folder.
    """
    try:
        check_numbers(context)
        system = structure(structure_file, epsilon, sigma, Cutoff(cutoff, truncation, switch_start))
        diameter = float(system.potential.sigma.detach().mean())
        measured = read_curve(target).in_angstrom(target_unit, diameter)
        curve = _within(system, structure_file, measured, target, r_min, r_max)
        job_at = partial(_job, context, system, dynamics, friction, tau, dt, seed)
        job = job_at(temperature)
        kernel = WIDTH * diameter if width is None else width
        box = system.potential.box
        assert box is not None
        density = len(system.position) / float(volume(box))
        aimed = curve.density if target_density is None else target_density
        doubts = different_density(density, aimed)
        order = order_of(system.position, box)
        prepared = Preparation(order)
        problem = partial(
            radial_problem, job, curve.r, kernel, estimator, steps, burn_in, compile_runs
        )
        make, observable, simulation = problem(job.initial)
        if replicas < 2:
            raise ValueError(f"--replicas must be at least 2, for an error; got {replicas}.")
        if iterations < 1:
            raise ValueError(f"--iterations must be at least 1; got {iterations}.")
        make().check(simulation, observable)
        ranks = Ranks.of()
        if ranks.first:
            check_writable(output)
    except (ValueError, TypeError) as error:
        refuse(error)
    with ending_at_once(line_of(store)) if store is not None else nullcontext():
        try:
            if melt or (melt is None and order.found):
                heat = melting_temperature(job)
                starts = melted(job_at(heat), job, replicas, compile_runs, ranks)
                ordered = sum(order_of(start, box).found for start in starts)
                prepared = Preparation(order, heat, ordered, replicas)
                make, observable, simulation = problem(job.among(starts))
            found = fit(
                simulation,
                observable,
                curve.g,
                make,
                replicas=replicas,
                iterations=iterations,
                stderr=curve.stderr,
                generator=seed,
                progress=True,
                store=store,
                group=ranks,
            )
        except ArithmeticError as error:
            unit = f"{1 / system.time:.4g} {system.time_name}"
            refuse(ValueError(f"{error} Times in this message are in units of {unit}."))
        except FAILURES as error:
            # A wrong density or a crystal may be the cause.
            also = "".join(f" Note: {doubt}." for doubt in doubts + prepared.doubts)
            refuse(ValueError(f"{error}{also}"))
    if not ranks.first:
        return
    skipped = BURN_IN if burn_in is None else burn_in
    about = {
        "target": target.name,
        "estimator": estimator,
        "width": kernel,
        "replicas": replicas,
        "burn_in_steps": skipped,
        "gradient_steps": round(simulation.duration / job.solver.dt)
        - (skipped if estimator == "reweighting" else 0),
        "compiled": compile_runs,
        "density": density,
        "target_density": aimed,
        "order": {"peak": order.peak, "limit": order.limit},
        "melted_at": prepared.temperature,
        "starts": prepared.sentence(system.temperature_name),
        "doubts": doubts + prepared.doubts,
    }
    report_fit(job, found, curve, about, output)


def _within(
    system: System, file: Path, curve: Curve, target: Path, r_min: float, r_max: float | None
) -> Curve:
    """Return the part of the target that is fitted, or raise if the box is too small for it."""
    box = system.potential.box
    if box is None:
        raise ValueError(
            f"'{file}' has no periodic cell, and g(r) needs a density; give a file with a cell."
        )
    half = 0.5 * float(perpendicular_widths(box).min())
    part = curve.between(r_min, float("inf") if r_max is None else r_max)
    if len(part.r) == 0:
        raise ValueError(
            f"target '{target}' has no distances from {r_min:g} to "
            f"{float('inf') if r_max is None else r_max:g} angstrom; it has {float(curve.r[0]):g} "
            f"to {float(curve.r[-1]):g}. Change --r-min or --r-max."
        )
    if float(part.r[-1]) > half:
        # Rounded down, so that the number can be given.
        limit = int(half * 100) / 100
        raise ValueError(
            f"target '{target}' has distances up to {float(part.r[-1]):g} angstrom, beyond half "
            f"the box of '{file}', {half:.4g}: give --r-max {limit:g}, or a larger box."
        )
    return part


def _job(
    context: typer.Context,
    system: System,
    dynamics: str,
    friction: float,
    tau: float | None,
    dt: float,
    seed: int,
    temperature: float,
) -> Job:
    if dynamics not in BATHS:
        raise ValueError(f"unknown thermostat '{dynamics}'; choose one of {', '.join(BATHS)}.")
    refuse_misplaced(context, dynamics)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature must be positive; got {temperature:g}.")
    bath = BathSettings(
        temperature, 50 * dt if tau is None else tau, friction, *memory_kernel(friction, None, None)
    )
    scheme = SCHEMES[dynamics]
    solver = solver_of(scheme, dynamics, dt * system.time, False)
    job = Job(system, model_of(system, dynamics, bath), scheme, solver, temperature, seed)
    # The bath is given, and the potential is fitted.
    for parameter in job.model.parameters(recurse=False):
        parameter.requires_grad_(False)
    job.check()
    return job
