"""Meshes of triangles and tetrahedra, made and measured.

A mesh is a rest shape. Its vertices are the atoms of a simulation, so a state has positions
``(*batch, vertices, dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, as_number, as_tensor, as_whole, wrong_shape
from adjsim.core.typing import Array, Number

# The faces of a tetrahedron of positive volume, seen counterclockwise from outside.
FACES = ((0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3))
# Volumes and areas below this multiple of the longest edge to the power of 3 or 2 are rounding
# errors of coordinates: an element this flat has no inverse rest shape.
FLAT = 1e-12
ONE = {"tetrahedra": "tetrahedron", "triangles": "triangle"}


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh of tetrahedra, or of triangles, or of both, with straight edges.

    Args:
        vertices: ``(vertices, dim)`` rest positions; dim is 3, or 2 for triangles in the plane.
        tetrahedra: ``(tetrahedra, 4)`` vertex numbers. The volume ``det(x1 - x0, x2 - x0, x3 -
            x0) / 6`` of each is positive.
        triangles: ``(triangles, 3)`` vertex numbers. In the plane they are counterclockwise.

    Raises:
        ValueError: an element that is inverted or degenerate, or that names a vertex twice or one
            that does not exist, and a vertex without an element, each with its number; vertices
            that are not finite or that require grad (trainable rest shapes are
            ``rest_stretch`` of :class:`~adjsim.potentials.ElasticPotential`).
    """

    vertices: Tensor
    tetrahedra: Tensor | None = None
    triangles: Tensor | None = None

    def __init__(
        self, vertices: Array, tetrahedra: Array | None = None, triangles: Array | None = None
    ) -> None:
        object.__setattr__(self, "vertices", _checked_vertices(vertices))
        for name, found in (("tetrahedra", tetrahedra), ("triangles", triangles)):
            checked = None if found is None else _checked_elements(name, found, len(self.vertices))
            object.__setattr__(self, name, checked)
        if not self.cells():
            raise ValueError("a mesh needs tetrahedra or triangles.")
        if self.tetrahedra is not None and self.dim != 3:
            raise ValueError("tetrahedra need vertices of dim 3; got dim 2.")
        absent = torch.ones(len(self.vertices), dtype=torch.bool)
        for name, elements in self.cells().items():
            sizes = self.volumes() if name == "tetrahedra" else self.areas()
            _check_sizes(ONE[name], self.vertices[elements], sizes)
            absent[elements.flatten()] = False
        if bool(absent.any()):
            raise ValueError(
                f"vertex {int(absent.int().argmax())} belongs to no element; remove it, since it "
                "would have no mass."
            )

    def __repr__(self) -> str:
        counts = [f"{len(self.vertices)} vertices"]
        counts += [f"{len(found)} {name}" for name, found in self.cells().items()]
        return f"Mesh({', '.join(counts)})"

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return self.vertices.shape[1]

    @property
    def elements(self) -> Tensor:
        """The tetrahedra, or the triangles of a mesh without tetrahedra."""
        found = self.triangles if self.tetrahedra is None else self.tetrahedra
        assert found is not None
        return found

    def cells(self) -> dict[str, Tensor]:
        """Return the vertex numbers of each kind of element, by name."""
        both = {"tetrahedra": self.tetrahedra, "triangles": self.triangles}
        return {name: found for name, found in both.items() if found is not None}

    def volumes(self) -> Tensor:
        """Compute the volume of each tetrahedron, ``(tetrahedra,)``.

        Raises:
            ValueError: a mesh without tetrahedra.
        """
        if self.tetrahedra is None:
            raise ValueError("a mesh without tetrahedra has areas() and no volumes().")
        a, b, c = _sides(self.vertices, self.tetrahedra)
        return (torch.linalg.cross(a, b) * c).sum(-1) / 6

    def areas(self) -> Tensor:
        """Compute the area of each triangle, ``(triangles,)``.

        Raises:
            ValueError: a mesh without triangles.
        """
        if self.triangles is None:
            raise ValueError("a mesh without triangles has no areas(); see surface().")
        a, b = _sides(self.vertices, self.triangles)
        if self.dim == 2:
            return (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2
        return torch.linalg.cross(a, b).norm(dim=-1) / 2

    def lumped_mass(self, density: Number) -> Tensor:
        """Compute the mass of each vertex, an equal share of each of its elements.

        Args:
            density: mass per volume (per area for a mesh without tetrahedra), a number or one for
                each element. The masses are differentiable in it.

        Returns:
            ``(vertices,)``, whose sum is the mass of the mesh.

        Raises:
            ValueError: a density that is not positive and finite, or of another length.
        """
        value, elements = as_tensor("density", density), self.elements
        if value.numel() != 1 and value.shape != elements.shape[:1]:
            raise wrong_shape(
                "density", f"a number or ({len(elements)},), one for each element", value
            )
        low, high = (float(x) for x in value.detach().aminmax())
        if not 0 < low <= high < math.inf:
            raise ValueError(
                f"density must be positive and finite; got {low:g} to {high:g}. Pin vertices by "
                "infinite masses instead."
            )
        sizes = self.areas() if self.tetrahedra is None else self.volumes()
        share = (value.reshape(-1) * sizes.to(value)) / elements.shape[1]
        shares = share.unsqueeze(-1).expand(elements.shape).reshape(-1)
        masses = torch.zeros(len(self.vertices), dtype=shares.dtype)
        return masses.index_add(0, elements.flatten(), shares)

    def edges(self) -> Tensor:
        """Return the edges of all elements, ``(edges, 2)``, each once, smaller number first."""
        found = [
            elements[:, pair]
            for elements in self.cells().values()
            for pair in combinations(range(elements.shape[1]), 2)
        ]
        return torch.cat(found).sort(-1).values.unique(dim=0)

    def surface(self) -> Tensor:
        """Return the outward triangles of the tetrahedra, ``(triangles, 3)``.

        They are counterclockwise seen from outside. They name vertices of the whole mesh.

        Raises:
            ValueError: a mesh without tetrahedra.
        """
        if self.tetrahedra is None:
            raise ValueError("a mesh without tetrahedra is a surface: see triangles.")
        faces = torch.cat([self.tetrahedra[:, face] for face in FACES])
        _, where, count = _counted(faces)
        return faces[count[where] == 1]

    def hinges(self) -> Tensor:
        """Return the pairs of triangles with a common edge, ``(hinges, 4)``.

        A row (i, j, k, l) is the edge from j to k between the triangles (i, j, k) and (l, k, j). So
        a dihedral angle of the four vertices in this order is pi where the triangles are flat.

        Raises:
            ValueError: a mesh without triangles, an edge of more than two triangles, neighbours
                with opposite orientations.
        """
        if self.triangles is None:
            raise ValueError("a mesh without triangles has no hinges().")
        tips = torch.cat([self.triangles[:, turn] for turn in ((0, 1, 2), (1, 2, 0), (2, 0, 1))])
        edges, where, count = _counted(tips[:, 1:])
        if bool((count > 2).any()):
            edge = edges[count.argmax()].tolist()
            raise ValueError(f"edge {edge} has {int(count.max())} triangles; a hinge has two.")
        order = torch.argsort(where, stable=True)
        shared = order[(count == 2)[where[order]]]
        first, second = tips[shared[0::2]], tips[shared[1::2]]
        same = (first[:, 1] != second[:, 2]).nonzero()
        if len(same):
            edge = first[same[0, 0], 1:].tolist()
            raise ValueError(
                f"the triangles at edge {edge} have opposite orientations: turn one of them round."
            )
        return torch.cat([first, second[:, :1]], 1)


def box(lengths: Array, cells: Array) -> Mesh:
    """Make a box of tetrahedra, six for each cell, with a corner at the origin.

    A cell is cut along its diagonal (the triangulation of Kuhn), so that neighbours fit.

    Args:
        lengths: three edge lengths.
        cells: three numbers of cells.

    Raises:
        ValueError: not three of each, or numbers that are not positive.
    """
    vertices, corner = _grid("box", lengths, cells, 3)
    found: list[Tensor] = []
    for order in permutations(range(3)):
        steps = torch.eye(3)[list(order)]
        path = [[0, 0, 0], *steps.cumsum(0).int().tolist()]
        # A path along the axes in odd order turns the other way round.
        if torch.linalg.det(steps) < 0:
            path[1], path[2] = path[2], path[1]
        found.append(torch.stack([corner(*step) for step in path], -1))
    return Mesh(vertices, torch.stack(found, -2).reshape(-1, 4))


def sheet(lengths: Array, cells: Array, *, dim: int = 3) -> Mesh:
    """Make a rectangle of triangles, two for each cell, with a corner at the origin.

    Args:
        lengths: two edge lengths.
        cells: two numbers of cells.
        dim: 3, a surface in the plane z = 0, whose normals are along z; or 2.

    Raises:
        ValueError: not two of each, numbers that are not positive, another dim.
    """
    vertices, corner = _grid("sheet", lengths, cells, 2)
    if dim not in (2, 3):
        raise ValueError(f"dim must be 2 or 3; got {dim}.")
    if dim == 3:
        vertices = torch.cat([vertices, torch.zeros_like(vertices[:, :1])], 1)
    lower = torch.stack([corner(0, 0), corner(1, 0), corner(1, 1)], -1)
    upper = torch.stack([corner(0, 0), corner(1, 1), corner(0, 1)], -1)
    return Mesh(vertices, triangles=torch.stack([lower, upper], -2).reshape(-1, 3))


def _checked_vertices(value: Array) -> Tensor:
    """Convert vertices to float64 on the CPU, and check them."""
    found = as_tensor("vertices", value)
    if found.requires_grad:
        raise ValueError(
            "vertices cannot require grad: a mesh is a fixed rest shape. rest_stretch of an "
            "elastic potential is a rest shape with a gradient."
        )
    if found.ndim != 2 or found.shape[1] not in (2, 3) or len(found) == 0:
        raise wrong_shape("vertices", "(vertices, 3) or (vertices, 2)", found)
    finite = torch.isfinite(found).all(-1)
    if not bool(finite.all()):
        number = int((~finite).int().argmax())
        raise ValueError(f"vertex {number} is not finite: {found[number].tolist()}.")
    return found.to("cpu", torch.float64)


def _checked_elements(name: str, value: Array, vertices: int) -> Tensor:
    """Convert tetrahedra or triangles to integers, and check that they name vertices."""
    found, members = as_indices(name, value), 4 if name == "tetrahedra" else 3
    if found.ndim != 2 or found.shape[1] != members or len(found) == 0:
        raise wrong_shape(name, f"({name}, {members}) vertex numbers, at least one", found)
    wrong = ((found < 0) | (found >= vertices)).any(-1)
    if bool(wrong.any()):
        number = int(wrong.int().argmax())
        raise ValueError(
            f"{ONE[name]} {number} is {found[number].tolist()} and the mesh has {vertices} "
            "vertices, numbered from 0."
        )
    ordered = found.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if bool(twice.any()):
        number = int(twice.int().argmax())
        raise ValueError(f"{ONE[name]} {number} names a vertex twice: {found[number].tolist()}.")
    return found


def _check_sizes(one: str, corners: Tensor, sizes: Tensor) -> None:
    """Raise if a volume or an area is zero or negative."""
    what, power = ("volume", 3) if one == "tetrahedron" else ("area", 2)
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


def _grid(
    name: str, lengths: Array, cells: Array, dim: int
) -> tuple[Tensor, Callable[..., Tensor]]:
    """Make the vertices of a grid, and a function that numbers those at a corner of each cell."""
    sizes, counts = list(lengths), list(cells)
    if len(sizes) != dim or len(counts) != dim:
        raise ValueError(
            f"a {name} has {dim} lengths and {dim} numbers of cells; got {len(sizes)} and "
            f"{len(counts)}."
        )
    wholes = [as_whole("cells", n) for n in counts]
    edges = [as_number("lengths", x) for x in sizes]
    if min(wholes) < 1 or not min(edges) > 0:
        raise ValueError(f"lengths and cells must be positive; got {edges} and {wholes}.")
    axes = [
        torch.arange(n + 1, dtype=torch.float64) * x / n for n, x in zip(wholes, edges, strict=True)
    ]
    vertices = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    numbers = torch.arange(vertices.numel() // dim).reshape(vertices.shape[:-1])

    def corner(*step: int) -> Tensor:
        part = tuple(slice(s, s + n) for s, n in zip(step, wholes, strict=True))
        return numbers[part].flatten()

    return vertices.reshape(-1, dim), corner


def _sides(vertices: Tensor, elements: Tensor) -> tuple[Tensor, ...]:
    """Return the vectors from the first vertex of each element to the others."""
    first, *rest = vertices[elements].unbind(1)
    return tuple(x - first for x in rest)


def _counted(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return different rows, in any order of their entries; which of them each is; their counts."""
    return rows.sort(-1).values.unique(dim=0, return_inverse=True, return_counts=True)
