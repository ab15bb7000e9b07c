"""Generalised Born with a cutoff, as staged sums over a neighbour list.

The two stages are psi of each atom, and the interactions of each atom with its neighbours. Force,
product and gradients are derivatives of their terms (:mod:`adjsim.potentials.pairs.term_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.potentials.pairs.kernels.sums import Pair
from adjsim.potentials.pairs.term_sums import Neighbours, Terms
from adjsim.potentials.solvent.descreening import DisplacedVolume
from adjsim.potentials.solvent.necks import NeckPairs, Necks
from adjsim.potentials.solvent.pairs import SHAPE, area_of
from adjsim.potentials.solvent.polarisation import Polarisation
from adjsim.potentials.solvent.radii import BornRadii


def born_radii(solvent: Any, near: Neighbours, numbers: Mapping[str, Tensor]) -> Tensor:
    """Compute the Born radii, ``(*batch, atoms)``."""
    radius, necks = numbers["radius"], solvent.necks
    rho = radius - numbers["offset"]
    shape = () if necks is None else (necks.reach, necks.quadratic, necks.sextic)
    terms = Terms(
        ("descreening", solvent.contained, shape), partial(_displaced, solvent.contained, necks)
    )
    tables = () if necks is None else (necks.depth, necks.place)
    sums = near.sums(terms, [rho, numbers["scale"] * rho, radius], tables)
    total = sums[0] if necks is None else sums[0] + numbers["neck"] * sums[1]
    alpha, beta, gamma = (numbers[name] for name in SHAPE)
    return BornRadii(rho * total, radius, rho, (alpha, beta, gamma), solvent.bounded).value


def energy(solvent: Any, near: Neighbours, numbers: Mapping[str, Tensor]) -> Tensor:
    """Compute the energy, ``(*batch,)``, differentiable."""
    born, charge = born_radii(solvent, near, numbers), numbers["charge"]
    kappa, cutoff = float(solvent.kappa), float(solvent.cutoff)
    terms = Terms(("polarisation", kappa, cutoff), partial(_polarised, kappa, 1 / cutoff))
    sums = near.sums(terms, [charge, born])
    alone = _interactions(torch.zeros_like(born), born * born, kappa, 0.0)
    parts = [x + charge * charge * y for x, y in zip(sums, alone, strict=True)]
    inside, outside = (solvent.constant / numbers[name] for name in ("solute", "solvent"))
    polar = 0.5 * (outside * parts[-1] - inside * parts[0])
    area = numbers["surface"] * area_of(numbers["radius"], solvent.probe, born)
    return (polar + area).sum(-1)


def _displaced(contained: bool, necks: Necks | None, pair: Pair) -> list[Tensor]:
    spheres = DisplacedVolume.apply(pair.s, pair.mine[0], pair.other[1], contained)
    if necks is None:
        return [spheres]
    r, radii, (depth, place) = pair.s.sqrt(), pair.mine[2] + pair.other[2], pair.tables
    return [spheres, NeckPairs(necks, r, 1 / r, depth, place, radii, pair.s >= 0).value()]


def _polarised(kappa: float, shift: float, pair: Pair) -> list[Tensor]:
    charges, product = pair.mine[0] * pair.other[0], pair.mine[1] * pair.other[1]
    return [charges * x for x in _interactions(pair.s, product, kappa, shift)]


def _interactions(s: Tensor, product: Tensor, kappa: float, shift: float) -> list[Tensor]:
    """Compute ``1/f - shift``, and with dissolved salt its product with exp(-kappa f)."""
    one, zero = torch.ones_like(s), torch.zeros_like(s)

    def interaction(inside: Tensor, outside: Tensor) -> Tensor:
        return Polarisation(s, product, 1 / product, inside, outside, kappa, shift).energy()

    plain = -interaction(one, zero)
    return [plain, interaction(zero, one)] if kappa else [plain]
