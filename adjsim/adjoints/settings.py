"""What compiled code depends on besides its inputs, as keys by which it is looked up."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

# What torch keeps in a module: registered tensors are inputs, submodules are looked at by themselves.
_OF_EVERY_MODULE = set(vars(nn.Module())) - {"training"}


def settings(module: nn.Module) -> tuple[Any, ...]:
    """The Python numbers and words of a module, those in its lists and dictionaries too, and which tensors it has that are not
    registered, in which version."""
    found: list[Any] = []
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            leaves, shape = tree_flatten(value)
            found.append((name, str(shape), *(known for x in leaves if (known := _setting(x)) is not None)))
    return tuple(found)


def _setting(x: Any) -> Any:
    if isinstance(x, Tensor):
        return id(x), x._version
    return (type(x), x) if isinstance(x, bool | int | float | complex | str) else None


def weak(record: Callable[..., Any]) -> Any:
    """A record as part of a key that does not keep it alive: it may hold the dynamics whose code is looked up."""
    return WeakMethod(record) if isinstance(record, MethodType) else ref(record)
