"""The tensors that a run reads, held as they were at its start.

A right-hand side reads tensors as arguments, as parameters and buffers of modules, and as variables that it captures. A run
replaces each that requires grad by a detached leaf, the stand-in, whenever it evaluates the right-hand side, forward and
backward. So the adjoint differentiates by the stand-ins and autograd meets the user's tensors once, at the end: their hooks
run once, and tensors computed from each other are not counted twice. A module under ``torch.func.functional_call`` is evaluated
with the tensors of that call after it has ended; ``p.data = ...`` and ``module.p = ...`` change nothing for a run that began.

Arguments are passed as stand-ins. Tensors of modules are exchanged in the module while it is evaluated, as functional_call
does, under a lock for each module. Declared tensors that no module has registered are exchanged in each call of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isroutine
from threading import Lock, RLock
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_locks_of = Lock()


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
        modules = {id(m): m for node in nodes if isinstance(node, nn.Module) for m in node.modules()}
        places = [place for module in modules.values() for place in _places(module)]
        loose = [x for x in nodes if isinstance(x, Tensor)]
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        #: Declared tensors that require grad.
        self.declared = list({id(x): x for x in (*(x for _, _, x in places), *loose) if x.requires_grad}.values())
        #: Tensors that a gradient is wanted by, and the stand-in of each.
        self.originals = list({id(x): x for x in (*given, *self.declared) if x.requires_grad}.values())
        self.leaves = [x.detach().requires_grad_() for x in self.originals]
        leaf_of = {id(x): leaf for x, leaf in zip(self.originals, self.leaves, strict=True)}
        self.args: tuple[Any, ...] = tree_map(lambda x: leaf_of.get(id(x), x), args)
        #: Stand-ins of arguments and of declared tensors that are no module's.
        self.named = {id(leaf_of[id(x)]) for x in (*given, *loose) if x.requires_grad}
        self._loose = {id(x): leaf_of[id(x)] for x in loose if x.requires_grad}
        self._places = [(holder, key, leaf_of.get(id(x), x)) for holder, key, x in places]
        self._modules = sorted(modules.values(), key=id) if places else []
        self._leaves = {id(leaf) for leaf in self.leaves}
        self._declared = {id(x) for x in self.declared} | {id(x.grad_fn) for x in self.declared if x.grad_fn is not None}
        read = [*(x for _, _, x in places), *loose, *given]
        self._versions = [(x, x._version) for x in read if not x.is_inference()]

    def held(self) -> ExitStack:
        """A context in which modules and captured tensors are those that the run has read."""
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(_lock_of(module))
            if self._places:
                stack.enter_context(_exchanged(self._places))
            if self._loose:
                stack.enter_context(_Substituted(self._loose))
            return stack.pop_all()

    def stand_in(self, x: Tensor) -> Tensor:
        """For what a function returns: a captured tensor itself is one that no call of torch has exchanged."""
        return self._loose.get(id(x), x)

    def is_stand_in(self, leaf: Tensor) -> bool:
        return id(leaf) in self._leaves

    def is_declared(self, node: Any, leaf: Tensor | None) -> bool:
        """Whether a node of a graph is a declared tensor, which an evaluation never meets: it meets the stand-in."""
        return id(node) in self._declared or id(leaf) in self._declared

    def refuse_changed(self) -> None:
        """Called before the way back: a tensor written to since has another gradient, and its stand-in shares its memory."""
        for x, version in self._versions:
            if x._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(x.shape)} that fun reads has been modified by an inplace operation since the "
                    "solution was found, so its gradient cannot be taken any more. Call backward() before it is changed."
                )


def owner(fun: Any) -> Any:
    """The object that a function belongs to, or that is called like one."""
    while isinstance(fun, partial):
        fun = fun.func
    if isinstance(fun, MethodType):
        return fun.__self__
    return None if isroutine(fun) or not hasattr(fun, "__dict__") else fun


def _places(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Where a module looks for its own tensors: a container, a key, and the tensor that is there."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name, x) for name, x in tensors.items() if x is not None)
    if isinstance(module, nn.RNNBase):
        # It reads its parameters by a list of its own.
        yield from ((module._flat_weights, i, x) for i, x in enumerate(module._flat_weights) if x is not None)


def _lock_of(module: nn.Module) -> Any:
    with _locks_of:
        return _locks.setdefault(module, RLock())


@contextmanager
def _exchanged(places: Iterable[tuple[Any, Any, Tensor]]) -> Iterator[None]:
    before = [(holder, key, holder[key], x) for holder, key, x in places]
    for holder, key, _, x in before:
        holder[key] = x
    try:
        yield
    finally:
        for holder, key, old, x in before:
            # A tensor that the evaluation itself has assigned stays.
            if holder[key] is x:
                holder[key] = old


class _Substituted(TorchFunctionMode):
    """Gives every call of torch the stand-ins of some tensors."""

    def __init__(self, leaves: dict[int, Tensor]) -> None:
        super().__init__()
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._of, args), **{name: self._of(x) for name, x in (kwargs or {}).items()})

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._leaves.get(id(x), x)
        return tree_map(self._of, x) if isinstance(x, list | tuple | dict) else x
