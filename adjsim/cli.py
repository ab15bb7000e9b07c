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
from adjsim.dynamics import (
    Dynamics,
    GeneralizedLangevin,
    Hamiltonian,
    Langevin,
    MassiveDynamics,
    NoseHooverChain,
    OverdampedLangevin,
)
from adjsim.estimators import Pathwise, Simulation
from adjsim.solvers import EulerMaruyama, LeimkuhlerMatthews, ODESolver, SDESolver, Splitting
from adjsim.solvers.base import SteppingSolver
from adjsim.systems import System, cluster, structure

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ADJOINTS: dict[str, Adjoint] = {
    "direct": DirectAdjoint(),
    "checkpoint": CheckpointAdjoint(),
    "reversible": ReversibleAdjoint(),
    "backsolve": BacksolveAdjoint(),
}
PLAIN = "reversible, plain"
SCHEMES = {
    "hamiltonian": "BAB",
    "nose-hoover": "NBABN",
    "langevin": "BAOAB",
    "generalised": "BAGAB",
    "overdamped": "LeimkuhlerMatthews",
}
OVERDAMPED = {"EulerMaruyama": EulerMaruyama, "LeimkuhlerMatthews": LeimkuhlerMatthews}


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
    replicas: Annotated[int, typer.Option(help="Starts to average over, each with momenta and noise of its own.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of momenta and noise.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figure and the JSON file.")] = Path("adjsim-compare"),
) -> None:
    """Set adjoint gradients beside backpropagation on a Lennard-Jones system.

    The observable is the potential energy per atom at the horizon. Its gradient with respect to epsilon and sigma (and to
    kT, tau, friction, rates and strengths of a thermostat) is taken by each adjoint from the same starts and the same noise.
    Writes compare.png and compare.json into the output folder.
    """
    real = structure_file is not None
    try:
        system = structure(structure_file, epsilon, sigma, cutoff) if real else cluster(epsilon, sigma, cutoff)
        if dynamics not in SCHEMES:
            raise ValueError(f"unknown dynamics '{dynamics}'; choose one of {', '.join(SCHEMES)}.")
        stiff = dynamics == "overdamped"
        step = dt if dt is not None else 4.0 if real else 0.0005 if stiff else 0.005
        usual = "200,400,800" if real else "5,10,20,40" if exact else "0.1,0.2,0.4,0.8" if stiff else "1,2,4,8"
        horizons = _horizons(horizon or [usual], step)
        warmth = temperature if temperature is not None else (85.0 if real else 0.8 if exact else 0.1)
        rate = friction if friction is not None else (0.001 if real else 1.0)
        bath = _Bath(warmth, tau if tau is not None else 50 * step, rate, *_memory(rate, rates, strengths))
        model = _model(system, dynamics, bath)
        word = scheme or SCHEMES[dynamics]
        solver = _solver(word, dynamics, step * system.time, exact)
        adjoints = _adjoints(adjoint, dynamics, exact)
        work = _Work(system, model, word, solver, adjoints, horizons, warmth, replicas, seed)
        work.check()
        if output.exists() and not output.is_dir():
            raise ValueError(f"output '{output}' is a file; name a folder.")
    except (ValueError, TypeError) as error:
        _refuse(error)
    comparisons = work.run()
    _report(work, comparisons, output)


@dataclass
class _Bath:
    """The numbers of a thermostat, in the units of the command line."""

    temperature: float
    tau: float
    friction: float
    rates: list[float]
    strengths: list[float]


@dataclass
class _Work:
    """What the command line asked for, in the library's words."""

    system: System
    model: Dynamics
    scheme: str
    solver: SteppingSolver
    adjoints: dict[str, Adjoint]
    horizons: list[float]
    temperature: float
    replicas: int
    seed: int

    def initial(self, replicas: int, generator: torch.Generator | None) -> State:
        """Thermal momenta, less their mean motion, on the system's positions."""
        position = self.system.position.expand(replicas, -1, -1)
        if isinstance(self.model, OverdampedLangevin):
            return self.model.init(position)
        assert isinstance(self.model, MassiveDynamics)
        kT = torch.tensor(self.temperature * self.system.temperature, dtype=position.dtype)
        momentum = self.model.thermal_momentum(position, kT, generator)
        mass = self.model.masses(position).expand(position.shape[-2], 1)
        drift = momentum.sum(-2, keepdim=True) / mass.sum()
        return self.model.init(position, momentum - mass * drift, generator)

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

    @property
    def exact(self) -> bool:
        return isinstance(self.solver, Splitting) and self.solver.exact

    @property
    def continuous(self) -> ODESolver | SDESolver:
        """What the continuous adjoint is solved with."""
        if self.model.stochastic:
            return SDESolver("midpoint", dt=self.solver.dt)
        return ODESolver("dopri5", rtol=1e-7, atol=1e-9)

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
        solver = self.continuous if name == "backsolve" else self.solver
        if name == PLAIN:
            solver = Splitting(self.scheme, self.solver.dt)
        simulation = Simulation(self.model, self.initial, [0.0, horizon * self.system.time], solver=solver)
        estimator = Pathwise(self.adjoints[name])
        generator = torch.Generator().manual_seed(self.seed)
        return compare(simulation, Final(self.energy_per_atom), {name: estimator}, replicas=self.replicas, generator=generator)


def _model(system: System, dynamics: str, bath: _Bath) -> Dynamics:
    def number(value: float | list[float] | torch.Tensor, unit: float) -> nn.Parameter:
        return nn.Parameter(torch.as_tensor(value, dtype=torch.float64) * unit)

    potential, mass, time = system.potential, system.mass, system.time
    if dynamics == "hamiltonian":
        return Hamiltonian(potential, mass)
    kT = number(bath.temperature, system.temperature)
    if dynamics == "nose-hoover":
        atoms, dim = system.position.shape
        return NoseHooverChain(potential, mass, kT, number(bath.tau, time), dof=atoms * dim - dim)
    if dynamics == "langevin":
        return Langevin(potential, mass, kT, number(bath.friction, 1 / time))
    if dynamics == "generalised":
        return GeneralizedLangevin(potential, mass, kT, number(bath.rates, 1 / time), number(bath.strengths, 1 / time**2))
    common = mass if len(mass.unique()) > 1 else mass.unique()[0]
    return OverdampedLangevin(potential, kT, number(common * bath.friction, 1 / time))


def _solver(scheme: str, dynamics: str, dt: float, exact: bool) -> SteppingSolver:
    if dynamics != "overdamped":
        return Splitting(scheme, dt, exact=exact)
    if exact:
        raise ValueError("--exact needs steps that can be undone, unlike those of overdamped; choose another dynamics.")
    if scheme not in OVERDAMPED:
        raise ValueError(f"scheme '{scheme}' does not go with overdamped; choose from {', '.join(OVERDAMPED)}.")
    return OVERDAMPED[scheme](dt)


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


def _adjoints(asked: list[str] | None, dynamics: str, exact: bool) -> dict[str, Adjoint]:
    fitting = [name for name in ADJOINTS if dynamics != "overdamped" or name != "reversible"]
    usual = [name for name in fitting if not exact or name != "backsolve"]
    names = [name.strip() for entry in asked for name in entry.split(",")] if asked else usual
    for name in names:
        if name not in ADJOINTS:
            raise ValueError(f"unknown adjoint '{name}'; choose from {', '.join(fitting)}.")
        if name not in fitting:
            raise ValueError(
                f"adjoint '{name}' needs steps that can be undone, unlike those of {dynamics}; "
                f"choose from {', '.join(fitting)}."
            )
    chosen = {name: ADJOINTS[name] for name in names}
    if exact and "reversible" in chosen:
        # With neither checkpoints nor a tolerance, so that what is lost is seen.
        chosen[PLAIN] = ReversibleAdjoint(checkpoint_every=sys.maxsize, tol=float("inf"))
    return chosen


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
    word = f"{work.scheme} exact" if work.exact else work.scheme
    console.print(
        f"{system.name}, {type(work.model).__name__}, {word} at dt = {work.solver.dt / system.time:g}, "
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
        solver, other = repr(work.continuous), "the exact flow"
        if work.model.stochastic:
            solver, other = "the midpoint rule of SDESolver at this dt", "other steps on the same noise"
        console.print(
            f"backsolve is the continuous adjoint on {solver}: it differentiates {other}, so its difference from "
            "the others is the discretisation error of dt, not of the adjoint.",
            soft_wrap=True,
        )
    if PLAIN in work.adjoints:
        console.print(
            f"{PLAIN} takes the same steps in floating point, and undoes them so. In chaos that is another path of the same "
            "system before long, with another gradient; and where its reconstruction error is not small, the gradient of none.",
            soft_wrap=True,
        )
    if not any(comparison.estimates for comparison in comparisons.values()):
        _fail("every method was lost, so nothing was written; use a smaller dt, a lower temperature or a shorter horizon.")
    picture = BytesIO()
    plot_horizons(comparisons, system.time_name).savefig(picture, format="png", dpi=130)
    document: dict[str, Any] = {
        "system": system.name,
        "dynamics": type(work.model).__name__,
        "scheme": work.scheme,
        "exact": work.exact,
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
