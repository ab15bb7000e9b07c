"""The tensors of a module, read once, and a module that runs with other tensors in their place.

A run reads the parameters and buffers of its dynamics when it starts. From then on, forward, replayed and backward, it runs the
dynamics with copies of them, so that nothing that becomes of the module in between (an optimiser's step, the end of a
``functional_call``, another thread) changes the run. Since a module holds its tensors, it is lent to one thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

# One lock for each module that has run, made under a lock of their own; an entry goes with its module.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_locks_lock = Lock()


V = TypeVar("V")


class ModuleCache(Generic[V]):
    """Values by module and key: of each module those used last, for as long as it lives. Threads may share it.

    Args:
        bound: how many values are kept for one module.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
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
            while len(known) > self.bound:
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
        wanted: which of them require grad, by their place in ``tensors``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = module.named_parameters(remove_duplicate=False)
        named = {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}
        places: dict[int, int] = {}
        self._place = {name: places.setdefault(id(x), len(places)) for name, x in named.items()}
        first: dict[int, str] = {}
        for name, place in self._place.items():
            first.setdefault(place, name)
        self.names = tuple(first[place] for place in range(len(places)))
        self.tensors = tuple(named[name] for name in self.names)
        self.wanted = tuple(place for place, x in enumerate(self.tensors) if x.requires_grad)

    def copies(self) -> tuple[Tensor, ...]:
        """The values, in tensors that nobody else has."""
        return tuple(x.detach().clone() for x in self.tensors)

    def trainable(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Of tensors that stand for those of the module, those for which a gradient is wanted, by name."""
        return {self.names[place]: tensors[place] for place in self.wanted}

    @contextmanager
    def bound(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run the module with these tensors in place of its own, by this thread alone."""
        named = {name: tensors[place] for name, place in self._place.items()}
        with lent(self.module), _reparametrize_module(self.module, named):
            yield


@contextmanager
def lent(module: nn.Module) -> Iterator[None]:
    """Keep other threads from running a module, or a part of it, until this one is done."""
    with _locks_lock:
        locks = [_locks.setdefault(part, RLock()) for part in module.modules()]
    with ExitStack() as stack:
        # Everybody takes locks in one order, so that nobody waits for somebody who waits.
        for lock in sorted(locks, key=id):
            stack.enter_context(lock)
        yield
