"""The Lennard-Jones potential."""

from __future__ import annotations

from torch import Tensor

from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.formula import SHIFTED, check_symmetric
from adjsim.potentials.pairs.truncation import Truncation


class LennardJones(PairPotential):
    """The Lennard-Jones potential, ``U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6)``.

    Args:
        epsilon: depth of the well, energy; a scalar or ``(atoms, atoms)``, symmetric.
        sigma: distance where the energy is zero, length; likewise. The minimum is at 2^(1/6) sigma.
        cutoff: pairs beyond this distance are left out. None: all pairs.
        truncation: how the energy ends at the cutoff, see
            :class:`~adjsim.potentials.PairPotential`. By default it is shifted to zero, and the
            force has a small jump. Where energy conservation matters, use 2.5 sigma or more, or
            another truncation.
        box: periodic cell, ``(dim,)`` lengths or ``(dim, dim)`` rows. Without a cutoff every pair
            counts once, at its nearest image.
        skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: epsilon is negative; epsilon or sigma is not symmetric, or is a vector. For a
            number per atom or species, with a mixing rule, see :class:`LennardJonesMixture`.
    """

    epsilon: Tensor
    sigma: Tensor

    _tables = ("epsilon", "sigma")

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
        super().__init__(
            cutoff=cutoff, box=box, truncation=truncation, skin=skin, exclusions=exclusions
        )
        register(self, "epsilon", epsilon, depth=True)
        register(self, "sigma", sigma, positive=True)
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Refuse parameters that are not one number for each pair."""
        check_symmetric("epsilon", self.epsilon)
        check_symmetric("sigma", self.sigma)

    def pair_parameters(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return epsilon and sigma of every pair, to broadcast against the squared distances."""
        return self.pair_parameter("epsilon", s), self.pair_parameter("sigma", s)

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return 4 * epsilon * x * (x - 1)

    def pair_slope(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 12 * epsilon * x * (1 - 2 * x) * inverse

    def pair_curvature(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 24 * epsilon * x * (7 * x - 2) * (inverse * inverse)

    def safe_distance(self, s: Tensor) -> Tensor:
        return self.pair_parameters(s.detach())[1].detach() ** 2

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6 and 1/r^2."""
        epsilon, sigma = self.pair_parameters(s)
        inverse = 1 / s
        ratio = sigma**2 * inverse
        return epsilon, ratio * ratio * ratio, inverse
