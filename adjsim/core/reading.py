"""Readings: what a run computes, read once from the modules that the user edits.

A reading holds the tensors of a module tree as they were when it was made, and makes private
shallow copies of the tree with these tensors, or with others, in their places. A run computes with
such copies alone, forward and backward. So a later change of the module (an optimiser's step,
``load_state_dict``, the end of a ``functional_call``) does not reach a run that has started, and
nothing is ever put into the user's module: other threads see it as it is.

Numbers are checked whenever a reading is made, by the rules under which they were registered
(:mod:`adjsim.core.parameters`) and by the method ``validate`` of a module, which its constructor
calls too. Values that follow from others are made with the reading (:mod:`adjsim.core.derived`).
Attributes of a copy are shared, but for those that reach modules and tensors of the tree, which are
rebuilt (:mod:`adjsim.core.rebinding`). Modules of ``torch.jit`` are neither copied nor read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adjsim.core.box import refuse_kept_boxes
from adjsim.core.derived import (
    MADE,
    OWN,
    READING,
    SOURCE,
    STANDARD,
    Made,
    derived_names,
    derived_of,
    has_values,
    own_tensors,
    replaced,
    source_of,
)
from adjsim.core.parameters import check_numbers
from adjsim.core.rebinding import PLAIN, Place, Rebound, rebound, slots_of
from adjsim.core.state import in_transform
from adjsim.core.transforms import are_forward

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")

_HOOKS = tuple(name for name in STANDARD if name.endswith("_hooks"))
_KEPT = STANDARD | OWN


class Reading(Generic[M]):
    """The tensors of a module tree at one time, and copies of the tree that hold them.

    The tree may be a copy that another reading has made. A periodic box takes the place of that of
    each part that has one.

    Attributes:
        source: the module that the user edits.
        tensors: each parameter and buffer once, even if it has several names.
        names: the first name of each.
        wanted: the indices in ``tensors`` of the tensors that require grad.
        slots: the names and places of the tensors, and the derived values that are no tensors.
    """

    def __init__(self, module: M, box: Tensor | None = None) -> None:
        self.module, self.source = module, source_of(module)
        self._parts = list(_parts(module))
        readable = has_values()
        if readable:
            for _, part in self._parts:
                check_numbers(part)
        found = [
            (path, part, table, name, x)
            for table in ("_parameters", "_buffers")
            for path, part in self._parts
            for name, x in vars(part)[table].items()
            if x is not None and name not in derived_names(type(part))
        ]
        if box is not None:
            # A part may hold the box of another under a name of its own.
            boxes = {id(x) for *_, name, x in found if name == "box"}
            if not boxes:
                raise ValueError(
                    f"{type(module).__name__} has no box to replace: give it one when it is made "
                    "(box=)."
                )
            found = [
                (path, part, table, name, box if id(x) in boxes else x)
                for path, part, table, name, x in found
            ]
        self._values: list[tuple[nn.Module, dict[str, Any]]] = []
        for path, part in self._parts:
            rules = derived_of(type(part))
            if not rules:
                continue
            holder = part
            if box is not None:
                holder = replaced(part, {name: x for _, y, _, name, x in found if y is part})
            values: dict[str, Any] = {}
            self._values.append((part, values))
            for rule in rules:
                # A copy that another reading has made knows its values.
                known = box is None and MADE in vars(part)
                value = rule.__get__(part) if known else rule.make(holder, readable)
                if not isinstance(value, Tensor):
                    values[rule.name] = value
                elif not value.requires_grad:
                    found.append((path, part, "_buffers", rule.name, value))
        number_of: dict[int, int] = {}
        names: list[str] = []
        tensors: list[Tensor] = []
        for path, _, _, name, x in found:
            if id(x) not in number_of:
                number_of[id(x)] = len(tensors)
                tensors.append(x)
                names.append(_joined(path, name))
        self.names, self.tensors = tuple(names), tuple(tensors)
        self.wanted = tuple(number for number, x in enumerate(tensors) if x.requires_grad)
        self._places = [(part, table, name, number_of[id(x)]) for _, part, table, name, x in found]
        # The attributes at this time, since the user's modules may change.
        self._states = [vars(part).copy() for _, part in self._parts]
        for (_, part), state in zip(self._parts, self._states, strict=True):
            for table in ("_parameters", "_buffers", "_modules"):
                state[table] = state[table].copy()
            for name in derived_names(type(part)):
                state["_buffers"].pop(name, None)
        places = tuple((path, name, number_of[id(x)]) for path, _, _, name, x in found)
        self.slots = (self.names, places, tuple(tuple(x.items()) for _, x in self._values))

    @property
    def lazy(self) -> bool:
        """Whether a tensor has no values before the module is first evaluated."""
        return any(map(is_lazy, self.tensors))

    def bound(self, tensors: Sequence[Tensor] | None = None) -> M:
        """Return an independent copy of the tree with these tensors, or those of the reading."""
        tensors = self.tensors if tensors is None else tensors
        twins: dict[int, Any] = {id(x): y for x, y in zip(self.tensors, tensors, strict=True)}
        for _, part in self._parts:
            twins[id(part)] = object.__new__(type(part))
        for (_, part), given in zip(self._parts, self._states, strict=True):
            twin, state = twins[id(part)], given.copy()
            for name, value in state.items():
                if name not in _KEPT and type(value) not in PLAIN:
                    state[name] = rebound(value, twins)
            for name in _HOOKS:
                if state.get(name):
                    state[name] = rebound(state[name], twins)
            state["_modules"] = {
                name: twins.get(id(child), child) for name, child in given["_modules"].items()
            }
            state["_parameters"] = given["_parameters"].copy()
            state["_buffers"] = given["_buffers"].copy()
            state[READING], state[SOURCE] = self, source_of(part)
            vars(twin).update(state)
            for name in slots_of(type(part)):
                if hasattr(part, name):
                    object.__setattr__(twin, name, rebound(getattr(part, name), twins))
        self._put(tensors, twins)
        copy: M = twins[id(self.module)]
        return copy

    def rebound(self, copy: nn.Module, value: V) -> V:
        """Replace modules of the tree inside a function or another value by those of a copy."""
        found = self._copies(copy)
        sources = {id(source_of(part)): found[id(part)] for _, part in self._parts}
        return rebound(value, found | sources)

    def leaves(self) -> tuple[Tensor, ...]:
        """Return copies of the values as leaves, which require grad where the tensors do."""
        return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in self.tensors)

    def connected(self) -> tuple[Tensor, ...]:
        """Return copies of the values with a graph to the tensors; leaves, if none is recorded."""
        if torch.is_grad_enabled() or in_transform() or self.has_tangents:
            return tuple(x.clone() for x in self.tensors)
        return self.leaves()

    @property
    def has_tangents(self) -> bool:
        """Whether a tensor is differentiated forward in time."""
        return are_forward(self.tensors)

    def trainable(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Select by name, from tensors in place of those of the reading, the trainable ones."""
        return {self.names[number]: tensors[number] for number in self.wanted}

    def put(self, tensors: Sequence[Tensor], copy: nn.Module) -> None:
        """Put other tensors into a copy that nobody else has."""
        self._put(tensors, self._copies(copy))

    def _put(self, tensors: Sequence[Tensor], parts: Mapping[int, nn.Module]) -> None:
        for part, table, name, number in self._places:
            vars(parts[id(part)])[table][name] = tensors[number]
        for part, values in self._values:
            twin = parts[id(part)]
            vars(twin)[MADE] = Made(values, own_tensors(twin))

    def _copies(self, copy: nn.Module) -> dict[int, nn.Module]:
        """Return the modules of a copy by the identity of those that were read."""
        copies = _parts(copy)
        return {id(part): x for (_, part), (_, x) in zip(self._parts, copies, strict=True)}

    def registers_others(self, copy: nn.Module) -> bool:
        """Return whether a copy has more or fewer modules or tensors than it was made with."""
        parts = [part for _, part in _parts(copy)]
        tables = [table for part in parts for table in (part._parameters, part._buffers)]
        tensors = sum(x is not None for table in tables for x in table.values())
        return (len(parts), tensors) != (len(self._parts), len(self._places))

    def kept(self, copy: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that modules of a copy have put into attributes, by their names."""
        return {
            _joined(path, name): x
            for (path, twin), given in zip(_parts(copy), self._states, strict=False)
            for name, x in vars(twin).items()
            if isinstance(x, Tensor) and given.get(name) is None
        }

    def refuse_kept(self, tensors: Sequence[Tensor], evaluate: Callable[[M], Any]) -> None:
        """Refuse a module that computes a tensor from parameters once, and keeps it.

        Later evaluations would read it with the graph of the first one, or without a graph.
        """
        copy = self.bound(tensors)
        with torch.enable_grad():
            evaluate(copy)
            first = self.kept(copy)
            evaluate(copy)
        for name, x in self.kept(copy).items():
            if x is first.get(name) and x.requires_grad:
                raise ValueError(
                    f"{type(copy).__name__} keeps {name!r}, which is computed from parameters in "
                    "the first evaluation (a cached property, or an attribute that is set once), "
                    "so later evaluations have no gradient of their own: compute it in each "
                    "evaluation."
                )

    def written(self, copy: nn.Module, tensors: Sequence[Tensor]) -> str | None:
        """Return the name of a tensor that a copy has written into or replaced, if any.

        Nobody else writes into the tensors that the copy was made with.
        """
        parts = self._copies(copy)
        for part, table, name, number in self._places:
            x = tensors[number]
            if vars(parts[id(part)])[table].get(name) is not x or x._version:
                return name
        return None

    def refuse_written(self, copy: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Refuse a copy that has written into a tensor that it was made with, or replaced one."""
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

        The function, such as a record, may name the user's module. Modules of the tree in its
        closure are replaced by those of the copy. Where it reaches the tree in another way, torch
        functions receive the tensors of the copy.
        """
        function = self.rebound(copy, function)
        stand_ins: dict[int, Tensor] = {}
        places: list[Place] = []
        reading: Reading[Any] | None = self
        # A copy has been read of another one, or of the user's module.
        while reading is not None:
            stand_ins |= {id(x): y for x, y in zip(reading.tensors, tensors, strict=False)}
            places += [
                (vars(part)[table], name, number)
                for part, table, name, number in reading._places
                if number < len(tensors)
            ]
            reading = vars(reading.module).get(READING)
        return Rebound(function, stand_ins, tuple(places), tuple(tensors)) if places else function


def read(module: M, box: Tensor | None = None) -> M:
    """Return the copy of a new reading, or the module if it is one or torch compiles it.

    A periodic box takes the place of that of each part.
    """
    if (box is None and READING in vars(module)) or torch.compiler.is_compiling():
        return module
    if isinstance(module, torch.jit.ScriptModule):
        return module
    found = Reading(module, box).bound()
    if box is not None:
        refuse_kept_boxes(found, box)
    return found


def as_part(part: M, whole: nn.Module, **values: Any) -> M:
    """Mark a module that a copy makes of its own tensors as belonging to the same reading.

    The values are derived values of the part that are no tensors.
    """
    if READING in vars(whole):
        vars(part)[READING] = vars(whole)[READING]
        vars(part)[MADE] = Made(values, own_tensors(part))
    return part


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a tree with their paths, each once."""
    seen, queue = {id(module)}, [("", module)]
    while queue:
        path, part = queue.pop()
        yield path, part
        for name, child in reversed(part._modules.items()):
            if child is None or id(child) in seen:
                continue
            if not isinstance(child, torch.jit.ScriptModule):
                seen.add(id(child))
                queue.append((_joined(path, name), child))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
