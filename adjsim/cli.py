"""The command line: ``adjsim compare``."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

from adjsim._progress import shown
from adjsim._trajectory import check_times, grid
from adjsim.compare import Comparison, compare, plot_horizons, write_whole
from adjsim.job import ADJOINTS, PLAIN, SCHEMES, Bath, Job, adjoints_of, model_of, solver_of
from adjsim.presets import ESTIMATORS, presets
from adjsim.solvers.base import SteppingSolver
from adjsim.systems import cluster, structure

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """adjsim: gradients through physical simulation."""


@app.command("compare")
def compare_command(
    context: typer.Context,
    preset: Annotated[
        str,
        typer.Argument(
            metavar="[PRESET]",
            help="lj13 (the Lennard-Jones cluster, or with --structure another, by every adjoint), or a problem to set "
            f"estimators beside each other on, with its exact answer where there is one: {', '.join(presets())}.",
        ),
    ] = "lj13",
    estimators: Annotated[
        list[str] | None,
        typer.Option(
            help=f"For a preset other than lj13: estimators to compare, of {', '.join(ESTIMATORS)}, by repeating it or by "
            "commas.",
            show_default="all",
        ),
    ] = None,
    structure_file: Annotated[
        Path | None,
        typer.Option(
            "--structure",
            metavar="FILE",
            help="Start from this structure (any file ASE reads: xyz, extxyz, pdb, cif) instead of the 13-atom cluster, "
            "with its cell, if it has one, as the periodic box. Units are then eV, angstrom, amu, fs and K.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Lennard-Jones well depth; shipped for the noble gases Ne, Ar, Kr, Xe.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Lennard-Jones diameter; shipped for the noble gases Ne, Ar, Kr, Xe.")
    ] = None,
    cutoff: Annotated[
        float | None,
        typer.Option(help="Cutoff distance.", show_default="in a box 3 sigma or half its width, else none"),
    ] = None,
    dynamics: Annotated[
        str,
        typer.Option(
            help="hamiltonian (constant energy), nose-hoover (constant temperature), langevin, generalised (Langevin with a "
            "memory) or overdamped."
        ),
    ] = "hamiltonian",
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Splitting scheme; for overdamped, EulerMaruyama or LeimkuhlerMatthews.",
            show_default=", ".join(f"{word} for {name}" for name, word in SCHEMES.items()),
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Carry the steps out on a lattice, where they are undone bit for bit, and show reversal in floating point "
            "(plain) beside it. The usual start is then a hot one, over longer horizons.",
        ),
    ] = False,
    dt: Annotated[
        float | None, typer.Option(help="Time step.", show_default="0.005 (overdamped 0.0005), 4 fs for a structure")
    ] = None,
    horizon: Annotated[
        list[str] | None,
        typer.Option(
            help="Length of the run in time, a multiple of dt. Several, by repeating it or by commas, give the figure an axis.",
            show_default="1,2,4,8 (overdamped 0.1,0.2,0.4,0.8; exact 5,10,20,40), or 200,400,800 fs for a structure",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of the start, and of the bath.",
            show_default="0.1 epsilon/kB (exact 0.8), or 85 K for a structure",
        ),
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Relaxation time of the Nose-Hoover chain.", show_default="50 dt")] = None,
    friction: Annotated[
        float | None,
        typer.Option(
            help="Rate at which momenta decay, 1/time; for generalised the integral of the memory. Overdamped: mass times it.",
            show_default="1, or 0.001/fs for a structure",
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(help="Decay rates of the memory of generalised, by commas, 1/time.", show_default="5 times friction"),
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(
            help="Strengths of the memory, one for each rate, 1/time^2.", show_default="friction times rate, shared evenly"
        ),
    ] = None,
    adjoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Adjoints to compare, of {', '.join(ADJOINTS)}, by repeating it or by commas; the first is the reference.",
            show_default="all that go with the dynamics",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Starts to average over, each with momenta and noise of its own.", show_default="1, or 4096 for a preset"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of momenta and noise.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path("adjsim-compare"),
) -> None:
    """Set adjoint gradients beside backpropagation on a Lennard-Jones system.

    The observable is the potential energy per atom at the horizon. Its gradient with respect to epsilon and sigma (and to
    kT, tau, friction, rates and strengths of a thermostat) is taken by each adjoint from the same starts and the same noise.
    Writes compare.png and compare.json into the output folder.

    With another preset, gradient estimators are set beside each other on a small problem: those of what happens along a path,
    and those of the equilibrium mean, which are two questions and are shown apart.
    """
    if preset != "lj13":
        _compare_estimators(context, preset, estimators, horizon, 4096 if replicas is None else replicas, seed, output)
        return
    real, replicas = structure_file is not None, 1 if replicas is None else replicas
    try:
        if estimators:
            raise ValueError(f"--estimators goes with the presets {', '.join(presets())}; lj13 compares adjoints (--adjoint).")
        system = structure(structure_file, epsilon, sigma, cutoff) if structure_file else cluster(epsilon, sigma, cutoff)
        if dynamics not in SCHEMES:
            raise ValueError(f"unknown dynamics '{dynamics}'; choose one of {', '.join(SCHEMES)}.")
        stiff = dynamics == "overdamped"
        step = dt if dt is not None else 4.0 if real else 0.0005 if stiff else 0.005
        usual = "200,400,800" if real else "5,10,20,40" if exact else "0.1,0.2,0.4,0.8" if stiff else "1,2,4,8"
        horizons = _horizons(horizon or [usual], step)
        warmth = temperature if temperature is not None else (85.0 if real else 0.8 if exact else 0.1)
        rate = friction if friction is not None else (0.001 if real else 1.0)
        bath = Bath(warmth, tau if tau is not None else 50 * step, rate, *_memory(rate, rates, strengths))
        model = model_of(system, dynamics, bath)
        word = scheme or SCHEMES[dynamics]
        solver = solver_of(word, dynamics, step * system.time, exact)
        adjoints = adjoints_of(adjoint, dynamics, exact)
        job = Job(system, model, word, solver, adjoints, horizons, warmth, replicas, seed)
        job.check()
        _check_output(output)
    except (ValueError, TypeError) as error:
        _refuse(error)
    comparisons = job.run()
    _report(job, comparisons, output)


def _compare_estimators(
    context: typer.Context,
    preset: str,
    names: list[str] | None,
    horizon: list[str] | None,
    replicas: int,
    seed: int,
    output: Path,
) -> None:
    try:
        known = presets()
        if preset not in known:
            raise ValueError(f"unknown preset '{preset}'; choose one of lj13, {', '.join(known)}.")
        mine = {"preset", "estimators", "horizon", "replicas", "seed", "output"}
        others = [name for name in context.params if name not in mine and _given(context, name)]
        if others:
            option = "structure" if others[0] == "structure_file" else others[0]
            raise ValueError(f"--{option} goes with the preset lj13, not with {preset}.")
        asked = [name.strip() for entry in names for name in entry.split(",")] if names else list(ESTIMATORS)
        for name in asked:
            if name not in ESTIMATORS:
                raise ValueError(f"unknown estimator '{name}'; choose from {', '.join(ESTIMATORS)}.")
        problem = known[preset]
        solver = problem.simulation(problem.horizon).solver
        assert isinstance(solver, SteppingSolver)
        horizons = _horizons(horizon or [f"{problem.horizon:g}"], solver.dt)
        if replicas < 2:
            raise ValueError(f"replicas must be at least 2 for an error bar; got {replicas}.")
        _check_output(output)
    except ValueError as error:
        _refuse(error)
    chosen = {name: ESTIMATORS[name]() for name in asked}
    results: dict[float, Comparison] = {}
    progress = Console(stderr=True)
    for time in shown(horizons, "horizons", len(horizons), progress.is_terminal):
        generator = torch.Generator().manual_seed(seed)
        results[time] = compare(problem.simulation(time), problem.observable, chosen, replicas=replicas, generator=generator)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"{problem.title}. {replicas} replicas, seed {seed}.", soft_wrap=True)
    exact = problem.exact() if problem.exact is not None else None
    if exact is not None:
        slopes = ", ".join(f"d/d {name} {slope:.6g}" for name, slope in exact[1].items())
        console.print(f"equilibrium, by quadrature: {exact[0]:.6g}, {slopes}", soft_wrap=True)
    for time, comparison in results.items():
        console.print(f"\nhorizon {time:g}")
        _print_comparison(console, comparison)
    document: dict[str, Any] = {
        "preset": preset,
        "title": problem.title,
        "replicas": replicas,
        "seed": seed,
        "exact": None if exact is None else {"value": exact[0], "grad": exact[1]},
        "horizons": [{"horizon": time, "methods": comparison.rows()} for time, comparison in results.items()],
    }
    _write(console, results, "", document, output)


def _given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"output '{output}' is a file; name a folder.")


def _print_comparison(console: Console, comparison: Comparison) -> None:
    if comparison.estimates:
        console.print(comparison.table())
    for remark in comparison.remarks():
        console.print(remark, soft_wrap=True)


def _write(console: Console, results: dict[float, Comparison], unit: str, document: dict[str, Any], output: Path) -> None:
    picture = BytesIO()
    plot_horizons(results, unit).savefig(picture, format="png", dpi=130)
    write_whole(output / "compare.png", picture.getvalue())
    write_whole(output / "compare.json", json.dumps(document, indent=2).encode())
    console.print(f"\nwrote {output / 'compare.png'} and {output / 'compare.json'}", soft_wrap=True)


def _memory(friction: float, rates: str | None, strengths: str | None) -> tuple[list[float], list[float]]:
    if strengths is not None and rates is None:
        raise ValueError("--strengths was given without --rates; give both, as many of each.")
    decays = _numbers("rates", rates) if rates is not None else [5 * friction]
    weights = _numbers("strengths", strengths) if strengths is not None else [friction * r / len(decays) for r in decays]
    if len(decays) != len(weights):
        raise ValueError(f"--rates has {len(decays)} numbers and --strengths {len(weights)}; give as many of each.")
    return decays, weights


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{option} '{text}' is not a list of numbers; write such as 1,4.") from None


def _horizons(asked: list[str], dt: float) -> list[float]:
    horizons = set()
    for text in (part.strip() for entry in asked for part in entry.split(",")):
        try:
            horizon = float(text)
        except ValueError:
            raise ValueError(f"horizon '{text}' is not a number; write a time such as 2.5.") from None
        if not 0 < horizon < float("inf"):
            raise ValueError(f"horizon {text} is not a positive time.")
        if dt > 0:
            try:
                grid(check_times([0.0, horizon]), dt)
            except ValueError:
                below = max(1, int(horizon / dt)) * dt
                raise ValueError(
                    f"horizon {text} is not a multiple of dt = {dt:g}; the nearest are {below:.10g} and {below + dt:.10g}."
                ) from None
        horizons.add(horizon)
    return sorted(horizons)


def _report(job: Job, comparisons: dict[float, Comparison], output: Path) -> None:
    system, steps = job.system, {h: round(h * job.system.time / job.solver.dt) for h in comparisons}
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    word = f"{job.scheme} exact" if job.exact else job.scheme
    console.print(
        f"{system.name}, {type(job.model).__name__}, {word} at dt = {job.solver.dt / system.time:g}, "
        f"{job.temperature:g} {system.temperature_name}, seed {job.seed}. Value: potential energy per atom at the horizon.",
        soft_wrap=True,
    )
    for horizon, comparison in comparisons.items():
        console.print(f"\nhorizon {horizon:g} {system.time_name} ({steps[horizon]} steps)")
        _print_comparison(console, comparison)
    if "backsolve" in job.adjoints:
        solver, other = repr(job.continuous), "the exact flow"
        if job.model.stochastic:
            solver, other = "the midpoint rule of SDESolver at this dt", "other steps on the same noise"
        console.print(
            f"backsolve is the continuous adjoint on {solver}: it differentiates {other}, so its difference from "
            "the others is the discretisation error of dt, not of the adjoint.",
            soft_wrap=True,
        )
    if PLAIN in job.adjoints:
        console.print(
            f"{PLAIN} takes the same steps in floating point, and undoes them so. In chaos that is another path of the same "
            "system before long, with another gradient; and where its reconstruction error is not small, the gradient of none.",
            soft_wrap=True,
        )
    if not any(comparison.estimates for comparison in comparisons.values()):
        _fail("every method was lost, so nothing was written; use a smaller dt, a lower temperature or a shorter horizon.")
    document: dict[str, Any] = {
        "system": system.name,
        "dynamics": type(job.model).__name__,
        "scheme": job.scheme,
        "exact": job.exact,
        "dt": job.solver.dt / system.time,
        "temperature": job.temperature,
        "units": {"time": system.time_name, "temperature": system.temperature_name},
        "replicas": job.replicas,
        "seed": job.seed,
        "horizons": [
            {"horizon": horizon, "steps": steps[horizon], "methods": comparison.rows()}
            for horizon, comparison in comparisons.items()
        ],
    }
    _write(console, comparisons, system.time_name, document, output)


def _refuse(error: Exception) -> NoReturn:
    print(f"adjsim: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)


def _fail(message: str) -> NoReturn:
    print(f"adjsim: {message}", file=sys.stderr)
    raise typer.Exit(1)
