"""The reciprocal part of an Ewald sum over waves, one by one.

With k the reciprocal vectors of the cell, V its volume and S(k) = sum of q_i exp(i k . r_i)::

    U = (2 pi constant / V) sum over k != 0 of exp(-k^2 / 4 alpha^2) / k^2 |S(k)|^2

Of k and -k, which have the same term, one is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from adjsim.core.box import volume


@dataclass(frozen=True)
class Waves:
    """The energy and force of the reciprocal part.

    Attributes:
        vectors: ``(waves, 3)`` k.
        weight: ``(waves,)`` the factor of ``|S(k)|^2``, twice that of the equation.
        alpha: 1/length.
    """

    vectors: Tensor
    weight: Tensor
    alpha: float

    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the energy, ``(*batch,)``."""
        cos, sin = self._waves(position)
        real, imaginary = _sums(charge, cos, sin)
        return (self.weight * (real * real + imaginary * imaginary)).sum(-1)

    def force(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the force, ``(*batch, atoms, 3)``."""
        cos, sin = self._waves(position)
        return self._force(charge, cos, sin, *_sums(charge, cos, sin))

    def linearised(
        self, position: Tensor, charge: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dcharge)."""
        cos, sin = self._waves(position)
        real, imaginary = _sums(charge, cos, sin)

        def product_along(v: Tensor) -> tuple[Tensor, Tensor]:
            rate = v @ self.vectors.T
            cos_v, sin_v = -rate * sin, rate * cos
            real_v, imaginary_v = _sums(charge, cos_v, sin_v)
            w = 2 * self.weight
            here = real_v[..., None, :] * cos + imaginary_v[..., None, :] * sin
            there = real[..., None, :] * cos_v + imaginary[..., None, :] * sin_v
            found = -((here + there) * w).sum(-1)
            return (
                self._force(charge, cos, sin, real_v, imaginary_v)
                + self._force(charge, cos_v, sin_v, real, imaginary),
                found.reshape(-1, len(charge)).sum(0),
            )

        return self._force(charge, cos, sin, real, imaginary), product_along

    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain."""
        real, imaginary = _sums(charge, *self._waves(position))
        energies = self.weight * (real * real + imaginary * imaginary)
        return wave_virial(energies, self.vectors, self.alpha)

    def _waves(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosine and sine of k . r, ``(*batch, atoms, waves)``."""
        phase = position @ self.vectors.T
        return phase.cos(), phase.sin()

    def _force(
        self, charge: Tensor, cos: Tensor, sin: Tensor, real: Tensor, imaginary: Tensor
    ) -> Tensor:
        field = real[..., None, :] * sin - imaginary[..., None, :] * cos
        return charge.unsqueeze(-1) * ((2 * self.weight * field) @ self.vectors)


def _sums(charge: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the real and imaginary part of S(k)."""
    return charge @ cos, charge @ sin


def wave_virial(energies: Tensor, vectors: Tensor, alpha: float) -> Tensor:
    """Compute the virial of waves with these energies ``(*batch, waves)``.

    A wave has the virial ``e (1 - 2 (1/k^2 + 1/(4 alpha^2)) k k^T)``, since V and k change with
    strain, and S(k) does not. The wave k = 0 has the unit matrix.
    """
    square = (vectors * vectors).sum(-1)
    factor = torch.where(square > 0, 1 / square.clamp(min=1e-300) + 0.25 / alpha**2, 0.0)
    unit = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    return energies.sum(-1)[..., None, None] * unit - 2 * torch.einsum(
        "...k,ka,kb->...ab", energies * factor, vectors, vectors
    )


def half_space(kmax: Sequence[int]) -> Tensor:
    """List integer vectors up to kmax, one of n and -n, without zero; ``(waves, 3)``."""
    ranges = [range(-k, k + 1) for k in kmax]
    found = [n for n in product(*ranges) if n > (0, 0, 0)]
    return torch.tensor(found, dtype=torch.float64).reshape(-1, 3)


def wave_vectors(cell: Tensor, kmax: Sequence[int]) -> Tensor:
    """Compute the vectors of the waves, ``(waves, 3)``."""
    return 2 * math.pi * half_space(kmax).to(cell.device) @ torch.linalg.inv(cell).T


def wave_weights(cell: Tensor, vectors: Tensor, alpha: float, constant: float) -> Tensor:
    """Compute the factors of ``|S(k)|^2``."""
    square = (vectors * vectors).sum(-1)
    return 4 * math.pi * constant / volume(cell) * torch.exp(-square / (4 * alpha**2)) / square
