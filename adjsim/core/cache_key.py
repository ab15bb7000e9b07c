"""Cache keys of compiled code, from everything that the code depends on except its inputs.

Tensors registered on modules are inputs of compiled code. Everything else that a potential or a
record reads is baked into the code, and so is part of the key: numbers, strings, arrays, activation
functions, data classes, attributes of classes, closures, globals, and modules that a function
imports or names in a string. Modules are numbered, so dynamics of the same structure have the same
key. An object that cannot be inspected is compared by its identity. A change inside such an object,
and a value that is read in another way, are found by a comparison of a compiled loop with steps
without compilation (:mod:`adjsim.adjoints.loops.loop`).
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache, partial, partialmethod
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NotImplementedType,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from adjsim.core.autocast import AutocastState, autocast_state
from adjsim.core.contents import bytes_of, of_table, remembered, sparse_parts, to_copy
from adjsim.core.derived import OWN, STANDARD, derived_names, source_of
from adjsim.core.libraries import is_library, is_package, of_library
from adjsim.core.rebinding import attributes_of

# Attributes of a module that are left out: registered tensors are inputs, submodules are inspected
# separately, rules of numbers enter no computation. Hooks are inspected where there are any.
_LEFT_OUT = (STANDARD | OWN) - {"training"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
# Values that are their own keys; the commonest are looked up in less time.
_SIMPLE = {type(None), bool, int, str}
_NUMBERS = (int, float, complex, Decimal, Fraction)
_VALUES = (*_NUMBERS, str, bytes, range, Enum, PurePath, date, time, timedelta, re.Pattern)
_SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (*_VALUES, *_SETTINGS, EllipsisType, NotImplementedType, np.ndarray)
# Weak dictionaries are caches: their entries are left out, since no result depends on them.
_CACHES = (WeakKeyDictionary, WeakValueDictionary, WeakIdKeyDictionary, WeakTensorKeyDictionary)
# The types of the descriptors of slots in a class.
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)


class UninspectableError(ValueError):
    """Raised for an object that cannot be inspected, where its identity is not enough."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} cannot be inspected, so a change of it would not be noticed. Use numbers, "
            "tensors, arrays, functions, data classes or modules there, or leave compile=True and "
            "store= out."
        )


class Identity:
    """A weak reference to an object, which equals only references to the same living object."""

    __slots__ = ("_id", "_ref")

    def __init__(self, x: Any) -> None:
        self._ref, self._id = ref(x), id(x)

    @property
    def referent(self) -> Any:
        """The object, or None after its end."""
        return self._ref()

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (x := self._ref()) is not None and x is other._ref()


class CacheKey(NamedTuple):
    """The key of everything that modules and a function read, and what cannot be inspected."""

    dtype: torch.dtype
    autocast: AutocastState
    modules: tuple[Any, ...]
    function: Any
    opaque: tuple[str, ...]


# Callables, and descriptors of the fields of named tuples, that hold what they read.
_GETTERS = (attrgetter, itemgetter, methodcaller, type(vars(CacheKey)["opaque"]))


@dataclass
class _KeyBuilder:
    """Builds one key from objects that may refer to each other.

    Attributes:
        numbers: the numbers of modules, by identity. Those of the dynamics are inspected
            separately.
        ignored: tells of the name of a Python module whether its data are left out.
        seen: the objects inspected so far, with their numbers, by identity. The references to them
            prevent reuse of their identities.
    """

    numbers: dict[int, int]
    ignored: Callable[[str], bool]
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)

    def key(self, x: Any, where: str) -> Any:
        """Build the key of an object; ``where`` names it in errors."""
        if type(x) in _SIMPLE:
            return type(x), x
        if isinstance(x, np.ma.MaskedArray):
            parts = np.asarray(x), np.ma.getmaskarray(x), x.fill_value
            return type(x), self.key(parts, where)
        if isinstance(x, _PLAIN) and of_library(type(x)):
            return self._contents(x, where)
        if isinstance(x, np.generic):
            return type(x), x.tobytes()
        if isinstance(x, Tensor):
            form = x.dtype, x.device, x.requires_grad, tuple(x.shape)
            if x.layout != torch.strided:
                parts = [self.key(part, where) for part in sparse_parts(x.detach())]
                return *form, x.layout, *(parts or [Identity(x), x._version])
            # The contents, since ``.data`` evades the version counter.
            return *form, hashlib.blake2b(bytes_of(x).data, digest_size=16).digest()
        if isinstance(x, bytearray):
            return bytearray, bytes(x)
        if isinstance(x, slice):
            return slice, self.key((x.start, x.stop, x.step), where)
        if isinstance(x, ModuleType):
            return x.__name__
        if id(x) in self.seen:
            return "seen", self.seen[id(x)][0]
        self.seen[id(x)] = (len(self.seen), x)
        if isinstance(x, _PLAIN):
            # A class of the user may add attributes, and methods that read anything.
            kind = self.key(type(x), where)
            if isinstance(x, Enum):
                return x.name, self.key(x.value, where), kind
            return self._contents(x, where), kind, *self._named(dict(attributes_of(x)), where)
        if isinstance(x, _CACHES):
            return type(x)
        if isinstance(x, ref):
            return type(x), self.key(x(), where)
        if isinstance(x, ContextVar):
            return type(x), x.name, self.key(x.get(None), where)
        if (table := of_table(x)) is not None:
            return type(x), self.key(table, where)
        if isinstance(x, _GETTERS):
            return type(x), self.key(x.__reduce__()[1:], where)
        if isinstance(x, (tuple, list, deque)):
            entries = (self.key(y, f"{where}[{i}]") for i, y in enumerate(x))
            return self._container(x, where, entries)
        if isinstance(x, (set, frozenset)):
            return self._container(x, where, (frozenset(self.key(y, where) for y in x),))
        if isinstance(x, Mapping):
            items = ((self.key(k, where), self.key(y, f"{where}[{k!r}]")) for k, y in x.items())
            made = self.key(getattr(x, "default_factory", None), where)
            return self._container(x, where, (made, *items))
        if isinstance(x, nn.Module):
            if id(x) in self.numbers:
                return nn.Module, self.numbers[id(x)]
            # Tensors of a module outside of the dynamics are constants.
            tensors = [self.key(y, where) for y in (*x.parameters(), *x.buffers())]
            return tuple(map(self.module, x.modules())), *tensors
        if isinstance(x, type):
            return self._class(x, where)
        own = not of_library(type(x)) and hasattr(type(x), "__slots__")
        if (callable(x) and not hasattr(x, "__dict__") and not own) or isinstance(
            x, BuiltinFunctionType | FunctionType | MethodType | partial
        ):
            return self._function(x, where)
        left_out = remembered(type(x))
        attributes = {name: y for name, y in attributes_of(x) if name not in left_out}
        if not attributes and (parts := to_copy(x)) is not None:
            # An array of the standard library, or a number of ctypes.
            return self._class(type(x), where), self.key(parts, where)
        if not attributes and not hasattr(x, "__dict__"):
            of: Any = type(x)
            self.opaque.append(f"{where} ({of.__name__})")
            return Identity(x) if of.__weakrefoffset__ else of
        return self._class(type(x), where), *self._named(attributes, where)

    def _contents(self, x: Any, where: str) -> Any:
        """Build the key of a number, a string or an array alone."""
        if isinstance(x, float):
            return float, x.hex()  # NaN equals itself, and the two zeros differ.
        if isinstance(x, np.ndarray):
            content = self.key(x.tolist(), where) if x.dtype.hasobject else x.tobytes()
            return x.shape, x.dtype.str, content
        return type(x), x

    def module(self, x: nn.Module) -> Any:
        """Build the key of one module."""
        name = type(x).__name__
        # Hooks of weight_norm and spectral_norm compute an attribute anew before each evaluation.
        hooks = x._forward_pre_hooks.values()
        computed = {hook.name for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))}
        left_out = _LEFT_OUT | derived_names(type(x)) | computed
        attributes = {key: value for key, value in vars(x).items() if key not in left_out}
        # Hooks are registered under numbers that no other hook of the process has.
        attributes |= {key: list(hooks.values()) for key in _HOOKS if (hooks := vars(x)[key])}
        parts = x._modules.items()
        return (
            self._number(x),
            self._class(type(x), name),
            tuple((path, self._number(y)) for path, y in parts if y is not None),
            *self._named(attributes, name),
        )

    def _number(self, x: nn.Module) -> int:
        return self.numbers.setdefault(id(x), 1 + max(self.numbers.values(), default=-1))

    def _named(self, values: Mapping[str, Any], where: str) -> list[Any]:
        return [(name, self.key(value, f"{where}.{name}")) for name, value in values.items()]

    def _container(self, x: Any, where: str, entries: Iterable[Any]) -> Any:
        """Build the key of a container, the methods of whose class may read anything."""
        kind = type(x) if of_library(type(x)) else self.key(type(x), where)
        return kind, self._attributes(x, where), *entries

    def _attributes(self, x: Any, where: str) -> Any:
        """Build the key of the attributes of a container or function."""
        found = {n: y for n, y in getattr(x, "__dict__", {}).items() if n != "__wrapped__"}
        return tuple(self._named(found, where))

    def _class(self, x: type, where: str) -> Any:
        kinds = [kind for kind in x.__mro__ if not of_library(kind)]
        if not kinds and of_library(type(x)):
            # Such a class does not change.
            return Identity(x), x.__module__
        found = []
        for kind in kinds:
            for name, value in vars(kind).items():
                value = called_by(value)
                if isinstance(value, FunctionType) or not (
                    name.startswith("__") or isinstance(value, _SLOTS)
                ):
                    found.append((name, self.key(value, f"{where}.{name}")))
        kind = () if of_library(type(x)) else self.key(type(x), where)
        bases = tuple(f"{base.__module__}.{base.__qualname__}" for base in x.__mro__[1:])
        # A class that the same code makes anew, in a function or in a cell of a notebook, is equal.
        return x.__qualname__, bases, kind, *found

    def _function(self, x: Any, where: str) -> Any:
        if isinstance(x, MethodType):
            return self.key(x.__func__, where), self.key(x.__self__, where)
        if isinstance(x, partial):
            return self.key(x.func, where), self.key(x.args, where), self.key(x.keywords, where)
        if not isinstance(x, FunctionType):
            owner = getattr(x, "__self__", None)
            if owner is None or isinstance(owner, ModuleType | type):
                return x
            return getattr(x, "__name__", type(x)), self.key(owner, where)
        cells = tuple(
            "empty" if cell == CellType() else self.key(cell.cell_contents, f"{where} ({name})")
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        )
        home: str = x.__globals__.get("__name__") or ""
        if is_library(home):
            # A decorator or a function transform of the package, around what is not fixed.
            return (x.__code__, cells) if cells else x
        mentioned = names_in(x.__code__)
        found = [(name, x.__globals__[name]) for name in sorted(mentioned & set(x.__globals__))]
        # Modules outside of libraries that the function may import.
        found += [
            (name, value)
            for name in _importable(mentioned, x.__globals__.get("__package__") or "")
            if isinstance(value := sys.modules.get(name), ModuleType) and not is_library(name)
        ]
        modules: set[int] = set()
        # The list grows by what functions may read from modules, and from modules inside these.
        for name, value in found:
            if isinstance(value, ModuleType) and id(value) not in modules:
                modules.add(id(value))
                read = () if self.ignored(value.__name__) else sorted(mentioned & set(vars(value)))
                found += [(f"{name}.{inner}", vars(value)[inner]) for inner in read]
        seen = ((name, self.key(value, f"{where} ({name})")) for name, value in found)
        return (
            x.__code__,
            cells,
            self._attributes(x, where),
            *seen,
            self.key(x.__defaults__, where),
            self.key(x.__kwdefaults__, where),
        )


def cache_key(
    module: nn.Module,
    function: Callable[..., Any] | None = None,
    ignored: Callable[[str], bool] = is_package,
) -> CacheKey:
    """Build a key from everything that a module and a function read, except registered tensors.

    Data in Python modules of whose names ``ignored`` is true are left out too.
    """
    modules = list(module.modules())
    numbers = {id(x): i for i, part in enumerate(modules) for x in (part, source_of(part))}
    builder = _KeyBuilder(numbers, ignored)
    return CacheKey(
        torch.get_default_dtype(),
        autocast_state(),
        tuple(builder.module(part) for part in modules),
        None if function is None else builder.key(function, "the record"),
        tuple(builder.opaque),
    )


def object_key(x: Any, where: str, ignored: Callable[[str], bool] = is_package) -> Any:
    """Build a key from everything that an object outside of the dynamics reads."""
    builder = _KeyBuilder({}, ignored)
    key = builder.key(x, where)
    if builder.opaque:
        raise UninspectableError(builder.opaque[0])
    return key


@lru_cache(4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Collect names, and strings that may be names, in code and in functions inside."""
    strings = (x for x in code.co_consts if isinstance(x, str))
    inner = (names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(strings, *inner)


@lru_cache(4096)
def _importable(names: frozenset[str], package: str) -> tuple[str, ...]:
    """List the full names of modules that code with these names may import."""
    parts = package.split(".") if package else []
    prefixes = ["", *(".".join(parts[:n]) + "." for n in range(1, len(parts) + 1))]
    return tuple(prefix + name for name in sorted(names) for prefix in prefixes)


def called_by(x: Any) -> Any:
    """Return the function that an attribute of a class calls, such as that of a property."""
    if isinstance(x, staticmethod | classmethod):
        return called_by(x.__func__)
    if isinstance(x, property | cached_property):
        return called_by(x.fget if isinstance(x, property) else x.func)
    if isinstance(x, partialmethod):
        return partial(x.func, *x.args, **x.keywords)
    # The wrapper of functools.cache has no code of its own.
    return x if isinstance(x, FunctionType) else getattr(x, "__wrapped__", x)
