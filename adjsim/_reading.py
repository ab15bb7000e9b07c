"""Readings: what a run computes, read once from the modules that the user edits.

A module is what the user edits; a reading is what is computed. A reading holds the tensors of a
module tree as they were when it was made, and :meth:`Reading.bound` makes private shallow copies of
the tree with these tensors, or with others, in their places. A run computes with such copies alone,
forward and backward. So a later change of the module (an optimiser's step, ``load_state_dict``, the
end of a ``functional_call``) does not reach a run that has started, and nothing is ever put into
the user's module: other threads see it as it is.

Numbers are checked whenever a reading is made, by the rules under which they were registered
(:func:`adjsim._params.register`) and by the method ``validate`` of a module, which its constructor
calls too. A value that follows from others (the volume of a box) is :class:`derived`: it is made
with the reading, and again only where one of its sources differs.

A copy is shallow: attributes that are no tensors are shared, but for the modules and tensors of the
tree inside lists, dictionaries, bound methods, partial functions and closures, whose copies take
their places.
Functions of the user that read the tree in other ways (a record that names the dynamics) are
evaluated by :meth:`Reading.on`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar, cast, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from adjsim._layout import is_tracing
from adjsim._state import in_transform

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")

# Attributes that torch gives every module.
_STANDARD = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
# Types of attributes that hold no modules.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_READING, _SOURCE = "_reading", "_source"
# Attributes that a copy keeps, or that it gets anew.
_KEPT = _STANDARD | {"_rules", _READING, _SOURCE}


class derived(Generic[V]):
    """A value of a module that follows from some of its attributes.

    ``@derived("box", "cutoff")`` above a method makes a property, whose value is made when a
    reading of the module is, or at the first use. The value is kept until a source has another
    value: tensors are compared by their contents, since ``x.data`` evades the version counter. A
    value with a source that requires grad is made at each use.

    A tensor is a buffer of the copies that a reading makes, and so an input of compiled loops; one
    that requires grad is made at each use. Any other value is a constant of them, and part of their
    key.
    """

    def __init__(self, *sources: str) -> None:
        self.sources = sources

    def __call__(self, function: Callable[[Any], V]) -> derived[V]:
        self.function = function
        self.__doc__ = function.__doc__
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, module: None, owner: Any = None) -> derived[V]: ...
    @overload
    def __get__(self, module: nn.Module, owner: Any = None) -> V: ...
    def __get__(self, module: nn.Module | None, owner: Any = None) -> derived[V] | V:
        if module is None:
            return self
        found = module._buffers.get(self.name)
        return self.make(module) if found is None else cast(V, found)

    def make(self, module: nn.Module) -> V:
        """Return the value that follows from the present sources."""
        sources = [getattr(module, name) for name in self.sources]
        tensors = [x for x in sources if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors) or not _has_values():
            return self.function(module)
        known = _derived.setdefault(source_of(module), {})
        if self.name in known and all(map(_equal, sources, known[self.name][0])):
            return known[self.name][1]
        with torch.no_grad():
            value = self.function(module)
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in sources]
        known[self.name] = (copies, value)
        return value


# The derived values of each module by name, with the values of their sources.
_derived: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], Any]]] = WeakKeyDictionary()


@cache
def _derived_of(kind: type) -> tuple[derived[Any], ...]:
    found = {name: x for base in reversed(kind.__mro__) for name, x in vars(base).items()}
    return tuple(x for x in found.values() if isinstance(x, derived))


@cache
def derived_names(kind: type) -> frozenset[str]:
    """Return the names of the derived values of a class of modules."""
    return frozenset(rule.name for rule in _derived_of(kind))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return (
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and (x.dtype, x.device) == (y.dtype, y.device)
            and torch.equal(x, y)
        )
    return type(x) is type(y) and bool(x == y)


def _has_values() -> bool:
    """Return whether the values of tensors can be read."""
    return not (in_transform() or is_tracing() or torch.compiler.is_compiling())


class Reading(Generic[M]):
    """The tensors of a module tree at one time, and copies of the tree that hold them.

    Args:
        module: the root of the tree; a copy that another reading has made is read as well.
        box: a periodic box in place of that of each part that has one; None: their own.

    Attributes:
        source: the module that the user edits.
        tensors: each parameter and buffer once, even if it has several names.
        names: the first name of each.
        wanted: the indices in ``tensors`` of the tensors that require grad.
        slots: the names, the places of the tensors in the tree, and the derived values that are no
            tensors.

    Raises:
        ValueError: a number that the constructor of its module would refuse; a box for a tree
            without one.
    """

    def __init__(self, module: M, box: Tensor | None = None) -> None:
        self.module, self.source = module, source_of(module)
        self._parts = list(_parts(module))
        if _has_values():
            for _, part in self._parts:
                _check(part)
        found = [
            (path, part, table, name, x)
            for table in ("_parameters", "_buffers")
            for path, part in self._parts
            for name, x in vars(part)[table].items()
            if x is not None and not (table == "_buffers" and name in derived_names(type(part)))
        ]
        if box is not None:
            found = _with_box(module, found, box)
        found += [
            (path, part, "_buffers", rule.name, x)
            for path, part, rule, x in self._derived_values(found if box is not None else ())
        ]
        number_of: dict[int, int] = {}
        self.tensors: tuple[Tensor, ...] = ()
        names: list[str] = []
        tensors: list[Tensor] = []
        for path, _, _, name, x in found:
            if id(x) not in number_of:
                number_of[id(x)] = len(tensors)
                tensors.append(x)
                names.append(f"{path}.{name}" if path else name)
        self.names, self.tensors = tuple(names), tuple(tensors)
        self.wanted = tuple(number for number, x in enumerate(tensors) if x.requires_grad)
        self._places = [(part, table, name, number_of[id(x)]) for _, part, table, name, x in found]
        # The attributes at this time, since the user's modules may change.
        self._states = [vars(part).copy() for _, part in self._parts]
        for state in self._states:
            for table in ("_parameters", "_buffers", "_modules"):
                state[table] = state[table].copy()
        places = tuple((path, name, number_of[id(x)]) for path, _, _, name, x in found)
        self.slots = (self.names, places, tuple(item for _, item in self._values))

    @property
    def lazy(self) -> bool:
        """Whether a tensor has no values before the module is first evaluated."""
        return any(map(is_lazy, self.tensors))

    def bound(self, tensors: Sequence[Tensor] | None = None) -> M:
        """Return a copy of the tree with these tensors in their places; None: those of the reading.

        A copy is independent of the user's module and of other copies.
        """
        tensors = self.tensors if tensors is None else tensors
        twins: dict[int, Any] = {id(x): y for x, y in zip(self.tensors, tensors, strict=True)}
        for _, part in self._parts:
            twins[id(part)] = object.__new__(type(part))
        for (_, part), given in zip(self._parts, self._states, strict=True):
            twin, state = twins[id(part)], given.copy()
            for name, value in state.items():
                if type(value) not in _PLAIN and name not in _KEPT:
                    state[name] = _rebound(value, twins, {})
            for name in _HOOKS:
                if state.get(name):
                    state[name] = _rebound(state[name], twins, {})
            state["_modules"] = {
                name: child if child is None else twins[id(child)]
                for name, child in given["_modules"].items()
            }
            state["_parameters"] = given["_parameters"].copy()
            state["_buffers"] = given["_buffers"].copy()
            state[_READING], state[_SOURCE] = self, source_of(part)
            vars(twin).update(state)
        for part, (name, value) in self._values:
            vars(twins[id(part)])[name] = value
        for part, table, name, number in self._places:
            vars(twins[id(part)])[table][name] = tensors[number]
        return cast(M, twins[id(self.module)])

    def rebound(self, copy: nn.Module, value: V) -> V:
        """Replace modules of the tree inside a function or another value by those of a copy."""
        found: dict[int, Any] = {}
        for (_, part), twin in zip(self._parts, _modules(copy), strict=True):
            found[id(part)] = found[id(source_of(part))] = twin
        return _rebound(value, found, {})

    def leaves(self) -> tuple[Tensor, ...]:
        """Return copies of the values as leaves, which require grad where the tensors do."""
        return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in self.tensors)

    def connected(self) -> tuple[Tensor, ...]:
        """Return copies of the values with a graph, by which autograd reaches the tensors once.

        Where no graph is recorded, they are leaves.
        """
        if not torch.is_grad_enabled() and not in_transform():
            return self.leaves()
        return tuple(x.clone() for x in self.tensors)

    def trainable(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Select by name, from tensors in place of those of the reading, the trainable ones."""
        return {self.names[number]: tensors[number] for number in self.wanted}

    def put(self, tensors: Sequence[Tensor], copy: nn.Module) -> None:
        """Put other tensors into a copy that nobody else has."""
        parts = dict(zip((id(part) for _, part in self._parts), _modules(copy), strict=True))
        for part, table, name, number in self._places:
            vars(parts[id(part)])[table][name] = tensors[number]

    def registers_others(self, copy: nn.Module) -> bool:
        """Return whether a copy has other modules or names of tensors than it was made with."""
        parts = _modules(copy)
        return len(parts) != len(self._parts) or any(
            _registered(twin, table) != _registered(part, table)
            for twin, (_, part) in zip(parts, self._parts, strict=True)
            for table in ("_parameters", "_buffers")
        )

    def written(self, copy: nn.Module, tensors: Sequence[Tensor]) -> str | None:
        """Return the name of a tensor that a copy has written into or replaced; None: it has not.

        Args:
            copy: the copy.
            tensors: those that the copy was made with, which nobody else writes into.
        """
        parts = dict(zip((id(part) for _, part in self._parts), _modules(copy), strict=True))
        for part, table, name, number in self._places:
            x = tensors[number]
            if vars(parts[id(part)])[table].get(name) is not x or x._version:
                return name
        return None

    def refuse_written(self, copy: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Refuse a copy that has written into a tensor that it was made with, or replaced one.

        Raises:
            ValueError: the name of the tensor.
        """
        name = self.written(copy, tensors)
        if name is not None:
            raise ValueError(
                f"{type(self.module).__name__} or a part of it writes to its own parameter or "
                f"buffer {name!r} while it runs, so a run that is repeated or reversed differs "
                "from the first. Put it into eval mode (.eval()), or keep such numbers out of the "
                "potential."
            )

    def on(
        self, copy: nn.Module, tensors: Sequence[Tensor], function: Callable[..., V]
    ) -> Callable[..., V]:
        """Return a function that reads a copy, and its tensors, where it names the source.

        A record or an observable is a function of the user, which may name the user's module.
        Modules of the tree in its closure are replaced by those of the copy. Where it reaches the
        tree in another way, torch functions receive the tensors of the copy.
        """
        found, rebound = self._stand_ins(tensors), self.rebound(copy, function)
        return _On(found, rebound) if found else rebound

    def _stand_ins(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Map the identity of each tensor of the source to one of these tensors."""
        found: dict[int, Tensor] = {}
        reading: Reading[Any] | None = self
        while reading is not None:
            found |= {id(x): y for x, y in zip(reading.tensors, tensors, strict=False)}
            reading = vars(reading.module).get(_READING)
        return found

    @property
    def untrained(self) -> tuple[Tensor, ...]:
        """The tensors that do not require grad, which a graph saves to notice later changes."""
        return tuple(
            x
            for number, x in enumerate(self.tensors)
            if number not in self.wanted and not x.is_inference()
        )

    def _derived_values(
        self, changed: Sequence[Any]
    ) -> Iterator[tuple[str, nn.Module, derived[Any], Tensor]]:
        """Make the derived values, and return those that are tensors.

        Args:
            changed: the tensors that differ from those of the modules, as places.
        """
        self._values: list[tuple[nn.Module, tuple[str, Any]]] = []
        for path, part in self._parts:
            rules = _derived_of(type(part))
            if not rules:
                continue
            own = {name: x for _, owner, _, name, x in changed if owner is part}
            holder = replaced(part, own) if own else part
            for rule in rules:
                value = rule.make(holder)
                if isinstance(value, Tensor):
                    if not value.requires_grad:
                        yield path, part, rule, value
                else:
                    self._values.append((part, (rule.name, value)))


@dataclass(frozen=True)
class _On(Generic[V]):
    """A function of the user, evaluated with stand-ins of tensors."""

    tensors: Mapping[int, Tensor]
    function: Callable[..., V]

    def __call__(self, *args: Any) -> V:
        with StandIns(self.tensors):
            value: Any = self.function(*args)
        # The function may return a tensor itself, which no torch function has replaced.
        return cast(V, self.tensors.get(id(value), value))


class StandIns(TorchFunctionMode):
    """A mode in which torch functions receive other tensors in place of some."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *map(self._of, args), **{name: self._of(x) for name, x in (kwargs or {}).items()}
        )

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensors.get(id(x), x)
        return tree_map(self._of, x) if isinstance(x, list | tuple | dict) else x


def is_read(module: nn.Module) -> bool:
    """Return whether a module is the copy that a reading has made."""
    return _READING in vars(module)


def read(module: M, box: Tensor | None = None) -> M:
    """Return what is computed for a module: the copy of a new reading, or the module if it is one.

    A tree that torch compiles is returned as it is.
    """
    if (box is None and is_read(module)) or torch.compiler.is_compiling():
        return module
    return Reading(module, box).bound()


def as_part(part: M, whole: nn.Module) -> M:
    """Mark a module that a copy makes of its own tensors as belonging to the same reading."""
    if is_read(whole):
        vars(part)[_READING] = vars(whole)[_READING]
    return part


def source_of(module: M) -> M:
    """Return the module that the user edits, of which a module is a copy or which it is."""
    return vars(module).get(_SOURCE, module)


def replaced(module: M, tensors: Mapping[str, Tensor | None]) -> M:
    """Return a shallow copy of one module with other tensors of these names.

    Its submodules are shared. Derived values with one of these sources are made again.
    """
    twin = object.__new__(type(module))
    state = vars(module) | {
        "_parameters": dict(module._parameters), "_buffers": dict(module._buffers)
    }  # fmt: skip
    vars(twin).update(state)
    for name, x in tensors.items():
        table: dict[str, Any] = twin._parameters if name in twin._parameters else twin._buffers
        table[name] = x
    for rule in _derived_of(type(module)):
        if not tensors.keys().isdisjoint(rule.sources):
            twin._buffers.pop(rule.name, None)
            vars(twin).pop(rule.name, None)
    return twin


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of one module that are not derived, by name."""
    made = derived_names(type(module))
    found = {**module._parameters, **module._buffers}
    return {name: x for name, x in found.items() if x is not None and name not in made}


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a tree with their paths, each once."""
    seen, queue = {id(module)}, [("", module)]
    while queue:
        path, part = queue.pop()
        yield path, part
        for name, child in reversed(part._modules.items()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{path}.{name}" if path else name, child))


def _modules(module: nn.Module) -> list[nn.Module]:
    return [part for _, part in _parts(module)]


def _registered(part: nn.Module, table: str) -> set[str]:
    """Return the names under which a module has tensors that are not derived."""
    found = {name for name, x in vars(part)[table].items() if x is not None}
    return found - derived_names(type(part))


def _check(part: nn.Module) -> None:
    """Refuse numbers of a module that its constructor would refuse."""
    for name, rule in vars(part).get("_rules", {}).items():
        x = getattr(part, name)
        if isinstance(x, Tensor) and not is_lazy(x):
            rule(name, x.detach())
    validate = getattr(type(part), "validate", None)
    if validate is not None:
        validate(part)


def _with_box(module: nn.Module, found: Sequence[Any], box: Tensor) -> list[Any]:
    """Put a box into each place of a tree that has one."""
    if not any(name == "box" for *_, name, _ in found):
        raise ValueError(
            f"{type(module).__name__} has no box to replace: give it one when it is made (box=)."
        )
    return [
        (path, part, table, name, box if name == "box" else x)
        for path, part, table, name, x in found
    ]


def _rebound(value: Any, twins: Mapping[int, Any], seen: dict[int, Any]) -> Any:
    """Replace modules and tensors of a tree inside a value by those of a copy.

    A value without such modules and tensors is returned itself.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, nn.Module | Tensor):
        return twins.get(id(value), value)
    if not gc.is_tracked(value):
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value
    if isinstance(value, dict):
        items = {name: _rebound(x, twins, seen) for name, x in value.items()}
        if all(x is y for x, y in zip(items.values(), value.values(), strict=True)):
            return value
        twin = value.copy()
        twin.update(items)
        return twin
    if isinstance(value, list | tuple):
        parts = [_rebound(x, twins, seen) for x in value]
        if all(x is y for x, y in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MethodType):
        owner = _rebound(value.__self__, twins, seen)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, partial):
        parts = [_rebound(x, twins, seen) for x in (value.func, value.args, value.keywords)]
        same = all(
            x is y for x, y in zip(parts, (value.func, value.args, value.keywords), strict=True)
        )
        return value if same else partial(parts[0], *parts[1], **parts[2])
    if isinstance(value, FunctionType) and value.__closure__:
        return _rebound_function(value, twins, seen)
    return value


def _rebound_function(
    function: FunctionType, twins: Mapping[int, Any], seen: dict[int, Any]
) -> FunctionType:
    """Replace modules and tensors of a tree in the closure of a function by those of a copy."""
    cells = list(function.__closure__ or ())
    changed = False
    for k, cell in enumerate(cells):
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # An empty cell.
        found = _rebound(content, twins, seen)
        if found is not content:
            cells[k], changed = CellType(found), True
    if not changed:
        return function
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    vars(twin).update(vars(function))
    return twin
