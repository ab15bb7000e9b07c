"""Corrections for the interactions beyond a cutoff."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_whole, describe_type
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.base import PairPotential

NODES = 200


def tail_corrections(potential: Potential, atoms: int, volume: float) -> tuple[Tensor, Tensor]:
    """Compute the energy and pressure of the pairs that a cutoff leaves out, at uniform density::

        energy   =  N^2/(2 V)   integral from a to infinity of 4 pi r^2 (u - v) dr
        pressure = -N^2/(6 V^2) integral from a to infinity of 4 pi r^3 d(u - v)/dr dr

    Here u is the energy of a pair without the cutoff, and v the energy with the cutoff, zero beyond
    it. The length a is the cutoff, or the start of :class:`~adjsim.potentials.Switched`. The terms
    by which a shifted or force-shifted energy differs from u inside the cutoff are not restored.
    The density of pairs is that of a uniform fluid, so do not use the corrections in a slab, a
    droplet or a crystal, nor with a start inside the first shell of neighbours.

    Args:
        potential: a pair potential with a cutoff, or a sum of such potentials.
        atoms: N.
        volume: V, of a box in three dimensions.

    Returns:
        Two scalars, differentiable in the parameters of the potential. If a parameter has a number
        for each pair, u - v is averaged over all pairs of atoms.

    Raises:
        TypeError: a potential that is not a pair potential.
        ValueError: no cutoff, a switch from zero distance, an energy that does not fall faster than
            about 1/r^3.3, fewer than two atoms, or a volume that is not positive.
    """
    terms = potential.terms()
    if len(terms) > 1 or terms[0] is not potential:
        parts = [tail_corrections(cast(Potential, part), atoms, volume) for part in terms]
        energies, pressures = zip(*parts, strict=True)
        return torch.stack(energies).sum(), torch.stack(pressures).sum()
    if not isinstance(potential, PairPotential):
        raise TypeError(f"tail_corrections takes pair potentials; got {describe_type(potential)}.")
    if potential.cutoff is None:
        raise ValueError("tail_corrections takes a potential with a cutoff; this one has none.")
    atoms, volume = as_whole("atoms", atoms), as_number("volume", volume)
    if atoms < 2 or not 0 < volume < math.inf:
        raise ValueError(
            f"tail_corrections needs at least two atoms and a positive volume; got {atoms} and "
            f"{volume}."
        )
    if potential.box is not None and len(potential.box) != 3:
        raise ValueError(f"tail_corrections is for three dimensions; box has {len(potential.box)}.")
    begin = potential.truncation.begin(potential.cutoff)
    if not begin > 0:
        raise ValueError("tail_corrections needs a switch that starts at a positive distance.")
    _check_decay(potential, atoms)
    energy, pressure = _integrals(potential, atoms, potential.cutoff, math.inf)
    if begin < potential.cutoff:
        within = _integrals(potential, atoms, begin, potential.cutoff)
        energy, pressure = energy + within[0], pressure + within[1]
    density = atoms / volume
    return 0.5 * atoms * density * energy, -(density**2) / 6 * pressure


def _integrals(
    potential: PairPotential, atoms: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Integrate 4 pi r^2 (u - v) and 4 pi r^3 d(u - v)/dr between two distances.

    Gauss-Legendre nodes in t, with r = low / t^4, make inverse powers smooth at infinity.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    bottom = 0.0 if math.isinf(high) else (low / high) ** 0.25
    t = torch.as_tensor((1 - bottom) / 2 * nodes + (1 + bottom) / 2)
    weight = torch.as_tensor((1 - bottom) / 2 * weights)
    r = low / t**4
    rows = [_missing(potential, atoms, x, truncated=not math.isinf(high)) for x in r.tolist()]
    energy, slope = (torch.stack(column) for column in zip(*rows, strict=True))
    shell = 4 * math.pi * r**2 * (4 * r / t) * weight
    return (shell * energy).sum(), (shell * r * slope).sum()


def _check_decay(potential: PairPotential, atoms: int) -> None:
    """Refuse an energy that falls like r^-3.25 or more slowly."""
    assert potential.cutoff is not None
    near, far = (
        float(_missing(potential, atoms, factor * potential.cutoff, False)[0].detach().abs())
        * factor**3
        for factor in (1e2, 1e8)
    )
    if far > 10**-1.5 * near:
        raise ValueError(
            f"the energy of {type(potential).__name__} does not fall faster than about 1/r^3.3, so "
            "the integral over its tail is infinite, or nearly so."
        )


def _missing(
    potential: PairPotential, atoms: int, r: float, truncated: bool
) -> tuple[Tensor, Tensor]:
    """Compute the mean over pairs of u - v, and of its derivative, at one distance."""
    s = torch.tensor(r * r, dtype=torch.float64)
    energy, slope = potential.pair_energy(s), potential.pair_slope(s)
    if truncated:
        energy = energy - potential.truncated_energy(s)
        slope = slope - potential.truncated_slope(s)
    return _mean(energy, atoms), 2 * r * _mean(slope, atoms)


def _mean(x: Tensor, atoms: int) -> Tensor:
    """Average over pairs of different atoms."""
    if x.numel() == 1:
        return x.reshape(())
    if x.shape != (atoms, atoms):
        raise ValueError(f"the potential is for {x.shape[-1]} atoms, and atoms is {atoms}.")
    return (x.sum() - x.diagonal().sum()) / (atoms * (atoms - 1))
