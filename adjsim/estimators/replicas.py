"""A simulation for any number of replicas, and the replicas that observe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.noise import Noise, as_generator
from adjsim.core.reading import Reading
from adjsim.core.state import AnyState, State, as_state, select
from adjsim.core.trajectory import (
    Final,
    TimeAverage,
    Trajectory,
    averaged_steps,
    check_times,
    step_numbers,
)
from adjsim.core.typing import Seed, Times
from adjsim.dynamics.base import Dynamics
from adjsim.simulation.simulate import Solver, run
from adjsim.solvers.base import SteppingSolver

Observable = TimeAverage | Final | Callable[[Trajectory[State]], Tensor]
Initial = Callable[[int, torch.Generator | None], State]
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class Steps(NamedTuple):
    """The steps of fixed size of a simulation."""

    begin: float
    dt: float
    last: int

    def time(self, number: int) -> float:
        return self.begin + number * self.dt

    def averaged(self, burn_in: float, every: int = 1) -> range:
        """List the steps whose ends enter a time average."""
        return averaged_steps(burn_in, self.dt, self.last, every)


@dataclass(frozen=True)
class Simulation(Generic[State]):
    """A simulation that can be run for any number of replicas.

    Args:
        dynamics: the physics; gradients are with respect to its named parameters.
        initial: ``initial(replicas, generator) -> state``, whose leading axis is the replicas. It
            is called without gradients: every estimator holds the starts fixed.
        ts: save times.
        solver: how the equations are integrated.
        compile: run in compiled loops of steps (see :func:`~adjsim.simulate`), for solvers of
            steps of a fixed size. Girsanov and ForwardSensitivity run every step in Python
            and are not compiled. Chunks of equal size share one compilation.
    """

    dynamics: Dynamics[State]
    initial: Initial[State]
    ts: Times
    solver: Solver
    compile: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.compile and not isinstance(self.solver, SteppingSolver):
            raise TypeError(
                "compile=True is for solvers of fixed steps, such as Splitting; not for "
                f"{self.solver!r}."
            )

    def starts(self, replicas: int, generator: Seed) -> State:
        """Make and check the starts of all replicas."""
        with torch.no_grad():
            state = as_state(self.initial(replicas, as_generator(generator)))
        self.dynamics.check(state)
        shape, batch = state[0].shape, self.dynamics.batch_shape(state)
        if batch[:1] != (replicas,):
            system = ("n",) if self.dynamics.system_axes == 1 else ("atoms", "dim")
            raise ValueError(
                f"initial({replicas}, generator) returned {state._fields[0]} of shape "
                f"{tuple(shape)}; the leading axis must be the {replicas} replicas: "
                f"({', '.join((str(replicas), *system))})."
            )
        return state

    def probes(self, replicas: int) -> State:
        """Make starts for tests before any work, always the same."""
        return self.starts(replicas, torch.Generator().manual_seed(0))

    @property
    def duration(self) -> float:
        """The time from the start to the last save time."""
        return float(self.ts[-1] - self.ts[0])

    def steps(self, what: str) -> Steps:
        """Return the steps, of which ``what`` reads the size, or refuse another solver."""
        if not isinstance(self.solver, SteppingSolver):
            raise TypeError(
                f"{what} needs a solver of a fixed step, not {type(self.solver).__name__}."
            )
        times, dt = check_times(self.ts), self.solver.dt
        return Steps(float(times[0]), dt, step_numbers(times, dt)[-1])

    def compiles(self, *, undone: bool = False) -> bool:
        """Return whether its steps can be compiled, and be undone in compiled loops."""
        solver = self.solver
        return (
            isinstance(solver, SteppingSolver)
            and solver.supports_compiling(self.dynamics, undone=undone) is None
        )

    def refuse_captured_force(self, estimator: str) -> None:
        """Refuse dynamics whose force reads a parameter other than from its module."""
        reading = Reading(self.dynamics)
        with torch.enable_grad():
            copy = reading.bound([x.detach() for x in reading.tensors])
            rates = copy.drift(check_times(self.ts)[0], self.probes(1))
        if any(rate.requires_grad for rate in rates):
            raise ValueError(
                f"{estimator}: the force reads a parameter from a list or as a captured variable "
                "instead of from its module, so no other value can be passed to it. Read it as an "
                "attribute of the module, or in an nn.ParameterList, or use Pathwise."
            )


@dataclass(frozen=True)
class Replicas(Generic[State]):
    """Independent runs of a simulation, from these starts and on this noise."""

    simulation: Simulation[State]
    observable: Observable[State]
    start: State
    noise: Noise | None = None

    def part(self, part: slice) -> Replicas[State]:
        """Return some of the replicas. Their noise keeps numbers, so make them when they run."""
        # Noise numbers systems, of which a replica with further batch axes has several.
        systems = self.simulation.dynamics.batch_shape(self.start)[1:].numel()
        noise = self.noise and Noise(self.noise.seed, self.noise.first + part.start * systems)
        return replace(self, start=select(self.start, part), noise=noise)

    @property
    def device(self) -> torch.device:
        return self.start[0].device

    @property
    def average(self) -> TimeAverage | None:
        """The observable, if it is a time average."""
        return self.observable if isinstance(self.observable, TimeAverage) else None

    @property
    def function(self) -> Callable[[Any], Tensor] | None:
        return state_function(self.observable)

    def at(self, values: Mapping[str, Tensor]) -> Replicas[State]:
        """Return the same runs at other values of parameters, by name."""
        dynamics, bound = substituted(self.simulation.dynamics, values)
        observable = self.observable
        if isinstance(observable, Final):
            observable = Final(bound(observable.function))
        elif self.average is None:
            observable = bound(observable)
        # A run gives the values to the function of a time average.
        simulation = replace(self.simulation, dynamics=dynamics)
        return replace(self, simulation=simulation, observable=observable)

    def run(
        self, adjoint: Adjoint, record: TimeAverage | None = None, ts: Times | None = None
    ) -> Trajectory[State]:
        """Run to the save times of the simulation, or to others."""
        this = self.simulation
        return run(
            this.dynamics,
            self.start,
            this.ts if ts is None else ts,
            this.solver,
            adjoint,
            record,
            self.noise,
            compile=this.compile,
        )

    def span(
        self, state: State, first: int, stop: int, adjoint: Adjoint, record: TimeAverage | None
    ) -> Trajectory[State]:
        """Run the steps from number ``first`` to ``stop``, from this state."""
        steps = self.simulation.steps("a part of a run")
        noise = self.noise and Noise(self.noise.seed, self.noise.first, first)
        part = replace(self, start=state, noise=noise)
        return part.run(adjoint, record, [steps.time(first), steps.time(stop)])

    def observe(self, adjoint: Adjoint) -> tuple[Tensor, Trajectory[State]]:
        """Run, and return the observable ``(replicas, ...)`` and the trajectory."""
        trajectory = self.run(adjoint, self.average)
        return self.evaluate(trajectory), trajectory

    def mean_at(self, values: Mapping[str, Tensor], costs: list[dict[str, Any]]) -> Tensor:
        """Compute the mean at other values of parameters, and append the cost of its runs."""
        seen, trajectory = self.at(values).observe(DirectAdjoint())
        costs.append(trajectory.stats)
        return seen.mean(0)

    def evaluate(self, trajectory: Trajectory[State]) -> Tensor:
        """Evaluate the observable, or return the time average that the run recorded."""
        observable = self.observable
        if isinstance(observable, TimeAverage):
            assert trajectory.record is not None
            return checked(trajectory.record, self.start)
        if isinstance(observable, Final):
            return checked(observable.function(trajectory.final), self.start)
        return checked(observable(trajectory), self.start)


def substituted(module: M, values: Mapping[str, Tensor]) -> tuple[M, Callable[[Any], Any]]:
    """Copy a module with other values of parameters, by any of their names.

    The second result makes a function read these values where it names the module itself.
    """
    reading = Reading(module)
    tensors = [values.get(name, x) for name, x in zip(reading.names, reading.tensors, strict=True)]
    copy = reading.bound(tensors)
    return copy, partial(reading.on, copy, tensors)


def with_values(module: M, values: Mapping[str, Tensor], function: Callable[[M], T]) -> T:
    """Evaluate a function of a copy of a module whose parameters have other values, by name."""
    copy, bound = substituted(module, values)
    return bound(function)(copy)


def state_function(observable: Observable[Any]) -> Callable[[Any], Tensor] | None:
    """Return the function of the state that is observed; None for one of the trajectory."""
    return observable.function if isinstance(observable, TimeAverage | Final) else None


def checked(values: Tensor, start: AnyState) -> Tensor:
    """Refuse values of an observable that are complex or empty, or lack the axis of the states."""
    count = start[0].shape[0]
    if values.is_complex():
        # A row of cotangents would give the derivative of its real part alone.
        raise TypeError(
            f"the observable is complex ({values.dtype}). Return torch.view_as_real of it, whose "
            "last axis has the real and the imaginary part."
        )
    if values.shape[:1] != (count,):
        raise ValueError(
            f"the observable has shape {tuple(values.shape)}, for states of {count} replicas or "
            f"frames; its leading axis must be theirs: ({count}, ...). Reduce over atoms and "
            "coordinates by their axes, such as mean((-1, -2)), and never over replicas."
        )
    if values.numel() == 0:
        raise ValueError(f"the observable has no entries; its shape is {tuple(values.shape)}.")
    return values
