"""The interface of estimators.

An estimator computes how the mean of an observable changes with the parameters of the dynamics.
There are two such means, and an approximation of the second. Every estimate is labelled with what
it estimates, the *estimand*:

``"path"``
    the mean over runs from the given starts, for the given time;
``"stationary"``
    the equilibrium mean, which does not depend on a start;
``"shadowing"``
    the long-time mean of a chaotic flow along a shadowing path, which has a bias
    (:class:`~adjsim.Shadowing`).

Replicas are run in chunks. Standard errors come from the spread of independent chunks, so intervals
are Student's t with one degree of freedom fewer than the number of chunks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint
from adjsim.core.arguments import outside_inference_mode
from adjsim.core.durable.ranks import Ranks
from adjsim.core.noise import Noise, as_generator, seed_from
from adjsim.core.parameters import refuse_untrainable
from adjsim.core.state import AnyState, State, as_state, select
from adjsim.core.trajectory import Final, TimeAverage, Trajectory
from adjsim.core.typing import Seed, Times
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.memory import PeakMemory
from adjsim.estimators.sharing import (
    Chunk,
    Work,
    costs_of,
    describe_estimate,
    measured,
    same_generator,
    shared,
)
from adjsim.estimators.unchanged import Unchanged
from adjsim.simulation.simulate import Solver, run
from adjsim.solvers.base import SteppingSolver

Observable = TimeAverage | Final | Callable[[Trajectory[State]], Tensor]
Initial = Callable[[int, torch.Generator | None], State]


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

    @property
    def duration(self) -> float:
        """The time from the start to the last save time."""
        return float(self.ts[-1] - self.ts[0])


class Estimator(ABC):
    """A way to estimate the gradient of an expectation."""

    estimand: ClassVar[str]

    @abstractmethod
    def __call__(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        *,
        replicas: int,
        chunks: int = 16,
        generator: Seed = None,
        store: str | Path | None = None,
        group: Any = None,
    ) -> GradientEstimate:
        """Estimate the mean of the observable and its gradient.

        Args:
            simulation: the simulation to run.
            observable: ``TimeAverage(fn)`` or ``Final(fn)``, where fn maps the state to a
                tensor ``(replicas, ...)``; or a function that maps the :class:`Trajectory` to
                such a tensor.
            replicas: number of independent runs.
            chunks: number of groups, as even as possible, in which the replicas run. Their spread
                gives the standard errors. The noise of a replica does not depend on the chunks.
            generator: seeds starts and noise, as a generator or an integer; None: torch's
                default generator.
            store: a folder that keeps finished chunks. Called again with the same arguments, also
                by other processes or another number of them, the estimate reads these and computes
                the rest.
            group: the process group of ``torch.distributed`` whose ranks share the chunks; None:
                the default group, which is made where ``torchrun`` has started the process. Every
                rank has the result. Its bits do not depend on the number of ranks, if every rank
                has the same number of threads.
        """

    def can_compile(self, simulation: Simulation[State]) -> bool:
        """Return whether the runs can be compiled."""
        solver = simulation.solver
        return (
            isinstance(solver, SteppingSolver)
            and solver.supports_compiling(simulation.dynamics) is None
        )

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        """Refuse, before any work, a simulation or an observable that does not apply."""
        return

    def finish(
        self, parts: list[Chunk], sizes: list[int], diagnostics: dict[str, Any]
    ) -> GradientEstimate:
        """Combine the chunks into the estimate."""
        value, value_stderr = mean_and_stderr([part.value for part in parts], sizes)
        pairs = {
            name: mean_and_stderr([part.grad[name] for part in parts], sizes)
            for name in parts[0].grad
        }
        errors = [e for part in parts if (e := part.stats.get("reconstruction_error")) is not None]
        return GradientEstimate(
            value,
            value_stderr,
            {name: pair[0] for name, pair in pairs.items()},
            {name: pair[1] for name, pair in pairs.items()},
            self.estimand,
            {
                "energy_evaluations": sum(part.stats["energy_evaluations"] for part in parts),
                "reconstruction_error": max(errors) if errors else None,
                "pairs": parts[0].stats.get("pairs"),
                "chunks": len(parts),
                "replicas": sum(sizes),
                "ess": float(sum(sizes)),
                **diagnostics,
            },
        )


class ChunkedEstimator(Estimator):
    """An estimator that runs its replicas chunk by chunk. Subclasses implement ``chunk``."""

    @outside_inference_mode()
    def __call__(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        *,
        replicas: int,
        chunks: int = 16,
        generator: Seed = None,
        store: str | Path | None = None,
        group: Any = None,
    ) -> GradientEstimate:
        refuse_untrainable(simulation.dynamics)
        ranks = Ranks.of(group)
        slices = chunk_slices(replicas, chunks)
        generator = same_generator(ranks, as_generator(generator))
        self.check(simulation, observable)
        starts = simulation.starts(replicas, generator)
        seed = seed_from(generator) if simulation.dynamics.stochastic else None

        def describe() -> dict[str, str]:
            return describe_estimate(self, simulation, observable, starts, slices, seed)

        measure = measured(simulation, observable, starts)
        with (
            shared(ranks, store, describe, measure, Unchanged(simulation.dynamics)) as work,
            PeakMemory(starts[0].device) as memory,
        ):
            begun = time.perf_counter()
            parts = self.run_chunks(simulation, observable, starts, slices, seed, work)
            sizes = [part.stop - part.start for part in slices]
            diagnostics = self.combine(simulation, parts, sizes)
            seconds = time.perf_counter() - begun
        compiled = simulation.compile and self.can_compile(simulation)
        costs = costs_of(ranks, seconds, memory.bytes)
        return self.finish(parts, sizes, {**costs, "compiled": compiled, **diagnostics})

    def run_chunks(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        starts: State,
        slices: list[slice],
        seed: int | None,
        work: Work,
    ) -> list[Chunk]:
        """Run all replicas, chunk by chunk."""

        def chunk(i: int) -> Chunk:
            noise = None if seed is None else Noise(seed, slices[i].start)
            return self.chunk(simulation, observable, select(starts, slices[i]), noise)

        return work.chunks(len(slices), chunk, starts[0].device)

    @abstractmethod
    def chunk(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        start: State,
        noise: Noise | None,
    ) -> Chunk:
        """Run a group of replicas."""

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Complete the chunks with data of all of them, and return additional diagnostics."""
        return {}


def observe(
    simulation: Simulation[State],
    observable: Observable[State],
    start: State,
    adjoint: Adjoint,
    noise: Noise | None,
) -> tuple[Tensor, Trajectory[State]]:
    """Run replicas, and return the observable ``(replicas, ...)`` and the trajectory."""
    record = observable if isinstance(observable, TimeAverage) else None
    trajectory = run(
        simulation.dynamics,
        start,
        simulation.ts,
        simulation.solver,
        adjoint,
        record,
        noise,
        compile=simulation.compile,
    )
    return checked(evaluate(observable, trajectory), start), trajectory


def evaluate(observable: Observable[State], trajectory: Trajectory[State]) -> Tensor:
    """Evaluate an observable on a trajectory, or return the time average that it recorded."""
    if isinstance(observable, TimeAverage):
        assert trajectory.record is not None
        return trajectory.record
    if isinstance(observable, Final):
        return observable.function(trajectory.final)
    return observable(trajectory)


def checked(values: Tensor, start: AnyState) -> Tensor:
    count = start[0].shape[0]
    if values.shape[:1] != (count,):
        raise ValueError(
            f"the observable has shape {tuple(values.shape)}, for a chunk of {count} replicas; its "
            f"leading axis must be the replicas: ({count}, ...). Reduce over atoms and coordinates "
            "by their axes, such as mean((-1, -2)), and never over replicas."
        )
    return values


def jacobian(mean: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the derivative of each entry of the mean with respect to each input.

    It is zero where the mean does not depend on the input.
    """
    if not inputs or not mean.requires_grad:
        return {name: x.new_zeros((*mean.shape, *x.shape)) for name, x in inputs.items()}
    wanted = list(inputs.values())
    rows: list[list[Tensor]] = []
    with torch.enable_grad():
        entries = mean.reshape(-1).unbind()
    for i, entry in enumerate(entries):
        found = torch.autograd.grad(
            entry, wanted, retain_graph=i + 1 < len(entries), allow_unused=True
        )
        rows.append(
            [
                torch.zeros_like(x) if g is None else g.detach()
                for g, x in zip(found, wanted, strict=True)
            ]
        )
    columns = zip(*rows, strict=True)
    return {
        name: torch.stack(column).reshape((*mean.shape, *x.shape))
        for (name, x), column in zip(inputs.items(), columns, strict=True)
    }


def stacked(columns: list[Tensor], value: Tensor, parameter: Tensor) -> Tensor:
    """Join the derivatives with respect to the entries of a parameter."""
    if not columns:
        return value.new_zeros((*value.shape, *parameter.shape))
    return torch.stack(columns, -1).reshape((*value.shape, *parameter.shape))


def chunk_slices(replicas: int, chunks: int) -> list[slice]:
    """Divide the replicas into groups as even as possible."""
    if replicas < 1 or chunks < 1:
        raise ValueError(f"replicas and chunks must be at least 1; got {replicas} and {chunks}.")
    chunks = min(chunks, replicas)
    edges = [replicas * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Compute the mean over replicas from chunk means."""
    total = sum(sizes)
    return torch.stack(
        [value * (size / total) for value, size in zip(values, sizes, strict=True)]
    ).sum(0)


def mean_and_stderr(means: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Compute mean and standard error from chunk means.

    The error is NaN for one chunk.
    """
    mean, count, total = weighted_mean(means, sizes), len(means), sum(sizes)
    if count == 1:
        return mean, torch.full_like(mean, float("nan"))
    squares = [
        ((value - mean) * (size / total)) ** 2 for value, size in zip(means, sizes, strict=True)
    ]
    return mean, (torch.stack(squares).sum(0) * count / (count - 1)).sqrt()
