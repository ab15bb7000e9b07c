"""Values of a module that follow from others, such as the volume of a box.

A value is made where a source has another value, and is never stored beside its source in the
module that the user edits. Copies of a module that a reading makes (:mod:`adjsim.core.reading`)
hold the values that were made with the reading, and the tensors that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import is_not
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.layout import is_tracing, outside_tracing
from adjsim.core.state import in_transform

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")

# Attributes that torch gives every module, and those of the library: the rules of numbers, and what
# a reading puts on a copy.
STANDARD = frozenset(vars(nn.Module()))
READING, MADE, SOURCE = "_reading", "_made", "_source"
OWN = frozenset({"_rules", READING, MADE, SOURCE})


@dataclass(frozen=True)
class Made:
    """The values and tensors that a copy of a module was made with.

    Attributes:
        values: the derived values that are no tensors; the others are buffers of the copy.
        tensors: its tensors. A value is out of date if one of its sources is another.
        evaluators: what evaluates pairs, with the objects for which it was made.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    evaluators: dict[Any, tuple[list[Any], Any]] = field(default_factory=dict)

    def holds(self, module: nn.Module, sources: tuple[str, ...]) -> bool:
        """Return whether a copy still holds these tensors that it was made with."""
        parameters, buffers = module._parameters, module._buffers
        return all(
            parameters.get(name, buffers.get(name)) is self.tensors.get(name) for name in sources
        )


def are(known: Sequence[Any], present: Sequence[Any]) -> bool:
    """Return whether objects are those from which a value was made."""
    return len(known) == len(present) and not any(map(is_not, known, present))


class derived(Generic[V]):
    """A value of a module that follows from some of its attributes.

    ``@derived("box", "cutoff")`` above a method makes a property, whose value is made when a
    reading of the module is, or at the first use. The value is kept until a source has another
    value: tensors are compared by their contents, since ``x.data`` evades the version counter. A
    value that requires grad, or with such a source, is made at each use.

    A tensor is a buffer of the copies that a reading makes, and so an input of compiled loops. Any
    other value is a constant of them, and part of their key.
    """

    def __init__(self, *sources: str) -> None:
        self.sources = sources

    def __call__(self, function: Callable[[Any], V]) -> derived[V]:
        self.function = function
        self.__doc__ = function.__doc__
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: Any = None) -> V:
        if module is None:
            return cast(V, self)
        made: Made | None = module.__dict__.get(MADE)
        if made is not None and made.holds(module, first_sources(type(module), self.name)):
            found = module._buffers.get(self.name)
            if found is not None:
                return cast(V, found)
            if self.name in made.values:
                return cast(V, made.values[self.name])
        return self.make(module)

    def make(self, module: nn.Module, readable: bool | None = None) -> V:
        """Return the value that follows from the present sources.

        The result of :func:`has_values` is given where it is known: it takes as long as the rest.
        """
        sources = [getattr(module, name) for name in self.sources]
        tensors = [x for x in sources if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors):
            return self.function(module)
        if has_values() if readable is None else readable:
            return self._kept(module, sources)
        if is_tracing() and all(map(has_numbers, tensors)):
            # A record names the user's module itself, whose tensors have values. The value is that
            # of the run's reading, for which the record receives the input of the loop.
            with outside_tracing(), torch._C.DisableTorchFunction():
                return self._kept(module, sources)
        return self.function(module)

    def _kept(self, module: nn.Module, sources: list[Any]) -> V:
        """Return the value that was made from these values of the sources, or make it."""
        known = _known.setdefault(source_of(module), {})
        if self.name in known and all(map(_equal, sources, known[self.name][0])):
            return known[self.name][1]
        with torch.no_grad(), outside_inference_mode():
            value = self.function(module)
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in sources]
        known[self.name] = (copies, value)
        return value


# The derived values of each module by name, with the values of their sources.
_known: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], Any]]] = WeakKeyDictionary()


@cache
def derived_of(kind: type) -> tuple[derived[Any], ...]:
    """Return the derived values of a class of modules, each after those that it follows from."""
    found = {name: x for base in reversed(kind.__mro__) for name, x in vars(base).items()}
    rules = [x for x in found.values() if isinstance(x, derived)]
    return tuple(sorted(rules, key=lambda x: _depth(kind, x.name)))


def _depth(kind: type, name: str) -> int:
    rule = getattr(kind, name, None)
    return 1 + max(_depth(kind, x) for x in rule.sources) if isinstance(rule, derived) else 0


@cache
def derived_names(kind: type) -> frozenset[str]:
    """Return the names of the derived values of a class of modules."""
    return frozenset(rule.name for rule in derived_of(kind))


@cache
def first_sources(kind: type, name: str) -> tuple[str, ...]:
    """Return the attributes from which a derived value follows, through other derived values."""
    rule = getattr(kind, name, None)
    if not isinstance(rule, derived):
        return (name,)
    return tuple({first for x in rule.sources for first in first_sources(kind, x)})


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor is neither an input of a trace nor one of a function transform."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return not (functorch.is_functorch_wrapped_tensor(x) or isinstance(x, FakeTensor))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def has_values() -> bool:
    """Return whether the values of tensors can be read."""
    return not (torch.compiler.is_compiling() or in_transform() or is_tracing())


def source_of(module: M) -> M:
    """Return the module that the user edits, of which a module is a copy or which it is."""
    return vars(module).get(SOURCE, module)


def replaced(module: M, tensors: Mapping[str, Tensor | None]) -> M:
    """Return a copy of one module, with shared submodules, and other tensors of these names.

    Derived values that follow from these tensors are made again.
    """
    twin, parameters = object.__new__(type(module)), {**module._parameters}
    buffers = {**module._buffers}
    vars(twin).update(vars(module), _parameters=parameters, _buffers=buffers)
    for name, x in tensors.items():
        table: dict[str, Any] = parameters if name in parameters else buffers
        table[name] = x
    return twin


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of one module that are not derived, by name."""
    made = derived_names(type(module))
    found = {**module._parameters, **module._buffers}
    return {name: x for name, x in found.items() if x is not None and name not in made}
