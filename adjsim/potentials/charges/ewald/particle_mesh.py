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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole
from adjsim.core.box import volume
from adjsim.core.derived import derived
from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.typing import Number
from adjsim.potentials.charges.ewald.autograd import ChargeSum, Forces, Product
from adjsim.potentials.charges.ewald.base import EwaldSum, three_numbers
from adjsim.potentials.charges.ewald.point_charges import PointCharges
from adjsim.potentials.charges.ewald.spreading import gather, moduli, spread
from adjsim.potentials.charges.ewald.waves import influence, shortened, wave_virial

SMALLEST_ORDER, LARGEST_ORDER, SMALLEST_MESH = 4, 10, 6


class MeshSum(EwaldSum):
    """Base class of Ewald sums with a mesh."""

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

    @derived("cell", "grid")
    def numbers(self) -> Tensor:
        """The integers of the waves that a real transform has, ``(sides, 3, waves)``."""
        whole = self._whole_numbers()
        sides = [whole]
        if self.box is not None and self.box.ndim == 2:
            # A real potential has the mean of G at m and -m. These differ in a tilted cell, for a
            # wave of half the number of points along an axis.
            sides.append(whole.flip((0, 1, 2)).roll((1, 1, 1), (0, 1, 2)))
        return torch.stack([x[..., : self._half, :].reshape(-1, 3).T for x in sides])

    @derived("grid", "order", "constant", "cell")
    def share(self) -> Tensor:
        """The constant over volume and moduli of splines, of waves that a real transform has."""
        return self._whole_share()[..., : self._half].flatten()

    @derived("grid", "cell")
    def multiplicity(self) -> Tensor:
        """How many waves of the mesh each one stands for, m alone, or m and -m."""
        _, _, z = self._whole_numbers()[..., : self._half, :].abs().unbind(-1)
        return torch.where((z == 0) | (2 * z == self.grid[2]), 1.0, 2.0).to(z).flatten()

    @derived("dual", "grid")
    def to_mesh(self) -> Tensor:
        """The matrix that takes positions to units of the spacing of the mesh."""
        points = torch.tensor(self.grid, dtype=torch.float64, device=self.dual.device)
        return self.dual.mT * points

    def reciprocal(self, position: Tensor, strain: Strain | None = None) -> Mesh:
        to_mesh = self.to_mesh.to(position)
        if strain is not None:
            to_mesh = shortened(to_mesh.mT, strain.value).reshape(-1, 3, 3).mT
        virial = self._virial_of_mesh
        return Mesh(self.influence_at(strain), to_mesh, self.grid, self.order, virial)

    @property
    def _half(self) -> int:
        """The number of waves along the last axis that a real transform has."""
        return self.grid[2] // 2 + 1

    def _whole_numbers(self) -> Tensor:
        """Compute the integers of all waves of the mesh, ``(*grid, 3)``."""
        like: dict[str, Any] = {"dtype": torch.float64, "device": self.cell.device}
        numbers = [torch.fft.fftfreq(n, 1 / n, **like) for n in self.grid]
        return torch.stack(torch.meshgrid(*numbers, indexing="ij"), -1)

    def _whole_share(self) -> Tensor:
        """Compute the constant over volume and moduli of the splines, of all waves of the mesh."""
        x, y, z = (moduli(self.order, n).to(self.cell.device) for n in self.grid)
        return self.constant / volume(self.cell) / (x[:, None, None] * y[:, None] * z)

    def _virial_of_mesh(self, square: Tensor) -> Tensor:
        """Compute the virial of the waves from ``|F|^2``."""
        numbers, share = self._whole_numbers().reshape(-1, 3), self._whole_share().flatten()
        whole = self.waves._replace(
            numbers=numbers.T.unsqueeze(0), share=share, multiplicity=torch.ones_like(share)
        )
        value = influence(whole, self.dual.new_zeros(1, 1))[0].to(square)
        waves = (2 * math.pi * numbers @ self.dual).to(square)
        return wave_virial(0.5 * value * square.flatten(-3), waves, self.alpha, self.power)


class ParticleMeshEwald(PointCharges, MeshSum):
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


@dataclass(frozen=True)
class Mesh(ChargeSum):
    """The energy and force of the reciprocal part.

    ``influence`` computes the columns of :func:`~.ewald.waves.influence`, of which a box that does
    not move needs the first, for the waves that a real transform has. A position times ``to_mesh``
    is in units of the spacing of the mesh. ``strain`` computes the virial of ``|F|^2``.
    """

    influence: Callable[..., Tensor]
    to_mesh: Tensor
    shape: tuple[int, ...]
    order: int
    strain: Callable[[Tensor], Tensor] | None = None

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        q = self._spread(self._at(position), charge.unsqueeze(-1))
        value = self._columns(position)[:, 0]
        phi = self._potential(_times_each(self._transform(q), value))
        return 0.5 * (q * phi).sum((-1, -2, -3)).reshape(position.shape[:-2])

    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Forces, Product]:
        settings = self.to_mesh, self.shape, self.order
        # The operators have no derivative, of which a derivative of forces in a trace consists.
        if not is_tracing() or in_transform():
            force, along, waves, phi = self.forces(position, charge)
            return (force, along), partial(self.product, position, charge, waves, phi)
        given = position.detach(), charge.detach()
        force, along, *found = torch.ops.adjsim.mesh_force(*given, self.influence(), *settings)
        kept = [x.detach() for x in found]

        def product(v: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            more = self.influence() if c is None else self.influence(c)
            return torch.ops.adjsim.mesh_product(*given, *kept, v.detach(), more, *settings)

        return (force, along), product

    def forces(self, position: Tensor, charge: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute force and W, and the charges in waves and their potential on the mesh."""
        u, q, columns = self._at(position), charge.unsqueeze(-1), self._columns(position)
        waves = self._transform(self._spread(u, q))
        phi = self._potential(_times_each(waves, columns[:, 0]))
        slope = gather(u, phi, 1, self.order)[..., 1:]
        along = -0.5 * self._sums(columns[:, 1:], waves, waves)
        return self._back(-q * slope, position), _rows(along, position), waves, phi

    def product(
        self,
        position: Tensor,
        charge: Tensor,
        waves: Tensor,
        phi: Tensor,
        v: Tensor,
        c: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the cotangents of position, strain and charges, a :data:`~.autograd.Product`."""
        columns = self._columns(position) if c is None else self._columns(position, c)
        u, w, q = self._at(position), self._at(v), charge.unsqueeze(-1)
        dipoles = torch.cat([torch.zeros_like(w[..., :1]), q * w], -1)
        moved = self._transform(self._spread(u, dipoles))
        amplitude = _times_each(moved, columns[:, 0])
        axes = (columns.shape[1] - 1) // 2
        if axes:
            amplitude = amplitude + _times_each(waves, columns[:, 1 + axes])
        along = gather(u, self._potential(amplitude), 1, self.order)
        here = gather(u, phi, 2, self.order)
        slope, curvature = here[..., 1:4], here[..., 4:]
        # A list of places would be copied to a GPU, which a CUDA graph refuses.
        matrix = torch.stack([curvature[..., i] for row in _SYMMETRIC for i in row], -1)
        bent = (matrix.unflatten(-1, (3, 3)) * w.unsqueeze(-2)).sum(-1)
        work = slope * w
        found = -work.sum(-1) - along[..., 0]
        strain = self._sums(columns[:, 1 : 1 + axes], waves, moved)
        strain = strain + 0.5 * self._sums(columns[:, 2 + axes :], waves, waves)
        own = (q * work).sum(-2)
        strain = (own if axes == 3 else own.sum(-1, keepdim=True))[:, :axes] - strain
        by_position = self._back(-q * (bent + along[..., 1:]), position)
        return by_position, _rows(strain, position), found.sum(0)

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        q = self._spread(self._at(position), charge.unsqueeze(-1))
        square = torch.fft.fftn(q, dim=(-3, -2, -1)).abs() ** 2
        assert self.strain is not None
        return self.strain(square).reshape(*position.shape[:-2], 3, 3)

    def _columns(self, like: Tensor, *c: Tensor) -> Tensor:
        """Compute the influence, ``(systems, columns, waves)``."""
        found = self.influence(*c).to(like)
        return found.reshape(-1, *found.shape[-2:])

    def _at(self, x: Tensor) -> Tensor:
        """Convert vectors to units of the mesh, ``(systems, atoms, 3)``."""
        return _times(x.reshape(-1, *x.shape[-2:]), self.to_mesh)

    def _back(self, covector: Tensor, like: Tensor) -> Tensor:
        """Convert derivatives with respect to units of the mesh."""
        return _times(covector, self.to_mesh.mT).reshape(like.shape)

    def _spread(self, u: Tensor, coefficients: Tensor) -> Tensor:
        return spread(u, coefficients.expand(len(u), -1, -1), self.shape, self.order)

    # Real numbers in place of complex ones: their products take half the time, and Inductor has no
    # others.

    def _transform(self, mesh: Tensor) -> Tensor:
        """Return the waves of a mesh, ``(systems, *waves, 2)``."""
        return torch.view_as_real(torch.fft.rfftn(mesh, dim=_AXES))

    def _potential(self, waves: Tensor) -> Tensor:
        """Return the mesh of these waves."""
        complex_waves = torch.view_as_complex(waves)
        return torch.fft.irfftn(complex_waves, s=self.shape, dim=_AXES, norm="forward")

    def _sums(self, columns: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Sum the products of two waves with columns of the influence, ``(systems, columns)``."""
        if not columns.shape[1]:
            return columns.new_zeros(len(a), 0)
        return (columns @ (a * b).reshape(len(a), -1, 2)).sum(-1)


_AXES = (-3, -2, -1)


def _times_each(waves: Tensor, factor: Tensor) -> Tensor:
    """Multiply waves by a factor of each."""
    return waves * factor.reshape(-1, *waves.shape[1:-1], 1)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(*like.shape[:-2], 1, -1)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply by a matrix, with bits that do not depend on the layout of x in memory."""
    first, second, third = (row.unsqueeze(-2) for row in matrix.unbind(-2))
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


@operator("mesh_force")
def mesh_force(
    position: Tensor, charge: Tensor, influence: Tensor, to_mesh: Tensor, shape: Sequence[int],
    order: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute force, W, waves and the potential on the mesh, see :class:`Mesh`."""
    mesh = Mesh(lambda: influence, to_mesh, tuple(shape), order)
    force, along, waves, phi = (x.contiguous() for x in mesh.forces(position, charge))
    return force, along, waves, phi


@operator("mesh_product")
def mesh_product(
    position: Tensor, charge: Tensor, waves: Tensor, phi: Tensor, v: Tensor, influence: Tensor,
    to_mesh: Tensor, shape: Sequence[int], order: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the products of the forces' derivatives with cotangents, see :class:`Mesh`."""
    mesh = Mesh(lambda: influence, to_mesh, tuple(shape), order)
    found = mesh.product(position, charge, waves, phi, v, None)
    of_position, along, of_charge = (x.contiguous() for x in found)
    return of_position, along, of_charge


@shapes_of(mesh_force)
def _(
    position: Tensor, charge: Tensor, influence: Tensor, to_mesh: Tensor, shape: Sequence[int],
    order: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch = position.shape[:-2]
    x, y, z = shape
    waves = position.new_empty((batch.numel(), x, y, z // 2 + 1, 2))
    along = position.new_empty((*batch, 1, influence.shape[-2] - 1))
    force = position.new_empty(position.shape)
    return force, along, waves, position.new_empty((batch.numel(), *shape))


@shapes_of(mesh_product)
def _(position: Tensor, charge: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    along = position.new_empty((*position.shape[:-2], 1, (rest[3].shape[-2] - 1) // 2))
    return position.new_empty(position.shape), along, charge.new_empty(charge.shape)
