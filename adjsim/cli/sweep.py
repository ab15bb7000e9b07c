"""The methods of a comparison, run over several horizons or numbers of replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from adjsim.cli.process import ProcessDied, run_in_process
from adjsim.core.durable.ranks import Ranks
from adjsim.core.progress import progress_bar
from adjsim.estimators import Estimator, Simulation
from adjsim.estimators.compare import Comparison, compare
from adjsim.estimators.replicas import Observable


@dataclass
class Sweep:
    """Horizons and numbers of replicas; the one with several values is the x-axis of the figure."""

    horizons: list[float]
    replicas: list[int]

    @property
    def axis(self) -> str:
        return "replicas" if len(self.replicas) > 1 else "horizon"

    def points(self) -> dict[float, tuple[float, int]]:
        """Return horizon and number of replicas, by the value on the axis."""
        return {
            count if self.axis == "replicas" else horizon: (horizon, count)
            for horizon, count in product(self.horizons, self.replicas)
        }


@dataclass(frozen=True)
class Question:
    """A simulation and an observable, as functions of the horizon.

    ``unit`` is that of the observable, where it is not one of the system's own units.
    """

    title: str
    simulation: Callable[[float], Simulation[Any]]
    observable: Callable[[float], Observable[Any]]
    unit: str = ""


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

    @property
    def compiles(self) -> bool:
        """Whether the runs are compiled."""
        return self.compile and self.make().can_compile(self.question().simulation(self.step))

    def __call__(
        self, horizon: float, replicas: int, store: Path | None = None, ranks: Ranks | None = None
    ) -> Comparison:
        """Compute value, gradient and cost after a warm-up, which keeps one-off work out of it."""
        question = self.question()

        def estimate(horizon: float, replicas: int, store: Path | None) -> Comparison:
            return compare(
                question.simulation(horizon),
                question.observable(horizon),
                {self.name: self.make()},
                replicas=replicas,
                generator=torch.Generator().manual_seed(self.seed),
                compile=self.compile,
                store=store,
                group=ranks,
            )

        # The warm-up is one step of two replicas. A compiled method warms up with the whole run, so
        # the memory that its compiled loops keep does not count as growth.
        estimate(*((horizon, replicas) if self.compiles else (self.step, 2)), None)
        return estimate(horizon, replicas, store)


def run_sweep(
    methods: list[Method], sweep: Sweep, reference: str | None, store: Path | None
) -> dict[float, Comparison]:
    """Compare the methods at each point of the sweep, each in a process of its own.

    Of several ranks, each runs its share of the chunks of all methods instead.
    """
    points, ranks, results = sweep.points(), Ranks.of(), {}
    with progress_bar() as progress:
        task = progress.add_task("comparing", total=len(points) * len(methods), doing="")
        for x, (horizon, replicas) in points.items():
            result = results[x] = Comparison({}, reference=reference)
            for method in methods:
                progress.update(task, doing=f"{method.name}, {sweep.axis} {x:g}")
                folder = None if store is None else store / f"{sweep.axis}-{x:g}"
                try:
                    part = (
                        run_in_process(method, horizon, replicas, folder)
                        if ranks.size == 1
                        else method(horizon, replicas, folder, ranks)
                    )
                except ProcessDied as died:
                    part = Comparison({}, {method.name: str(died)})
                result.estimates |= part.estimates
                result.failures |= part.failures
                progress.advance(task)
    return results
