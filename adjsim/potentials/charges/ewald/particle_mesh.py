"""Ewald's sum with a mesh in reciprocal space.

With Q the charges spread to a mesh (:mod:`adjsim.potentials.charges.ewald.spreading`) and F its
discrete Fourier transform::

    U = 1/2 sum over waves m != 0 of G(m) |F(m)|^2
    G(m) = constant / (pi V) exp(-pi^2 m^2 / alpha^2) / m^2 / (moduli of the splines)

phi = inverse transform of G F is the potential on the mesh. The force is the derivative of this
energy, ``F_i = -q_i sum over g of phi(g) dW/dr``. Its derivative along a vector v is again such a
sum, with the potential of the dipoles q v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole
from adjsim.core.box import inverse
from adjsim.core.derived import derived
from adjsim.core.layout import is_tracing
from adjsim.core.typing import Number
from adjsim.potentials.charges.ewald.autograd import ChargeSum, Product
from adjsim.potentials.charges.ewald.base import EwaldSum, three_numbers
from adjsim.potentials.charges.ewald.direct import wave_virial
from adjsim.potentials.charges.ewald.spreading import gather, moduli, spread

SMALLEST_ORDER, LARGEST_ORDER, SMALLEST_MESH = 4, 10, 6


class ParticleMeshEwald(EwaldSum):
    """Point charges in a periodic box, by the smooth particle-mesh Ewald method.

    The energy is that of :class:`Ewald`. Its reciprocal part is computed on a mesh, to which
    cardinal B-splines spread the charges, by fast Fourier transforms. The force is the derivative
    of the interpolated energy. See Essmann et al., J. Chem. Phys. 103, 8577 (1995). The force on
    all atoms together is zero only to the accuracy of the mesh, so the centre of mass may drift.

    In an exact run the reciprocal force of an atom is rounded as one contribution, a function of
    the position alone on the CPU; on a GPU atoms are added to the mesh in any order.

    With ``compile=True`` torch evaluates the mesh part inside the compiled loop.

    Args:
        charge, box, cutoff, alpha, tolerance, exclusions, constant, skin: see :class:`Ewald`.
        grid: the number of mesh points along each row of the box, or one number for all. None:
            ``2 alpha d / (3 tolerance^(1/5))`` for a row of length d, at least six, as OpenMM
            chooses it. (OpenMM takes the diagonal of a tilted box in place of lengths of rows.)
        order: of the splines, from 4 to 10.

    Raises:
        ValueError: as :class:`Ewald`; another order, a mesh with fewer points than the order.
    """

    def __init__(
        self,
        *values: Number,
        grid: int | Sequence[int] | None = None,
        order: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(*values, **options)
        self.order = as_whole("order", order)
        self.given_grid = None if grid is None else three_numbers("grid", grid, 0)
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
        if self.given_grid is not None:
            three_numbers("grid", self.given_grid, self.order)

    @derived("cell", "given_grid", "alpha", "tolerance", "order")
    def grid(self) -> tuple[int, ...]:
        """The number of mesh points along each row of the box."""
        if self.given_grid is not None:
            return self.given_grid
        return mesh_size(self.alpha, self.cell.norm(dim=1).tolist(), self.tolerance, self.order)

    @derived("cell", "grid", "alpha", "order", "constant")
    def influence(self) -> Tensor:
        """The influence function, of the waves that a real transform has."""
        # A real potential has the mean of G at m and -m. These differ in a tilted cell, for a wave
        # of half the number of points along an axis.
        full = self._full_influence(self._waves())
        opposite = full.flip((0, 1, 2)).roll((1, 1, 1), (0, 1, 2))
        return (0.5 * (full + opposite))[..., : full.shape[-1] // 2 + 1]

    @derived("cell", "grid")
    def to_mesh(self) -> Tensor:
        """The matrix that takes positions to units of the spacing of the mesh."""
        points = torch.tensor(self.grid, dtype=torch.float64, device=self.cell.device)
        return inverse(self.cell) * points

    def reciprocal(self, position: Tensor) -> Mesh:
        influence, to_mesh = self.influence.to(position), self.to_mesh.to(position)
        return Mesh(influence, to_mesh, self.grid, self.order, self._virial_of_mesh)

    def _waves(self) -> Tensor:
        """Compute the reciprocal vectors of the mesh, ``(*grid, 3)``."""
        like: dict[str, Any] = {"dtype": torch.float64, "device": self.cell.device}
        numbers = [torch.fft.fftfreq(n, 1 / n, **like) for n in self.grid]
        integers = torch.stack(torch.meshgrid(*numbers, indexing="ij"), -1)
        return 2 * math.pi * integers @ inverse(self.cell).T

    def _full_influence(self, waves: Tensor) -> Tensor:
        """Compute G of every wave of the mesh."""
        square = waves.square().sum(-1)
        x, y, z = (moduli(self.order, n) for n in self.grid)
        product = (x[:, None, None] * y[:, None] * z).to(square.device)
        safe = torch.where(square > 0, square, 1.0)
        factor = 4 * math.pi * self.constant / self.volume
        found = factor * torch.exp(-square / (4 * self.alpha**2)) / safe
        return torch.where(square > 0, found / product, 0.0)

    def _virial_of_mesh(self, square: Tensor) -> Tensor:
        """Compute the virial of the waves from ``|F|^2``."""
        waves = self._waves()
        energies = 0.5 * self._full_influence(waves).to(square) * square
        return wave_virial(energies.flatten(-3), waves.to(square).reshape(-1, 3), self.alpha)


@dataclass(frozen=True)
class Mesh(ChargeSum):
    """The energy and force of the reciprocal part.

    ``influence`` is G of the waves that a real transform has. A position times ``to_mesh`` is in
    units of the spacing of the mesh. ``strain`` computes the virial of ``|F|^2``.
    """

    influence: Tensor
    to_mesh: Tensor
    shape: tuple[int, ...]
    order: int
    strain: Callable[[Tensor], Tensor] | None = None

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        q = self._spread(self._at(position), charge.unsqueeze(-1))
        return 0.5 * (q * self._potential(q)).sum((-1, -2, -3)).reshape(position.shape[:-2])

    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Tensor, Product]:
        settings = self.influence, self.to_mesh, self.shape, self.order
        if not is_tracing():
            value, phi = self.force_and_potential(position, charge)
            return value, lambda v: self.product(position, charge, phi, v)
        given = position.detach(), charge.detach()
        value, phi = torch.ops.adjsim.mesh_force(*given, *settings)

        def product(v: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ops.adjsim.mesh_product(*given, phi.detach(), v.detach(), *settings)

        return value, product

    def force_and_potential(self, position: Tensor, charge: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the force, and the potential on the mesh."""
        u, q = self._at(position), charge.unsqueeze(-1)
        phi = self._potential(self._spread(u, q))
        slope = gather(u, phi, 1, self.order)[..., 1:]
        return self._back(-q * slope, position), phi

    def product(
        self, position: Tensor, charge: Tensor, phi: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute v^T dF/dq and v^T dF/dcharge, from the potential on the mesh."""
        u, w, q = self._at(position), self._at(v), charge.unsqueeze(-1)
        dipoles = torch.cat([torch.zeros_like(w[..., :1]), q * w], -1)
        along = gather(u, self._potential(self._spread(u, dipoles)), 1, self.order)
        here = gather(u, phi, 2, self.order)
        slope, curvature = here[..., 1:4], here[..., 4:]
        # A list of places would be copied to a GPU, which a CUDA graph refuses.
        matrix = torch.stack([curvature[..., i] for row in _SYMMETRIC for i in row], -1)
        bent = (matrix.unflatten(-1, (3, 3)) * w.unsqueeze(-2)).sum(-1)
        found = -(slope * w).sum(-1) - along[..., 0]
        return self._back(-q * (bent + along[..., 1:]), position), found.sum(0)

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        q = self._spread(self._at(position), charge.unsqueeze(-1))
        square = torch.fft.fftn(q, dim=(-3, -2, -1)).abs() ** 2
        assert self.strain is not None
        return self.strain(square).reshape(*position.shape[:-2], 3, 3)

    def _at(self, x: Tensor) -> Tensor:
        """Convert vectors to units of the mesh, ``(systems, atoms, 3)``."""
        return _times(x, self.to_mesh).reshape(-1, *x.shape[-2:])

    def _back(self, covector: Tensor, like: Tensor) -> Tensor:
        """Convert derivatives with respect to units of the mesh."""
        return _times(covector, self.to_mesh.T).reshape(like.shape)

    def _spread(self, u: Tensor, coefficients: Tensor) -> Tensor:
        return spread(u, coefficients.expand(len(u), -1, -1), self.shape, self.order)

    def _potential(self, q: Tensor) -> Tensor:
        """Convolve charges on the mesh with G."""
        axes = (-3, -2, -1)
        # Real numbers by real numbers: a product of complex ones takes twice as long, and Inductor
        # has none.
        waves = torch.view_as_real(torch.fft.rfftn(q, dim=axes)) * self.influence.unsqueeze(-1)
        waves = torch.view_as_complex(waves)
        return torch.fft.irfftn(waves, s=self.shape, dim=axes, norm="forward")


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply by a matrix, with bits that do not depend on the layout of x in memory."""
    first, second, third = matrix.unbind(0)
    return x[..., 0:1] * first + x[..., 1:2] * second + x[..., 2:3] * third


# The places of xx xy xz yy yz zz in a symmetric matrix.
_SYMMETRIC = [[0, 1, 2], [1, 3, 4], [2, 4, 5]]


def mesh_size(
    alpha: float, lengths: Sequence[float], tolerance: float, order: int
) -> tuple[int, ...]:
    """Choose the numbers of mesh points, as documented in :class:`ParticleMeshEwald`."""
    least = max(SMALLEST_MESH, order)
    factor = 2 * alpha / (3 * tolerance**0.2)
    return tuple(max(math.ceil(factor * length), least) for length in lengths)


# A traced step contains these operators. Torch's compilers call them, and compile none of the
# transforms, so that a compiled force has the bits of an eager one.


@torch.library.custom_op("adjsim::mesh_force", mutates_args=())
def mesh_force(
    position: Tensor, charge: Tensor, influence: Tensor, to_mesh: Tensor, shape: Sequence[int],
    order: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the force, and the potential on the mesh, see :class:`Mesh`."""
    mesh = Mesh(influence, to_mesh, tuple(shape), order)
    return mesh.force_and_potential(position, charge)


@torch.library.custom_op("adjsim::mesh_product", mutates_args=())
def mesh_product(
    position: Tensor, charge: Tensor, phi: Tensor, v: Tensor, influence: Tensor, to_mesh: Tensor,
    shape: Sequence[int], order: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the product of the force's derivative with a vector, see :class:`Mesh`."""
    return Mesh(influence, to_mesh, tuple(shape), order).product(position, charge, phi, v)


@mesh_force.register_fake
def _(position: Tensor, charge: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    systems = position.shape[:-2].numel()
    return position.new_empty(position.shape), position.new_empty((systems, *rest[2]))


@mesh_product.register_fake
def _(position: Tensor, charge: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return position.new_empty(position.shape), charge.new_empty(charge.shape)
