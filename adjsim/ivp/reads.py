"""The tensors that a run reads, held as they were at its start.

A right-hand side reads tensors as arguments, as parameters and buffers of modules, and as variables
that it captures. A run replaces each that requires grad by a detached leaf, the stand-in, whenever
it evaluates the right-hand side, forward and backward. So the adjoint differentiates by the
stand-ins and autograd meets the user's tensors once, at the end: their hooks run once, and tensors
computed from each other are not counted twice. A module under ``torch.func.functional_call`` is
evaluated with the tensors of that call after it has ended; ``p.data = ...`` and ``module.p = ...``
change nothing for a run that began.

Arguments are passed as stand-ins. Tensors of modules are exchanged in the module while it is
evaluated, as functional_call does, under a lock for each module. Declared tensors that no module
has registered are exchanged in each call of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from inspect import isroutine
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from adjsim._module import exclusive, swapped, tensor_slots


class Reads:
    """What a right-hand side reads besides time and state.

    Args:
        fun: the function; where it is a module, or a method of one, the module's tensors are read.
        args: its other arguments.
        declared: tensors and modules that it reads besides.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], declared: Any) -> None:
        declared = list(declared) if isinstance(declared, Iterator) else declared
        nodes = [*tree_leaves(owner(fun)), *tree_leaves(declared)]
        modules = {
            id(m): m for node in nodes if isinstance(node, nn.Module) for m in node.modules()
        }
        found = [place for module in modules.values() for place in tensor_slots(module)]
        loose = [x for x in nodes if isinstance(x, Tensor)]
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        #: Declared tensors that require grad.
        self.declared = list(
            {id(x): x for x in (*(x for _, _, x in found), *loose) if x.requires_grad}.values()
        )
        #: Tensors that a gradient is wanted by, and the stand-in of each.
        self.originals = list(
            {id(x): x for x in (*given, *self.declared) if x.requires_grad}.values()
        )
        self.leaves = [x.detach().requires_grad_() for x in self.originals]
        leaf_of = {id(x): leaf for x, leaf in zip(self.originals, self.leaves, strict=True)}
        self.args: tuple[Any, ...] = tree_map(lambda x: leaf_of.get(id(x), x), args)
        #: Stand-ins of arguments and of declared tensors that are no module's.
        self.named = {id(leaf_of[id(x)]) for x in (*given, *loose) if x.requires_grad}
        self._loose = {id(x): leaf_of[id(x)] for x in loose if x.requires_grad}
        self._slots = [(holder, key, leaf_of.get(id(x), x)) for holder, key, x in found]
        self._modules = list(modules.values())
        self._leaves = {id(leaf) for leaf in self.leaves}
        self._declared = {id(x) for x in self.declared} | {
            id(x.grad_fn) for x in self.declared if x.grad_fn is not None
        }
        read = [*(x for _, _, x in found), *loose, *given]
        self._versions = [(x, x._version) for x in read if not x.is_inference()]

    def held(self) -> ExitStack:
        """A context in which modules and captured tensors are those that the run has read."""
        with ExitStack() as stack:
            if self._slots:
                stack.enter_context(exclusive(*self._modules))
                stack.enter_context(swapped(self._slots))
            if self._loose:
                stack.enter_context(_Substituted(self._loose))
            return stack.pop_all()

    def stand_in(self, x: Tensor) -> Tensor:
        """For what a function returns: a captured tensor itself is one that no call of torch has
        exchanged.
        """
        return self._loose.get(id(x), x)

    def is_stand_in(self, leaf: Tensor) -> bool:
        return id(leaf) in self._leaves

    def is_declared(self, node: Any, leaf: Tensor | None) -> bool:
        """Whether a node of a graph is a declared tensor, which an evaluation never meets: it meets
        the stand-in.
        """
        return id(node) in self._declared or id(leaf) in self._declared

    def refuse_changed(self) -> None:
        """Called before the way back: a tensor written to since has another gradient, and its
        stand-in shares its memory.
        """
        for x, version in self._versions:
            if x._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(x.shape)} that fun reads has been modified by an "
                    "inplace operation since the "
                    "solution was found, so its gradient cannot be taken any more. Call "
                    "backward() before it is changed."
                )


def owner(fun: Any) -> Any:
    """The object that a function belongs to, or that is called like one."""
    while isinstance(fun, partial):
        fun = fun.func
    if isinstance(fun, MethodType):
        return fun.__self__
    return None if isroutine(fun) or not hasattr(fun, "__dict__") else fun


class _Substituted(TorchFunctionMode):
    """Gives every call of torch the stand-ins of some tensors."""

    def __init__(self, leaves: dict[int, Tensor]) -> None:
        super().__init__()
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *map(self._of, args), **{name: self._of(x) for name, x in (kwargs or {}).items()}
        )

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._leaves.get(id(x), x)
        return tree_map(self._of, x) if isinstance(x, list | tuple | dict) else x
