"""Records of a run whose number of steps is not known, in bounded memory."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """An observer that keeps a record of every so many steps.

    When there are too many, every second one is dropped, and the distance of later ones doubles.

    Args:
        most: the largest number of records.
        every: the distance of the records at first, in steps.
        record: returns what is kept of a step.
    """

    def __init__(self, most: int, every: int, record: Callable[[Any], T]) -> None:
        self.most, self.every, self.count, self.record = most, every, 0, record
        self.kept: list[T] = []

    def __call__(self, state: Any) -> None:
        if self.count % self.every == 0:
            self.kept.append(self.record(state))
            if len(self.kept) > self.most:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1
