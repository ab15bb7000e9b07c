"""States of objects that a store saves, and from which a computation goes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from adjsim.core.durable.store import Nested, Store, StoreError, moved


class Stateful(Protocol):
    """An object whose state a store saves, and from which another object like it goes on.

    A state has named parts: trees (:data:`~adjsim.core.durable.store.Nested`) or :class:`Entries`.
    Nothing writes into a tensor of a state. In a state that is loaded, tensors are on the device of
    the run, and tuples and entries are lists.
    """

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return everything that later steps need of the steps so far."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an object that was made with the same arguments."""


@dataclass(frozen=True)
class Entries:
    """A part of a state that grows at its end alone, of which a save writes the new entries.

    If ``stacked``, an entry is a sequence of tensors, each written with those of other entries.
    """

    values: Sequence[Nested]
    stacked: bool = False


class SavedStates:
    """The states of several objects in a store, of which each save replaces the last.

    The new entries of each save are a file of their own. The part of this name says how many of
    these files count, and is replaced as a whole.
    """

    def __init__(self, store: Store, name: str, objects: Mapping[str, Stateful]) -> None:
        self.store, self.name, self.objects = store, name, objects
        self._files, self._counts = 0, dict[str, int]()

    def save(self, about: Nested) -> None:
        """Save the states of all objects, and what else a run needs to go on."""
        plain: dict[str, Nested] = {}
        new: dict[str, Nested] = {}
        counts: dict[str, int] = {}
        for name, x in self.objects.items():
            state = x.state()
            plain[name] = {key: y for key, y in state.items() if not isinstance(y, Entries)}
            for key, y in state.items():
                if isinstance(y, Entries):
                    label = f"{name}.{key}"
                    counts[label] = len(y.values)
                    new[label] = list(y.values[self._counts.get(label, 0) :])
                    if y.stacked:
                        stacks = [torch.stack(x) for x in zip(*new[label], strict=True)]
                        new[label] = {"stacks": stacks}
        if counts != self._counts:
            self.store.write(self._file(self._files), new)
            self._files, self._counts = self._files + 1, counts
        found = {"files": self._files, "counts": counts, "states": plain, "about": about}
        self.store.write(self.name, found)

    def load(self, device: torch.device) -> Nested:
        """Load the states of the last save, and return what it says besides; None without one."""
        if not self.store.has(self.name):
            return None
        found = moved(self.store.read(self.name), device)
        self._files, self._counts = found["files"], found["counts"]
        files = [moved(self.store.read(self._file(i)), device) for i in range(self._files)]
        for label, count in self._counts.items():
            entries = [x for file in files for x in _unstacked(file[label])]
            if len(entries) != count:
                raise StoreError(
                    f"store '{self.store.folder}' has {len(entries)} of {count} entries of "
                    f"{label}. Remove the folder, and run again."
                )
            name, _, key = label.partition(".")
            found["states"][name][key] = entries
        for name, x in self.objects.items():
            x.load_state(found["states"][name])
        return found["about"]

    def _file(self, number: int) -> str:
        return f"{self.name}-{number:06}"


def _unstacked(found: Nested) -> Sequence[Nested]:
    return list(zip(*found["stacks"], strict=True)) if isinstance(found, dict) else found
