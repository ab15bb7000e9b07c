"""Meshes of triangles and tetrahedra: made, measured, read and written."""

from adjsim.meshes.mesh import Mesh, box, read, sheet, write, write_series

__all__ = ["Mesh", "box", "read", "sheet", "write", "write_series"]
