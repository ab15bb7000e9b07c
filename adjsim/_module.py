"""The tensors of a module, and runs with other tensors in their place.

A run reads the parameters and buffers of its dynamics when it starts. From then on (forward,
recomputation, backward) it runs the dynamics with copies of these tensors. So a later change of the
module (an optimiser's step, the end of a ``functional_call``, another thread) does not change the
run. The copies are put into the module while it runs, so one thread at a time may run it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# One lock for each module that has run. The table has a lock of its own; an entry is removed with
# its module.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_locks_lock = Lock()


V = TypeVar("V")


@dataclass
class _Used(Generic[V]):
    """A value of a cache, and the number of its last use."""

    value: V
    last_use: int


class ModuleCache(Generic[V]):
    """A thread-safe cache by module and key of the most recently used values.

    Args:
        capacity: number of values kept for one module.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values: WeakKeyDictionary[nn.Module, dict[Hashable, _Used[V]]] = WeakKeyDictionary()
        self._uses = itertools.count()
        self._lock = Lock()

    def get(self, module: nn.Module, key: Hashable) -> V | None:
        """Return the value, or None."""
        with self._lock:
            # One look-up, since a long key takes long to hash and to compare.
            found = self._values.get(module, {}).get(key)
            if found is None:
                return None
            found.last_use = next(self._uses)
            return found.value

    def put(self, module: nn.Module, key: Hashable, value: V) -> None:
        """Store a value, and remove the least recently used one if there are too many."""
        with self._lock:
            known = self._values.setdefault(module, {})
            known[key] = _Used(value, next(self._uses))
            while len(known) > self.capacity:
                del known[min(known, key=lambda key: known[key].last_use)]

    def drop(self, module: nn.Module) -> list[V]:
        """Remove all values of a module, and return them."""
        with self._lock:
            return [used.value for used in self._values.pop(module, {}).values()]

    def count(self, module: nn.Module) -> int:
        """Count the values of a module."""
        with self._lock:
            return len(self._values.get(module, ()))


class ModuleTensors:
    """The current parameters and buffers of a module.

    Args:
        module: the module.

    Attributes:
        tensors: each tensor once, even if it has several names.
        names: the first name of each.
        wanted: the indices in ``tensors`` of the tensors that require grad.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.names, self.tensors = tuple(named), tuple(named.values())
        self.wanted = tuple(number for number, x in enumerate(self.tensors) if x.requires_grad)
        number_of = {id(x): number for number, x in enumerate(self.tensors)}
        self._locks = _locks_of(module)
        found = [
            (path, *place) for path, part in module.named_modules() for place in tensor_slots(part)
        ]
        self._slots = [(holder, key, number_of[id(x)]) for _, holder, key, x in found]
        #: Where each tensor is: the path of a module, a key in it, and the index of the tensor.
        self.slots = (self.names, tuple((path, key, number_of[id(x)]) for path, _, key, x in found))

    def copies(self) -> tuple[Tensor, ...]:
        """Return copies of the values that share no memory."""
        return tuple(x.detach().clone() for x in self.tensors)

    def trainable(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Select by name, from tensors in place of the module's own, the trainable ones."""
        return {self.names[number]: tensors[number] for number in self.wanted}

    @property
    def untrained(self) -> tuple[Tensor, ...]:
        """The tensors that do not require grad, which a graph saves to notice later changes."""
        return tuple(
            x
            for number, x in enumerate(self.tensors)
            if number not in self.wanted and not x.is_inference()
        )

    @contextmanager
    def substituted(self, tensors: Sequence[Tensor]) -> Generator[None, None, None]:
        """Run the module with these tensors in place of its own, by this thread alone."""
        slots = [(holder, key, tensors[number]) for holder, key, number in self._slots]
        versions = [_version(x) for _, _, x in slots]
        with _acquired(self._locks), swapped(slots):
            yield
            for (holder, key, x), version in zip(slots, versions, strict=True):
                if holder[key] is not x or _version(x) != version:
                    raise ValueError(
                        f"{type(self.module).__name__} or a part of it writes to its own parameter "
                        f"or buffer {key!r} while it runs, so a run that is repeated or reversed "
                        "differs from the first. Put it into eval mode (.eval()), or keep such "
                        "numbers out of the potential."
                    )


def tensor_slots(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """List the tensors of a module without its submodules, as container, key and tensor."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name, x) for name, x in tensors.items() if x is not None)
    if isinstance(module, nn.RNNBase):
        # It reads its parameters from a list of its own, where functional_call does not replace
        # them.
        known, flat = module._parameters, module._flat_weights
        names = enumerate(module._flat_weights_names)
        yield from (
            (flat, i, x)
            for i, name in names
            if i < len(flat) and (x := known.get(name)) is not None
        )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


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


@contextmanager
def swapped(slots: Iterable[tuple[Any, Any, Tensor]]) -> Generator[None, None, None]:
    """Put other tensors into containers, and put the former ones back afterwards."""
    before = [(holder, key, holder[key], x) for holder, key, x in slots]
    for holder, key, _, x in before:
        holder[key] = x
    try:
        yield
    finally:
        for holder, key, old, x in before:
            # A tensor that the module itself has assigned meanwhile stays.
            if holder[key] is x:
                holder[key] = old


def exclusive(*modules: nn.Module) -> AbstractContextManager[None]:
    """Keep other threads from running modules, or parts of them, inside this context."""
    return _acquired(_locks_of(*modules))


def _locks_of(*modules: nn.Module) -> list[Any]:
    """Return the locks of modules and of their parts, in one global order.

    The order prevents deadlock.
    """
    with _locks_lock:
        locks = {
            id(part): _locks.setdefault(part, RLock())
            for module in modules
            for part in module.modules()
        }
    return sorted(locks.values(), key=id)


@contextmanager
def _acquired(locks: Sequence[Any]) -> Generator[None, None, None]:
    held: list[Any] = []
    try:
        for lock in locks:
            lock.acquire()
            held.append(lock)
        yield
    finally:
        for lock in held:
            lock.release()
