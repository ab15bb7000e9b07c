"""Runtime checks of the annotations of everything that the package exports.

Private functions and closures are left unchecked, and so are the formulas of pair potentials: they
run many times a step, and checking them would take most of the time of the tests. The warnings of
solve_ivp name the line of the caller, and its own checks of types are tested.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import jaxtyped

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
    return jaxtyped(function, typechecker=beartype)


def _check_methods(cls: type) -> None:
    for key, value in list(vars(cls).items()):
        if key.startswith(("_", *FORMULAS)) and key not in ("__init__", "__call__"):
            continue
        if inspect.isfunction(value):
            setattr(cls, key, _checked(value))
        elif isinstance(value, (classmethod, staticmethod)):
            setattr(cls, key, type(value)(_checked(value.__func__)))
