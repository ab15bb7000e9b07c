"""What a comparison from the command line consists of: a system, its dynamics, a scheme, adjoints and horizons."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import nn

from adjsim._state import State
from adjsim._trajectory import Final
from adjsim.adjoints import Adjoint, BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint
from adjsim.compare import Comparison, compare
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
from adjsim.systems import System

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


@dataclass
class Bath:
    """The numbers of a thermostat, in the units of the command line."""

    temperature: float
    tau: float
    friction: float
    rates: list[float]
    strengths: list[float]


@dataclass
class Job:
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


def model_of(system: System, dynamics: str, bath: Bath) -> Dynamics:
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


def solver_of(scheme: str, dynamics: str, dt: float, exact: bool) -> SteppingSolver:
    if dynamics != "overdamped":
        return Splitting(scheme, dt, exact=exact)
    if exact:
        raise ValueError("--exact needs steps that can be undone, unlike those of overdamped; choose another dynamics.")
    if scheme not in OVERDAMPED:
        raise ValueError(f"scheme '{scheme}' does not go with overdamped; choose from {', '.join(OVERDAMPED)}.")
    return OVERDAMPED[scheme](dt)


def adjoints_of(asked: list[str] | None, dynamics: str, exact: bool) -> dict[str, Adjoint]:
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
