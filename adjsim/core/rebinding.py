"""Functions and other values that reach the modules of a tree, with copies in their places.

A value reaches a tree through containers, attributes of objects of the user, bound methods, partial
functions, and the closure and the defaults of functions. Global variables and objects of libraries
are not followed.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar, cast
from weakref import ReferenceType

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_map

from adjsim.core.libraries import of_library

V = TypeVar("V")

# Types of attributes that hold no modules.
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class OfRun:
    """A value, other than modules and tensors, of which each run has a twin of its own."""


def rebound(value: V, twins: Mapping[int, Any]) -> V:
    """Replace modules, tensors and values of a run inside a value, by their identities.

    The parts of the value that reach one are copied, others kept. Parts that are shared, or that
    contain each other, stay so.
    """
    return value if type(value) in PLAIN else _rebuilt(value, twins, {})


def reached(value: Any) -> Iterator[Any]:
    """Yield all that a value leads to, each once."""
    waiting, seen = [value], set[int]()
    while waiting:
        x = waiting.pop()
        if type(x) in PLAIN or id(x) in seen:
            continue
        yield x
        seen.add(id(x))
        waiting.extend(_inside(x))


def _is_replaced(x: Any, twins: Mapping[int, Any]) -> bool:
    return id(x) in twins and isinstance(x, nn.Module | Tensor | OfRun)


def _inside(x: Any) -> Iterable[Any]:
    """Return what a value is made of: of objects, the attributes of classes of the user."""
    if isinstance(x, Tensor) or not gc.is_tracked(x):
        return ()
    if isinstance(x, dict):
        return (*x.keys(), *x.values())
    if isinstance(x, list | tuple | set | frozenset | deque):
        # Subclasses may have no length, such as the irreps of e3nn.
        return iter(x)
    if isinstance(x, MethodType):
        return (x.__self__,)
    if isinstance(x, partial):
        return (x.func, x.args, x.keywords)
    if isinstance(x, FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]
        return (*cells, x.__defaults__, x.__kwdefaults__, *vars(x).values())
    if isinstance(x, type | ModuleType | ReferenceType):
        return ()
    followed = isinstance(x, nn.Module | SimpleNamespace) or not of_library(type(x))
    return (y for _, y in attributes_of(x)) if followed else ()


def attributes_of(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name."""
    yield from getattr(x, "__dict__", {}).items()
    for name in slots_of(type(x)):
        if hasattr(x, name):
            yield name, getattr(x, name)


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class holds in slots."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _rebuilt(value: Any, twins: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    """Return a value with copies of the parts that reach a twin."""
    if _is_replaced(value, twins):
        return twins[id(value)]
    if id(value) in memo:
        return memo[id(value)]
    if not any(_is_replaced(x, twins) for x in reached(value)):
        return value

    def inner(x: Any) -> Any:
        return _rebuilt(x, twins, memo)

    if isinstance(value, FunctionType):
        return _rebuilt_function(value, inner, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, inner(value.__self__))
    if isinstance(value, partial):
        return partial(inner(value.func), *inner(value.args), **inner(value.keywords))
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(inner, value))
    if isinstance(value, frozenset):
        return type(value)(map(inner, value))
    if isinstance(value, nn.Module):
        twin: Any = object.__new__(type(value))
        vars(twin).update(vars(value))
    else:
        twin = copy.copy(value)
    memo[id(value)] = twin
    if isinstance(value, dict):
        dict.clear(twin)
        for name, x in value.items():
            dict.__setitem__(twin, inner(name), inner(x))
    elif isinstance(value, list):
        list.__setitem__(twin, slice(None), list(map(inner, value)))
    elif isinstance(value, set | deque):
        twin.clear()
        for x in value:
            twin.add(inner(x)) if isinstance(value, set) else twin.append(inner(x))
    for name, x in attributes_of(value):
        if type(x) not in PLAIN and (found := inner(x)) is not x:
            if name in getattr(twin, "__dict__", {}):
                vars(twin)[name] = found
            else:
                object.__setattr__(twin, name, found)
    return twin


def _rebuilt_function(
    function: FunctionType, inner: Callable[[Any], Any], memo: dict[int, Any]
) -> FunctionType:
    """Return a function with copies in its closure, its defaults and its attributes."""
    cells = [memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()]
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(cells)
    )
    memo[id(function)] = twin
    for cell, new in zip(function.__closure__ or (), cells, strict=True):
        # An empty cell stays empty, and a cell that several functions share is filled once.
        if cell != CellType() and new == CellType():
            new.cell_contents = inner(cell.cell_contents)
    twin.__defaults__ = inner(function.__defaults__)
    twin.__kwdefaults__ = inner(function.__kwdefaults__)
    vars(twin).update({name: inner(x) for name, x in vars(function).items()})
    return twin


# The table of tensors of a module of the user, the name there, and the number of the tensor.
Place = tuple[Mapping[str, Any], str, int]


@dataclass(frozen=True)
class Rebound(Generic[V]):
    """A function of the user that reads other tensors in place of those of some modules.

    Attributes:
        stand_ins: the other tensors, by the identity of those that they stand for.
        places: the places of the modules. The tensors there at a call, after the end of a
            ``functional_call`` for example, are replaced too.
        tensors: the other tensors, by number.
    """

    function: Callable[..., V]
    stand_ins: Mapping[int, Tensor]
    places: tuple[Place, ...]
    tensors: tuple[Tensor, ...]

    def __call__(self, *args: Any) -> V:
        found = dict(self.stand_ins)
        for table, name, number in self.places:
            if (x := table.get(name)) is not None:
                found.setdefault(id(x), self.tensors[number])
        stand_ins = StandIns(found)
        with stand_ins:
            value: Any = self.function(*args)
        # The function may return tensors themselves, which no torch function has replaced.
        return cast(V, stand_ins.within(value))


class StandIns(TorchFunctionMode):
    """A mode in which torch functions receive other tensors in place of some."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: self.within(x) for name, x in (kwargs or {}).items()}
        return func(*map(self.within, args), **named)

    def within(self, x: Any) -> Any:
        """Return a value with the other tensors in place of those that it contains."""
        if isinstance(x, Tensor):
            return self._tensors.get(id(x), x)
        if not isinstance(x, list | tuple | dict):
            return x
        if not tree_is_leaf(x):
            return tree_map(self.within, x)
        # A subclass of list or tuple, of which a torch function takes a list as well.
        found = x if isinstance(x, dict) else [self.within(y) for y in x]
        return found if any(a is not b for a, b in zip(found, x, strict=True)) else x
