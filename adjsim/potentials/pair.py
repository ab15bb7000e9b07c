"""Pair potentials, written as a function of the squared distance.

With ``s_ij = |q_i - q_j|^2`` and ``U = sum over i<j of u(s_ij)``, everything the adjoint asks for follows from u' and u''
elementwise, with d_ij = q_i - q_j and, for a vector v of the shape of q, w_ij = v_i - v_j::

    F_i           = sum_j -2 u'(s_ij) d_ij
    (dF/dq v)_i   = sum_j -4 u''(s_ij) (d_ij . w_ij) d_ij - 2 u'(s_ij) w_ij      (symmetric: its transpose too)
    v . dF/dtheta = sum_ij -(d_ij . w_ij) du'(s_ij)/dtheta

so that no automatic differentiation passes through the geometry. Pairs that do not count (an atom with itself, beyond
the cutoff) get a harmless distance before any division and a zero after, so values and gradients stay finite.

All pairs are evaluated, which is right up to about a thousand atoms. Coordinates come first inside, ``(dim, atoms,
atoms)``: the long axis is then the last one, which vectorises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjsim._box import checked_box, differences, nearest_image
from adjsim._grid import Grid
from adjsim._params import register
from adjsim._typing import Energies, Number, Positions
from adjsim.potentials.base import Contraction, Potential, Pullback, derivative


class PairPotential(Potential):
    """A sum over pairs i<j of ``pair_energy(s)``, s the squared distance.

    Subclasses write ``pair_energy``; ``pair_slope`` (du/ds) and ``pair_curvature`` (d2u/ds2) follow, or are given.

    Args:
        cutoff: pairs at or beyond this distance do not count; the energy is shifted to zero there. None: no cutoff.
        box: ``(dim,)`` edge lengths or ``(dim, dim)`` rows of a periodic cell; distances are to the nearest image.

    Raises:
        ValueError: a cutoff above half the smallest perpendicular width of the box, where an atom would meet two images.
    """

    box: Tensor | None

    def __init__(self, *, cutoff: float | None = None, box: Tensor | Sequence[float] | None = None) -> None:
        super().__init__()
        if cutoff is not None and not cutoff > 0:
            raise ValueError(f"cutoff must be positive; got {cutoff}.")
        self.cutoff = cutoff
        self.register_buffer("box", None if box is None else checked_box(box, cutoff))

    def pair_energy(self, s: Tensor) -> Tensor:
        """u(s), elementwise."""
        raise TypeError(f"{type(self).__name__} has no pair_energy(s).")

    def pair_slope(self, s: Tensor) -> Tensor:
        """du/ds, elementwise."""
        return derivative(self.pair_energy, s)

    def pair_curvature(self, s: Tensor) -> Tensor:
        """d2u/ds2, elementwise."""
        return derivative(self.pair_slope, s)

    def harmless(self, s: Tensor) -> Tensor:
        """A squared distance at which the functions above are finite, for pairs that do not count."""
        return torch.ones((), dtype=s.dtype, device=s.device)

    def forward(self, position: Positions) -> Energies:
        _, s, counts = self._geometry(position)
        energy = self.pair_energy(s)
        if self.cutoff is not None:
            energy = energy - self.pair_energy(torch.full_like(self.harmless(s), self.cutoff**2))
        return 0.5 * torch.where(counts, energy, 0.0).sum((-1, -2))

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        d, s, counts = self._geometry(position)
        slope = torch.where(counts, self.pair_slope(s), 0.0)
        return _sum_pairs(-2 * slope, d, grid)

    def force_vjp(self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            d, s, counts = self._geometry(position)
            slope = torch.where(counts, self.pair_slope(s), 0.0)
            value = _sum_pairs(-2 * slope, d, grid)

        def pullback(v: Tensor) -> tuple[Tensor, Contraction]:
            with torch.no_grad():
                w = differences(v)
                dw = (d * w).sum(-3)
                bend = torch.where(counts, self.pair_curvature(s), 0.0) * dw
                along = (bend.unsqueeze(-3) * d).sum(-1).mul_(-4)
                along = along.sub_((slope.unsqueeze(-3) * w).sum(-1), alpha=2).transpose(-1, -2)
                return along, Contraction(self.pair_slope, torch.where(counts, -dw, 0.0), s)

        return value, pullback

    def _geometry(self, position: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Differences ``(*batch, dim, atoms, atoms)``, squared distances and which pairs count, ``(*batch, atoms, atoms)``."""
        d = differences(position)
        if self.box is not None:
            d = nearest_image(d, self.box.to(position), exact=self.cutoff is None)
        s = (d * d).sum(-3)
        counts = ~torch.eye(position.shape[-2], dtype=torch.bool, device=position.device)
        if self.cutoff is not None:
            counts = counts & (s < self.cutoff**2)
        return d, torch.where(counts, s, self.harmless(s)), counts


class LennardJones(PairPotential):
    """``U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6)``.

    Args:
        epsilon: depth of the well, energy; a scalar or ``(atoms, atoms)``, symmetric.
        sigma: distance where the energy is zero, length; likewise. The minimum is at 2^(1/6) sigma.
        cutoff: pairs beyond it are left out and the energy is shifted to zero there; the force jumps by a little, so use
            2.5 sigma or more where energy conservation matters. None: all pairs.
        box: periodic cell, ``(dim,)`` lengths or ``(dim, dim)`` rows. Without a cutoff every pair counts once, at its
            nearest image.
    """

    epsilon: Tensor
    sigma: Tensor

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        *,
        cutoff: float | None = None,
        box: Tensor | Sequence[float] | None = None,
    ) -> None:
        super().__init__(cutoff=cutoff, box=box)
        register(self, "epsilon", epsilon)
        register(self, "sigma", sigma, positive=True)

    def pair_parameters(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """epsilon and sigma of every pair, to broadcast against the squared distances."""
        return self.epsilon.to(s), self.sigma.to(s)

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x = self._sixth(s)
        return 4 * epsilon * x * (x - 1)

    def pair_slope(self, s: Tensor) -> Tensor:
        epsilon, x = self._sixth(s)
        return 12 * epsilon * x * (1 - 2 * x) / s

    def pair_curvature(self, s: Tensor) -> Tensor:
        epsilon, x = self._sixth(s)
        return 24 * epsilon * x * (7 * x - 2) / (s * s)

    def harmless(self, s: Tensor) -> Tensor:
        return self.pair_parameters(s.detach())[1].detach() ** 2

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """epsilon and (sigma/r)^6."""
        epsilon, sigma = self.pair_parameters(s)
        ratio = sigma**2 / s
        return epsilon, ratio * ratio * ratio


def _sum_pairs(weight: Tensor, d: Tensor, grid: Grid | None) -> Tensor:
    push = weight.unsqueeze(-3) * d
    if grid is not None:
        push = grid.round(push)
    return push.sum(-1).transpose(-1, -2)
