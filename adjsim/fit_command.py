"""The command line's ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adjsim._box import perpendicular_widths
from adjsim._files import check_writable
from adjsim._interruption import ending_at_once
from adjsim._ranks import RankError, Ranks
from adjsim._trajectory import TimeAverage, Trajectory
from adjsim.adjoints import CompileError, ReconstructionError, ReversibleAdjoint
from adjsim.curve import Curve, read_curve
from adjsim.estimators import Estimator, Pathwise, Reweighting, Simulation
from adjsim.estimators.base import Initial, Observable
from adjsim.fit import fit
from adjsim.fit_report import report_fit
from adjsim.job import Job
from adjsim.models import SCHEMES, BathSettings, model_of, solver_of
from adjsim.observables import smooth_radial_distribution
from adjsim.options import line_of, memory_kernel, refuse, refuse_misplaced
from adjsim.simulation import simulate
from adjsim.systems import TRUNCATIONS, Cutoff, System, structure

ESTIMATORS = ("reweighting", "pathwise")
BATHS = [name for name in SCHEMES if name != "hamiltonian"]
# Steps between frames, of the burn-in, and of the run along which a pathwise gradient is taken,
# which grows exponentially with its length.
EVERY, BURN_IN, PATH = 50, 500, 250
# Errors of a run, which are shown in one line.
FAILURES = (ValueError, ArithmeticError, ReconstructionError, CompileError, RankError)
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
        system = structure(structure_file, epsilon, sigma, Cutoff(cutoff, truncation, switch_start))
        curve = _within(system, structure_file, read_curve(target), target, r_min, r_max)
        job = _job(context, system, dynamics, temperature, friction, tau, dt, seed)
        kernel = WIDTH * float(system.potential.sigma.detach().mean()) if width is None else width
        if not kernel > 0:
            raise ValueError(f"--width must be positive; got {kernel:g}.")
        make, observable, simulation = _problem(
            job, curve.r, kernel, estimator, steps, burn_in, compile_runs
        )
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
        except FAILURES as error:
            refuse(error)
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
    temperature: float,
    friction: float,
    tau: float | None,
    dt: float,
    seed: int,
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


class _Radial:
    """The radial distribution function of each replica of a state.

    Reweighting evaluates its stored states again at other parameters, so values are kept as long as
    their positions.
    """

    def __init__(self, r: Tensor, box: Tensor, width: float) -> None:
        self.r, self.box, self.width = r, box, width
        self.known = WeakTensorKeyDictionary()

    def __call__(self, state: Any) -> Tensor:
        q: Tensor = state.position
        if q not in self.known:
            # One system at a time, since the kernels of all pairs of one fill the cache.
            rows = [smooth_radial_distribution(x, self.r, self.box, width=self.width) for x in q]
            self.known[q] = torch.stack(rows)
        return self.known[q]


def _problem(
    job: Job,
    r: Tensor,
    width: float,
    estimator: str,
    steps: int | None,
    burn_in: int | None,
    compile_runs: bool,
) -> tuple[Callable[[], Estimator], Observable[Any], Simulation[Any]]:
    """Return a function that makes the estimator, the mean that it estimates, and its runs.

    A pathwise gradient is that of the run after the burn-in, from starts that the burn-in has
    brought to equilibrium at the present parameters. The parameters act during this run alone, so
    the gradient is smaller than that at equilibrium. The mean is that at equilibrium.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator '{estimator}'; choose one of {', '.join(ESTIMATORS)}.")
    box, dt = job.system.potential.box, job.solver.dt
    assert box is not None
    skip = BURN_IN if burn_in is None else burn_in
    if skip < 0:
        raise ValueError(f"--burn-in must not be negative; got {skip}.")
    default = 2500 if estimator == "reweighting" else skip + PATH
    length = default if steps is None else steps
    every = min(EVERY, (length - skip) // 2)
    if every < 1:
        raise ValueError(
            f"--steps {length} leaves {length - skip} after the burn-in of {skip}, and two frames "
            "are needed; give more steps, or a shorter --burn-in."
        )
    radial = _Radial(r, box, width)

    def along(run: Trajectory[Any]) -> Tensor:
        frames = [smooth_radial_distribution(q, r, box, width=width) for q in run.position[1:]]
        return torch.stack(frames).mean(0)

    def simulation(initial: Initial[Any], times: Iterable[int]) -> Simulation[Any]:
        ts = torch.tensor([n * dt for n in times], dtype=torch.float64)
        return Simulation(job.model, initial, ts, job.solver, compile=compile_runs)

    if estimator == "reweighting":
        average = TimeAverage(radial, burn_in=skip * dt)
        make = partial(Reweighting, every=every * dt)
        return make, average, simulation(job.initial, (0, length))

    def equilibrated(replicas: int, generator: torch.Generator | None) -> Any:
        start = job.initial(replicas, generator)
        if skip == 0:
            return start
        run = simulate(
            job.model,
            start,
            [0.0, skip * dt],
            solver=job.solver,
            generator=generator,
            compile=compile_runs,
        )
        return run.final

    make = partial(Pathwise, ReversibleAdjoint())
    return make, along, simulation(equilibrated, range(0, length - skip + 1, every))
