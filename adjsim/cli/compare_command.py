"""The command line's ``compare``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from adjsim.cli.job import ADJOINTS, Job, adjoints_of, estimators_of, question_of
from adjsim.cli.models import SCHEMES, BathSettings, model_of, solver_of
from adjsim.cli.options import (
    check_numbers,
    estimator_names,
    given,
    line_of,
    memory_kernel,
    observable_named,
    observable_names,
    preset_of,
    refuse,
    refuse_misplaced,
    sweep_of,
)
from adjsim.cli.presets import ESTIMATORS, Preset, presets
from adjsim.cli.quantities import QUANTITIES
from adjsim.cli.report import report_adjoints, report_estimators
from adjsim.cli.sweep import run_sweep
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.core.durable.store import StoreError
from adjsim.io.systems import TRUNCATIONS, Cutoff, cluster, structure
from adjsim.solvers.base import SteppingSolver

# Options that every preset takes; the others define the system of lj13.
COMMON = {
    "preset",
    "estimators",
    "observable",
    "horizon",
    "replicas",
    "seed",
    "output",
    "store",
    "compile_runs",
}


def compare_command(
    context: typer.Context,
    preset: Annotated[
        str,
        typer.Argument(
            metavar="[PRESET]",
            help="lj13 (a Lennard-Jones cluster, or the system of --structure), or a test problem "
            "with an exact answer, on which estimators are compared: "
            f"{', '.join(presets())}.",
        ),
    ] = "lj13",
    estimators: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Estimators to compare: all, or some of {', '.join(ESTIMATORS)} (repeat the "
            "option, or separate names by commas). With lj13 they estimate the gradient of the "
            "mean over the second half of the run with respect to epsilon and sigma.",
            show_default="all; for lj13 none: adjoints are compared",
        ),
    ] = None,
    observable: Annotated[
        str | None,
        typer.Option(help=f"Observable: {observable_names()}.", show_default="the first"),
    ] = None,
    structure_file: Annotated[
        Path | None,
        typer.Option(
            "--structure",
            metavar="FILE",
            help="Start from this structure (any file ASE reads: xyz, extxyz, pdb, cif) instead of "
            "the 13-atom cluster. Its cell, if it has one, is the periodic box. Units are then eV, "
            "angstrom, amu, fs and K.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Lennard-Jones well depth. Values for Ne, Ar, Kr and Xe are built in."),
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(help="Lennard-Jones diameter. Values for Ne, Ar, Kr and Xe are built in."),
    ] = None,
    cutoff: Annotated[
        float | None,
        typer.Option(
            help="Cutoff distance.",
            show_default="none; in a box the smaller of 3 sigma and half its width",
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
    skin: Annotated[
        float | None,
        typer.Option(
            help="How far the neighbour list reaches beyond the cutoff. It changes the time, and "
            "no number.",
            show_default="chosen by the library",
        ),
    ] = None,
    distance: Annotated[
        float | None,
        typer.Option(
            help="Distance at which the observable rdf is taken.", show_default="2^(1/6) sigma"
        ),
    ] = None,
    dynamics: Annotated[
        str | None,
        typer.Option(
            help="hamiltonian (constant energy), nose-hoover (constant temperature), langevin, "
            "generalised (Langevin with a memory kernel), overdamped, or a thermostat: bussi, "
            "andersen, berendsen or velocity-rescale.",
            show_default="hamiltonian, or langevin with --estimators",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Splitting scheme; for overdamped, EulerMaruyama or LeimkuhlerMatthews.",
            show_default=", ".join(f"{scheme} for {name}" for name, scheme in SCHEMES.items()),
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Run the steps on a fixed-point lattice, where they are reversed bit for bit, and "
            "compare with reversal in floating point (plain). By default the cluster then starts "
            "hotter and runs longer.",
        ),
    ] = False,
    dt: Annotated[
        float | None,
        typer.Option(
            help="Time step.", show_default="0.005 (overdamped 0.0005), 4 fs for a structure"
        ),
    ] = None,
    horizon: Annotated[
        list[str] | None,
        typer.Option(
            help="Length of the run, a time that is a multiple of dt. Several horizons (repeat the "
            "option, or separate them by commas) are the x-axis of the figure.",
            show_default="1,2,4 (overdamped 0.1,0.2,0.4,0.8; exact 5,10,20,40), or 200,400,800 fs "
            "for a structure; with --estimators 10 (overdamped 0.4), or 400 fs; or the preset's",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of the initial momenta and of the thermostat.",
            show_default="0.1 epsilon/kB (exact 0.8), or 85 K for a structure",
        ),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(
            help="Relaxation time of nose-hoover, bussi and berendsen.", show_default="50 dt"
        ),
    ] = None,
    friction: Annotated[
        float | None,
        typer.Option(
            help="Decay rate of momenta, 1/time; for generalised the integral of the memory "
            "kernel, and for andersen the rate of collisions. For overdamped the friction "
            "coefficient is the mass times this rate.",
            show_default="1, or 0.001/fs for a structure",
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Decay rates of the memory kernel of generalised, 1/time, separated by commas.",
            show_default="5 times friction",
        ),
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(
            help="Strengths of the memory kernel, one for each rate, 1/time^2.",
            show_default="friction times rate, over the number of rates",
        ),
    ] = None,
    adjoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Adjoints to compare, of {', '.join(ADJOINTS)} (repeat the option, or separate "
            "names by commas). The first is the reference.",
            show_default="all that apply to the dynamics",
        ),
    ] = None,
    replicas: Annotated[
        list[str] | None,
        typer.Option(
            help="Number of replicas to average over, each with its own momenta and noise. Several "
            "numbers (repeat the option, or separate them by commas) are the x-axis of the figure "
            "instead of the horizon.",
            show_default="1; with --estimators 64; for a preset 4096",
        ),
    ] = None,
    compile_runs: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the runs of all methods that support it: the adjoints direct, checkpoint "
            "and reversible, and the estimators pathwise, finite-difference, score-function and "
            "reweighting. Each compiles for a few seconds at the first horizon and reads the "
            "compiled code from a cache at the others. The seconds in the table include neither.",
        ),
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps finished parts. Called again with the same options, the "
            "command reads these and computes the rest."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of momenta and noise.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path(
        "adjsim-compare"
    ),
) -> None:
    """Compare adjoint gradients with backpropagation, or gradient estimators with each other.

    Adjoints: each differentiates the observable of a Lennard-Jones system at the horizon with
    respect to epsilon and sigma (and kT, tau, friction, rates and strengths of a thermostat), from
    the same starts and the same noise.

    Estimators (--estimators, or a preset other than lj13): gradients of means, with error bars. The
    mean along a path and the mean at equilibrium are two questions, and the table shows their
    answers apart.

    Writes compare.png and compare.json into the output folder.
    """
    try:
        check_numbers(context)
        names, job, adjoints, default_horizons = estimator_names(estimators), None, {}, ""
        if preset == "lj13":
            ending = Cutoff(cutoff, truncation, switch_start, skin)
            system = (
                structure(structure_file, epsilon, sigma, ending)
                if structure_file
                else cluster(epsilon, sigma, ending)
            )
            model = dynamics or ("langevin" if names else "hamiltonian")
            if model not in SCHEMES:
                raise ValueError(f"unknown dynamics '{model}'; choose one of {', '.join(SCHEMES)}.")
            refuse_misplaced(context, model)
            from_file, overdamped = structure_file is not None, model == "overdamped"
            step = dt if dt is not None else 4.0 if from_file else 0.0005 if overdamped else 0.005
            start_temperature = (
                temperature
                if temperature is not None
                else (85.0 if from_file else 0.8 if exact else 0.1)
            )
            rate = friction if friction is not None else (0.001 if from_file else 1.0)
            bath = BathSettings(
                start_temperature,
                tau if tau is not None else 50 * step,
                rate,
                *memory_kernel(rate, rates, strengths),
            )
            scheme = scheme or SCHEMES[model]
            job = Job(
                system,
                model_of(system, model, bath),
                scheme,
                solver_of(scheme, model, step * system.time, exact),
                start_temperature,
                seed,
                distance,
            )
            job.check()
            quantity = observable_named(QUANTITIES, preset, observable)
            question = job.question(quantity)
            default_horizons = (
                "200,400,800"
                if from_file
                else "5,10,20,40"
                if exact
                else "0.1,0.2,0.4,0.8"
                if overdamped
                else "1,2,4"
            )
            problem = Preset(
                job.title,
                400.0 if from_file else 0.4 if overdamped else 10.0,
                64,
                {quantity: question},
            )
            if names:
                if adjoint:
                    raise ValueError(
                        "--adjoint compares adjoints, and --estimators compares estimators; give "
                        "one of the two."
                    )
                # Most estimators have no gradient with respect to the thermostat's parameters, and
                # one table shows one set of parameters.
                for parameter in job.model.parameters(recurse=False):
                    parameter.requires_grad_(False)
            else:
                adjoints = adjoints_of(adjoint, model, exact)
        else:
            problem = preset_of(preset)
            misplaced = [
                name for name in context.params if name not in COMMON and given(context, name)
            ]
            if misplaced:
                option = misplaced[0].removesuffix("_file").replace("_", "-")
                raise ValueError(f"--{option} is for the preset lj13, not for {preset}.")
            quantity = observable_named(problem.questions, preset, observable)
            question = problem.questions[quantity]
            names = names or list(ESTIMATORS)
            solver = question.simulation(problem.horizon).solver
            assert isinstance(solver, SteppingSolver)
            step = solver.dt
        # An error bar needs two replicas.
        default_horizon, default_replicas, least = (
            (f"{problem.horizon:g}", problem.replicas, 2) if names else (default_horizons, 1, 1)
        )
        sweep = sweep_of(
            horizon or [default_horizon], step, replicas or [str(default_replicas)], least
        )
        ranks = Ranks.of()
        if ranks.first:
            check_writable(output)
        if names:
            methods = estimators_of(
                names, partial(question_of, preset, quantity, job), step, seed, compile_runs
            )
        else:
            assert job is not None
            methods = job.adjoints(adjoints, quantity, compile_runs)
    except (ValueError, TypeError) as error:
        refuse(error)
    with ending_at_once(line_of(store)) if store is not None else nullcontext():
        try:
            results = run_sweep(methods, sweep, None if names else next(iter(adjoints)), store)
        except (StoreError, RankError) as error:
            refuse(error)
    if not ranks.first:
        return
    if names:
        report = report_estimators(problem, preset, quantity, question, job, seed, sweep, results)
    else:
        assert job is not None
        report = report_adjoints(job, quantity, adjoints, sweep, results)
    if report.empty:
        print(
            "adjsim: no method returned a number, so no files were written; the reasons are above.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    report.write(output)
