"""The parts of a comparison from the command line.

These are the system, its dynamics, the scheme, the methods, the horizons and the replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

from adjsim._state import AnyState
from adjsim._trajectory import Final, TimeAverage
from adjsim.adjoints import (
    Adjoint,
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ReversibleAdjoint,
)
from adjsim.apart import ProcessDied, apart
from adjsim.compare import Comparison, compare
from adjsim.dynamics import (
    Andersen,
    Berendsen,
    Bussi,
    Dynamics,
    GeneralizedLangevin,
    Hamiltonian,
    Langevin,
    MassiveDynamics,
    NoseHooverChain,
    OverdampedLangevin,
    VelocityRescale,
)
from adjsim.estimators import Estimator, Pathwise, Simulation
from adjsim.observables import radius_of_gyration
from adjsim.presets import ESTIMATORS, Question, presets
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
    "bussi": "BABR",
    "andersen": "BABC",
    "berendsen": "BABR",
    "velocity-rescale": "BABR",
}
# The dynamics whose steps have no inverse, and those that continuous solvers cannot take.
NO_INVERSE = ("overdamped", "andersen", "velocity-rescale")
NO_EQUATION = ("bussi", "andersen", "velocity-rescale")
OVERDAMPED = {"EulerMaruyama": EulerMaruyama, "LeimkuhlerMatthews": LeimkuhlerMatthews}


@dataclass
class BathSettings:
    """The numbers of a thermostat, in the units of the command line."""

    temperature: float
    tau: float
    friction: float
    rates: list[float]
    strengths: list[float]


# Observables of a system of atoms, by the names of the command line.
OBSERVABLES: dict[str, tuple[str, Callable[[System, Tensor], Tensor]]] = {
    "energy": (
        "potential energy per atom",
        lambda system, position: system.potential(position) / position.shape[-2],
    ),
    "gyration": ("radius of gyration", lambda system, position: radius_of_gyration(position)),
}


@dataclass
class Sweep:
    """Horizons and numbers of replicas, of which one may have several values.

    These values are the x-axis of the figure.
    """

    horizons: list[float]
    replicas: list[int]

    def check(self, least: int) -> None:
        if min(self.replicas) < least:
            why = " for an error bar" if least > 1 else ""
            raise ValueError(f"replicas must be at least {least}{why}; got {min(self.replicas)}.")
        if len(self.horizons) > 1 and len(self.replicas) > 1:
            raise ValueError(
                "give several horizons or several numbers of replicas, not both: the figure has "
                "one axis."
            )

    @property
    def axis(self) -> str:
        return "replicas" if len(self.replicas) > 1 else "horizon"

    def points(self) -> dict[float, tuple[float, int]]:
        """Return horizon and number of replicas, by the value on the axis."""
        pairs = [(horizon, count) for horizon in self.horizons for count in self.replicas]
        return {
            (count if self.axis == "replicas" else horizon): (horizon, count)
            for horizon, count in pairs
        }


@dataclass(frozen=True)
class Method:
    """One method of a comparison, which pickles so that it can run in another process.

    ``make`` and ``question`` are called in that process, since a question holds functions that do
    not pickle, and an estimator may store samples.
    """

    name: str
    make: Callable[[], Estimator]
    question: Callable[[], Question]
    step: float
    seed: int
    compile: bool

    def __call__(self, horizon: float, replicas: int) -> Comparison:
        """Compute value, gradient and cost at a horizon, after a warm-up run.

        The warm-up keeps one-off work of the process out of the measured time and memory.
        """
        question = self.question()
        # The warm-up is one step of two replicas. A compiled method warms up with the whole run, so
        # the memory that its compiled loops keep does not count as growth.
        compiled = self.compile and self.make().can_compile(question.simulation(horizon))
        self._estimate(question, *((horizon, replicas) if compiled else (self.step, 2)))
        return self._estimate(question, horizon, replicas)

    def _estimate(self, question: Question, horizon: float, replicas: int) -> Comparison:
        generator = torch.Generator().manual_seed(self.seed)
        return compare(
            question.simulation(horizon),
            question.observable(horizon),
            {self.name: self.make()},
            replicas=replicas,
            generator=generator,
            compile=self.compile,
        )


def run_sweep(
    methods: list[Method], sweep: Sweep, reference: str | None
) -> dict[float, Comparison]:
    """Compare the methods at each point of the sweep.

    Each method runs in a process of its own. A progress bar is shown on a terminal.
    """
    console, points = Console(stderr=True), sweep.points()
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[doing]}"))
    results = {}
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("comparing", total=len(points) * len(methods), doing="")
        for x, (horizon, replicas) in points.items():
            result = results[x] = Comparison({}, reference=reference)
            for method in methods:
                progress.update(task, doing=f"{method.name}, {sweep.axis} {x:g}")
                try:
                    part = apart(method, horizon, replicas)
                except ProcessDied as died:
                    part = Comparison({}, {method.name: str(died)})
                result.estimates |= part.estimates
                result.failures |= part.failures
                progress.advance(task)
    return results


def estimators_of(
    names: list[str], question: Callable[[], Question], step: float, seed: int, compile: bool
) -> list[Method]:
    """Make the methods that estimate the gradient of a question."""
    _check_compile(compile, [ESTIMATORS[name]() for name in names], question().simulation(step))
    return [
        Method(name, ESTIMATORS[name], question, step, seed, compile)
        for name in dict.fromkeys(names)
    ]


def _check_compile(
    requested: bool, estimators: list[Estimator], simulation: Simulation[Any]
) -> None:
    if requested and not any(estimator.can_compile(simulation) for estimator in estimators):
        raise ValueError(
            "--compile: none of these methods can be compiled. The adjoint reversible can, and so "
            "can the estimators finite-difference, score-function and reweighting."
        )


@dataclass
class Job:
    """A system of atoms with the dynamics, solver and seed of its run."""

    system: System
    model: Dynamics[Any]
    scheme: str
    solver: SteppingSolver
    temperature: float
    seed: int

    def initial(self, replicas: int, generator: torch.Generator | None) -> AnyState:
        """Make starts at the system's positions, with thermal momenta of zero total."""
        position = self.system.position.expand(replicas, -1, -1)
        if isinstance(self.model, OverdampedLangevin):
            return self.model.init(position)
        assert isinstance(self.model, MassiveDynamics)
        kT = torch.tensor(self.temperature * self.system.temperature, dtype=position.dtype)
        momentum = self.model.thermal_momentum(position, kT, generator)
        mass = self.model.masses(position).expand(position.shape[-2], 1)
        drift = momentum.sum(-2, keepdim=True) / mass.sum()
        return self.model.init(position, momentum - mass * drift, generator)

    def observed(self, quantity: str) -> Callable[[AnyState], Tensor]:
        return lambda state: OBSERVABLES[quantity][1](self.system, state.position)

    def check(self) -> None:
        """Refuse, before any work, settings that the run would refuse."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative; got {self.temperature:g}.")
        state = self.initial(1, torch.Generator().manual_seed(self.seed))
        self.model.check(state)
        self.solver.program(self.model, state)

    @property
    def exact(self) -> bool:
        return isinstance(self.solver, Splitting) and self.solver.exact

    @property
    def title(self) -> str:
        scheme = f"{self.scheme} exact" if self.exact else self.scheme
        return (
            f"{self.system.name}, {type(self.model).__name__}, {scheme} at dt = "
            f"{self.solver.dt / self.system.time:g}, "
            f"{self.temperature:g} {self.system.temperature_name}"
        )

    def steps(self, horizon: float) -> int:
        return round(horizon * self.system.time / self.solver.dt)

    @property
    def continuous(self) -> ODESolver | SDESolver:
        """The solver of the continuous adjoint."""
        if self.model.stochastic:
            return SDESolver("midpoint", dt=self.solver.dt)
        # This takes two thirds of the time of the default tolerances, and its error is a hundredth
        # of the error of velocity Verlet at this dt. A method of higher order is slower where a
        # cutoff makes forces jump: dopri8 takes twenty times as many evaluations there.
        return ODESolver("dopri5", rtol=1e-6, atol=1e-8)

    def simulation(
        self, horizon: float, solver: SteppingSolver | ODESolver | SDESolver
    ) -> Simulation[Any]:
        return Simulation(
            self.model, self.initial, [0.0, horizon * self.system.time], solver=solver
        )

    def adjoints(self, adjoints: dict[str, Adjoint], quantity: str, compile: bool) -> list[Method]:
        """Make the methods that compute adjoint gradients of the observable at the horizon."""
        _check_compile(
            compile,
            [Pathwise(adjoint) for adjoint in adjoints.values()],
            self.simulation(1.0, self.solver),
        )
        step = self.solver.dt / self.system.time
        return [
            Method(
                name,
                partial(Pathwise, adjoint),
                partial(self.final, quantity, name),
                step,
                self.seed,
                compile,
            )
            for name, adjoint in adjoints.items()
        ]

    def final(self, quantity: str, name: str) -> Question:
        """Return the observable at the horizon as a question, with the adjoint's own solver."""
        solver = self.continuous if name == "backsolve" else self.solver
        if name == PLAIN:
            solver = Splitting(self.scheme, self.solver.dt)
        title, observable = (
            f"{OBSERVABLES[quantity][0]} at the horizon",
            Final(self.observed(quantity)),
        )
        return Question(
            title, lambda horizon: self.simulation(horizon, solver), lambda horizon: observable
        )

    def questions(self) -> dict[str, Question]:
        """Return the questions for estimators: means over the second half of the run."""

        def question(quantity: str) -> Question:
            return Question(
                f"{OBSERVABLES[quantity][0]}, mean over the second half of the run",
                lambda horizon: self.simulation(horizon, self.solver),
                lambda horizon: TimeAverage(
                    self.observed(quantity), burn_in=horizon * self.system.time / 2
                ),
            )

        return {quantity: question(quantity) for quantity in OBSERVABLES}


def question_of(preset: str, quantity: str, job: Job | None) -> Question:
    """Return an estimator's question by name, from the job or, without one, from the preset."""
    return (presets()[preset].questions if job is None else job.questions())[quantity]


def model_of(system: System, dynamics: str, bath: BathSettings) -> Dynamics[Any]:
    def number(value: float | list[float] | torch.Tensor, unit: float) -> nn.Parameter:
        return nn.Parameter(torch.as_tensor(value, dtype=torch.float64) * unit)

    potential, mass, time = system.potential, system.mass, system.time
    if dynamics == "hamiltonian":
        return Hamiltonian(potential, mass)
    kT = number(bath.temperature, system.temperature)
    atoms, dim = system.position.shape
    relaxing = {"nose-hoover": NoseHooverChain, "bussi": Bussi, "berendsen": Berendsen}
    if dynamics in relaxing:
        return relaxing[dynamics](
            potential, mass, kT, number(bath.tau, time), dof=atoms * dim - dim
        )
    if dynamics == "velocity-rescale":
        return VelocityRescale(potential, mass, kT, dof=atoms * dim - dim)
    if dynamics == "andersen":
        return Andersen(potential, mass, kT, bath.friction / time)
    if dynamics == "langevin":
        return Langevin(potential, mass, kT, number(bath.friction, 1 / time))
    if dynamics == "generalised":
        return GeneralizedLangevin(
            potential, mass, kT, number(bath.rates, 1 / time), number(bath.strengths, 1 / time**2)
        )
    common = mass if len(mass.unique()) > 1 else mass.unique()[0]
    return OverdampedLangevin(potential, kT, number(common * bath.friction, 1 / time))


def solver_of(scheme: str, dynamics: str, dt: float, exact: bool) -> SteppingSolver:
    if dynamics != "overdamped":
        return Splitting(scheme, dt, exact=exact)
    if exact:
        raise ValueError(
            "--exact needs invertible steps, and the steps of overdamped have no inverse; choose "
            "another dynamics."
        )
    if scheme not in OVERDAMPED:
        raise ValueError(
            f"scheme '{scheme}' is not for overdamped; choose from {', '.join(OVERDAMPED)}."
        )
    return OVERDAMPED[scheme](dt)


def adjoints_of(requested: list[str] | None, dynamics: str, exact: bool) -> dict[str, Adjoint]:
    unfit = {"reversible": NO_INVERSE, "backsolve": NO_EQUATION}
    applicable = [name for name in ADJOINTS if dynamics not in unfit.get(name, ())]
    if requested:
        names = [name.strip() for entry in requested for name in entry.split(",")]
    else:
        names = [name for name in applicable if not exact or name != "backsolve"]
    for name in names:
        if name not in ADJOINTS:
            raise ValueError(f"unknown adjoint '{name}'; choose from {', '.join(applicable)}.")
        if name not in applicable:
            why = (
                f"needs invertible steps, and the steps of {dynamics} have no inverse"
                if name == "reversible"
                else f"needs a continuous solver, which {dynamics} does not have"
            )
            raise ValueError(f"adjoint '{name}' {why}; choose from {', '.join(applicable)}.")
    chosen = {name: ADJOINTS[name] for name in names}
    if exact and "reversible" in chosen:
        # Without checkpoints and without a tolerance, so that the table shows the full error.
        chosen[PLAIN] = ReversibleAdjoint(checkpoint_every=sys.maxsize, tol=float("inf"))
    return chosen
