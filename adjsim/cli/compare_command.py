"""The command line's ``compare``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import typer

from adjsim.adjoints.base import Adjoint
from adjsim.cli.compare_parameters import CompareParameters
from adjsim.cli.job import Job, adjoints_of, estimators_of, question_of
from adjsim.cli.models import SCHEMES, BathSettings, model_of, solver_of
from adjsim.cli.options import (
    check_numbers,
    estimator_names,
    is_given,
    line_of,
    memory_kernel,
    observable_named,
    preset_of,
    refuse,
    refuse_misplaced,
    sweep_of,
)
from adjsim.cli.parameters import command_of
from adjsim.cli.presets import ESTIMATORS, Preset
from adjsim.cli.quantities import QUANTITIES
from adjsim.cli.report import report_adjoints, report_estimators
from adjsim.cli.sweep import Method, Sweep, run_sweep
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.core.durable.store import StoreError
from adjsim.estimators.compare import Comparison
from adjsim.io.systems import Cutoff, System, cluster, structure
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


@dataclass(frozen=True)
class Comparing:
    """What is compared.

    Attributes:
        problem: the questions, with the horizon and the number of replicas of estimators.
        quantity: the name of the question.
        names: the estimators; empty: adjoints are compared.
        job: the runs of a system of atoms; None for a test problem.
        adjoints: the adjoints by their names.
        horizons: the horizons of adjoints.
        dt: the step, in the units of the command line.
    """

    problem: Preset
    quantity: str
    names: list[str]
    job: Job | None
    adjoints: dict[str, Adjoint]
    horizons: str
    dt: float


def compare_command(context: typer.Context, given: CompareParameters) -> None:
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
        names = estimator_names(given.estimators)
        atoms = given.preset == "lj13"
        found = _of_atoms(context, given, names) if atoms else _of_preset(context, given, names)
        sweep = _sweep_of(given, found)
        ranks = Ranks.of()
        if ranks.first:
            check_writable(given.output)
        methods = _methods(given, found)
    except (ValueError, TypeError) as error:
        refuse(error)
    store = given.store
    with ending_at_once(line_of(store)) if store is not None else nullcontext():
        try:
            reference = None if found.names else next(iter(found.adjoints))
            results = run_sweep(methods, sweep, reference, store)
        except (StoreError, RankError) as error:
            refuse(error)
    if ranks.first:
        _write(given, found, sweep, results)


def _of_atoms(context: typer.Context, given: CompareParameters, names: list[str]) -> Comparing:
    """Return a comparison on the cluster, or on the structure of a file."""
    model = given.dynamics or ("langevin" if names else "hamiltonian")
    ending = Cutoff(given.cutoff, given.truncation, given.switch_start, given.skin)
    if given.structure_file is None:
        system = cluster(given.epsilon, given.sigma, ending)
    else:
        system = structure(given.structure_file, given.epsilon, given.sigma, ending)
    if model not in SCHEMES:
        raise ValueError(f"unknown dynamics '{model}'; choose one of {', '.join(SCHEMES)}.")
    refuse_misplaced(context, model)
    overdamped = model == "overdamped"
    job, dt = _job_of(given, system, model)
    quantity = observable_named(QUANTITIES, given.preset, given.observable)
    horizon = 400.0 if given.from_file else 0.4 if overdamped else 10.0
    problem = Preset(job.title, horizon, 64, {quantity: job.question(quantity)})
    if not names:
        adjoints = adjoints_of(given.adjoint, model, given.exact)
        horizons = _horizons(given, overdamped)
        return Comparing(problem, quantity, names, job, adjoints, horizons, dt)
    if given.adjoint:
        raise ValueError(
            "--adjoint compares adjoints, and --estimators compares estimators; give one of the "
            "two."
        )
    # Most estimators have no gradient with respect to the thermostat's parameters, and one table
    # shows one set of parameters.
    for parameter in job.model.parameters(recurse=False):
        parameter.requires_grad_(False)
    return Comparing(problem, quantity, names, job, {}, "", dt)


def _job_of(given: CompareParameters, system: System, model: str) -> tuple[Job, float]:
    """Return the runs of a system, and their step in the units of the command line."""
    small = 0.0005 if model == "overdamped" else 0.005
    dt = _first(given.dt, 4.0 if given.from_file else small)
    temperature = _first(
        given.temperature, 85.0 if given.from_file else 0.8 if given.exact else 0.1
    )
    rate = _first(given.friction, 0.001 if given.from_file else 1.0)
    kernel = memory_kernel(rate, given.rates, given.strengths)
    bath = BathSettings(temperature, _first(given.tau, 50 * dt), rate, *kernel)
    scheme = given.scheme or SCHEMES[model]
    job = Job(
        system,
        model_of(system, model, bath),
        scheme,
        solver_of(scheme, model, dt * system.time, given.exact),
        temperature,
        given.seed,
        given.distance,
    )
    job.check()
    return job, dt


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _horizons(given: CompareParameters, overdamped: bool) -> str:
    if given.from_file:
        return "200,400,800"
    return "5,10,20,40" if given.exact else "0.1,0.2,0.4,0.8" if overdamped else "1,2,4"


def _of_preset(context: typer.Context, given: CompareParameters, names: list[str]) -> Comparing:
    """Return a comparison of estimators on a test problem."""
    problem = preset_of(given.preset)
    misplaced = [name for name in context.params if name not in COMMON and is_given(context, name)]
    if misplaced:
        option = misplaced[0].removesuffix("_file").replace("_", "-")
        raise ValueError(f"--{option} is for the preset lj13, not for {given.preset}.")
    quantity = observable_named(problem.questions, given.preset, given.observable)
    solver = problem.questions[quantity].simulation(problem.horizon).solver
    assert isinstance(solver, SteppingSolver)
    return Comparing(problem, quantity, names or list(ESTIMATORS), None, {}, "", solver.dt)


def _sweep_of(given: CompareParameters, found: Comparing) -> Sweep:
    if not found.names:
        return sweep_of(
            given.horizon or [found.horizons], found.dt, given.replicas or ["1"], least=1
        )
    # An error bar needs two replicas.
    return sweep_of(
        given.horizon or [f"{found.problem.horizon:g}"],
        found.dt,
        given.replicas or [str(found.problem.replicas)],
        least=2,
    )


def _methods(given: CompareParameters, found: Comparing) -> list[Method]:
    if not found.names:
        assert found.job is not None
        return found.job.adjoints(found.adjoints, found.quantity, given.compile_runs)
    question = partial(question_of, given.preset, found.quantity, found.job)
    return estimators_of(found.names, question, found.dt, given.seed, given.compile_runs)


def _write(
    given: CompareParameters, found: Comparing, sweep: Sweep, results: dict[float, Comparison]
) -> None:
    """Show the results, and write the figure and the records."""
    if found.names:
        question = found.problem.questions[found.quantity]
        report = report_estimators(
            found.problem, given.preset, found.quantity, question, found.job, given.seed, sweep,
            results,
        )  # fmt: skip
    else:
        assert found.job is not None
        report = report_adjoints(found.job, found.quantity, found.adjoints, sweep, results)
    if report.empty:
        print(
            "adjsim: no method returned a number, so no files were written; the reasons are above.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    report.write(given.output)


compare = command_of(CompareParameters, compare_command)
