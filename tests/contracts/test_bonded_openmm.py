"""Bonded terms against OpenMM, in its own units (kJ/mol, nm), so that numbers are the same."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from tests.bonded import ANGLES, BONDS, CHAIN, EVERY, MAPS, PAIRS, TORSIONS, close


def openmm_term(name: str):
    mm = pytest.importorskip("openmm", reason="OpenMM is not installed")

    def filled(force, method, rows):
        for row in rows:
            getattr(force, method)(*row)
        return force

    def custom(force, kind, names, rows):
        for parameter_name in names:
            getattr(force, f"addPer{kind}Parameter")(parameter_name)
        return filled(force, f"add{kind}", rows)

    table = {
        "bonds, each": lambda p: filled(
            mm.HarmonicBondForce(),
            "addBond",
            [(*i, r, x) for i, r, x in zip(BONDS, p.length.tolist(), p.k.tolist(), strict=True)],
        ),
        "morse": lambda p: custom(
            mm.CustomBondForce("D*(1-exp(-a*(r-r0)))^2"),
            "Bond",
            ("D", "a", "r0"),
            [
                (*i, (p.depth[t].item(), p.width.item(), p.length[t].item()))
                for i, t in zip(BONDS, [0, 1, 0, 0, 1], strict=True)
            ],
        ),
        "angles": lambda p: filled(
            mm.HarmonicAngleForce(),
            "addAngle",
            [(*i, a, x) for i, a, x in zip(ANGLES, p.angle.tolist(), p.k.tolist(), strict=True)],
        ),
        "cosines": lambda p: custom(
            mm.CustomAngleForce("0.5*k*(cos(theta)-cos(t0))^2"),
            "Angle",
            ("k", "t0"),
            [
                (*i, (p.k[t].item(), p.angle.item()))
                for i, t in zip(ANGLES, [0, 1, 1, 0], strict=True)
            ],
        ),
        "urey-bradley": lambda p: filled(
            mm.HarmonicBondForce(),
            "addBond",
            [(a, c, p.length.item(), p.k.item()) for a, _, c in ANGLES],
        ),
        "torsions": lambda p: filled(
            mm.PeriodicTorsionForce(),
            "addTorsion",
            [(*i, n + 1, p.phase[n].item(), p.k[n].item()) for n, i in enumerate(TORSIONS)],
        ),
        "series, each": lambda p: filled(
            mm.RBTorsionForce(),
            "addTorsion",
            [(*i, *c) for i, c in zip(TORSIONS, p.coefficients.tolist(), strict=True)],
        ),
        "maps": lambda p: filled(
            filled(mm.CMAPTorsionForce(), "addMap", [(8, p.energy.detach().T.flatten().tolist())]),
            "addTorsion",
            [(0, *i) for i in MAPS],
        ),
        "impropers": lambda p: custom(
            mm.CustomTorsionForce(f"0.5*k*min(d,2*{math.pi!r}-d)^2; d=abs(theta-t0)"),
            "Torsion",
            ("k", "t0"),
            [(*i, (p.k.item(), a)) for i, a in zip(TORSIONS, p.angle.tolist(), strict=True)],
        ),
        "explicit": lambda p: custom(
            mm.CustomBondForce("4*e*((s/r)^12-(s/r)^6)+1.7*qq/r"),
            "Bond",
            ("e", "s", "qq"),
            [
                (*i, row)
                for i, row in zip(
                    PAIRS,
                    torch.stack([p.epsilon, p.sigma, p.product], -1).tolist(),
                    strict=True,
                )
            ],
        ),
        "points": lambda p: custom(
            mm.CustomExternalForce("0.5*k*((x-x0)^2+(y-y0)^2+(z-z0)^2)"),
            "Particle",
            ("k", "x0", "y0", "z0"),
            [
                (i, (k, *x))
                for i, k, x in zip((1, 4), p.k.tolist(), p.position.tolist(), strict=True)
            ],
        ),
    }
    return mm, table[name]


@pytest.mark.parametrize(
    "name",
    [
        "bonds, each", "morse", "angles", "cosines", "urey-bradley", "torsions", "series, each",
        "maps", "impropers", "explicit", "points",
    ],
)  # fmt: skip
def test_energies_and_forces_equal_those_of_openmm(name):
    mm, make = openmm_term(name)
    potential, system = EVERY[name](), mm.System()
    for _ in range(6):
        system.addParticle(1.0)
    system.addForce(make(potential))
    context = mm.Context(
        system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("Reference")
    )
    context.setPositions(CHAIN.numpy())
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy()._value
    # Its angles are acos of cosines, in double precision.
    assert float(potential(CHAIN)) == pytest.approx(energy, rel=1e-8)
    close(adjsim.force(potential, CHAIN), torch.tensor(state.getForces(asNumpy=True)._value), 1e-8)
