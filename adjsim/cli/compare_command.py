"""The command line's ``compare``."""

from __future__ import annotations

import sys
from functools import partial

import typer

from adjsim.cli.compare_parameters import CompareParameters
from adjsim.cli.job import Job, adjoints_of, estimator_names, job_of
from adjsim.cli.models import SCHEMES, BathSettings
from adjsim.cli.options import (
    check_numbers,
    memory_kernel,
    refuse,
    refuse_misplaced,
    resumable,
    sweep_of,
)
from adjsim.cli.parameters import command_of
from adjsim.cli.report import Comparing, report_comparison
from adjsim.cli.sweep import Sweep, run_sweep
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.core.durable.store import StoreError
from adjsim.io.systems import Cutoff, System, cluster, structure


def compare_command(context: typer.Context, given: CompareParameters) -> None:
    """Compare adjoint gradients with backpropagation, or gradient estimators with each other.

    Adjoints: each differentiates the observable of a Lennard-Jones system at the horizon with
    respect to epsilon and sigma (and kT, tau, friction, rates and strengths of a thermostat), from
    the same starts and the same noise.

    Estimators (--estimators): gradients of means, with error bars. The mean along a path and the
    mean at equilibrium are two questions, and the table shows their answers apart.

    Writes compare.png and compare.json into the output folder.
    """
    try:
        check_numbers(context)
        found = _comparing(context, given, estimator_names(given.estimators))
        ranks = Ranks.of()
        if ranks.first:
            check_writable(given.output)
        if given.compile_runs and not any(method.compiles for method in found.methods):
            raise ValueError(
                "--compile: none of these methods can be compiled. The adjoints direct, checkpoint "
                "and reversible can, and so can the estimators pathwise, finite-difference, "
                "score-function and reweighting."
            )
    except (ValueError, TypeError) as error:
        refuse(error)
    with resumable(given.store):
        try:
            results = run_sweep(found.methods, found.sweep, found.reference, given.store)
        except (StoreError, RankError) as error:
            refuse(error)
    if ranks.first and not report_comparison(found, results, given.output):
        print(
            "adjsim: no method returned a number, so no files were written; the reasons are above.",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _comparing(context: typer.Context, given: CompareParameters, names: list[str]) -> Comparing:
    """Return a comparison on the cluster, or on the structure of a file."""
    model = given.dynamics or ("langevin" if names else "hamiltonian")
    ending = Cutoff(given.cutoff, given.truncation, given.switch_start, given.skin)
    make = cluster if given.structure_file is None else partial(structure, given.structure_file)
    system = make(given.epsilon, given.sigma, ending)
    if model not in SCHEMES:
        raise ValueError(f"unknown dynamics '{model}'; choose one of {', '.join(SCHEMES)}.")
    refuse_misplaced(context, model)
    job = _job_of(given, system, model)
    name, brief = given.observable, model == "overdamped"
    if names:
        if given.adjoint:
            raise ValueError(
                "--adjoint compares adjoints, and --estimators compares estimators; give one of "
                "the two."
            )
        # Most estimators have no gradient with respect to the thermostat's parameters, and one
        # table shows one set of parameters.
        job.freeze_bath()
        horizon = "400" if given.structure_file else "0.4" if brief else "10"
        methods = job.estimators(names, name, given.compile_runs)
        sweep = _sweep(given, job, horizon, 64)
        return Comparing(job, job.question(name), methods, sweep)
    horizons = "5,10,20,40" if given.exact else "0.1,0.2,0.4,0.8" if brief else "1,2,4"
    adjoints = adjoints_of(given.adjoint, model, given.exact)
    methods = job.adjoints(adjoints, name, given.compile_runs)
    sweep = _sweep(given, job, "200,400,800" if given.structure_file else horizons, 1)
    return Comparing(job, job.final(name), methods, sweep, next(iter(adjoints)))


def _job_of(given: CompareParameters, system: System, model: str) -> Job:
    """Return the runs of a system, and their step in the units of the command line."""
    small = 0.0005 if model == "overdamped" else 0.005
    dt = _first(given.dt, 4.0 if given.structure_file else small)
    temperature = _first(
        given.temperature, 85.0 if given.structure_file else 0.8 if given.exact else 0.1
    )
    rate = _first(given.friction, 0.001 if given.structure_file else 1.0)
    kernel = memory_kernel(rate, given.rates, given.strengths)
    bath = BathSettings(temperature, _first(given.tau, 50 * dt), rate, *kernel)
    scheme = given.scheme or SCHEMES[model]
    return job_of(system, model, scheme, dt, bath, given.seed, given.exact, given.distance)


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _sweep(given: CompareParameters, job: Job, horizons: str, replicas: int) -> Sweep:
    # An error bar needs two replicas.
    counts, least = given.replicas or [str(replicas)], min(replicas, 2)
    return sweep_of(given.horizon or [horizons], job.dt, counts, least)


compare = command_of(CompareParameters, compare_command)
