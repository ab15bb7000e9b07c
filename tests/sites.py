"""Force fields of eight atoms with a virtual site of each kind among the particles."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import adjsim
from adjsim.potentials.sites.force_field import SitedForceField
from adjsim.potentials.sites.groups import AverageSites, LocalCoordinatesSites, OutOfPlaneSites
from adjsim.potentials.sites.virtual_sites import VirtualSites
from tests.problems import parameter, vector

SITES = [1, 4, 5, 9, 10, 13]
# Atoms 0 to 7 among the particles.
ATOMS = [k for k in range(14) if k not in SITES]
EXCLUDED = [
    [1, ATOMS[0]], [1, ATOMS[1]], [4, ATOMS[1]], [4, ATOMS[3]], [4, ATOMS[5]], [5, ATOMS[4]],
    [5, ATOMS[5]], [5, ATOMS[7]], [9, ATOMS[6]], [9, ATOMS[2]], [9, ATOMS[7]], [10, ATOMS[3]],
    [10, ATOMS[2]], [10, ATOMS[7]], [10, ATOMS[1]], [13, ATOMS[5]], [13, ATOMS[4]], [13, ATOMS[1]],
]  # fmt: skip


def matrix(*rows: tuple[float, ...]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(rows, dtype=torch.float64))


def virtual_sites() -> VirtualSites:
    """Sites of each kind, with numbers of one for all, of each and of types."""
    return VirtualSites(
        14,
        two=AverageSites([1], [[0, 1]], vector(0.3)),
        three=AverageSites([4], [[1, 3, 5]], matrix((0.15, 0.1))),
        plane=OutOfPlaneSites(
            [5, 13], [[4, 5, 7], [5, 4, 1]], matrix((-0.2, 0.15), (0.1, -0.1)), vector(0.12, -0.2)
        ),
        local=LocalCoordinatesSites(
            [9], [[6, 2, 7]], vector(0.1, -0.2, 0.15), vector(0.1, 0.0), vector(0.5, 0.5),
            vector(-1.0, 1.0),
        ),
        four=LocalCoordinatesSites(
            [10], [[3, 2, 7, 1]], matrix((-0.1, 0.2, 0.1)), [0.0, 0.1, 0.0], [[1.0, 0.2, 0.0]],
            [[0.0, -1.0, 1.0]], types=[0],
        ),
    )  # fmt: skip


def force_field(box: Tensor | None) -> SitedForceField:
    """Pairs of atoms and sites, charges, and bonds of which one is of a site."""
    kinds = torch.tensor([int(k in SITES) for k in range(14)])
    charge = nn.Parameter(torch.linspace(-0.5, 0.7, 14, dtype=torch.float64))
    options = {"box": box, "cutoff": None if box is None else 1.6, "exclusions": EXCLUDED}
    bonds = [[ATOMS[0], ATOMS[1]], [5, ATOMS[6]]]
    parts = {
        "bonds": adjsim.HarmonicBond(bonds, parameter(4.0), parameter(1.3)),
        "pairs": adjsim.LennardJonesMixture(kinds, vector(1.1, 0.3), vector(0.95, 0.4), **options),
        "charges": adjsim.Coulomb(charge, **options)
        if box is None
        else adjsim.ParticleMeshEwald(charge, tolerance=1e-3, **options),
    }
    return SitedForceField(virtual_sites(), **parts)
