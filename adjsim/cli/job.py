"""A comparison on a system of atoms: its runs, its questions and its methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints import (
    Adjoint,
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ReversibleAdjoint,
)
from adjsim.cli.models import NO_EQUATION, NO_INVERSE, BathSettings, model_of, solver_of
from adjsim.cli.options import listed
from adjsim.cli.quantities import Quantity, quantity_of
from adjsim.cli.sweep import Method, Question
from adjsim.core.state import AnyState, position_of
from adjsim.core.trajectory import Final, TimeAverage
from adjsim.dynamics import Dynamics, MassiveDynamics, OverdampedLangevin
from adjsim.dynamics.starts import check_potential
from adjsim.estimators import (
    Estimator,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    Pathwise,
    Reweighting,
    ScoreFunction,
    Simulation,
)
from adjsim.estimators.replicas import Observable
from adjsim.io.systems import System
from adjsim.simulation.simulate import simulate
from adjsim.solvers import ODESolver, SDESolver, Splitting
from adjsim.solvers.base import SteppingSolver

ADJOINTS: dict[str, Adjoint] = {
    "direct": DirectAdjoint(),
    "checkpoint": CheckpointAdjoint(),
    "reversible": ReversibleAdjoint(),
    "backsolve": BacksolveAdjoint(),
}
PLAIN = "reversible, plain"
ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "pathwise": partial(Pathwise, CheckpointAdjoint()),
    "forward-sensitivity": ForwardSensitivity,
    "finite-difference": FiniteDifference,
    "girsanov": Girsanov,
    "score-function": ScoreFunction,
    "reweighting": Reweighting,
}


def job_of(
    system: System,
    dynamics: str,
    scheme: str,
    dt: float,
    bath: BathSettings,
    seed: int,
    exact: bool = False,
    distance: float | None = None,
) -> Job:
    """Return the runs of a system, with the numbers in the units of the command line."""
    model = model_of(system, dynamics, bath)
    solver = solver_of(scheme, dynamics, dt * system.time, exact)
    return checked(Job(system, model, scheme, solver, bath.temperature, seed, distance))


def checked(job: Job) -> Job:
    """Return a job, or refuse settings that its run would refuse, before any work."""
    state = job.initial(1, torch.Generator().manual_seed(job.seed))
    job.model.check(state)
    check_potential(job.system.potential, position_of(state))
    job.solver.plan(job.model, state, 0.0)
    return job


@dataclass
class Job:
    """A system of atoms with its runs; ``distance`` is that of an observed g(r)."""

    system: System
    model: Dynamics[Any]
    scheme: str
    solver: SteppingSolver
    temperature: float
    seed: int
    distance: float | None = None

    def initial(self, replicas: int, generator: torch.Generator | None) -> AnyState:
        """Make starts at the system's positions, with thermal momenta of zero total."""
        return self.start(self.system.position.expand(replicas, -1, -1), generator)

    def drawn(
        self, positions: Tensor, replicas: int, generator: torch.Generator | None
    ) -> AnyState:
        """Make starts at places drawn from positions, ``(count, atoms, dim)``."""
        index = torch.randint(len(positions), (replicas,), generator=generator)
        return self.start(positions[index], generator)

    def start(self, position: Tensor, generator: torch.Generator | None) -> AnyState:
        """Make a start at positions, ``(replicas, atoms, dim)``, as :meth:`initial` does."""
        if isinstance(self.model, OverdampedLangevin):
            return self.model.init(position)
        assert isinstance(self.model, MassiveDynamics)
        kT = torch.tensor(self.temperature * self.system.temperature, dtype=position.dtype)
        momentum = self.model.thermal_momentum(position, kT, generator)
        mass = self.model.masses(position).expand(position.shape[-2], 1)
        drift = momentum.sum(-2, keepdim=True) / mass.sum()
        return self.model.init(position, momentum - mass * drift, generator=generator)

    def run(
        self, start: AnyState, steps: int, generator: torch.Generator | None, compile: bool
    ) -> Any:
        """Return the state after a number of steps."""
        solver, ts = self.solver, [0.0, steps * self.solver.dt]
        run = simulate(self.model, start, ts, solver=solver, generator=generator, compile=compile)
        return run.final

    def freeze_bath(self) -> None:
        """Take no gradients with respect to the parameters of the dynamics itself."""
        for parameter in self.model.parameters(recurse=False):
            parameter.requires_grad_(False)

    @property
    def title(self) -> str:
        return self.titled([self.temperature])

    def titled(self, temperatures: list[float]) -> str:
        """Describe runs like these, at several temperatures."""
        potential = self.system.potential
        ending = ""
        if potential.cutoff is not None:
            ending = f" within {potential.cutoff:g} ({potential.truncation!r})"
        scheme = f"{self.scheme} exact" if self.solver.exact else self.scheme
        return (
            f"{self.system.name}, {type(self.model).__name__}, {scheme} at dt = "
            f"{self.dt:g}, {', '.join(f'{x:g}' for x in temperatures)} "
            f"{self.system.temperature_name}, {self.pairs}"
            f"{ending}"
        )

    @property
    def pairs(self) -> str:
        """The way in which pairs are evaluated, in words."""
        return self.system.potential.path(self.system.position)

    @property
    def dt(self) -> float:
        """The step in the units of the command line."""
        return self.solver.dt / self.system.time

    def steps(self, horizon: float) -> int:
        return round(horizon / self.dt)

    @property
    def continuous(self) -> ODESolver | SDESolver:
        """The solver of the continuous adjoint."""
        if self.model.stochastic:
            return SDESolver("midpoint", dt=self.solver.dt)
        # This takes two thirds of the time of the default tolerances, and its error is a hundredth
        # of the error of velocity Verlet at this dt. A method of higher order is slower where a
        # cutoff makes forces jump: dopri8 takes twenty times as many evaluations there.
        return ODESolver("dopri5", rtol=1e-6, atol=1e-8)

    def adjoints(self, adjoints: dict[str, Adjoint], quantity: str, compile: bool) -> list[Method]:
        """Make the methods that compute adjoint gradients of the observable at the horizon."""
        settings = (self.dt, self.seed, compile)
        return [
            Method(name, partial(Pathwise, adjoint), partial(self.final, quantity, name), *settings)
            for name, adjoint in adjoints.items()
        ]

    def estimators(self, names: list[str], quantity: str, compile: bool) -> list[Method]:
        """Make the methods that estimate the gradient of the mean of the observable."""
        settings = (partial(self.question, quantity), self.dt, self.seed, compile)
        return [Method(name, ESTIMATORS[name], *settings) for name in dict.fromkeys(names)]

    def final(self, name: str, adjoint: str = "direct") -> Question:
        """Ask for an observable at the horizon, with the solver of an adjoint."""
        solver = self.continuous if adjoint == "backsolve" else self.solver
        if adjoint == PLAIN:
            solver = Splitting(self.scheme, self.solver.dt)
        quantity = quantity_of(name, self.system, self.model, self.distance)
        observable = Final(quantity.value)
        return self._asked(" at the horizon", quantity, solver, lambda horizon: observable)

    def question(self, name: str) -> Question:
        """Ask for the mean over the second half of the run, or for what has none at the horizon."""
        quantity = quantity_of(name, self.system, self.model, self.distance)
        if quantity.from_start:
            return self.final(name)
        return self._asked(
            ", mean over the second half of the run",
            quantity,
            self.solver,
            lambda horizon: TimeAverage(quantity.value, burn_in=horizon * self.system.time / 2),
        )

    def _asked(
        self,
        which: str,
        quantity: Quantity,
        solver: SteppingSolver | ODESolver | SDESolver,
        observable: Callable[[float], Observable[Any]],
    ) -> Question:
        def simulation(horizon: float) -> Simulation[Any]:
            times = [0.0, horizon * self.system.time]
            return Simulation(self.model, self.initial, times, solver=solver)

        return Question(f"{quantity.title}{which}", simulation, observable, quantity.unit)


def estimator_names(requested: list[str] | None) -> list[str]:
    names = listed(requested or [])
    if names == ["all"]:
        return list(ESTIMATORS)
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(
                f"unknown estimator '{name}'; choose from {', '.join(ESTIMATORS)}, or all."
            )
    return names


def adjoints_of(requested: list[str] | None, dynamics: str, exact: bool) -> dict[str, Adjoint]:
    unfit = {"reversible": NO_INVERSE, "backsolve": NO_EQUATION}
    applicable = [name for name in ADJOINTS if dynamics not in unfit.get(name, ())]
    default = [name for name in applicable if not exact or name != "backsolve"]
    names = listed(requested) if requested else default
    for name in names:
        if name not in ADJOINTS:
            raise ValueError(f"unknown adjoint '{name}'; choose from {', '.join(applicable)}.")
        if name not in applicable:
            why = f"needs a continuous solver, which {dynamics} does not have"
            if name == "reversible":
                why = f"needs invertible steps, and the steps of {dynamics} have no inverse"
            raise ValueError(f"adjoint '{name}' {why}; choose from {', '.join(applicable)}.")
    chosen = {name: ADJOINTS[name] for name in names}
    if exact and "reversible" in chosen:
        # Without checkpoints and without a tolerance, so that the table shows the full error.
        chosen[PLAIN] = ReversibleAdjoint(checkpoint_every=sys.maxsize, tol=float("inf"))
    return chosen
