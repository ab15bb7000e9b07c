"""The interface of estimators.

An estimator computes how the mean of an observable changes with the parameters of the dynamics.
There are two such means, and an approximation of each. Every estimate is labelled with what
it estimates, the *estimand*:

``"path"``
    the mean over runs from the given starts, for the given time;
``"stationary"``
    the equilibrium mean, which does not depend on a start;
``"shadowing"``
    the long-time mean of a chaotic flow along a shadowing path, which has a bias
    (:class:`~adjsim.Shadowing`);
``"clipped path"``
    the first with clipped cotangents, which has a bias (:class:`~adjsim.Pathwise`).

Replicas are run in chunks. Standard errors come from the spread of independent chunks, so intervals
are Student's t with one degree of freedom fewer than the number of chunks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole, outside_inference_mode
from adjsim.core.durable.manifest import tensor_fingerprint
from adjsim.core.durable.ranks import Ranks
from adjsim.core.noise import Noise, as_generator, seed_from
from adjsim.core.norms import norm
from adjsim.core.parameters import refuse_untrainable
from adjsim.core.rows import pulled_rows
from adjsim.core.state import State
from adjsim.core.typing import Seed
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.memory import PeakMemory
from adjsim.estimators.replicas import Observable, Replicas, Simulation
from adjsim.estimators.sharing import Chunk, Work, describe_computation, same_generator, shared

# Rows of cotangents in one sweep, which keeps as many cotangents of the state.
SWEPT_TOGETHER = 16


@dataclass(frozen=True)
class Request(Generic[State]):
    """The question to an estimator: an observable of replicas in chunks."""

    simulation: Simulation[State]
    observable: Observable[State]
    slices: list[slice]
    generator: torch.Generator | None

    def draw(self) -> Replicas[State]:
        """Draw the starts and the noise of all replicas from the generator."""
        simulation = self.simulation
        starts = simulation.starts(self.slices[-1].stop, self.generator)
        noise = Noise(seed_from(self.generator)) if simulation.dynamics.stochastic else None
        return Replicas(simulation, self.observable, starts, noise)

    @property
    def sizes(self) -> list[int]:
        """The number of replicas of each chunk."""
        return [part.stop - part.start for part in self.slices]


class Estimator(ABC):
    """A way to estimate the gradient of an expectation."""

    estimand: str
    # Whether loops of steps may be compiled.
    compilable: ClassVar[bool] = True

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
        refuse_untrainable(simulation.dynamics)
        ranks, slices = Ranks.of(group), chunk_slices(replicas, chunks)
        source = same_generator(ranks, as_generator(generator))
        self.check(simulation, observable)
        request = Request(simulation, observable, slices, source)
        drawn = self.drawn(request)
        with (
            shared(ranks, store, lambda: self.described(request, drawn), drawn) as work,
            PeakMemory(drawn.device) as memory,
        ):
            begun = time.perf_counter()
            parts = self.chunks(request, drawn, work)
            diagnostics = self.combine(simulation, parts, request.sizes)
            seconds = time.perf_counter() - begun
        costs = ranks.exchange([seconds, memory.bytes])
        value, value_stderr = mean_and_stderr([part.value for part in parts], request.sizes)
        pairs = {
            name: mean_and_stderr([part.grad[name] for part in parts], request.sizes)
            for name in parts[0].grad
        }
        return GradientEstimate(
            value,
            value_stderr,
            {name: grad for name, (grad, _) in pairs.items()},
            {name: stderr for name, (_, stderr) in pairs.items()},
            self.estimand,
            {
                **joined_stats([part.stats for part in parts]),
                "chunks": len(parts),
                "replicas": replicas,
                "ess": float(replicas),
                "seconds": max(cost[0] for cost in costs),
                "peak_memory": max(cost[1] for cost in costs),
                **({} if ranks.size == 1 else {"ranks": ranks.size}),
                "compiled": simulation.compile and self.can_compile(simulation),
                **diagnostics,
            },
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def can_compile(self, simulation: Simulation[State]) -> bool:
        """Return whether the runs can be compiled."""
        return self.compilable and simulation.compiles()

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        """Refuse, before any work, a simulation or an observable that does not apply."""
        return

    def drawn(self, request: Request[State]) -> Replicas[State]:
        """Return the replicas of all chunks, the first of which tests a store."""
        return request.draw()

    def described(self, request: Request[State], drawn: Replicas[State]) -> dict[str, str]:
        """Describe the estimate by everything that its numbers depend on."""
        starts = drawn.start._asdict().items()
        return {
            **describe_computation(self, drawn.simulation, drawn.observable),
            **{f"{name} of the starts": tensor_fingerprint(x) for name, x in starts},
            "the chunks": f"{request.sizes}",
            "the seed": f"{drawn.noise and drawn.noise.seed}",
        }

    @abstractmethod
    def chunks(self, request: Request[State], drawn: Replicas[State], work: Work) -> list[Chunk]:
        """Compute the chunks of all replicas."""

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Complete the chunks with data of all of them, and return additional diagnostics."""
        return {}


class ChunkedEstimator(Estimator):
    """An estimator of which a chunk needs no other. Subclasses implement ``chunk``."""

    def chunks(self, request: Request[State], drawn: Replicas[State], work: Work) -> list[Chunk]:
        return work.chunks(request.slices, lambda part: self.chunk(drawn.part(part)), drawn.device)

    @abstractmethod
    def chunk(self, replicas: Replicas[State]) -> Chunk:
        """Run a group of replicas."""


def joined_stats(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the costs of several runs of one dynamics."""
    errors = [e for stats in runs if (e := stats.get("reconstruction_error")) is not None]
    return {
        "energy_evaluations": sum(stats["energy_evaluations"] for stats in runs),
        "reconstruction_error": max(errors, default=None),
        "pairs": runs[0].get("pairs"),
    }


def jacobian(mean: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the derivative of each entry of the mean by each input, zero for one not used.

    A backward run takes several cotangents in little more time than one.
    """
    if not inputs or not mean.requires_grad or not mean.numel():
        return {name: x.new_zeros((*mean.shape, *x.shape)) for name, x in inputs.items()}
    wanted = list(inputs.values())
    with torch.enable_grad():
        flat = mean.reshape(-1)
    rows = torch.eye(len(flat), dtype=flat.dtype, device=flat.device).split(SWEPT_TOGETHER)
    parts = [pulled_rows([flat], wanted, [part]) for part in rows]
    return {
        name: torch.cat(columns).reshape((*mean.shape, *x.shape))
        for (name, x), *columns in zip(inputs.items(), *parts, strict=True)
    }


def stacked(columns: list[Tensor], value: Tensor, parameter: Tensor) -> Tensor:
    """Join the derivatives with respect to the entries of a parameter."""
    joined = torch.stack(columns, -1) if columns else value.new_zeros(0)
    return joined.reshape((*value.shape, *parameter.shape))


def chunk_slices(replicas: int, chunks: int) -> list[slice]:
    """Divide the replicas into groups as even as possible."""
    replicas = as_whole("replicas", replicas, least=1)
    chunks = min(as_whole("chunks", chunks, least=1), replicas)
    edges = [replicas * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Compute the mean over replicas from chunk means."""
    shares = [size / sum(sizes) for size in sizes]
    return torch.stack([x * share for x, share in zip(values, shares, strict=True)]).sum(0)


def mean_and_stderr(means: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Compute mean and standard error (NaN for one chunk) from chunk means."""
    mean, count, total = weighted_mean(means, sizes), len(means), sum(sizes)
    if count == 1:
        return mean, torch.full_like(mean, float("nan"))
    off = [(x - mean) * (size / total) for x, size in zip(means, sizes, strict=True)]
    return mean, norm(torch.stack(off), 0) * math.sqrt(count / (count - 1))
