"""The input tensors of a right-hand side, fixed at the start of a run.

A right-hand side reads tensors as arguments, as parameters and buffers of modules, and as captured
variables. Whenever a run evaluates the right-hand side, forward or backward, it replaces each
tensor that requires grad by a detached leaf, called its stand-in. So the adjoint differentiates
with respect to the stand-ins, and autograd reaches the user's tensors once, at the end: their hooks
run once, and tensors computed from each other are not counted twice. A module under
``torch.func.functional_call`` is evaluated with the tensors of that call, even after the call has
returned. Assignments such as ``p.data = ...`` and ``module.p = ...`` do not affect a run that has
started.

Arguments are passed as stand-ins. Modules are read once, and their copies with stand-ins take their
places in the function and in its closure (:mod:`adjsim.core.reading`). Where a plain function reads
a declared tensor or module in another way, torch functions receive the stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import isroutine
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adjsim.core.reading import Reading
from adjsim.core.rebinding import StandIns


class InputTensors:
    """The inputs of a right-hand side other than time and state.

    Args:
        fun: the function. If it is a module or a method of one, the module's tensors are inputs.
        args: its further arguments.
        declared: tensors and modules that it reads in addition.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], declared: Any) -> None:
        declared = list(declared) if isinstance(declared, Iterator) else declared
        own = tree_leaves(owner(fun))
        nodes = [*own, *tree_leaves(declared)]
        modules = [x for x in nodes if isinstance(x, nn.Module)]
        # A module in the closure may hold the declared ones.
        reading = Reading(nn.ModuleList([*modules, *_closed_over(fun)]))
        registered = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        unregistered = [x for x in nodes if isinstance(x, Tensor)]
        arguments = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        #: Declared tensors that require grad.
        self.declared = list(
            {id(x): x for x in (*registered, *unregistered) if x.requires_grad}.values()
        )
        #: Tensors with respect to which a gradient is wanted, and the stand-in of each.
        self.originals = list(
            {id(x): x for x in (*arguments, *self.declared) if x.requires_grad}.values()
        )
        # Copies, so that a later change of a tensor in place is one of the next run alone.
        self.leaves = [x.detach().clone().requires_grad_() for x in self.originals]
        leaf_of = {id(x): leaf for x, leaf in zip(self.originals, self.leaves, strict=True)}
        copies = leaf_of | {
            id(x): x.detach().clone()
            for x in (*arguments, *reading.tensors)
            if id(x) not in leaf_of
        }
        self.args: tuple[Any, ...] = tree_map(lambda x: copies.get(id(x), x), args)
        #: Stand-ins of arguments and of declared tensors, by identity, without those of modules.
        self.named = {id(leaf_of[id(x)]) for x in (*arguments, *unregistered) if x.requires_grad}
        #: The function, with copies of the modules that hold the stand-ins.
        self.fun = reading.rebound(reading.bound([copies[id(x)] for x in reading.tensors]), fun)
        captured = [*unregistered]
        if not any(isinstance(x, nn.Module) for x in own):
            captured += registered
        self._captured = {id(x): leaf_of[id(x)] for x in captured if x.requires_grad}
        self._leaves = {id(leaf) for leaf in self.leaves}
        self._declared = {id(x) for x in self.declared} | {
            id(x.grad_fn) for x in self.declared if x.grad_fn is not None
        }

    def evaluate(self, t: Any, y: Any) -> Any:
        """Evaluate the function with the tensors of the run."""
        with StandIns(self._captured) if self._captured else nullcontext():
            value = self.fun(t, y, *self.args)
        # A function may return a captured tensor itself, which no torch function has replaced.
        return self._captured.get(id(value), value)

    def is_stand_in(self, leaf: Tensor) -> bool:
        return id(leaf) in self._leaves

    def is_declared(self, node: Any, leaf: Tensor | None) -> bool:
        """Test whether a node of a graph is a declared tensor instead of its stand-in.

        An evaluation uses the stand-ins, so it reaches a declared tensor only through a tensor
        computed beforehand.
        """
        return id(node) in self._declared or id(leaf) in self._declared


def _closed_over(fun: Any) -> list[nn.Module]:
    """Return the modules in the closure of a function."""
    cells = fun.__closure__ or () if isinstance(fun, FunctionType) else ()
    return [
        cell.cell_contents
        for cell in cells
        if cell != CellType() and isinstance(cell.cell_contents, nn.Module)
    ]


def owner(fun: Any) -> Any:
    """Return the object to which a method belongs, or a callable object itself."""
    while isinstance(fun, partial):
        fun = fun.func
    if isinstance(fun, MethodType):
        return fun.__self__
    return None if isroutine(fun) or not hasattr(fun, "__dict__") else fun
