"""How the chunks of an estimate are shared among ranks, and kept in a store.

A chunk is the unit of work. Its starts and its noise do not depend on who runs it, and the chunks
are combined in their own order on every rank. So values, gradients and standard errors are the same
bits for any number of ranks, with and without a store, if every rank has the same number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.durable.manifest import (
    Measure,
    check_numbers,
    describe_function,
    describe_module,
    describe_object,
    tensor_fingerprint,
    versions,
)
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Nested, Store, moved
from adjsim.core.state import AnyState, select
from adjsim.core.trajectory import Final, TimeAverage
from adjsim.estimators.unchanged import Unchanged
from adjsim.simulation.simulate import rates_at_start

T = TypeVar("T")


@dataclass
class Chunk:
    """The results of a group of replicas: mean, gradient, and data to combine."""

    value: Tensor
    grad: dict[str, Tensor]
    stats: dict[str, Any]
    extra: Any = None


@dataclass(frozen=True)
class Work:
    """The ranks that share the chunks of an estimate, and the store that keeps them.

    Attributes:
        ranks: the ranks.
        unchanged: checks, after each part, that the dynamics have not changed.
        store: the store; None: chunks are not kept.
    """

    ranks: Ranks
    unchanged: Unchanged
    store: Store | None = None

    def chunks(
        self, count: int, compute: Callable[[int], Chunk], device: torch.device
    ) -> list[Chunk]:
        """Compute chunks, each on one rank unless it is stored, and return all of them."""
        if self.ranks.size == 1 and self.store is None:
            return [self._checked(compute, i) for i in range(count)]

        def tree(i: int) -> Nested:
            chunk = compute(i)
            stats = {key: x for key, x in chunk.stats.items() if _is_plain(x)}
            return [chunk.value, chunk.grad, stats, chunk.extra]

        found = self.trees("chunk", count, tree)
        return [Chunk(*moved(tree, device)) for tree in found]

    def trees(self, what: str, count: int, compute: Callable[[int], Nested]) -> list[Nested]:
        """Compute trees, each on one rank unless it is stored, and return all of them."""
        store = self.store
        if store is None:
            return self.ranks.share(count, partial(self._checked, compute))

        def stored(i: int) -> Nested:
            return self.stored(f"{what}-{i:05}", compute, i)

        return self.ranks.collect(count, self._taken(store, what, count), stored)

    def stored(self, name: str, compute: Callable[[int], Nested], i: int) -> Nested:
        """Read a part of the store, or compute and write it; without a store compute it."""
        if self.store is None:
            return self._checked(compute, i)
        if not self.store.has(name):
            self.store.write(name, self._checked(compute, i))
        return self.store.read(name)

    def _checked(self, compute: Callable[[int], T], i: int) -> T:
        found = compute(i)
        self.unchanged.check()
        return found

    def _taken(self, store: Store, what: str, count: int) -> Iterator[int]:
        """List the numbers of this rank: its share of what is stored, and what it claims."""
        names = [f"{what}-{i:05}" for i in range(count)]
        finished = [i for i in range(count) if store.has(names[i])]
        done = self.ranks.exchange(finished)[0]
        yield from done[self.ranks.rank :: self.ranks.size]
        for i in sorted(set(range(count)) - set(done)):
            if store.claim(names[i]):
                yield i


@contextmanager
def shared(
    ranks: Ranks,
    store: str | Path | None,
    describe: Callable[[], dict[str, str]],
    measure: Measure,
    unchanged: Unchanged,
) -> Generator[Work, None, None]:
    """Check that all ranks compute the same, and hold the store while they do.

    Args:
        ranks: the ranks.
        store: the folder of the store, or None.
        describe: describes the computation.
        measure: evaluates the computation at a start.
        unchanged: checks that the dynamics have not changed.

    Raises:
        RankError: the ranks compute different things.
        StoreError: the store cannot be used, on all ranks.
    """
    if ranks.size == 1 and store is None:
        yield Work(ranks, unchanged)
        return
    about = describe()
    ranks.agree(about)
    if store is None:
        yield Work(ranks, unchanged)
        return
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
        yield Work(ranks, unchanged, Store(folder))


def same_generator(ranks: Ranks, generator: torch.Generator | None) -> torch.Generator | None:
    """Give the generator of all ranks the state of that of the first rank.

    None stands for torch's default generator.
    """
    if ranks.size > 1:
        source = torch.default_generator if generator is None else generator
        source.set_state(ranks.exchange(source.get_state())[0])
    return generator


def describe_estimate(
    estimator: Any,
    simulation: Any,
    observable: Any,
    starts: AnyState | None,
    slices: list[slice],
    seed: int | None,
) -> dict[str, str]:
    """Describe an estimate by everything that its numbers depend on.

    Without ``starts`` the function that makes them is described, as far as it can be inspected.

    Raises:
        StoreError: a part of it cannot be inspected.
    """
    function = observable
    if isinstance(observable, TimeAverage | Final):
        function = observable.function
    settings = {name: x for name, x in vars(estimator).items() if not name.startswith("_")}
    burn_in = f" after {observable.burn_in}" if isinstance(observable, TimeAverage) else ""
    return {
        "the computation": "an estimate",
        **versions(),
        **describe_module(simulation.dynamics, function),
        **_describe_starts(simulation, starts),
        "the estimator": type(estimator).__name__,
        **{f"{name} of the estimator": describe_object(x, name) for name, x in settings.items()},
        "the observable": f"{type(observable).__name__}{burn_in}",
        "the solver": describe_object(simulation.solver, "the solver"),
        "ts": describe_object(simulation.ts, "ts"),
        "the chunks": f"{[part.stop - part.start for part in slices]}",
        "the seed": f"{seed}",
        "compile": f"{simulation.compile}",
    }


def _describe_starts(simulation: Any, starts: AnyState | None) -> dict[str, str]:
    if starts is None:
        return {"the starts": describe_function(simulation.initial, "the starts")}
    return {f"{name} of the starts": tensor_fingerprint(x) for name, x in starts._asdict().items()}


def measured(simulation: Any, observable: Any, start: AnyState) -> Measure:
    """Return what evaluates a simulation, and an observable of states, at one of its starts."""
    state_function = isinstance(observable, TimeAverage | Final)
    return partial(
        rates_at_start,
        simulation.dynamics,
        select(start, slice(0, 1)),
        float(simulation.ts[0]),
        observable.function if state_function else None,
    )


@contextmanager
def unadvanced(generator: torch.Generator | None) -> Generator[None, None, None]:
    """Restore the state of a generator at the end; None stands for torch's default generator."""
    source = torch.default_generator if generator is None else generator
    state = source.get_state()
    try:
        yield
    finally:
        source.set_state(state)


def costs_of(ranks: Ranks, seconds: float, peak_memory: int) -> dict[str, Any]:
    """Return the largest time and memory of all ranks, and the number of ranks if several."""
    found = ranks.exchange([seconds, peak_memory])
    costs: dict[str, Any] = {
        "seconds": max(cost[0] for cost in found),
        "peak_memory": max(cost[1] for cost in found),
    }
    return costs if ranks.size == 1 else {**costs, "ranks": ranks.size}


def _is_plain(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(_is_plain, x.values()))
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, bool | int | float | str | Tensor)
