"""The command line: ``adjsim compare``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import nn

from adjsim._state import State
from adjsim._trajectory import Final, check_times, grid
from adjsim.adjoints import Adjoint, BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint
from adjsim.compare import Comparison, compare, plot_horizons, write_whole
from adjsim.dynamics import Hamiltonian, MassiveDynamics, NoseHooverChain
from adjsim.estimators import Pathwise, Simulation
from adjsim.solvers import ODESolver, Splitting
from adjsim.systems import System, cluster, structure

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ADJOINTS: dict[str, Adjoint] = {
    "direct": DirectAdjoint(),
    "checkpoint": CheckpointAdjoint(),
    "reversible": ReversibleAdjoint(),
    "backsolve": BacksolveAdjoint(),
}
SCHEMES = {"hamiltonian": "BAB", "nose-hoover": "NBABN"}
EXACT_FLOW = ODESolver("dopri5", rtol=1e-7, atol=1e-9)


@app.callback()
def main() -> None:
    """adjsim: gradients through physical simulation."""


@app.command("compare")
def compare_command(
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
        str, typer.Option(help="hamiltonian (constant energy) or nose-hoover (constant temperature).")
    ] = "hamiltonian",
    scheme: Annotated[str | None, typer.Option(help="Splitting scheme.", show_default="BAB, or NBABN for nose-hoover")] = None,
    dt: Annotated[float | None, typer.Option(help="Time step.", show_default="0.005, or 4 fs for a structure")] = None,
    horizon: Annotated[
        list[str] | None,
        typer.Option(
            help="Length of the run in time, a multiple of dt. Several, by repeating it or by commas, give the figure an axis.",
            show_default="1,2,4,8, or 200,400,800 fs for a structure",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of the start.", show_default="0.1 epsilon/kB, or 85 K for a structure"),
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Relaxation time of the Nose-Hoover chain.", show_default="50 dt")] = None,
    adjoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Adjoints to compare, of {', '.join(ADJOINTS)}, by repeating it or by commas; the first is the reference.",
            show_default="all",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Starts to average over, each with momenta of its own.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the momenta.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path("adjsim-compare"),
) -> None:
    """Set adjoint gradients beside backpropagation on a Lennard-Jones system.

    The observable is the potential energy per atom at the horizon. Its gradient with respect to epsilon and sigma (and kT
    and tau of a thermostat) is taken by each adjoint from the same starts. Writes compare.png and compare.json into the
    output folder.
    """
    real = structure_file is not None
    try:
        system = structure(structure_file, epsilon, sigma, cutoff) if real else cluster(epsilon, sigma, cutoff)
        step = dt if dt is not None else (4.0 if real else 0.005)
        horizons = _horizons(horizon or (["200,400,800"] if real else ["1,2,4,8"]), step)
        warmth = temperature if temperature is not None else (85.0 if real else 0.1)
        model = _model(system, dynamics, warmth, tau if tau is not None else 50 * step)
        solver = Splitting(scheme or SCHEMES[dynamics], step * system.time)
        work = _Work(system, model, solver, _adjoints(adjoint or list(ADJOINTS)), horizons, warmth, replicas, seed)
        work.check()
        if output.exists() and not output.is_dir():
            raise ValueError(f"output '{output}' is a file; name a folder.")
    except (ValueError, TypeError) as error:
        _refuse(error)
    comparisons = work.run()
    _report(work, comparisons, output)


@dataclass
class _Work:
    """What the command line asked for, in the library's words."""

    system: System
    model: MassiveDynamics
    solver: Splitting
    adjoints: dict[str, Adjoint]
    horizons: list[float]
    temperature: float
    replicas: int
    seed: int

    def initial(self, replicas: int, generator: torch.Generator | None) -> State:
        """Thermal momenta, less their mean motion, on the system's positions."""
        position = self.system.position.expand(replicas, -1, -1)
        kT = torch.tensor(self.temperature * self.system.temperature, dtype=position.dtype)
        momentum = self.model.thermal_momentum(position, kT, generator)
        mass = self.model.masses(position).expand(position.shape[-2], 1)
        drift = momentum.sum(-2, keepdim=True) / mass.sum()
        return self.model.init(position, momentum - mass * drift)

    def energy_per_atom(self, state: State) -> torch.Tensor:
        return self.system.potential(state.position) / state.position.shape[-2]

    def check(self) -> None:
        """Whatever would be refused later is refused now."""
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1; got {self.replicas}.")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative; got {self.temperature:g}.")
        state = self.initial(self.replicas, torch.Generator().manual_seed(self.seed))
        self.model.check(state)
        self.solver.program(self.model, state)

    def run(self) -> dict[float, Comparison]:
        """A comparison for each horizon, warm, with a progress bar on a terminal."""
        console = Console(stderr=True)
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[doing]}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("comparing", total=1 + len(self.horizons) * len(self.adjoints), doing="warming up")
            for name in self.adjoints:
                self.estimate(name, self.solver.dt / self.system.time)
            results = {}
            for horizon in self.horizons:
                parts = []
                for name in self.adjoints:
                    progress.update(task, advance=1, doing=f"{name}, horizon {horizon:g}")
                    parts.append(self.estimate(name, horizon))
                estimates = {k: v for part in parts for k, v in part.estimates.items()}
                failures = {k: v for part in parts for k, v in part.failures.items()}
                results[horizon] = Comparison(estimates, failures, reference=next(iter(self.adjoints)))
        return results

    def estimate(self, name: str, horizon: float) -> Comparison:
        """One method at one horizon."""
        solver = EXACT_FLOW if name == "backsolve" else self.solver
        simulation = Simulation(self.model, self.initial, [0.0, horizon * self.system.time], solver=solver)
        estimator = Pathwise(self.adjoints[name])
        generator = torch.Generator().manual_seed(self.seed)
        return compare(simulation, Final(self.energy_per_atom), {name: estimator}, replicas=self.replicas, generator=generator)


def _model(system: System, dynamics: str, temperature: float, tau: float) -> MassiveDynamics:
    if dynamics == "hamiltonian":
        return Hamiltonian(system.potential, system.mass)
    if dynamics == "nose-hoover":
        kT = nn.Parameter(torch.tensor(temperature * system.temperature, dtype=torch.float64))
        relaxation = nn.Parameter(torch.tensor(tau * system.time, dtype=torch.float64))
        atoms, dim = system.position.shape
        return NoseHooverChain(system.potential, system.mass, kT, relaxation, dof=atoms * dim - dim)
    raise ValueError(f"unknown dynamics '{dynamics}'; choose one of {', '.join(SCHEMES)}.")


def _adjoints(asked: list[str]) -> dict[str, Adjoint]:
    names = [name.strip() for entry in asked for name in entry.split(",")]
    for name in names:
        if name not in ADJOINTS:
            raise ValueError(f"unknown adjoint '{name}'; choose from {', '.join(ADJOINTS)}.")
    return {name: ADJOINTS[name] for name in names}


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


def _report(work: _Work, comparisons: dict[float, Comparison], output: Path) -> None:
    system, steps = work.system, {h: round(h * work.system.time / work.solver.dt) for h in comparisons}
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(
        f"{system.name}, {type(work.model).__name__}, {work.solver.scheme} at dt = {work.solver.dt / system.time:g}, "
        f"{work.temperature:g} {system.temperature_name}, seed {work.seed}. Value: potential energy per atom at the horizon.",
        soft_wrap=True,
    )
    for horizon, comparison in comparisons.items():
        console.print(f"\nhorizon {horizon:g} {system.time_name} ({steps[horizon]} steps)")
        if comparison.estimates:
            console.print(comparison.table())
        for name, reason in comparison.failures.items():
            console.print(f"{name}: {reason}", soft_wrap=True)
    if "backsolve" in work.adjoints:
        console.print(
            f"backsolve is the continuous adjoint on {EXACT_FLOW!r}: it differentiates the exact flow, so its difference from "
            "the others is the discretisation error of dt, not of the adjoint.",
            soft_wrap=True,
        )
    if not any(comparison.estimates for comparison in comparisons.values()):
        _fail("every method was lost, so nothing was written; use a smaller dt, a lower temperature or a shorter horizon.")
    picture = BytesIO()
    plot_horizons(comparisons, system.time_name).savefig(picture, format="png", dpi=130)
    document: dict[str, Any] = {
        "system": system.name,
        "dynamics": type(work.model).__name__,
        "scheme": work.solver.scheme,
        "dt": work.solver.dt / system.time,
        "temperature": work.temperature,
        "units": {"time": system.time_name, "temperature": system.temperature_name},
        "replicas": work.replicas,
        "seed": work.seed,
        "horizons": [
            {"horizon": horizon, "steps": steps[horizon], "methods": comparison.rows()}
            for horizon, comparison in comparisons.items()
        ],
    }
    write_whole(output / "compare.png", picture.getvalue())
    write_whole(output / "compare.json", json.dumps(document, indent=2).encode())
    console.print(f"\nwrote {output / 'compare.png'} and {output / 'compare.json'}", soft_wrap=True)


def _refuse(error: Exception) -> NoReturn:
    print(f"adjsim: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)


def _fail(message: str) -> NoReturn:
    print(f"adjsim: {message}", file=sys.stderr)
    raise typer.Exit(1)
