"""The chunks of an estimate, shared among ranks and kept in a store.

The starts and the noise of a chunk do not depend on who runs it, and the chunks are combined in
their own order on every rank. So values, gradients and standard errors are the same bits for any
number of ranks, with and without a store, if every rank has the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.durable.manifest import (
    check_numbers,
    describe_module,
    describe_object,
    versions,
)
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Nested, Store, moved
from adjsim.core.state import select
from adjsim.core.trajectory import TimeAverage
from adjsim.estimators.replicas import Observable, Replicas, Simulation, state_function
from adjsim.estimators.unchanged import Unchanged
from adjsim.simulation.simulate import rates_at_start

P = TypeVar("P")


@dataclass
class Chunk:
    """The results of a group of replicas: mean, gradient, and data to combine."""

    value: Tensor
    grad: dict[str, Tensor]
    stats: dict[str, Any]
    extra: Any = None


@dataclass(frozen=True)
class Work:
    """The ranks that share the parts of an estimate, and the store (or None) that keeps them."""

    ranks: Ranks
    unchanged: Unchanged
    store: Store | None = None

    def chunks(
        self, parts: Sequence[P], compute: Callable[[P], Chunk], device: torch.device
    ) -> list[Chunk]:
        """Compute the chunk of each part, on one rank unless it is stored, and return all."""
        store, count = self.store, len(parts)

        def tree(i: int) -> Nested:
            return list(vars(compute(parts[i])).values())

        if store is None:
            found = self.shared(count, tree)
        else:
            names = [f"chunk-{i:05}" for i in range(count)]
            numbers = self._taken(store, names)
            found = self.ranks.collect(count, numbers, lambda i: self.stored(names[i], tree, i))
        return [Chunk(*moved(tree, device)) for tree in found]

    def shared(self, count: int, compute: Callable[[int], Nested]) -> list[Nested]:
        """Compute trees that are not stored, each on one rank, and return all of them."""
        return self.ranks.share(count, partial(self._checked, compute))

    def stored(self, name: str, compute: Callable[[int], Nested], i: int) -> Nested:
        """Read a part of the store, or compute and write it; without a store compute it."""
        if self.store is None:
            return self._checked(compute, i)
        if not self.store.has(name):
            self.store.write(name, self._checked(compute, i))
        return self.store.read(name)

    def _checked(self, compute: Callable[[int], Nested], i: int) -> Nested:
        found = compute(i)
        self.unchanged.check()
        return found

    def _taken(self, store: Store, names: list[str]) -> Iterator[int]:
        """List the numbers of this rank: its share of the stored parts, and those it claims."""
        done = self.ranks.exchange([i for i, name in enumerate(names) if store.has(name)])[0]
        yield from done[self.ranks.rank :: self.ranks.size]
        for i in sorted(set(range(len(names))) - set(done)):
            if store.claim(names[i]):
                yield i


@contextmanager
def shared(
    ranks: Ranks,
    store: str | Path | None,
    describe: Callable[[], dict[str, str]],
    replicas: Replicas[Any],
) -> Generator[Work, None, None]:
    """Check that all ranks compute the same, and hold the store while they do.

    The first replica tests whether numbers are those of the store.
    """
    simulation = replicas.simulation
    work = Work(ranks, Unchanged(simulation.dynamics))
    about = {} if ranks.size == 1 and store is None else describe()
    ranks.agree(about)
    if store is None:
        yield work
        return
    begin = float(simulation.ts[0])
    one = select(replicas.start, slice(0, 1))
    measure = partial(rates_at_start, simulation.dynamics, one, begin, replicas.function)
    line = f"interrupted. Run it again with store='{store}' to go on." if ranks.first else ""
    with ending_at_once(line), ExitStack() as stack:

        def hold(_: int) -> str:
            kept = Store(store)
            stack.enter_context(kept.held(about))
            check_numbers(kept, measure)
            kept.release()
            stack.callback(kept.release)
            return f"{kept.folder}"

        # The other ranks wait for the first one, and raise its error.
        (folder,) = ranks.collect(1, (0,) if ranks.first else (), hold)
        yield replace(work, store=Store(folder))


def same_generator(ranks: Ranks, generator: torch.Generator | None) -> torch.Generator | None:
    """Give the generator of all ranks (None: torch's default one) the state of the first rank's."""
    if ranks.size > 1:
        source = torch.default_generator if generator is None else generator
        source.set_state(ranks.exchange(source.get_state())[0])
    return generator


def describe_computation(
    estimator: Any, simulation: Simulation[Any], observable: Observable[Any]
) -> dict[str, str]:
    """Describe an estimate by all that its numbers depend on, but starts, chunks and seed."""
    settings = {name: x for name, x in vars(estimator).items() if not name.startswith("_")}
    function: Any = state_function(observable) or observable
    average = f" {observable.steps}" if isinstance(observable, TimeAverage) else ""
    return {
        "the computation": "an estimate",
        **versions(),
        **describe_module(simulation.dynamics, function),
        "the estimator": type(estimator).__name__,
        **{f"{name} of the estimator": describe_object(x, name) for name, x in settings.items()},
        "the observable": f"{type(observable).__name__}{average}",
        "the solver": describe_object(simulation.solver, "the solver"),
        "ts": describe_object(simulation.ts, "ts"),
        "compile": f"{simulation.compile}",
    }
