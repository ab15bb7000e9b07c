"""Bending of shells: energies of the angles between neighbouring triangles."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.coordinates import Fold
from adjsim.core.typing import Number
from adjsim.meshes import Mesh
from adjsim.potentials.bonded.bonds_and_angles import HarmonicTerm
from adjsim.potentials.bonded.torsions import DihedralTerm


class HingeBending(HarmonicTerm, DihedralTerm):
    """Bending of a surface, ``U = sum over hinges of k 3 |e|^2 / A (theta - rest)^2``.

    This is the discrete shell of Grinspun et al., Symposium on Computer Animation (2003). A hinge
    is a pair of triangles with a common edge. theta is the angle by which they are folded, zero
    where they are flat, e is the edge and A the sum of both areas, in the rest shape. theta is
    positive where the normals of the triangles (by the right hand, in the order of their vertices)
    point away from each other.

    Bending alone lets triangles stretch; add springs, ``HarmonicBond(mesh.edges(), k, lengths)``. A
    regular grid of rectangles that is bent along an axis has the flexural rigidity 6 k. In other
    directions and on other meshes, also fine ones, it differs: fit k to a measured deflection.
    theta jumps from pi to -pi where triangles pass through each other; the force is finite there,
    and zero for a triangle without area.

    Args:
        mesh: the rest shape, a mesh with triangles. Positions are ``(*batch, vertices, 3)``.
        stiffness: k, energy; a number, or one for each hinge in the order of ``mesh.hinges()``.
        rest_angle: radians; likewise. None: the angles of the rest shape.

    Raises:
        ValueError: a mesh whose triangles have no common edge, numbers of other lengths.
    """

    coordinate = Fold

    stiffness: Tensor
    rest_angle: Tensor
    weight: Tensor

    def __init__(self, mesh: Mesh, stiffness: Number, rest_angle: Number | None = None) -> None:
        hinges = mesh.hinges()
        if len(hinges) == 0:
            raise ValueError("the mesh has no hinge: no two of its triangles have a common edge.")
        super().__init__(hinges)
        with outside_inference_mode(), torch.no_grad():
            flat = mesh.vertices
            rest = torch.cat([flat, torch.zeros(len(flat), 3 - mesh.dim).to(flat)], -1)
            corners = rest[hinges]
            edge = corners[:, 2] - corners[:, 1]
            area = sum(
                torch.linalg.cross(edge, corners[:, k] - corners[:, 1]).norm(dim=-1) / 2
                for k in (0, 3)
            )
            # It follows from the mesh, and is not part of the saved state.
            self.register_buffer("weight", 3 * edge.square().sum(-1) / area, persistent=False)
            angle = self.geometry(rest).value.flatten() if rest_angle is None else rest_angle
        self.register_term_parameter("stiffness", stiffness)
        self.register_term_parameter("rest_angle", angle)

    def factor(self, x: Tensor) -> Tensor:
        return 2 * (self.term_parameter("stiffness", x) * self.weight.to(x))

    def change(self, x: Tensor) -> Tensor:
        return x - self.term_parameter("rest_angle", x)
