"""Cache keys of compiled code, from everything that the code depends on except its inputs.

Tensors registered on modules are inputs of compiled code. Everything else that a potential or a
record reads is baked into the code: numbers, strings, arrays, activation functions, data classes,
attributes of classes, closures, globals, and modules that a function imports or names in a string.
So all of these are part of the key. An object that cannot be inspected is compared by its identity.
A change inside such an object, and a value that is read in another way, are found by a comparison
of a compiled loop with its steps taken without compilation (:mod:`adjsim.adjoints.loops.check`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
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
from adjsim.core.code import called_by, imported_by, names_in
from adjsim.core.derived import derived_names, source_of
from adjsim.core.libraries import is_library, is_package

# Attributes that torch puts on a module: registered tensors are inputs, submodules are inspected
# separately. Hooks are inspected where there are any. Rules of numbers do not enter a computation.
_MODULE_ATTRIBUTES = set(vars(nn.Module())) - {"training"} | {
    "_rules",
    "_reading",
    "_source",
    "_made",
}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    Enum,
    Fraction,
    PurePath,
    range,
    type(Ellipsis),
    type(NotImplemented),
    torch.memory_format,
)


# The commonest of these, looked up in less time.
_SIMPLE = {type(None), bool, int, str}
# Weak dictionaries are caches: their entries are left out, since no result depends on them.
_CACHES = (WeakKeyDictionary, WeakValueDictionary, WeakIdKeyDictionary, WeakTensorKeyDictionary)
# Callables that hold the names or the numbers that they read.
_GETTERS = (attrgetter, itemgetter, methodcaller)
# The types of the descriptors of slots in a class.
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)


class _Named(NamedTuple):
    field: Any


# The type of the descriptors of fields in a class of named tuples, which hold their position.
_FIELD: Any = type(vars(_Named)["field"])


class UninspectableError(ValueError):
    """Raised for an object that cannot be inspected, where its identity is not enough.

    Args:
        what: names the object.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} cannot be inspected, so a change of it would not be noticed. Use numbers, "
            "tensors, arrays, functions, data classes or modules there, or leave compile=True and "
            "store= out."
        )


class Identity:
    """A weak reference to an object, compared by identity.

    It equals only references to the same living object.
    """

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
    """The key of everything that a module and a function read.

    Attributes:
        dtype: the default dtype.
        autocast: the state of autocast.
        modules: the keys of the modules.
        function: the key of the function.
        opaque: names of the objects that cannot be inspected.
    """

    dtype: torch.dtype
    autocast: AutocastState
    modules: tuple[Any, ...]
    function: Any
    opaque: tuple[str, ...]


@dataclass
class _KeyBuilder:
    """Builds one key from objects that may refer to each other.

    Args:
        known: identities of modules that are inspected separately.
        ignored: tells of the name of a Python module whether its data are left out.
        seen: the objects inspected so far, with their numbers, by identity. References to the
            objects prevent reuse of their identities.
        opaque: names of the objects that cannot be inspected.
    """

    known: set[int]
    ignored: Callable[[str], bool]
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)

    def key(self, x: Any, where: str) -> Any:
        """Build the key of an object; ``where`` names it in errors."""
        if type(x) in _SIMPLE:
            return type(x), x
        if isinstance(x, float):
            return float, x.hex()  # NaN equals itself, and the two zeros differ.
        if isinstance(x, _PLAIN):
            if isinstance(x, Enum) and not _of_library(type(x)):
                return x.name, self.key(x.value, where), self.key(type(x), where)
            return type(x), x
        if isinstance(x, np.generic):
            return type(x), x.tobytes()
        if isinstance(x, _FIELD):
            return x.__reduce__()
        if isinstance(x, Tensor):
            return _tensor(x)
        if isinstance(x, np.ndarray):
            return (
                x.shape,
                x.dtype.str,
                self.key(x.tolist(), where) if x.dtype.hasobject else x.tobytes(),
            )
        if isinstance(x, ModuleType):
            return x.__name__
        if id(x) in self.seen:
            return "seen", self.seen[id(x)][0]
        self.seen[id(x)] = (len(self.seen), x)
        if isinstance(x, _CACHES):
            return type(x)
        if isinstance(x, _GETTERS):
            return type(x), self.key(x.__reduce__()[1:], where)
        if isinstance(x, (tuple, list, deque)):
            return (
                self._kind(x, where),
                self._attributes(x, where),
                *(self.key(y, f"{where}[{i}]") for i, y in enumerate(x)),
            )
        if isinstance(x, (set, frozenset)):
            return self._kind(x, where), frozenset(self.key(y, where) for y in x)
        if isinstance(x, Mapping):
            items = ((self.key(k, where), self.key(y, f"{where}[{k!r}]")) for k, y in x.items())
            return self._kind(x, where), self._attributes(x, where), *items
        if isinstance(x, nn.Module):
            return Identity(source_of(x)) if id(x) in self.known else self._foreign_module(x, where)
        if isinstance(x, type):
            return self._class(x, where)
        own = not _of_library(type(x)) and hasattr(type(x), "__slots__")
        if (callable(x) and not hasattr(x, "__dict__") and not own) or isinstance(
            x, BuiltinFunctionType | FunctionType | MethodType | partial
        ):
            return self._function(x, where)
        return self._object(x, where)

    def module(self, x: nn.Module) -> Any:
        """Build the key of one module of the dynamics."""
        name = type(x).__name__
        # Hooks of weight_norm and spectral_norm compute an attribute anew before each evaluation.
        hooks = x._forward_pre_hooks.values()
        computed = {hook.name for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))}
        attributes = {
            key: value
            for key, value in vars(x).items()
            if key not in computed
            and (
                (key not in _MODULE_ATTRIBUTES and key not in derived_names(type(x)))
                or (value and key in _HOOKS)
            )
        }
        parts = tuple(
            (path, Identity(source_of(part)))
            for path, part in x._modules.items()
            if part is not None
        )
        return (
            Identity(source_of(x)),
            self._class(type(x), name),
            parts,
            *((key, self.key(value, f"{name}.{key}")) for key, value in attributes.items()),
        )

    def _foreign_module(self, x: nn.Module, where: str) -> Any:
        """Build the key of a module outside the dynamics, whose tensors are constants."""
        tensors = [*x.parameters(), *x.buffers()]
        return tuple(self.module(part) for part in x.modules()), *(
            self.key(y, where) for y in tensors
        )

    def _class(self, x: type, where: str) -> Any:
        kinds = [kind for kind in x.__mro__ if not _of_library(kind)]
        if not kinds and _of_library(type(x)):
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
        kind = () if _of_library(type(x)) else self.key(type(x), where)
        bases = tuple(f"{base.__module__}.{base.__qualname__}" for base in x.__mro__[1:])
        return Identity(x), bases, kind, *found

    def _kind(self, x: Any, where: str) -> Any:
        """Build the key of the class of a container, whose methods may read anything."""
        kind = type(x)
        return kind if _of_library(kind) else self.key(kind, where)

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
        cells_of = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        cells = tuple(self._cell(cell, f"{where} ({name})") for name, cell in cells_of)
        home: str = x.__globals__.get("__name__") or ""
        if is_library(home):
            # A decorator or a function transform of the package, around what is not fixed.
            return (x.__code__, cells) if cells else x
        mentioned = names_in(x.__code__)
        found = [(name, x.__globals__[name]) for name in sorted(mentioned & set(x.__globals__))]
        found += imported_by(mentioned, x.__globals__.get("__package__") or "")
        modules: set[int] = set()
        # The list grows by what functions may read from modules, and from modules inside these.
        for name, value in found:
            if not isinstance(value, ModuleType) or id(value) in modules:
                continue
            modules.add(id(value))
            if not self.ignored(value.__name__):
                found += [
                    (f"{name}.{inner}", vars(value)[inner])
                    for inner in sorted(mentioned & set(vars(value)))
                ]
        seen = ((name, self.key(value, f"{where} ({name})")) for name, value in found)
        return (
            x.__code__,
            cells,
            self._attributes(x, where),
            *seen,
            self.key(x.__defaults__, where),
            self.key(x.__kwdefaults__, where),
        )

    def _attributes(self, x: Any, where: str) -> Any:
        """Build the key of the attributes of a list, dictionary or function."""
        attributes = {
            name: value
            for name, value in getattr(x, "__dict__", {}).items()
            if name != "__wrapped__"
        }
        return tuple(
            (name, self.key(value, f"{where}.{name}")) for name, value in attributes.items()
        )

    def _cell(self, cell: Any, where: str) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        return self.key(content, where)

    def _object(self, x: Any, where: str) -> Any:
        slots = [
            name
            for kind in type(x).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(x, name)
        ]
        if not hasattr(x, "__dict__") and not slots:
            self.opaque.append(f"{where} ({type(x).__name__})")
            return Identity(x) if type(x).__weakrefoffset__ else type(x)
        inner = {
            **getattr(x, "__dict__", {}),
            **{name: getattr(x, name) for name in slots if name != "__weakref__"},
        }
        return self._class(type(x), where), *(
            (name, self.key(value, f"{where}.{name}")) for name, value in inner.items()
        )


def cache_key(
    module: nn.Module,
    function: Callable[..., Any] | None = None,
    ignored: Callable[[str], bool] = is_package,
) -> CacheKey:
    """Build a key from everything that a module and a function read.

    Registered tensors are left out, since they are inputs. So are data in the Python modules of
    whose names ``ignored`` is true.
    """
    modules = list(module.modules())
    builder = _KeyBuilder({id(x) for part in modules for x in (part, source_of(part))}, ignored)
    return CacheKey(
        torch.get_default_dtype(),
        autocast_state(),
        tuple(builder.module(part) for part in modules),
        None if function is None else builder.key(function, "the record"),
        tuple(builder.opaque),
    )


def object_key(x: Any, where: str, ignored: Callable[[str], bool] = is_package) -> Any:
    """Build a key from everything that an object outside of the dynamics reads.

    Raises:
        UninspectableError: an object that cannot be inspected.
    """
    builder = _KeyBuilder(set(), ignored)
    key = builder.key(x, where)
    if builder.opaque:
        raise UninspectableError(builder.opaque[0])
    return key


def _tensor(x: Tensor) -> Any:
    """Build the key of a tensor from its contents, since ``.data`` evades the version counter."""
    kind = (x.dtype, x.device, x.requires_grad, tuple(x.shape))
    if x.layout != torch.strided:
        return *kind, Identity(x), x._version
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return *kind, hashlib.blake2b(content.tobytes(), digest_size=16).digest()


def _of_library(kind: type) -> bool:
    return is_library(kind.__module__)
