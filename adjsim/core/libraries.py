"""Libraries, whose functions and classes do not change while a program runs.

A module is of a library by the place of its file, not by its name: a user's own ``queue.py`` is not
of the standard library.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

_PACKAGES = {"adjsim", "beartype", "jaxtyping", "numpy", "pandas", "scipy", "torch"}
# Folders of these packages, wherever they are installed.
_SITES = {
    *(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")),
    *(Path(f"{x.__file__}").resolve().parents[1] for x in (np, torch)),
    Path(__file__).resolve().parents[2],
}
_STANDARD = {
    Path(sysconfig.get_path(name), inner).resolve()
    for name in ("stdlib", "platstdlib")
    for inner in ("", "lib-dynload")
}


def is_library(module: str) -> bool:
    """Return whether a module of this name is of the standard library or a known package."""
    root = module.partition(".")[0]
    return _is_library(root, sys.modules.get(root))


def is_package(module: str) -> bool:
    """Return whether a module of this name is of a known package."""
    root = module.partition(".")[0]
    return _is_package(root, sys.modules.get(root))


@cache
def of_library(kind: type) -> bool:
    """Return whether a class is of the standard library or a known package."""
    # A class may define the attribute for its objects, and then has no name of its own.
    module: object = kind.__module__
    return isinstance(module, str) and is_library(module)


@cache
def _is_package(root: str, module: ModuleType | None) -> bool:
    path = _path(module)
    return root in _PACKAGES and path is not None and path.parents[1] in _SITES


@cache
def _is_library(root: str, module: ModuleType | None) -> bool:
    if _is_package(root, module):
        return True
    if module is None or root not in sys.stdlib_module_names:
        return False
    path = _path(module)
    if path is None:
        return root in sys.builtin_module_names
    return path.parents[path.stem == "__init__"] in _STANDARD


def _path(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()
