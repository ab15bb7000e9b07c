"""Ewald's sum with a mesh in reciprocal space."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole
from adjsim.core.derived import derived
from adjsim.core.typing import Array, Number
from adjsim.potentials.charges.ewald.base import EwaldSum
from adjsim.potentials.charges.ewald.mesh import Mesh, full_influence, mesh_virial, real_influence
from adjsim.potentials.charges.ewald.splitting import mesh_size, three_numbers

SMALLEST_ORDER, LARGEST_ORDER = 4, 10


class ParticleMeshEwald(EwaldSum):
    """Point charges in a periodic box, by the smooth particle-mesh Ewald method.

    The energy is that of :class:`Ewald`. Its reciprocal part is computed on a mesh, to which
    cardinal B-splines spread the charges, by fast Fourier transforms. The force is the derivative
    of the interpolated energy. See Essmann et al., J. Chem. Phys. 103, 8577 (1995).

    The force on all atoms together is zero only to the accuracy of the mesh, so the centre of mass
    may drift.

    In an exact run the reciprocal force of an atom is rounded as one contribution. It is a function
    of the position alone, since one code path computes it forward and backward, with sums of fixed
    order. That holds on the CPU; on a GPU atoms are added to the mesh in any order.

    ``compile=True`` compiles the rest of the step by torch's Inductor, which calls the mesh
    part as it is: a C++ loop has no Fourier transform. Compilation may take minutes.

    Args:
        charge, box, cutoff, alpha, exclusions, constant, skin: see :class:`Ewald`.
        tolerance: the approximate relative error of forces, between 0 and 0.5.
        grid: the number of mesh points along each row of the box, or one number for all. None:
            ``2 alpha d / (3 tolerance^(1/5))`` for a row of length d, at least six, as OpenMM
            chooses it. (OpenMM takes the diagonal of a tilted box in place of lengths of rows.)
        order: of the splines, from 4 to 10.

    Raises:
        ValueError: as :class:`Ewald`; an order outside this range, a mesh with fewer points than
            the order.
    """

    def __init__(
        self,
        charge: Number,
        *,
        box: Array,
        cutoff: float,
        alpha: float | None = None,
        tolerance: float = 5e-4,
        grid: int | Sequence[int] | None = None,
        order: int = 5,
        exclusions: Array | None = None,
        constant: float = 1.0,
        skin: float | None = None,
    ) -> None:
        super().__init__(
            charge, box=box, cutoff=cutoff, alpha=alpha, tolerance=tolerance,
            exclusions=exclusions, constant=constant, skin=skin,
        )  # fmt: skip
        self.order = as_whole("order", order)
        self.given = None if grid is None else three_numbers("grid", grid, 0)
        self.validate()
        _ = self.grid

    def validate(self) -> None:
        """Refuse an order or a mesh that the constructor would refuse."""
        super().validate()
        if not SMALLEST_ORDER <= self.order <= LARGEST_ORDER:
            raise ValueError(
                f"order must be from {SMALLEST_ORDER} to {LARGEST_ORDER}, so that the derivative "
                f"of the force is continuous; got {self.order}."
            )
        if self.given is not None:
            three_numbers("grid", self.given, self.order)

    @derived("cell", "given", "alpha", "tolerance", "order")
    def grid(self) -> tuple[int, ...]:
        """The number of mesh points along each row of the box."""
        if self.given is not None:
            return self.given
        return mesh_size(self.alpha, self.lengths(), self.tolerance, self.order)

    @derived("cell", "grid", "alpha", "order", "constant")
    def influence(self) -> Tensor:
        """The influence function, of the waves that a real transform has."""
        full = full_influence(self.cell, self.grid, self.alpha, self.order, self.constant)
        return real_influence(full)

    @derived("cell", "grid")
    def to_mesh(self) -> Tensor:
        """The matrix that takes positions to units of the spacing of the mesh."""
        points = torch.tensor(self.grid, dtype=torch.float64, device=self.cell.device)
        return torch.linalg.inv(self.cell) * points

    def reciprocal(self, position: Tensor) -> Mesh:
        def strain(square: Tensor) -> Tensor:
            return mesh_virial(square, self.cell, self.alpha, self.order, self.constant)

        influence, to_mesh = self.influence.to(position), self.to_mesh.to(position)
        return Mesh(influence, to_mesh, self.grid, self.order, strain)
