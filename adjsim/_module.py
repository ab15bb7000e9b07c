"""The tensors of a module, read once, and a module that runs with other tensors in their place.

A run reads the parameters and buffers of its dynamics when it starts. From then on, forward, replayed and backward, it runs the
dynamics with copies of them, so that nothing that becomes of the module in between (an optimiser's step, the end of a
``functional_call``, another thread) changes the run. Since a module holds its tensors, it is lent to one thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

# One lock for each module that has run, made under a lock of their own; an entry goes with its module.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_locks_lock = Lock()


V = TypeVar("V")


class ModuleCache(Generic[V]):
    """Values by module and key: of each module those used last, for as long as it lives. Threads may share it.

    Args:
        bound: how many values are kept for one module.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, V]] = WeakKeyDictionary()
        self._lock = Lock()

    def get(self, module: nn.Module, key: Hashable) -> V | None:
        """The value, or None."""
        with self._lock:
            known = self._values.get(module)
            if known is None or key not in known:
                return None
            known.move_to_end(key)
            return known[key]

    def put(self, module: nn.Module, key: Hashable, value: V) -> None:
        """Keep a value, and forget the one that was used longest ago if there are too many."""
        with self._lock:
            known = self._values.setdefault(module, OrderedDict())
            known[key] = value
            while len(known) > self.capacity:
                known.popitem(last=False)

    def count(self, module: nn.Module) -> int:
        """How many values are kept for a module."""
        with self._lock:
            return len(self._values.get(module, ()))


class ModuleTensors:
    """The parameters and buffers of a module as they are now.

    Args:
        module: whose tensors.

    Attributes:
        tensors: each of them once, also where it has several names.
        names: the first name of each.
        wanted: which of them require grad, by their number in ``tensors``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.names, self.tensors = tuple(named), tuple(named.values())
        self.wanted = tuple(number for number, x in enumerate(self.tensors) if x.requires_grad)
        number_of = {id(x): number for number, x in enumerate(self.tensors)}
        self._locks = _locks_of(module)
        found = [(path, *place) for path, part in module.named_modules() for place in tensor_slots(part)]
        self._slots = [(holder, key, number_of[id(x)]) for _, holder, key, x in found]
        #: Which tensor is where: by the path of a module, a key in it, and the number of the tensor.
        self.slots = (self.names, tuple((path, key, number_of[id(x)]) for path, _, key, x in found))

    def copies(self) -> tuple[Tensor, ...]:
        """The values, in tensors that nobody else has."""
        return tuple(x.detach().clone() for x in self.tensors)

    def trainable(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Of tensors that stand for those of the module, those for which a gradient is wanted, by name."""
        return {self.names[number]: tensors[number] for number in self.wanted}

    @contextmanager
    def substituted(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run the module with these tensors in place of its own, by this thread alone."""
        slots = [(holder, key, tensors[number]) for holder, key, number in self._slots]
        versions = [_version(x) for _, _, x in slots]
        with _acquired(self._locks), swapped(slots):
            yield
            for (holder, key, x), version in zip(slots, versions, strict=True):
                if holder[key] is not x or _version(x) != version:
                    raise ValueError(
                        f"{type(self.module).__name__} or a part of it writes to its own parameter or buffer {key!r} while it "
                        "runs, "
                        "so that a run that is repeated or retraced differs from the first. Put it into eval mode, keep such "
                        "numbers out of the potential, or use DirectAdjoint()."
                    )


def tensor_slots(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Where a module looks for its own tensors, without those of its submodules: a container, a key, and the tensor there."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name, x) for name, x in tensors.items() if x is not None)
    if isinstance(module, nn.RNNBase):
        # It reads its parameters by a list of its own, in which functional_call leaves the former ones.
        known, flat = module._parameters, module._flat_weights
        names = enumerate(module._flat_weights_names)
        yield from ((flat, i, x) for i, name in names if i < len(flat) and (x := known.get(name)) is not None)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@contextmanager
def swapped(slots: Iterable[tuple[Any, Any, Tensor]]) -> Iterator[None]:
    """Put other tensors into containers, and give the former ones back afterwards."""
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
    """Keep other threads from running modules, or parts of them, until this one is done."""
    return _acquired(_locks_of(*modules))


def _locks_of(*modules: nn.Module) -> list[Any]:
    """The locks of modules and of their parts, in the one order in which everybody takes them, so that nobody waits for
    somebody who waits."""
    with _locks_lock:
        locks = {id(part): _locks.setdefault(part, RLock()) for module in modules for part in module.modules()}
    return sorted(locks.values(), key=id)


@contextmanager
def _acquired(locks: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield
