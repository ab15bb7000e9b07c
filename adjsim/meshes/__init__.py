"""Meshes of triangles and tetrahedra: made, measured, read and written."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adjsim.meshes.mesh import Mesh, box, sheet

if TYPE_CHECKING:
    from adjsim.meshes.files import read, write, write_series

__all__ = ["Mesh", "box", "read", "sheet", "write", "write_series"]


def __getattr__(name: str) -> Any:
    # Meshio is imported when a file is read or written.
    if name not in __all__:
        raise AttributeError(f"module 'adjsim.meshes' has no attribute {name!r}")
    return getattr(import_module("adjsim.meshes.files"), name)
