"""Corrections for the interactions beyond a cutoff."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from adjsim._inputs import as_number, as_whole
from adjsim.potentials.pair import PairPotential
from adjsim.potentials.truncation import Switched

NODES = 200


def tail_corrections(potential: PairPotential, atoms: int, volume: float) -> tuple[Tensor, Tensor]:
    """Compute the energy and pressure of the pairs that a cutoff leaves out, at uniform density::

        energy   =  N^2/(2 V)   integral from a to infinity of 4 pi r^2 (u - v) dr
        pressure = -N^2/(6 V^2) integral from a to infinity of 4 pi r^3 d(u - v)/dr dr

    Here v is the energy with the cutoff, zero beyond it, and a is the cutoff, or the start of
    :class:`~adjsim.potentials.Switched`. The constant by which a shifted potential differs inside
    the cutoff is not restored. The density of pairs is that of a uniform fluid, so do not use the
    corrections in a slab, a droplet or a crystal.

    Args:
        potential: a pair potential with a cutoff.
        atoms: N.
        volume: V, in the dimensions of the box; three dimensions are assumed.

    Returns:
        Two scalars, differentiable in the parameters of the potential. With a number for each pair,
        the mean over all pairs of atoms.

    Raises:
        ValueError: no cutoff, or an energy that does not fall faster than 1/r^3.
    """
    if potential.cutoff is None:
        raise ValueError("tail_corrections takes a potential with a cutoff; this one has none.")
    atoms, volume = as_whole("atoms", atoms), as_number("volume", volume)
    truncation = potential.truncation
    begin = truncation.start if isinstance(truncation, Switched) else potential.cutoff
    begin = max(begin, 1e-3 * potential.cutoff)
    parts = [_integrals(potential, potential.cutoff, math.inf, truncated=False)]
    if begin < potential.cutoff:
        parts.append(_integrals(potential, begin, potential.cutoff, truncated=True))
    energy = torch.stack([part[0] for part in parts]).sum()
    pressure = torch.stack([part[1] for part in parts]).sum()
    density = atoms / volume
    return 0.5 * atoms * density * energy, -(density**2) / 6 * pressure


def _integrals(
    potential: PairPotential, low: float, high: float, truncated: bool
) -> tuple[Tensor, Tensor]:
    """Integrate 4 pi r^2 (u - v) and 4 pi r^3 d(u - v)/dr by Gauss-Legendre nodes in 1/r."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    top, bottom = 1 / low, 0.0 if math.isinf(high) else 1 / high
    inverse = torch.as_tensor((top - bottom) / 2 * nodes + (top + bottom) / 2)
    weight = torch.as_tensor((top - bottom) / 2 * weights)
    r = 1 / inverse
    rows = [_pairs(potential, float(x), truncated) for x in r]
    energy, slope = (torch.stack(column) for column in zip(*rows, strict=True))
    # dr = r^2 d(1/r).
    shell = 4 * math.pi * weight * r**4
    terms = shell * energy
    sizes = terms.detach().abs()
    if bottom == 0.0 and float(sizes[:2].max()) > 1e-3 * float(sizes.max()):
        raise ValueError(
            f"the energy of {type(potential).__name__} does not fall faster than 1/r^3, so the "
            "integral over its tail is infinite."
        )
    return terms.sum(), (shell * r * slope).sum()


def _pairs(potential: PairPotential, r: float, truncated: bool) -> tuple[Tensor, Tensor]:
    """Compute the mean over pairs of u - v and of its derivative at one distance."""
    s = torch.tensor(r * r, dtype=torch.float64)
    energy, slope = potential.pair_energy(s), potential.pair_slope(s)
    if truncated:
        energy = energy - potential.truncated_energy(s)
        slope = slope - potential.truncated_slope(s)
    return energy.mean(), 2 * r * slope.mean()
