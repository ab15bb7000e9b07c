"""The input tensors of a right-hand side, fixed at the start of a run.

A right-hand side reads tensors as arguments, as parameters and buffers of modules, and as captured
variables. A run, forward and backward, replaces each tensor that requires grad by a detached leaf,
called its stand-in. So autograd reaches the user's tensors once, at the end: their hooks run once,
and tensors computed from each other are not counted twice. A module under
``torch.func.functional_call`` is evaluated with the tensors of that call, even after the call has
returned. Later assignments such as ``p.data = ...`` and ``module.p = ...`` do not affect a run.

Arguments are passed as stand-ins. Modules are read once, and their copies with stand-ins take their
places in the function and in its closure (:mod:`adjsim.core.reading`). Where a plain function reads
a declared tensor or module in another way, torch functions receive the stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import getclosurevars, isfunction, isroutine
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adjsim.core.parameters import graph_nodes, leaves
from adjsim.core.reading import Reading
from adjsim.core.rebinding import Rebound
from adjsim.core.state import in_transform
from adjsim.core.transforms import outside_transforms
from adjsim.ivp.connection import (
    is_solution,
    is_transformed,
    plain,
    refuse_wrapped,
    undeclared,
)
from adjsim.ivp.histories import History, HistoryReader


class InputTensors:
    """The inputs of a right-hand side other than time and state.

    If the function is a module or a method of one, the module's tensors are inputs, and so are
    those of modules among the arguments and of ``declared``.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        declared: Any,
        batch: Size,
        of_samples: bool = False,
    ) -> None:
        declared = list(declared) if isinstance(declared, Iterator) else declared
        #: Tensors with respect to which a gradient is wanted, and the stand-in of each.
        self.originals, self.leaves = list[Tensor](), list[Tensor]()
        #: The solutions that the function reads, whose states become originals too.
        self.histories = HistoryReader(self.originals, self.leaves, batch, of_samples)
        self._given = fun
        fun, args, declared = self.histories.twins_in((fun, args, declared))
        own = tree_leaves(owner(fun))
        given = [x for x in tree_leaves(args) if isinstance(x, nn.Module)]
        nodes = [*own, *tree_leaves(declared), *given]
        modules = [x for x in nodes if isinstance(x, nn.Module)]
        # A module in the closure may hold the declared ones.
        reading = Reading(nn.ModuleList([*modules, *_closed_over(fun)]))
        registered = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        unregistered = [x for x in nodes if isinstance(x, Tensor)]
        arguments = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        found = (*arguments, *registered, *unregistered)
        wanted = {id(x): x for x in found if x.requires_grad or is_transformed(x)}
        self.originals += wanted.values()
        # Copies, so that a later change of a tensor in place is one of the next run alone.
        with outside_transforms():
            self.leaves += [plain(x).clone().requires_grad_() for x in self.originals]
            leaf_of = dict(zip(wanted, self.leaves, strict=True))
            constants = [x for x in (*arguments, *reading.tensors) if id(x) not in leaf_of]
            copies = leaf_of | {id(x): plain(x).clone() for x in constants}
        self.args: tuple[Any, ...] = tree_map(lambda x: copies.get(id(x), x), args)
        #: Stand-ins of arguments and of declared tensors, by identity, without those of modules.
        self.named = {id(leaf_of[id(x)]) for x in (*arguments, *unregistered) if id(x) in leaf_of}
        copied = reading.bound([copies[id(x)] for x in reading.tensors])
        function = reading.rebound(copied, fun)
        of_module = any(isinstance(x, nn.Module) for x in own)
        # Copies are bound to the function. A module among the arguments is outside of it, and its
        # tensors are replaced where they are read.
        passed = [x for m in given for x in (*m.parameters(), *m.buffers())]
        captured = [*unregistered, *(passed if of_module else registered)]
        self._stand_ins = {id(x): leaf_of[id(x)] for x in captured if id(x) in leaf_of}
        self._function = function
        self._guard = refuse_wrapped() if in_transform() else nullcontext()
        for x in (*nodes, *tree_leaves(args)):
            table = self.histories.add(x.original) if isinstance(x, History) else None
            self.named |= {id(table.values)} if table and table.values.requires_grad else set()
        self._declared = {id(x): x.grad_fn for x in (*registered, *unregistered) if x.requires_grad}
        self._computed = {node for node in self._declared.values() if node is not None}

    def evaluate(self, t: Any, y: Any, *args: Any, sample: Tensor | None = None) -> Any:
        """Evaluate the function with the tensors of the run; ``args`` are those of the run.

        Histories of samples are read for one ``sample``, a number that vmap hides; None: for all.
        """
        function: Any = self.histories.bound(self._function, sample)
        if self._stand_ins:
            function = Rebound(function, self._stand_ins, (), ())
        with self._guard:
            return function(t, y, *args)

    def refuse_undeclared(self, out: Tensor, *known: Tensor) -> None:
        """Refuse a rate whose graph has a leaf that is neither declared nor known."""
        given = {id(x) for x in (*known, *self.leaves)}
        if is_transformed(out):
            raise undeclared("a tensor with a tangent, which")
        for node in graph_nodes(out):
            leaf = getattr(node, "variable", None)
            computed = node in self._computed or id(leaf) in self._declared
            strange = None if leaf is None or id(leaf) in given else leaf
            if (computed or strange is not None) and any(map(is_solution, graph_nodes(out))):
                raise ValueError(
                    "fun reads a solution that is a global variable or an attribute of a class, so "
                    "the adjoint would lose its gradient: pass it in args=(..., solution.sol), or "
                    "capture it in a local function."
                )
            # An evaluation uses the stand-ins, so it reaches a declared tensor only through a
            # tensor computed beforehand.
            if computed:
                raise ValueError(
                    "fun reads a tensor that was computed from a declared one before the solution: "
                    "compute it in fun, or declare it instead."
                )
            if strange is not None:
                raise undeclared(f"{_name_of(strange, self._given)}, which requires grad and")


def _closed_over(fun: Any) -> list[nn.Module]:
    """Return the modules in the closure of a function."""
    cells = fun.__closure__ or () if isinstance(fun, FunctionType) else ()
    contents = (cell.cell_contents for cell in cells if cell != CellType())
    return [x for x in contents if isinstance(x, nn.Module)]


def owner(fun: Any) -> Any:
    """Return the object to which a method belongs, or a callable object itself."""
    while isinstance(fun, partial):
        fun = fun.func
    if isinstance(fun, MethodType):
        return fun.__self__
    return None if isroutine(fun) or not hasattr(fun, "__dict__") else fun


def _name_of(leaf: Tensor, fun: Callable[..., Any]) -> str:
    """Describe a tensor by its name in a function, or else by its shape."""
    places: list[tuple[str, dict[Any, Any]]] = []
    if owner(fun) is not None:
        places.append((f"a plain attribute of {type(owner(fun)).__name__}", vars(owner(fun))))
    plain = fun.forward if isinstance(fun, nn.Module) else fun
    while isinstance(plain, partial | MethodType):
        if isinstance(plain, partial):
            given = plain.keywords | dict(enumerate(plain.args))
            places.append(("an argument of a partial", given))
        plain = plain.func if isinstance(plain, partial) else plain.__func__
    if isfunction(plain):
        seen = getclosurevars(plain)
        places.append(("", {**seen.globals, **seen.nonlocals}))
    for where, names in places:
        for name, value in names.items():
            if isinstance(value, Tensor) and any(x is leaf for x in (value, *leaves(value))):
                return f"'{name}'" + (f" ({where})" if where else "")
            parameters = value.named_parameters() if isinstance(value, nn.Module) else ()
            for inner, x in parameters:
                if x is leaf:
                    return f"'{name}.{inner}'"
    return f"a tensor of shape {tuple(leaf.shape)}"
