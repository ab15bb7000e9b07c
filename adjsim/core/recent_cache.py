"""A cache, and the check that a potential leaves its argument as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

V = TypeVar("V")


class RecentCache(Generic[V]):
    """A thread-safe cache of the most recently used values."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Each value with the number of its last use.
        self._values: dict[Hashable, list[Any]] = {}
        self._uses = itertools.count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        """Return the value, or None."""
        with self._lock:
            # One look-up, since a long key takes long to hash and to compare.
            found = self._values.get(key)
            if found is None:
                return None
            found[1] = next(self._uses)
            return found[0]

    def put(self, key: Hashable, value: V) -> None:
        """Store a value, and remove the least recently used one if there are too many."""
        with self._lock:
            self._values[key] = [value, next(self._uses)]
            while len(self._values) > self.capacity:
                del self._values[min(self._values, key=lambda key: self._values[key][1])]

    def drop(self, chosen: Callable[[Any], bool]) -> list[V]:
        """Remove the values whose keys are chosen, and return them."""
        with self._lock:
            return [self._values.pop(key)[0] for key in list(self._values) if chosen(key)]


def version_of(x: Tensor) -> int:
    """Return how often torch has counted a write to a tensor."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def refuse_written(potential: nn.Module, position: Tensor, version: int) -> None:
    """Refuse a potential that has written into its argument since it had this version."""
    if version_of(position) != version:
        raise ValueError(
            f"{type(potential).__name__} writes into the position that it is given, which would "
            "change the state of the run (an assignment to a slice, or an operation such as "
            "add_). Work on position.clone(), or avoid operations in place."
        )
