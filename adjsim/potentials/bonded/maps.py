"""Maps of two torsions (CMAP): energies that are interpolated on a periodic grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from adjsim.core.coordinates import Coordinate, Dihedral, Vector, combined, scaled
from adjsim.core.declared import declared
from adjsim.core.derived import derived
from adjsim.core.rounding import Rounding
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.torsions import differentiated, polynomial
from adjsim.potentials.products import with_fewer_axes

# The four B-splines over a cell, as polynomials in the place u from 0 to 1, lowest power first.
SPLINE = [
    [x / 6 for x in row] for row in ((1, -3, 3, -1), (4, 0, -6, 3), (1, 3, 3, -3), (0, 0, 0, 1))
]


class Torsions(Coordinate):
    """Two dihedral angles, ``(*batch, 2, terms)``, each of three of six displacements."""

    def __init__(self, *b: Vector) -> None:
        self._angles = Dihedral(*b[:3]), Dihedral(*b[3:])
        self.value = torch.cat([x.value for x in self._angles], -2)
        self.gradient = [g for x in self._angles for g in x.gradient]

    def along(self, *v: Vector) -> tuple[Tensor, list[Vector]]:
        first, last = (x.along(*w) for x, w in zip(self._angles, (v[:3], v[3:]), strict=True))
        return torch.cat([first[0], last[0]], -2), [*first[1], *last[1]]


class TorsionMap(BondedPotential):
    r"""Maps of two torsions, CMAP: ``U = sum over terms of E(phi, psi)``, periodic in both angles.

    E is the cubic spline, with continuous second derivatives, through the values of a grid of n
    times n points: ``energy[a, b]`` is E at phi = 2 pi a/n and psi = 2 pi b/n. With the
    coefficients c of the B-splines :math:`\beta` (places in units of 2 pi/n)::

        E(phi, psi) = sum over a, b of beta(phi - a) beta(psi - b) c[a, b]
        (c[a-1] + 4 c[a] + c[a+1]) / 6 = energy[a]              along both axes

    OpenMM and CHARMM interpolate by the same spline. The angles are those of
    :class:`~adjsim.PeriodicTorsion`. See MacKerell, Feig and Brooks, J. Comput. Chem. 25, 1400
    (2004). Do not use a map for one angle; a torsion is cheaper.

    Args:
        index: ``(terms, 8)``, the four atoms of phi and those of psi, most of which are the same.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 8
    distinct = (0, 1, 2, 3), (4, 5, 6, 7)
    steps = ((0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7))
    coordinate = Torsions
    dim = 3

    energy: Tensor = declared(
        "values of the map, energy; ``(n, n)``, ``(terms, n, n)`` or ``(types, n, n)`` with n at "
        "least 4",
        finite=True,
    )
    spline: Tensor

    def __init__(self, index: Array, energy: Number, **options: Any) -> None:
        super().__init__(index, energy, **options)
        self.validate()

    def register_term_parameter(
        self, name: str, value: Number, *, columns: tuple[int, ...] = (), **rule: Any
    ) -> None:
        shape = torch.as_tensor(value).shape
        if len(shape) not in (2, 3) or shape[-1] != shape[-2] or shape[-1] < 4:
            raise ValueError(
                "energy must be (n, n), (terms, n, n) or (types, n, n) with n at least 4; got "
                f"shape {tuple(shape)}."
            )
        super().register_term_parameter(name, value, columns=tuple(shape[-2:]), **rule)
        ring = torch.eye(shape[-1], dtype=torch.float64)
        ring = (4 * ring + ring.roll(1, 0) + ring.roll(-1, 0)) / 6
        self.register_buffer("spline", torch.linalg.inv(ring), persistent=False)

    def element(self, x: Tensor) -> Tensor:
        return self._interpolated(x, (0, 0))[0]

    def slope(self, x: Tensor) -> Tensor:
        """Compute dE/dphi and dE/dpsi, of the shape of x."""
        return torch.cat(self._interpolated(x, (1, 0), (0, 1)), -2)

    def curvature(self, x: Tensor) -> Tensor:
        """Compute d2E/dphi2, d2E/dphi dpsi and d2E/dpsi2, ``(*batch, 3, terms)``."""
        return torch.cat(self._interpolated(x, (2, 0), (1, 1), (0, 2)), -2)

    @derived("energy")
    def coefficients(self) -> Tensor:
        """The coefficients c of the B-splines, ``(maps, n, n)``."""
        rows, count = self.energy.to(self.spline), self.energy.shape[-1]
        for _ in range(2):
            # The matrix of the splines is symmetric.
            rows = (rows.reshape(-1, count) @ self.spline).unflatten(0, (-1, count)).mT
        return rows

    def _interpolated(self, x: Tensor, *orders: tuple[int, int]) -> list[Tensor]:
        """Compute derivatives of E, of an order in each angle, ``(*batch, 1, terms)``."""
        count, near = self.energy.shape[-1], torch.arange(-1, 3, device=x.device)
        scale = count / (2 * math.pi)
        place = x * scale
        cell = torch.floor(place.detach())
        # The index of a place that is not finite would be none of the table.
        whole = torch.where(cell.abs() < torch.inf, torch.remainder(cell, count), 0.0)
        around = torch.remainder(whole.to(torch.int64).unsqueeze(-1) + near, count)
        first, second = around.split(1, -3)
        maps = self._maps()
        maps = maps.unsqueeze(-1) if isinstance(maps, Tensor) else maps
        rows = ((maps * count + first) * count).unsqueeze(-1) + second.unsqueeze(-2)
        c = [list(row.unbind(-1)) for row in self.coefficients.to(x).flatten()[rows].unbind(-2)]
        u, v = (place - cell).split(1, -2)
        found: list[Tensor] = []
        for i, j in orders:
            along_first, along_second = _splines(u, i), _splines(v, j)
            inner = [_total(along_second, row) for row in c]
            found.append(scale ** (i + j) * _total(along_first, inner))
        return found

    def _maps(self) -> Tensor | int:
        """Return the map of each term."""
        if self.energy.ndim == 2 or len(self.energy) == 1:
            return 0
        terms = len(self.index)
        return torch.arange(terms, device=self.index.device) if self.types is None else self.types

    def _pulls(self, x: Coordinate, slope: Tensor, rounding: Rounding) -> list[Vector]:
        slopes, rounding = slope.split(1, -2), with_fewer_axes(rounding, 1)
        pulls = [scaled(-slopes[k // 3], g) for k, g in enumerate(x.gradient)]
        return [[rounding.round(part) for part in pull] for pull in pulls]

    def _changes(
        self, x: Coordinate, slope: Tensor, moves: Sequence[Vector]
    ) -> tuple[Tensor, list[Vector]]:
        rate, turned = x.along(*moves)
        (first, second), slopes = rate.split(1, -2), slope.split(1, -2)
        aa, ab, bb = self.curvature(x.value).split(1, -2)
        changes = -(aa * first + ab * second), -(ab * first + bb * second)
        return rate, [
            combined(scaled(changes[k // 3], g), -slopes[k // 3], turn)
            for k, (g, turn) in enumerate(zip(x.gradient, turned, strict=True))
        ]


def _splines(u: Tensor, order: int) -> list[Tensor]:
    """Compute a derivative of the four B-splines at a place u of a cell."""
    return [polynomial(u, differentiated(row, order)) for row in SPLINE]


def _total(factors: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, map(torch.mul, factors, terms))
