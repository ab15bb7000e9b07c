"""Cache keys of compiled code, from everything that the code depends on except its inputs.

Tensors registered on modules are inputs of compiled code. Everything else that a potential or a
record reads is baked into the code: numbers, strings, arrays, activation functions, data classes,
attributes of classes, closures and globals. So all of these are part of the key. A value that
cannot be inspected is refused, since a change of it would not be noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import cache, cached_property, partial, partialmethod
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
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

from adjsim._reading import derived_names, source_of

# Attributes that torch puts on a module: registered tensors are inputs, submodules are inspected
# separately. Hooks are inspected where there are any. Rules of numbers do not enter a computation.
_MODULE_ATTRIBUTES = set(vars(nn.Module())) - {"training"} | {"_rules", "_reading", "_source"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
# Packages whose functions and classes do not change while a program runs.
_FIXED = {
    "adjsim",
    "beartype",
    "builtins",
    "enum",
    "functools",
    "itertools",
    "jaxtyping",
    "math",
    "numpy",
    "operator",
    "scipy",
    "torch",
    "_operator",
    "collections",
    "typing",
    "cmath",
    "abc",
    "types",
}
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
    """Raised for a value that compiled code depends on and that cannot be inspected."""


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


@dataclass
class _KeyBuilder:
    """Builds one key from objects that may refer to each other.

    Args:
        known: identities of modules that are inspected separately.
        fixed: packages that are not inspected.
        seen: the objects inspected so far, with their numbers, by identity. References to the
            objects prevent reuse of their identities.
    """

    known: set[int]
    fixed: AbstractSet[str] = frozenset(_FIXED)
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def key(self, x: Any, where: str) -> Any:
        """Build the key of an object; ``where`` names it in errors."""
        if type(x) in _SIMPLE:
            return type(x), x
        if isinstance(x, float):
            return float, x.hex()  # NaN equals itself, and the two zeros differ.
        if isinstance(x, _PLAIN):
            if isinstance(x, Enum) and _package(type(x)) not in self.fixed:
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
        if isinstance(x, (tuple, list)):
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
        if (callable(x) and not hasattr(x, "__dict__")) or isinstance(
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
        kinds = [kind for kind in x.__mro__ if _package(kind) not in self.fixed]
        if not kinds and _package(type(x)) in self.fixed:
            # Such a class does not change.
            return Identity(x), x.__module__
        found = []
        for kind in kinds:
            for name, value in vars(kind).items():
                value = _inside(value)
                if isinstance(value, FunctionType) or not (
                    name.startswith("__") or isinstance(value, _SLOTS)
                ):
                    found.append((name, self.key(value, f"{where}.{name}")))
        kind = () if _package(type(x)) in self.fixed else self.key(type(x), where)
        bases = tuple(f"{base.__module__}.{base.__qualname__}" for base in x.__mro__[1:])
        return Identity(x), bases, kind, *found

    def _kind(self, x: Any, where: str) -> Any:
        """Build the key of the class of a container, whose methods may read anything."""
        kind = type(x)
        return kind if _package(kind) in self.fixed else self.key(kind, where)

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
        if _package_named(x.__globals__.get("__name__") or "") in self.fixed:
            # A decorator or a function transform of the package, around what is not fixed.
            return (x.__code__, cells) if cells else x
        mentioned = _names(x.__code__)
        found = [(name, x.__globals__[name]) for name in sorted(mentioned & set(x.__globals__))]
        modules: set[int] = set()
        # The list grows by what functions may read from modules, and from modules inside these.
        for name, value in found:
            if not isinstance(value, ModuleType) or id(value) in modules:
                continue
            modules.add(id(value))
            if _package_of(value) not in self.fixed:
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
            return self.key(cell.cell_contents, where)
        except ValueError as empty:
            if isinstance(empty, UninspectableError):
                raise
            return "empty"

    def _object(self, x: Any, where: str) -> Any:
        slots = [
            name
            for kind in type(x).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(x, name)
        ]
        if not hasattr(x, "__dict__") and not slots:
            raise UninspectableError(
                f"{where} is {type(x).__name__}, which cannot be inspected, so a change of it "
                "would not be noticed. Use numbers, tensors, arrays, functions, data classes or "
                "modules there, or leave compile=True and store= out."
            )
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
    also_fixed: AbstractSet[str] = frozenset(),
) -> Any:
    """Build a key from everything that a module and a function read.

    Registered tensors are left out, since they are inputs, and so are the packages ``also_fixed``.

    Raises:
        UninspectableError: a value that cannot be inspected.
    """
    modules = list(module.modules())
    builder = _KeyBuilder(
        {id(x) for part in modules for x in (part, source_of(part))}, frozenset(_FIXED | also_fixed)
    )
    default = torch.get_default_dtype()
    return (
        default,
        tuple(builder.module(part) for part in modules),
        None if function is None else builder.key(function, "the record"),
    )


def object_key(x: Any, where: str, also_fixed: AbstractSet[str] = frozenset()) -> Any:
    """Build a key from everything that an object outside of the dynamics reads.

    Raises:
        UninspectableError: a value that cannot be inspected.
    """
    return _KeyBuilder(set(), frozenset(_FIXED | also_fixed)).key(x, where)


def _tensor(x: Tensor) -> Any:
    """Build the key of a tensor from its contents, since ``.data`` evades the version counter."""
    kind = (x.dtype, x.device, x.requires_grad, tuple(x.shape))
    if x.layout != torch.strided:
        return *kind, Identity(x), x._version
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return *kind, hashlib.blake2b(content.tobytes(), digest_size=16).digest()


def _inside(x: Any) -> Any:
    """Return the function that an attribute of a class calls, such as that of a property."""
    if isinstance(x, staticmethod | classmethod):
        return _inside(x.__func__)
    if isinstance(x, property):
        return _inside(x.fget)
    if isinstance(x, cached_property):
        return _inside(x.func)
    if isinstance(x, partialmethod):
        return partial(x.func, *x.args, **x.keywords)
    # The wrapper of functools.cache has no code of its own.
    return x if isinstance(x, FunctionType) else getattr(x, "__wrapped__", x)


def _package_of(x: ModuleType) -> str:
    return x.__name__.partition(".")[0]


def _package(x: Any) -> str:
    return _package_named(getattr(x, "__module__", None) or "")


@cache
def _package_named(module: str) -> str:
    return module.partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """Collect the global names and attributes in a function's code, and in functions inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
