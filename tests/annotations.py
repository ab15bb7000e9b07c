"""Runtime checks of the annotations of everything that the package exports.

Private functions and closures are left unchecked, and so are the formulas of pair potentials: they
run many times a step, and checking them would take most of the time of the tests. The warnings of
solve_ivp name the line of the caller, and its own checks of types are tested.

A check reads types, shapes and element types alone, so a call whose arguments and result have the
forms of a call that has passed is not checked again: the force of a run is checked at its first
step.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

import adjsim

FORMULAS = ("pair_", "safe_distance")
UNCHECKED = (adjsim.solve_ivp,)


def check_annotations() -> None:
    """Wrap exported functions, wherever the library has imported them, and methods."""
    exported = [getattr(adjsim, name) for name in adjsim.__all__]
    functions = {x: _checked(x) for x in exported if inspect.isfunction(x) and x not in UNCHECKED}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "adjsim":
            for key, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in functions:
                    setattr(module, key, functions[value])
    classes = {base for x in exported if inspect.isclass(x) for base in x.__mro__}
    for cls in classes:
        if cls.__module__.partition(".")[0] == "adjsim":
            _check_methods(cls)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function, so that calls of forms that are new are checked."""
    checked = jaxtyped(function, typechecker=beartype)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        known = _results(function, _form(args), *((name, _form(x)) for name, x in kwargs.items()))
        if not known:
            result = checked(*args, **kwargs)
            known.add(_form(result))
            return result
        result = function(*args, **kwargs)
        if (found := _form(result)) not in known:
            _returning(function, result)(*args, **kwargs)
            known.add(found)
        return result

    return call


@functools.cache
def _results(*call: Any) -> set[Any]:
    """Return the forms of results that have passed, for a function and forms of its arguments.

    They are in a cache of functools, since the library's search for changed numbers follows any
    other container that a function reads.
    """
    return set()


def _form(x: Any) -> Any:
    """Return the properties of an argument that a check reads."""
    kind = type(x)
    if kind is Tensor:  # Most arguments of most calls.
        return kind, x.shape, x.dtype
    if isinstance(x, Tensor) and not isinstance(x, UninitializedTensorMixin):
        return kind, x.shape, x.dtype
    if isinstance(x, (tuple, list)):
        return kind, *map(_form, x)
    if isinstance(x, dict):
        return kind, *((key, _form(value)) for key, value in x.items())
    return x if kind is str else kind


def _returning(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """Return a checked function with the same annotations that returns a given result."""

    @functools.wraps(function)
    def returning(*_: Any, **__: Any) -> Any:
        return result

    return jaxtyped(returning, typechecker=beartype)


def _check_methods(cls: type) -> None:
    for key, value in list(vars(cls).items()):
        if key.startswith(("_", *FORMULAS)) and key not in ("__init__", "__call__"):
            continue
        if inspect.isfunction(value):
            setattr(cls, key, _checked(value))
        elif isinstance(value, (classmethod, staticmethod)):
            setattr(cls, key, type(value)(_checked(value.__func__)))
