"""Checks of the vertices and elements of a mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_tensor
from adjsim.core.typing import Array

# Volumes and areas below this multiple of the longest edge to the power of 3 or 2 are rounding
# errors of coordinates: an element this flat has no inverse rest shape.
FLAT = 1e-12


def checked_vertices(value: Array) -> Tensor:
    """Convert vertices to float64 on the CPU, and check them."""
    found = as_tensor("vertices", value)
    if found.requires_grad:
        raise ValueError(
            "vertices cannot require grad: a mesh is a fixed rest shape. rest_stretch of an "
            "elastic potential is a rest shape with a gradient."
        )
    if found.ndim != 2 or found.shape[1] not in (2, 3) or len(found) == 0:
        raise ValueError(
            f"vertices must be (vertices, 3) or (vertices, 2); got shape {tuple(found.shape)}."
        )
    finite = torch.isfinite(found).all(-1)
    if not bool(finite.all()):
        number = int((~finite).int().argmax())
        raise ValueError(f"vertex {number} is not finite: {found[number].tolist()}.")
    return found.to("cpu", torch.float64)


def checked_elements(name: str, value: Array, vertices: int) -> Tensor:
    """Convert tetrahedra or triangles to integers, and check that they name vertices."""
    found, members = as_indices(name, value), 4 if name == "tetrahedra" else 3
    if found.ndim != 2 or found.shape[1] != members or len(found) == 0:
        raise ValueError(
            f"{name} must be ({name}, {members}) vertex numbers, at least one; got shape "
            f"{tuple(found.shape)}."
        )
    one = "tetrahedron" if name == "tetrahedra" else "triangle"
    wrong = ((found < 0) | (found >= vertices)).any(-1)
    if bool(wrong.any()):
        number = int(wrong.int().argmax())
        raise ValueError(
            f"{one} {number} is {found[number].tolist()} and the mesh has {vertices} vertices, "
            "numbered from 0."
        )
    ordered = found.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if bool(twice.any()):
        number = int(twice.int().argmax())
        raise ValueError(f"{one} {number} names a vertex twice: {found[number].tolist()}.")
    return found


def check_sizes(vertices: Tensor, one: str, elements: Tensor, sizes: Tensor) -> None:
    """Raise if a volume or an area is zero or negative."""
    corners, what, power = vertices[elements], "area", 2
    if elements.shape[1] == 4:
        what, power = "volume", 3
    longest = torch.cdist(corners, corners).amax((-1, -2)) ** power
    flat = sizes.abs() <= FLAT * longest
    if bool(flat.any()):
        number = int(flat.int().argmax())
        raise ValueError(f"{one} {number} is degenerate: its {what} is {float(sizes[number]):g}.")
    if bool((sizes < 0).any()):
        number = int((sizes < 0).int().argmax())
        raise ValueError(
            f"{one} {number} is inverted: its {what} is {float(sizes[number]):g}. Exchange two of "
            "its vertices."
        )


def check_orphans(vertices: int, cells: Iterable[Tensor]) -> None:
    """Raise if a vertex belongs to no element."""
    named = torch.zeros(vertices, dtype=torch.bool)
    for elements in cells:
        named[elements.flatten()] = True
    if not bool(named.all()):
        raise ValueError(
            f"vertex {int((~named).int().argmax())} belongs to no element; remove it, since it "
            "would have no mass."
        )
