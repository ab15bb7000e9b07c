"""What the code of a function may read besides its arguments."""

from __future__ import annotations

import sys
from functools import cached_property, lru_cache, partial, partialmethod
from types import CodeType, FunctionType, ModuleType
from typing import Any

from adjsim.core.libraries import is_library


@lru_cache(4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Collect global names, attributes and strings in a function's code and in functions inside.

    A string may be the name of a global, of an attribute or of a module.
    """
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, CodeType):
            found |= names_in(constant)
    return frozenset(found)


def imported_by(names: frozenset[str], package: str) -> list[tuple[str, ModuleType]]:
    """List modules outside of libraries that code with these names may import.

    The code is of a module in ``package``.
    """
    modules = ((name, sys.modules.get(name)) for name in _importable(names, package))
    return [
        (name, module)
        for name, module in modules
        if isinstance(module, ModuleType) and not is_library(name)
    ]


@lru_cache(4096)
def _importable(names: frozenset[str], package: str) -> tuple[str, ...]:
    """List the full names of modules that code with these names may import."""
    parts = package.split(".") if package else []
    prefixes = ["", *(".".join(parts[:n]) + "." for n in range(1, len(parts) + 1))]
    return tuple(prefix + name for name in sorted(names) for prefix in prefixes)


def called_by(x: Any) -> Any:
    """Return the function that an attribute of a class calls, such as that of a property."""
    if isinstance(x, staticmethod | classmethod):
        return called_by(x.__func__)
    if isinstance(x, property):
        return called_by(x.fget)
    if isinstance(x, cached_property):
        return called_by(x.func)
    if isinstance(x, partialmethod):
        return partial(x.func, *x.args, **x.keywords)
    # The wrapper of functools.cache has no code of its own.
    return x if isinstance(x, FunctionType) else getattr(x, "__wrapped__", x)
