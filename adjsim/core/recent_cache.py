"""A cache of the most recently used values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

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
