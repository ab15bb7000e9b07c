"""Contact between particles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.declared import declared
from adjsim.core.typing import Number
from adjsim.potentials.pairs.base import PairPotential


class ParticleContact(PairPotential):
    """Contact between balls, ``U = sum over i<j of k/2 max(0, d_ij - r)^2`` with d = R_i + R_j.

    Energy and force are continuous, and the curvature jumps from k to 0 at contact. Two balls of
    equal mass m that meet with relative velocity w are in contact for ``t_c = pi sqrt(m / 2k)`` and
    overlap by at most ``w sqrt(m / 2k)``, so choose k by the overlap that is allowed. They pass
    through each other if their relative energy is above k d^2 / 2. Balls with one centre have no
    force on each other.

    Args:
        {parameters}
        cutoff: reach of the neighbour list, at least the largest d, also after an optimiser has
            changed the radii. None: the largest d, or no neighbour list if the radius requires
            grad, so that it may grow.
        box, skin, exclusions: see :class:`~adjsim.potentials.PairPotential`.

    Raises:
        ValueError: radii that are not positive, a cutoff below the largest d, and as
            :class:`~adjsim.potentials.PairPotential`.
    """

    radius: Tensor = declared(
        "R, length; a number or ``(atoms,)``", positive=True, shapes=((), ("atoms",))
    )
    stiffness: Tensor = declared("k, energy / length^2")
    omitted_arguments = ("truncation",)

    def __init__(
        self, radius: Number, *values: Number, cutoff: float | None = None, **options: Any
    ) -> None:
        found = as_tensor("radius", radius)
        # A radius that is not positive is refused by its own rule.
        if cutoff is None and not found.requires_grad and (largest := _largest_reach(found)) > 0:
            cutoff = largest
        super().__init__(found, *values, cutoff=cutoff, **options)
        self.validate()

    def validate(self) -> None:
        """Refuse radii beyond the reach of the neighbour list."""
        super().validate()
        largest = _largest_reach(self.radius)
        if self.cutoff is not None and largest > self.cutoff * (1 + 1e-12):
            raise ValueError(
                f"cutoff must be at least the largest sum of two radii, {largest:g}; it is "
                f"{self.cutoff:g}: give a larger cutoff, or a radius that requires grad."
            )

    def pair_energy(self, s: Tensor) -> Tensor:
        r, reach = self._distances(s)
        overlap = torch.where(s == 0, reach, (reach - r).clamp(min=0))
        return 0.5 * self.pair_parameter("stiffness", s) * overlap * overlap

    def pair_slope(self, s: Tensor) -> Tensor:
        r, reach = self._distances(s)
        slope = -0.5 * self.pair_parameter("stiffness", s) * (reach / r - 1).clamp(min=0)
        return torch.where(s == 0, 0.0, slope)

    def pair_curvature(self, s: Tensor) -> Tensor:
        r, reach = self._distances(s)
        curvature = 0.25 * self.pair_parameter("stiffness", s) * reach / (r * r * r)
        # Not (r < reach), which would make NaN zero.
        return torch.where(s == 0, 0.0, torch.where(r >= reach, 0.0, curvature))

    def _distances(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance of every pair, one in place of zero, and that of contact."""
        r = torch.where(s == 0, 1.0, s).sqrt()
        if self.radius.numel() == 1:
            return r, 2 * self.pair_parameter("radius", s).reshape(())
        own, other = self.atom_parameter("radius", s)
        return r, own + other


def _largest_reach(radius: Tensor) -> float:
    """Return the largest sum of the radii of two different particles."""
    radii = radius.detach().flatten()
    both = radii.expand(2) if len(radii) == 1 else radii.topk(min(2, len(radii))).values
    return float(both.sum())
