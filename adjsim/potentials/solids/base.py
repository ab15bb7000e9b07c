"""The base of elastic solids: sums over elements of an energy of their deformation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.parameters import register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Number, Positions
from adjsim.meshes import Mesh
from adjsim.potentials.base import Potential
from adjsim.potentials.bonded.selection import Selection
from adjsim.potentials.products import DeferredVJP, Pullback
from adjsim.potentials.solids.matrices import Matrix, inner, product, transposed


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


class ElasticPotential(Potential):
    """An elastic solid, ``U = sum over elements of V psi(F)``, with F constant in each element.

    With the sides ``D = (x_1 - x_0, ..., x_dim - x_0)`` of an element as columns, and D_0 those of
    its rest shape, ``F = D D_0^-1``. A rest shape stretched by factors s along the axes has
    ``F = D D_0^-1 diag(1/s)`` and the volume ``V_0 prod(s)``: this is how an actuator contracts a
    solid. The force on vertex k is ``-V P (D_0^-1)^T e_k``, and that on vertex 0 is minus the sum
    of the others, so that momentum is conserved. The moduli of Lame are

        mu = E / (2 (1 + nu))        lambda = E nu / ((1 + nu) (1 - 2 nu))

    Tetrahedra are solids; triangles in the plane are solids in plane strain of thickness one.
    Subclasses name a :class:`Material`. Each vertex reads the forces of its elements by a table
    and sums them, so that sums have a fixed order; in exact runs they are rounded to the lattice
    before.

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
        elements = mesh.elements
        if elements.shape[1] != mesh.dim + 1:
            raise ValueError(
                f"{type(self).__name__} needs tetrahedra, or triangles with vertices of dim 2. A "
                "surface in space is made of springs (HarmonicBond over mesh.edges()) and bending "
                "(HingeBending)."
            )
        self.count = len(elements)
        with outside_inference_mode():
            corners = mesh.vertices[elements]
            sides = (corners[:, 1:] - corners[:, :1]).transpose(-1, -2)
            # Components first, elements last: (dim, dim, elements) and (elements,).
            inverse = torch.linalg.inv(sides).permute(1, 2, 0).contiguous()
            self.register_buffer("inverse", inverse, persistent=False)
            size = mesh.areas() if mesh.tetrahedra is None else mesh.volumes()
            self.register_buffer("volume", size, persistent=False)
            self.corners = Selection(elements.T.flatten(), len(mesh.vertices))
        shapes = [(), (self.count,)]
        each = "one number for each element"
        register(
            self, "youngs_modulus", youngs_modulus, positive=True, finite=True, shapes=shapes,
            each=each,
        )  # fmt: skip
        register(
            self, "poissons_ratio", poissons_ratio, between=(-1, 0.5), shapes=shapes, each=each,
            advice="A solid that is nearly incompressible has 0.49.",
        )  # fmt: skip
        if rest_stretch is None:
            self.register_buffer("rest_stretch", None)
        else:
            rows = [(mesh.dim,), (self.count, mesh.dim)]
            register(
                self, "rest_stretch", rest_stretch, positive=True, finite=True, shapes=rows,
                each="one row for each element",
            )  # fmt: skip

    def forward(self, position: Positions) -> Energies:
        mu, lam, *stretch = self.element_numbers(position)
        a, b = self.material(
            self._deformation(position, self._inverse(position, stretch))
        ).energies()
        return (mu * a + lam * b).sum(-1)

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        mu, lam, *stretch = self.element_numbers(position)
        inverse = self._inverse(position, stretch)
        stress = self.material(self._deformation(position, inverse)).stress(mu, lam)
        return self._join(stress, inverse, rounding)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            mu, lam, *stretch = self.element_numbers(position)
            inverse = self._inverse(position, stretch)
            f = self._deformation(position, inverse)
            material = self.material(f)
            stress = material.stress(mu, lam)
            value = self._join(stress, inverse, rounding)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            with torch.no_grad():
                df = self._deformation(v, inverse)
                change = material.product(mu, lam, df)
                cotangents = [-rate for rate in material.rates(df)]
                # F and dF have the factor 1/s, and P is symmetric in its derivatives.
                cotangents += (
                    [
                        (inner([q], [x]) + inner([p], [y])) / s
                        for s, q, x, p, y in zip(
                            stretch, *map(transposed, (change, f, stress, df)), strict=True
                        )
                    ]
                    if stretch
                    else []
                )
                weight = torch.stack(torch.broadcast_tensors(*cotangents), -2)
                numbers = DeferredVJP(self, self._stacked_numbers, weight, weight)
                return self._join(change, inverse, UNROUNDED), numbers

        return value, pullback

    def virial(self, position: Positions) -> Tensor:
        """Compute ``-sum over elements of V P F^T``, ``(*batch, dim, dim)``."""
        mu, lam, *stretch = self.element_numbers(position)
        f = self._deformation(position, self._inverse(position, stretch))
        found = product(self.material(f).stress(mu, lam), transposed(f))
        return -torch.stack([torch.stack([x.sum(-1) for x in row], -1) for row in found], -2)

    def deformation(self, position: Positions) -> Tensor:
        """Compute the deformation gradient of each element, ``(*batch, elements, dim, dim)``."""
        _, _, *stretch = self.element_numbers(position)
        f = self._deformation(position, self._inverse(position, stretch))
        return torch.stack([torch.stack(list(row), -1) for row in f], -2)

    def element_numbers(self, x: Tensor) -> list[Tensor]:
        """Compute V mu, V lambda, and s along each axis if the rest shape is stretched.

        Each is ``(elements,)``, or a number.
        """
        modulus, ratio = (
            self._of_elements(p, x) for p in (self.youngs_modulus, self.poissons_ratio)
        )
        volume, stretch = self.volume.to(x), self._stretch(x)
        for s in stretch:
            volume = volume * s
        mu = modulus / (2 * (1 + ratio))
        return [volume * mu, volume * (2 * mu * ratio / (1 - 2 * ratio)), *stretch]

    def _stacked_numbers(self, x: Tensor) -> Tensor:
        return torch.stack([value.expand(self.count) for value in self.element_numbers(x)])

    def _stretch(self, x: Tensor) -> list[Tensor]:
        if self.rest_stretch is None:
            return []
        return [self._of_elements(s, x) for s in self.rest_stretch.unbind(-1)]

    def _of_elements(self, value: Tensor, x: Tensor) -> Tensor:
        return (value.reshape(()) if value.numel() == 1 else value).to(x)

    def _inverse(self, x: Tensor, stretch: Sequence[Tensor]) -> Matrix:
        """Compute the inverse of the sides at rest, by rows."""
        rows = [list(row.unbind(0)) for row in self.inverse.to(x).unbind(0)]
        if stretch:
            rows = [[b / s for b, s in zip(row, stretch, strict=True)] for row in rows]
        return rows

    def _deformation(self, x: Tensor, inverse: Matrix) -> Matrix:
        """Compute the sides of the elements of any ``x_i``, times the inverse of those at rest."""
        self._check_position(x)
        sides: list[list[Tensor]] = []
        for column in x.unbind(-1):
            first, *rest = self.corners(column).split(self.count, -1)
            sides.append([end - first for end in rest])
        return product(sides, inverse)

    def _join(self, stress: Matrix, inverse: Matrix, rounding: Rounding) -> Tensor:
        """Sum the forces of stresses V P on vertices, to ``(*batch, vertices, dim)``."""
        if rounding.rounds and rounding.spacing.ndim:
            rounding = Rounding(rounding.spacing.squeeze(-1).squeeze(-1))
        columns: list[Tensor] = []
        for pulls in product(stress, transposed(inverse)):
            # The pulls are minus the forces. Rounded, they are added exactly.
            pulls = [rounding.round(pull) for pull in pulls]
            total = pulls[0]
            for pull in pulls[1:]:
                total = total + pull
            columns.append(self.corners.transpose(torch.cat([total, *(-p for p in pulls)], -1)))
        return torch.stack(columns, -1)

    def _check_position(self, position: Tensor) -> None:
        if position.shape[-2:] != self.mesh_size:
            vertices, dim = self.mesh_size
            raise ValueError(
                f"{type(self).__name__} has {vertices} vertices in {dim} dimensions; position is "
                f"{tuple(position.shape)}."
            )
