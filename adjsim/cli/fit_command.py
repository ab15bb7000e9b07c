"""The command line's ``fit``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from torch import Tensor

from adjsim.adjoints import CompileError, ReconstructionError
from adjsim.cli.curve import UNITS, Curve, read_curve
from adjsim.cli.fit_report import report_fit
from adjsim.cli.job import Job, job_of
from adjsim.cli.melting import (
    Order,
    Preparation,
    different_density,
    melted,
    melting_temperature,
    order_of,
)
from adjsim.cli.models import SCHEMES, BathSettings
from adjsim.cli.options import (
    SEED,
    STORE,
    SWITCH_START,
    TAU,
    TRUNCATION,
    check_numbers,
    memory_kernel,
    output,
    refuse,
    refuse_misplaced,
    resumable,
)
from adjsim.cli.parameters import command_of, option
from adjsim.cli.radial_fit import radial_problem
from adjsim.core.box import perpendicular_widths, volume
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.estimators.fit.fit import fit
from adjsim.io.systems import Cutoff, System, structure

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
    target: Path = option(
        MISSING,
        "The measured g(r): columns of distance in angstrom, g(r), and, if known, its standard "
        "error, which then weights the fit.",
        metavar="CSV",
    )
    target_unit: str = option("angstrom", f"Unit of the target's distances: {', '.join(UNITS)}.")
    target_density: float | None = option(
        None,
        "Atoms per cubic angstrom of the measured liquid, to compare with the structure.",
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
    cutoff: float | None = option(
        None,
        "Cutoff distance, held fixed.",
        show_default="the smaller of 3 sigma and half the width of the box",
    )
    truncation: str = TRUNCATION
    switch_start: float | None = SWITCH_START
    r_min: float = option(0.0, "Leave out distances of the target below this one.")
    r_max: float | None = option(
        None,
        "Leave out distances of the target above this one, at most half the box.",
        show_default="none are left out",
    )
    width: float | None = option(
        None,
        "Standard deviation of the kernel that smooths the simulated g(r).",
        show_default=f"{WIDTH} sigma",
    )
    dynamics: str = option("langevin", f"Thermostat: {', '.join(BATHS)}.")
    temperature: float = option(85.0, "Temperature of the measurement.")
    friction: float = option(
        0.001, "Decay rate of momenta, 1/fs; for andersen the rate of collisions."
    )
    tau: float | None = TAU
    dt: float = option(4.0, "Time step.")
    steps: int | None = option(
        None,
        "Steps of each run, with those of the burn-in.",
        show_default="2500; for pathwise 250 more than the burn-in",
    )
    burn_in: int = option(500, "Steps at the start that are left out.")
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


@dataclass(frozen=True)
class Fitting:
    """Runs of a structure, the part of a measured g(r) that is fitted, and doubts of the result."""

    job: Job
    curve: Curve
    width: float
    box: Tensor
    density: float
    target_density: float | None
    order: Order
    doubts: list[str]


def fit_command(context: typer.Context, given: FitParameters) -> None:
    """Fit epsilon and sigma of a Lennard-Jones liquid to a measured g(r).

    Runs of the structure at the temperature of the measurement give g(r) and its gradient. Steps of
    Gauss and Newton fit epsilon and sigma, with errors from the spread over replicas.

    Writes fit.png and fit.json into the output folder.
    """
    try:
        check_numbers(context)
        fitting = _fitting(context, given)
        job = fitting.job
        runs = (given.estimator, given.steps, given.burn_in, given.compile_runs)
        problem = partial(radial_problem, job, fitting.curve.r, fitting.width, *runs)
        make, observable, simulation = problem(job.initial)
        make().check(simulation, observable)
        ranks = Ranks.of()
        if ranks.first:
            check_writable(given.output)
    except (ValueError, TypeError) as error:
        refuse(error)
    prepared = Preparation(fitting.order)
    with resumable(given.store):
        try:
            if given.melt or (given.melt is None and fitting.order.found):
                prepared, starts = _melted(context, given, fitting, ranks)
                make, observable, simulation = problem(partial(job.drawn, starts))
            found = fit(
                simulation,
                observable,
                fitting.curve.g,
                make,
                replicas=given.replicas,
                iterations=given.iterations,
                stderr=fitting.curve.stderr,
                generator=given.seed,
                progress=True,
                store=given.store,
                group=ranks,
            )
        except ArithmeticError as error:
            unit = f"{1 / job.system.time:.4g} {job.system.time_name}"
            refuse(ValueError(f"{error} Times in this message are in units of {unit}."))
        except (ValueError, ReconstructionError, CompileError, RankError) as error:
            # A wrong density or a crystal may be the cause.
            also = "".join(f" Note: {doubt}." for doubt in fitting.doubts + prepared.doubts)
            refuse(ValueError(f"{error}{also}"))
    if ranks.first:
        steps = round(simulation.duration / job.solver.dt)
        report_fit(job, found, fitting.curve, _about(given, fitting, prepared, steps), given.output)


def _fitting(context: typer.Context, given: FitParameters) -> Fitting:
    """Read the structure and the target, and check them against each other."""
    ending = Cutoff(given.cutoff, given.truncation, given.switch_start)
    system = structure(given.structure_file, given.epsilon, given.sigma, ending)
    diameter = float(system.potential.sigma.detach().mean())
    measured = read_curve(given.target).in_angstrom(given.target_unit, diameter)
    box = system.potential.box
    if box is None:
        raise ValueError(
            f"'{given.structure_file}' has no periodic cell, and g(r) needs a density; give a file "
            "with a cell."
        )
    curve = _within(box, given, measured)
    job = _job(context, given, system, given.temperature)
    density = len(system.position) / float(volume(box))
    aimed = curve.density if given.target_density is None else given.target_density
    return Fitting(
        job,
        curve,
        WIDTH * diameter if given.width is None else given.width,
        box,
        density,
        aimed,
        order_of(system.position, box),
        different_density(density, aimed),
    )


def _melted(
    context: typer.Context, given: FitParameters, fitting: Fitting, ranks: Ranks
) -> tuple[Preparation, Tensor]:
    """Melt the structure, once for each replica."""
    heat = melting_temperature(fitting.job)
    hot = _job(context, given, fitting.job.system, heat)
    starts = melted(hot, fitting.job, given.replicas, given.compile_runs, ranks)
    ordered = sum(order_of(start, fitting.box).found for start in starts)
    return Preparation(fitting.order, heat, ordered, given.replicas), starts


def _about(
    given: FitParameters, fitting: Fitting, prepared: Preparation, steps: int
) -> dict[str, Any]:
    """Describe the fit, for its report."""
    return {
        "target": given.target.name,
        "estimator": given.estimator,
        "width": fitting.width,
        "replicas": given.replicas,
        "burn_in_steps": given.burn_in,
        "gradient_steps": steps - (given.burn_in if given.estimator == "reweighting" else 0),
        "compiled": given.compile_runs,
        "density": fitting.density,
        "target_density": fitting.target_density,
        "order": {"peak": fitting.order.peak, "limit": fitting.order.limit},
        "melted_at": prepared.temperature,
        "starts": prepared.sentence(fitting.job.system.temperature_name),
        "doubts": fitting.doubts + prepared.doubts,
    }


def _within(box: Tensor, given: FitParameters, curve: Curve) -> Curve:
    """Return the part of the target that is fitted, or raise if the box is too small for it."""
    target = given.target
    r_min, r_max = given.r_min, given.r_max or float("inf")
    half = 0.5 * float(perpendicular_widths(box).min())
    part = curve.between(r_min, r_max)
    if len(part.r) == 0:
        raise ValueError(
            f"target '{target}' has no distances from {r_min:g} to {r_max:g} angstrom; it has "
            f"{float(curve.r[0]):g} to {float(curve.r[-1]):g}. Change --r-min or --r-max."
        )
    if float(part.r[-1]) > half:
        # Rounded down, so that the number can be given.
        limit = int(half * 100) / 100
        raise ValueError(
            f"target '{target}' has distances up to {float(part.r[-1]):g} angstrom, beyond half "
            f"the box of '{given.structure_file}', {half:.4g}: give --r-max {limit:g}, or a larger "
            "box."
        )
    return part


def _job(context: typer.Context, given: FitParameters, system: System, temperature: float) -> Job:
    dynamics, friction = given.dynamics, given.friction
    if dynamics not in BATHS:
        raise ValueError(f"unknown thermostat '{dynamics}'; choose one of {', '.join(BATHS)}.")
    refuse_misplaced(context, dynamics)
    if temperature == 0:
        raise ValueError("--temperature must be positive for a fit; got 0.")
    tau = 50 * given.dt if given.tau is None else given.tau
    bath = BathSettings(temperature, tau, friction, *memory_kernel(friction, None, None))
    job = job_of(system, dynamics, SCHEMES[dynamics], given.dt, bath, given.seed)
    # The bath is given, and the potential is fitted.
    job.freeze_bath()
    return job


fit_to_curve = command_of(FitParameters, fit_command)
