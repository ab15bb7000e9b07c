"""Bonded terms of a chain of six atoms, one of each kind and of each form of its parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import adjsim
from tests.problems import parameter, vector

CHAIN = torch.tensor(
    [
        [0.0, 0.1, 0.0],
        [1.4, -0.1, 0.2],
        [2.0, 1.2, -0.1],
        [3.3, 1.3, 0.7],
        [3.9, 2.5, 0.3],
        [2.9, 0.1, 1.5],
    ],
    dtype=torch.float64,
)
BONDS = [[0, 1], [2, 1], [2, 3], [3, 4], [3, 5]]
ANGLES = [[0, 1, 2], [1, 2, 3], [2, 3, 4], [5, 3, 4]]
MAPS = [[0, 1, 2, 3, 1, 2, 3, 4], [5, 3, 2, 1, 3, 2, 1, 0]]
TORSIONS = [[0, 1, 2, 3], [1, 2, 3, 4], [5, 3, 2, 1]]
PAIRS = [[0, 3], [4, 1], [5, 1]]
POINTS = CHAIN[[1, 4]] + torch.tensor([[0.3, -0.2, 0.1], [-0.4, 0.1, 0.5]], dtype=torch.float64)
SERIES = (1.1, 0.7, -0.4, 0.3, 0.2, -0.1)
CHARGES = (0.4, -0.3, 0.5, -0.2, 0.1, -0.5)


def matrix(*values: tuple[float, ...]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def grid(size: int, *maps: int) -> nn.Parameter:
    """Values of maps of two torsions."""
    generator = torch.Generator().manual_seed(size)
    return nn.Parameter(torch.randn(*maps, size, size, generator=generator, dtype=torch.float64))


def mixture(**options) -> adjsim.LennardJonesMixture:
    return adjsim.LennardJonesMixture(
        [0, 1, 0, 2, 1, 2], vector(0.3, 0.5, 0.4), vector(2.0, 2.4, 2.2), **options
    )


def pairwise() -> adjsim.Morse:
    """A pair potential with a number for each pair of six atoms."""
    steps = torch.arange(6, dtype=torch.float64)
    depth = nn.Parameter(1 + 0.03 * (steps[:, None] + steps))
    return adjsim.Morse(depth, parameter(0.7), parameter(1.9))


BONDED = {
    "bonds": lambda **o: adjsim.HarmonicBond(BONDS, parameter(30.0), parameter(1.4), **o),
    "bonds, each": lambda **o: adjsim.HarmonicBond(
        BONDS, vector(30.0, 25.0, 20.0, 35.0, 15.0), vector(1.4, 1.5, 1.3, 1.45, 1.2), **o
    ),
    "bonds, types": lambda **o: adjsim.HarmonicBond(
        BONDS, vector(30.0, 25.0), vector(1.4, 1.5, 1.3), types=[0, 1, 0, 0, 1], **o
    ),
    "morse": lambda **o: adjsim.MorseBond(
        BONDS, vector(4.0, 5.0), parameter(1.8), vector(1.4, 1.5), types=[0, 1, 0, 0, 1], **o
    ),
    "angles": lambda **o: adjsim.HarmonicAngle(
        ANGLES, vector(3.0, 4.0, 5.0, 6.0), vector(1.9, 2.0, 2.1, 1.7), **o
    ),
    "cosines": lambda **o: adjsim.CosineAngle(
        ANGLES, vector(3.0, 4.0), parameter(1.9), types=[0, 1, 1, 0], **o
    ),
    "urey-bradley": lambda **o: adjsim.UreyBradley(ANGLES, parameter(3.0), parameter(2.4), **o),
    "torsions": lambda **o: adjsim.PeriodicTorsion(
        TORSIONS, vector(0.7, 1.1, 0.5), [1, 2, 3], vector(0.0, 0.3, math.pi), **o
    ),
    "torsions, types": lambda **o: adjsim.PeriodicTorsion(
        TORSIONS, vector(0.7, 1.1), [3, 2], vector(0.2, 0.3), types=[0, 1, 0], **o
    ),
    "series": lambda **o: adjsim.RyckaertBellemans(TORSIONS, vector(*SERIES), **o),
    "series, each": lambda **o: adjsim.RyckaertBellemans(
        TORSIONS, matrix(SERIES, SERIES[::-1], CHARGES), **o
    ),
    "series, types": lambda **o: adjsim.RyckaertBellemans(
        TORSIONS, matrix(SERIES, SERIES[::-1]), types=[1, 0, 1], **o
    ),
    "custom bonds": lambda **o: adjsim.potentials.CustomBond(
        BONDS,
        "D*(1-exp(-a*(r-r0)))^2",
        {"D": vector(4.0, 5.0), "a": parameter(18.0), "r0": vector(0.14, 0.15)},
        length_unit=10.0,
        types=[0, 1, 0, 0, 1],
        **o,
    ),
    "custom angles": lambda **o: adjsim.potentials.CustomAngle(
        ANGLES,
        "k/2*(cos(theta)-cos(t0))^2",
        {"k": vector(3.0, 4.0), "t0": parameter(1.9)},
        types=[0, 1, 1, 0],
        **o,
    ),
    "custom torsions": lambda **o: adjsim.potentials.CustomTorsion(
        TORSIONS,
        "k/2*min(d, 2*pi-d)^2; d=abs(theta-t0); pi=3.141592653589793",
        {"k": parameter(3.0), "t0": vector(2.9, -3.1, 0.4)},
        **o,
    ),
    "custom compounds": lambda **o: adjsim.potentials.CustomCompound(
        TORSIONS,
        "k*(distance(p1,p2)-r0)*(angle(p2,p3,p4)-t0) + k*cos(dihedral(p1,p2,p3,p4)-t0)*u;"
        "u=exp(-distance(p4,p1)^2)",
        {"k": vector(3.0, 4.0), "r0": parameter(0.14), "t0": parameter(1.9)},
        length_unit=10.0,
        types=[0, 1, 0],
        **o,
    ),
    "custom centroids": lambda **o: adjsim.potentials.CustomCentroid(
        [[0, 1, 2], [2, 3], [5], [4, 0]],
        [[0, 1, 2], [3, 0, 1]],
        "k*(distance(g1,g2)-r0)^2 + k*angle(g1,g2,g3)",
        {"k": vector(3.0, 4.0), "r0": parameter(1.4)},
        weights=[[1.0, 2.0, 4.0], [1.0, 1.0], [3.0], [1.0, 3.0]],
        **o,
    ),
    "custom hydrogen bonds": lambda **o: adjsim.potentials.CustomHydrogenBond(
        [[0, 1], [2, 1], [3, 2]],
        [[4, 3], [5, 3]],
        "depth*q*p*exp(-distance(d1,a1)^2)*cos(angle(d2,d1,a1))^2",
        {"depth": parameter(2.0)},
        donor_numbers={"q": vector(0.5, 0.7, 0.6)},
        acceptor_numbers={"p": vector(1.1, 1.2)},
        exclusions=[[2, 1]],
        **o,
    ),
    "tabulated bonds": lambda **o: adjsim.potentials.CustomBond(
        BONDS,
        "f(r, kind) + g(kind)*r^2",
        {"kind": [0.0, 1.0, 0.0, 1.0, 1.0]},
        tables={
            "f": adjsim.potentials.ContinuousFunction(grid(6), [-0.1, -0.2], [8.0, 1.3]),
            "g": adjsim.potentials.DiscreteFunction(vector(3.0, 5.0)),
        },
        **o,
    ),
    "maps": lambda **o: adjsim.TorsionMap(MAPS, grid(8), **o),
    "maps, types": lambda **o: adjsim.TorsionMap(MAPS, grid(6, 3), types=[2, 0], **o),
    "impropers": lambda **o: adjsim.HarmonicImproper(
        TORSIONS, parameter(3.0), vector(2.9, -3.1, 0.4), **o
    ),
    "explicit": lambda **o: adjsim.ExplicitPairs(
        PAIRS, vector(0.3, 0.4, 0.2), vector(2.9, 2.8, 2.4), vector(0.2, -0.3, 0.1), 1.7, **o
    ),
    "scaled, species": lambda **o: adjsim.ScaledPairs(mixture(), PAIRS, parameter(0.5), **o),
    "scaled, charges": lambda **o: adjsim.ScaledPairs(
        adjsim.Coulomb(vector(*CHARGES), 1.7), PAIRS, vector(0.5, 0.8, 0.6), **o
    ),
    "scaled, pairs": lambda **o: adjsim.ScaledPairs(pairwise(), PAIRS, 0.5, **o),
    "scaled, truncated": lambda **o: adjsim.ScaledPairs(
        mixture(cutoff=3.0), PAIRS, 0.5, truncated=True, **o
    ),
}
RESTRAINTS = {
    "points": lambda **o: adjsim.PositionRestraint(
        [1, 4], vector(3.0, 2.0), nn.Parameter(POINTS.clone()), **o
    ),
    "custom places": lambda **o: adjsim.potentials.CustomExternal(
        [1, 4],
        "k*periodicdistance(x,y,z,x0,0.5,z0)^2",
        {"k": vector(3.0, 2.0), "x0": parameter(1.0), "z0": 0.3},
        **o,
    ),
    "balls": lambda **o: adjsim.FlatBottomRestraint(
        [1, 4, 2],
        parameter(3.0),
        nn.Parameter(torch.cat([POINTS, CHAIN[2:3] + 0.05])),
        parameter(0.2),
        **o,
    ),
}
EVERY = BONDED | RESTRAINTS


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare relative to the largest entry, since entries cancel."""
    found, expected = found.detach(), expected.detach()
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)
