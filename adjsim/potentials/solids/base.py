"""The base of elastic solids: sums over elements of an energy of their deformation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from operator import add, mul, truediv
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.coordinates import dot
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Number, Positions
from adjsim.meshes import Mesh
from adjsim.potentials.bonded.selection import Selection
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.products import DeferredVJP, Pullback, with_fewer_axes
from adjsim.potentials.solids.matrices import Matrix


class Material(ABC):
    """An isotropic energy density ``psi = mu a(F) + lambda b(F)`` at deformation gradients F.

    F is the argument of the constructor. Matrices are in components, see
    :mod:`adjsim.potentials.solids.matrices`; mu and lambda are the moduli of Lame, ``(elements,)``
    or numbers.
    """

    @abstractmethod
    def __init__(self, f: Matrix) -> None: ...

    @abstractmethod
    def energies(self) -> tuple[Tensor, Tensor]:
        """Compute a and b."""

    @abstractmethod
    def stress(self, mu: Tensor, lam: Tensor) -> Matrix:
        """Compute the first Piola-Kirchhoff stress ``P = dpsi/dF``."""

    @abstractmethod
    def rates(self, df: Matrix) -> tuple[Tensor, Tensor]:
        """Compute the derivatives of a and b along dF."""

    @abstractmethod
    def product(self, mu: Tensor, lam: Tensor, df: Matrix) -> Matrix:
        """Compute the derivative of the stress along dF."""


class _Strained(NamedTuple):
    """The elements at a position: V mu, V lambda, rest stretch, inverse sides at rest, and F."""

    mu: Tensor
    lam: Tensor
    stretch: list[Tensor]
    inverse: Matrix
    f: Matrix
    material: Material


class ElasticPotential(ClosedForm, inherits_forces=True):
    """An elastic solid, ``U = sum over elements of V psi(F)``, with F constant in each element.

    With the sides ``D = (x_1 - x_0, ..., x_dim - x_0)`` of an element as columns, and D_0 those of
    its rest shape, ``F = D D_0^-1``. A rest shape stretched by factors s along the axes has
    ``F = D D_0^-1 diag(1/s)`` and the volume ``V_0 prod(s)``: this is how an actuator contracts a
    solid. The force on vertex k is ``-V P (D_0^-1)^T e_k``, and that on vertex 0 is minus the sum
    of the others, so that momentum is conserved. The moduli of Lame are

        mu = E / (2 (1 + nu))        lambda = E nu / ((1 + nu) (1 - 2 nu))

    Tetrahedra are solids; triangles in the plane are solids in plane strain of thickness one.
    Subclasses name a :class:`Material`. Sums over the elements of a vertex have a fixed order; in
    exact runs forces are rounded to the lattice before.

    Args:
        mesh: the rest shape. Positions are ``(*batch, vertices, dim)``.
        youngs_modulus: E, energy / volume; a number, or ``(elements,)``.
        poissons_ratio: nu, between -1 and 1/2; likewise. An optimiser keeps both admissible by
            :class:`~adjsim.Positive` and :class:`~adjsim.Between`.
        rest_stretch: s, positive; ``(dim,)``, or ``(elements, dim)``. None: 1.

    Raises:
        ValueError: numbers outside of these ranges or of other lengths, triangles that are not in
            the plane. At evaluation: a position with another number of vertices or dimensions.
    """

    material: ClassVar[type[Material]]

    youngs_modulus: Tensor
    poissons_ratio: Tensor
    rest_stretch: Tensor | None
    inverse: Tensor
    volume: Tensor

    def __init__(
        self,
        mesh: Mesh,
        youngs_modulus: Number,
        poissons_ratio: Number,
        *,
        rest_stretch: Number | None = None,
    ) -> None:
        super().__init__()
        self.mesh_size = mesh.vertices.shape
        elements, name = mesh.elements, type(self).__name__
        if elements.shape[1] != mesh.dim + 1:
            raise ValueError(
                f"{name} needs tetrahedra, or triangles with vertices of dim 2. A surface in space "
                "is made of springs (HarmonicBond over mesh.edges()) and bending (HingeBending)."
            )
        self.count = count = len(elements)
        with outside_inference_mode():
            corners = mesh.vertices[elements]
            sides = (corners[:, 1:] - corners[:, :1]).transpose(-1, -2)
            # Components first, elements last: (dim, dim, elements) and (elements,).
            inverse = torch.linalg.inv(sides).permute(1, 2, 0).contiguous()
            self.register_buffer("inverse", inverse, persistent=False)
            size = mesh.areas() if mesh.tetrahedra is None else mesh.volumes()
            self.register_buffer("volume", size, persistent=False)
            self.corners = Selection(elements.T.flatten(), len(mesh.vertices))
        rule: dict[str, Any] = {"shapes": [(), (count,)], "each": "one number for each element"}
        register(self, "youngs_modulus", youngs_modulus, positive=True, finite=True, **rule)
        advice = "A solid that is nearly incompressible has 0.49."
        register(self, "poissons_ratio", poissons_ratio, between=(-1, 0.5), advice=advice, **rule)
        if rest_stretch is None:
            self.register_buffer("rest_stretch", None)
            return
        rule = {"shapes": [(mesh.dim,), (count, mesh.dim)], "each": "one row for each element"}
        register(self, "rest_stretch", rest_stretch, positive=True, finite=True, **rule)

    def forward(self, position: Positions) -> Energies:
        strained = self._strained(position)
        a, b = strained.material.energies()
        return (strained.mu * a + strained.lam * b).sum(-1)

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        mu, lam, stretch, inverse, f, material = self._strained(position)
        stress = material.stress(mu, lam)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            df = self._deformation(v, inverse)
            change = material.product(mu, lam, df)
            # F and dF have the factor 1/s, and P is symmetric in its derivatives.
            columns = zip(change.T, f.T, stress.T, df.T, strict=True)
            cotangents = [-rate for rate in material.rates(df)] + [
                (dot(q, x) + dot(p, y)) / s
                for s, (q, x, p, y) in zip(stretch, columns, strict=False)
            ]
            weight = torch.stack(torch.broadcast_tensors(*cotangents), -2)
            numbers = DeferredVJP(self, self._stacked_numbers, weight, weight)
            return self._join(change, inverse, UNROUNDED), numbers

        return self._join(stress, inverse, rounding), pullback

    def virial(self, position: Positions) -> Tensor:
        """Compute ``-sum over elements of V P F^T``, ``(*batch, dim, dim)``."""
        mu, lam, _, _, f, material = self._strained(position)
        found = material.stress(mu, lam) @ f.T
        return -torch.stack([torch.stack([x.sum(-1) for x in row], -1) for row in found], -2)

    def deformation(self, position: Positions) -> Tensor:
        """Compute the deformation gradient of each element, ``(*batch, elements, dim, dim)``."""
        f = self._strained(position).f
        return torch.stack([torch.stack(row, -1) for row in f], -2)

    def _strained(self, position: Tensor) -> _Strained:
        mu, lam, *stretch = self.element_numbers(position)
        # The inverse of the sides at rest, by rows.
        inverse = Matrix(row.unbind(0) for row in self.inverse.to(position).unbind(0))
        if stretch:
            inverse = Matrix(map(truediv, row, stretch) for row in inverse)
        f = self._deformation(position, inverse)
        return _Strained(mu, lam, stretch, inverse, f, self.material(f))

    def element_numbers(self, x: Tensor) -> list[Tensor]:
        """Compute V mu, V lambda and, of a stretched shape, s along each axis."""
        given = [self.youngs_modulus, self.poissons_ratio]
        if self.rest_stretch is not None:
            given += self.rest_stretch.unbind(-1)
        numbers = [value.reshape(()) if value.numel() == 1 else value for value in given]
        modulus, ratio, *stretch = (number.to(x) for number in numbers)
        volume = reduce(mul, stretch, self.volume.to(x))
        mu = modulus / (2 * (1 + ratio))
        return [volume * mu, volume * (2 * mu * ratio / (1 - 2 * ratio)), *stretch]

    def _stacked_numbers(self, x: Tensor) -> Tensor:
        return torch.stack([value.expand(self.count) for value in self.element_numbers(x)])

    def _deformation(self, x: Tensor, inverse: Matrix) -> Matrix:
        """Compute the sides of the elements of any ``x_i``, times the inverse of those at rest."""
        if x.shape[-2:] != self.mesh_size:
            vertices, dim = self.mesh_size
            raise ValueError(
                f"{type(self).__name__} has {vertices} vertices in {dim} dimensions; position is "
                f"{tuple(x.shape)}."
            )
        corners = [self.corners(column).split(self.count, -1) for column in x.unbind(-1)]
        return Matrix([end - first for end in rest] for first, *rest in corners) @ inverse

    def _join(self, stress: Matrix, inverse: Matrix, rounding: Rounding) -> Tensor:
        """Sum the forces of stresses V P on vertices, to ``(*batch, vertices, dim)``."""
        rounding = with_fewer_axes(rounding, 2)
        columns: list[Tensor] = []
        for row in stress @ inverse.T:
            # The pulls are minus the forces. Rounded, they are added exactly.
            pulls = [rounding.round(pull) for pull in row]
            ends = torch.cat([reduce(add, pulls), *(-pull for pull in pulls)], -1)
            columns.append(self.corners.transpose(ends))
        return torch.stack(columns, -1)
