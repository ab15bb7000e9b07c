"""What pair kernels have in common: the struct of their arguments, and their C++ of vectors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from importlib.resources import files

import torch

from adjsim.compiler import TYPES, vector_functions

# The members of the struct ``View`` of a field, with their C++ types. A stride counts elements.
VIEW = {
    "data": "REAL*",
    "cotangent": "int64_t",
    "system": "int64_t",
    "atom": "int64_t",
    "axis": "int64_t",
}
# The members of the struct ``Call`` of all arguments.
CALL = {
    "systems": "int64_t",
    "atoms": "int64_t",
    "dim": "int64_t",
    "cotangents": "int64_t",
    "threads": "int64_t",
    "image": "int64_t",  # NO_BOX, ORTHOGONAL or TILTED
    "position": "View",
    "vector": "View",
    "force": "View",
    "product": "View",
    "virial": "View",
    "strain": "View",
    "box": "const REAL*",  # (dim) lengths or (dim, dim) rows, of one system after another
    "box_step": "int64_t",  # the numbers of one system; 0: all systems have one box
    "stretch": "const REAL*",  # the cotangents of the virial, each of one system after another
    "spacing": "const REAL*",  # of the grid, one for each system, or one if spacing_step is 0
    "spacing_step": "int64_t",
    "virial_spacing": "const REAL*",  # as spacing, of the grid of the virial
    "virial_spacing_step": "int64_t",
    "weight": "const REAL*",  # the cotangent of the energy, one for each system
    "energy": "REAL*",  # one for each system
    "operands": "const REAL* const*",
    "gradients": "REAL* const*",
    "species": "const int64_t*",  # one for each atom: its row and column in tables
    "kinds": "int64_t",  # the number of rows of a table
    "cutoff": "double",
    "skin": "double",
    "acquire": "Acquire*",  # of the library of neighbour lists, unused if all pairs are evaluated
    "release": "Release*",
    "exclusions": "const int64_t*",  # (excluded, 2) atoms that do not interact
    "excluded": "int64_t",
    "classes": "const int64_t*",  # one for each atom; null: a list holds all pairs
    "partners": "const int64_t*",  # (class_count, class_count), 1 for classes that interact
    "class_count": "int64_t",
    "mutual": "int64_t",  # 1: a list holds a pair once, at the atom with the smaller number
}
_NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


class ViewStruct(ctypes.Structure):
    _fields_ = tuple((name, _NUMBERS.get(kind, ctypes.c_void_p)) for name, kind in VIEW.items())


class CallStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, {**_NUMBERS, "View": ViewStruct}.get(kind, ctypes.c_void_p))
        for name, kind in CALL.items()
    )


@functools.cache
def declarations(dtype: torch.dtype) -> str:
    """Declare the structs of a call in C++, for numbers of a type."""
    structs = _struct("View", VIEW), _struct("Call", CALL)
    return "\n".join([f"#define REAL {TYPES[dtype]}", text("list.h"), *structs])


def _struct(name: str, members: Mapping[str, str]) -> str:
    lines = (f"{kind} {member};" for member, kind in members.items())
    return "\n".join([f"struct {name} {{", *lines, "};"])


@functools.cache
def text(name: str) -> str:
    """Return the C++ source of this name."""
    return files("adjsim.potentials.pairs.kernels").joinpath(name).read_text()


def on_vectors(functions: str, dtype: torch.dtype) -> list[str]:
    """Return the types of a kernel that computes W pairs at once, its functions and its cell."""
    return [
        "typedef REAL V __attribute__((vector_size(W * sizeof(REAL))));",
        "typedef decltype(V{} < V{}) Mask;",
        "static inline V splat(REAL x) { return V{} + x; }",
        vector_functions(dtype),
        functions,
        text("images.h"),
    ]
