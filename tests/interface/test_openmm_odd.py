"""Odd systems of custom forces, beside OpenMM's Reference platform."""

from __future__ import annotations

import copy
from unittest.mock import patch

import numpy as np
import openmm
import pytest
import torch

import adjsim
from adjsim.core.refusal import Refusal
from adjsim.io import from_openmm, to_openmm
from adjsim.potentials.pairs import base
from tests.openmm_custom import sites
from tests.openmm_systems import energy_and_forces, reference

ATOMS = 12
SIDES = np.diag((2.0, 2.1, 2.2))
TILTED = np.array([[2.0, 0, 0], [0.5, 2.1, 0], [-0.6, 0.4, 2.2]])
RNG = np.random.default_rng(3)
# Numbers of atoms by name; "t" are kinds, and "w" are kinds but for rounding.
NUMBERS = {
    "q": RNG.normal(size=ATOMS),
    "s": RNG.uniform(0.2, 0.35, ATOMS),
    "e": RNG.uniform(0.2, 0.8, ATOMS),
    "t": np.arange(ATOMS) % 3,
    "w": 0.9 * (np.arange(ATOMS) % 3) - 0.2,
}
KINDS = openmm.Discrete2DFunction(3, 3, [1.0, 2.0, 3.0, 2.0, 4.0, 5.0, 3.0, 5.0, 6.0])
WELLS = "4*e*((s/r)^12-(s/r)^6); s=0.5*(s1+s2); e=sqrt(e1*e2)"
FUNCTIONS = (
    "select(step(r-0.5), min(r,0.6)*q1*q2, max(r,0.4)^2) + floor(q1*q2) + ceil(r)*0.1 + erf(r)"
    "+ erfc(2*r) + atan2(r,0.3) + cot(r) + sec(r) + csc(r) + square(r) + cube(r) + recip(r)"
    "+ asin(r/4) + acos(r/4) + atan(r) + sinh(r) + cosh(r) + tanh(r) + log(r) + abs(r-0.51)"
    "+ tan(r) + delta(q1-q2) + sqrt(r) + exp(-r) + sin(r) + cos(r)"
)


def pairs(text, *, method=2, switch=None, groups=(), far=False, **tables):
    """A force between pairs with the numbers that its text names, and its exclusions."""
    force = openmm.CustomNonbondedForce(text)
    names = [name for name in NUMBERS if f"{name}1" in text]
    for name in names:
        force.addPerParticleParameter(name)
    force.addGlobalParameter("g", 1.3)
    for k in range(ATOMS):
        force.addParticle([float(NUMBERS[name][k]) for name in names])
    for name, table in tables.items():
        force.addTabulatedFunction(name, copy.deepcopy(table))
    for one, other in groups:
        force.addInteractionGroup(one, other)
    force.addExclusion(0, 1)
    force.addExclusion(5, 2)
    force.setNonbondedMethod(method)
    force.setCutoffDistance(0.8)
    force.setUseSwitchingFunction(switch is not None)
    force.setSwitchingDistance(switch or 0.1)
    return force


def terms(name, text, *, width, word="Bond", listed=False, **numbers):
    """A periodic force of some terms of atoms that are far from each other."""
    force = getattr(openmm, name)(*([width] if listed else []), text)
    for number in numbers:
        getattr(force, f"addPer{word}Parameter")(number)
    force.addGlobalParameter("g", 1.3)
    for k in range(5):
        atoms = np.random.default_rng(k).permutation(ATOMS)[:width].tolist()
        row = [value * (1 + 0.1 * k) for value in numbers.values()]
        getattr(force, f"add{word}")(*([atoms] if listed else atoms), row)
    force.setUsesPeriodicBoundaryConditions(True)
    return force


def smooth(*sizes, low, high):
    values = np.random.default_rng(1).normal(size=sizes).flatten().tolist()
    ends = [x for pair in zip(low, high, strict=True) for x in pair]
    counts = sizes if len(sizes) > 1 else ()
    return getattr(openmm, f"Continuous{len(sizes)}DFunction")(*counts, values, *ends)


def centroids():
    force = openmm.CustomCentroidBondForce(
        4, "k*(distance(g1,g2)-0.3)^2 + dihedral(g1,g2,g3,g4) + g*angle(g1,g2,g3)"
    )
    force.addPerBondParameter("k")
    force.addGlobalParameter("g", 1.3)
    for k in range(4):
        force.addGroup([3 * k, 3 * k + 1, 3 * k + 2], *([[1.0, 0.0, 2.5]] if k == 1 else []))
    force.addBond([0, 1, 2, 3], [5.0])
    force.setUsesPeriodicBoundaryConditions(True)
    return force


def bonds_of_hydrogen():
    """Some atoms are a donor and an acceptor, so their pairs are excluded."""
    force = openmm.CustomHbondForce("g*f(distance(a1,d1))*q*p*cos(dihedral(d1,d2,a1,a2))")
    force.addPerDonorParameter("q")
    force.addPerAcceptorParameter("p")
    force.addGlobalParameter("g", 1.3)
    force.addTabulatedFunction("f", smooth(7, low=[0.0], high=[1.5]))
    for k in range(4):
        force.addDonor(k, k + 1, -1, [1.0 + k])
        force.addAcceptor(k + 4, k + 6, -1, [0.5 + k])
    force.addExclusion(3, 0)
    force.setNonbondedMethod(2)
    force.setCutoffDistance(0.7)
    return force


def stages(values, energies, method, **tables):
    """A force of computed values and energies, each of atoms (0), pairs (1) or all pairs (2)."""
    force = openmm.CustomGBForce()
    kinds = force.SingleParticle, force.ParticlePair, force.ParticlePairNoExclusions
    for name in NUMBERS:
        force.addPerParticleParameter(name)
    force.addGlobalParameter("g", 1.3)
    for k in range(ATOMS):
        force.addParticle([float(x[k]) for x in NUMBERS.values()])
    for name, text, kind in values:
        force.addComputedValue(name, text, kinds[kind])
    for text, kind in energies:
        force.addEnergyTerm(text, kinds[kind])
    for name, table in tables.items():
        force.addTabulatedFunction(name, copy.deepcopy(table))
    force.addExclusion(0, 1)
    force.addExclusion(5, 2)
    force.setNonbondedMethod(method)
    force.setCutoffDistance(0.8)
    return force


# Forces, the box, and whether atoms are in other copies of the box.
SYSTEMS = {
    "groups with exclusions and a switch": (
        lambda: pairs(
            WELLS,
            switch=0.6,
            groups=[(range(4), range(3, ATOMS)), ([0, 1], [1, 2, 0]), (range(4), range(3, ATOMS))],
        ),
        SIDES,
        True,
    ),
    "groups without a cutoff": (
        lambda: pairs(WELLS, method=0, groups=[(range(3), range(2, ATOMS)), ([], [1])]),
        SIDES,
        False,
    ),
    "pairs in a tilted box": (lambda: pairs("q1*q2*exp(-g*r)/r", switch=0.5), TILTED, True),
    "kinds that are rounded": (lambda: pairs("k(w1,w2)*g*r", k=KINDS), SIDES, False),
    "kinds in two ways": (lambda: pairs("k(t1,t2)*(t1+t2)*g*r", k=KINDS), SIDES, False),
    "a table of two numbers": (
        lambda: pairs("f(r,abs(q1-q2))*g", f=smooth(5, 6, low=[0.1, -0.1], high=[0.9, 4.0])),
        SIDES,
        False,
    ),
    "a table that ends": (
        lambda: pairs("f(r)*g", f=smooth(4, low=[0.3], high=[0.6])),
        SIDES,
        False,
    ),
    "every function": (lambda: pairs(FUNCTIONS, method=1), SIDES, False),
    "powers": (
        lambda: pairs("2^r^2 - -r^2 + -2^2*r + r^-2 + r^0.5 + (-r)^2 + 6/3/r*g", method=1),
        SIDES,
        False,
    ),
    "numbers": (lambda: pairs("1.e-3*r+1.E+1*r+1e2*r^2+.5e-2/r+5.*g*r", method=1), SIDES, False),
    "definitions of one name": (lambda: pairs("a*r; a=b+1; b=a^2*g; a=r", method=1), SIDES, False),
    "periodic bonds": (
        lambda: terms("CustomBondForce", "k*(r-g/4)^2+log(r)", width=2, k=9.0),
        SIDES,
        True,
    ),
    "periodic angles": (
        lambda: terms("CustomAngleForce", "k*(cos(theta)-g/4)^2", width=3, word="Angle", k=9.0),
        SIDES,
        True,
    ),
    "torsions through a tilted box": (
        lambda: terms(
            "CustomTorsionForce",
            "k*min(d, 2*pi-d)^2+g*cos(3*theta); d=abs(theta-0.3); pi=3.1415926535",
            width=4,
            word="Torsion",
            k=9.0,
        ),
        TILTED,
        False,
    ),
    "points in a periodic box": (
        lambda: terms(
            "CustomCompoundBondForce",
            "k*pointdistance((x1+x2)/2,(y1+y2)/2,(z1+z2)/2,x3,y3,z3)^2"
            "+g*pointangle(x1,y1,z1,x2,y2,z2,x3,y3,z3)+distance(p1,p3)",
            width=3,
            listed=True,
            k=9.0,
        ),
        SIDES,
        True,
    ),
    "centroids in a tilted box": (centroids, TILTED, False),
    "hydrogen bonds in a tilted box": (bonds_of_hydrogen, TILTED, True),
    "atoms in a metal": (
        lambda: stages(
            [("rho", "e2*exp(-3*r/s1)*(1-r/0.8)^2", 2), ("F", "-sqrt(rho+0.1)", 0)],
            [("g*F", 0), ("e1*e2*exp(-6*r)/r", 1)],
            2,
        ),
        TILTED,
        True,
    ),
    "stages of places": (
        lambda: stages(
            [
                ("I", "0.1*a*exp(-r)*s1; a=c+r; c=2*b; b=q1-q2+3", 1),
                ("A", "I^2+q", 0),
                ("B", "A*I+x-y*z", 0),
                ("C", "max(A,B)+min(s,0.2)*step(B)", 0),
            ],
            [("C*A+sin(x)*B", 0), ("0.01*C1*C2*B1*B2/r", 1), ("r^2*A1*A2*abs(q1-q2)", 2)],
            1,
        ),
        SIDES,
        False,
    ),
    "stages of tables": (
        lambda: stages(
            [("I", "f(r)*q2*k(t1,t2)*d(t1,t2,1)", 1), ("B", "h(I)+k(t,1)", 0)],
            [("B", 0), ("u(r,B1*B2)*I1*I2", 2)],
            2,
            f=smooth(6, low=[0.1], high=[1.4]),
            h=smooth(5, low=[-80.0], high=[80.0]),
            u=smooth(5, 6, low=[0.1, -200.0], high=[1.5, 200.0]),
            k=KINDS,
            d=openmm.Discrete3DFunction(3, 3, 2, [1.0 + k for k in range(18)]),
        ),
        SIDES,
        True,
    ),
}


def with_sites():
    """A virtual site in pairs, groups, torsions, centroids and hydrogen bonds."""
    system = openmm.System()
    torsion = openmm.CustomTorsionForce("3*cos(theta)")
    torsion.addTorsion(3, 5, 6, 7, [])
    bond = openmm.CustomHbondForce("distance(d1,a1)^2")
    bond.addDonor(3, 0, -1, [])
    bond.addAcceptor(5, 6, -1, [])
    centre = openmm.CustomCentroidBondForce(2, "distance(g1,g2)^2")
    centre.addGroup([3, 1])
    centre.addGroup([4, 5])
    centre.addBond([0, 1], [])
    for k in range(ATOMS):
        system.addParticle(0.0 if k == 3 else 10.0 + k % 3)
    place = openmm.LocalCoordinatesSite(
        [0, 1, 2], [0.5, 0.3, 0.2], [-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0], [0.05, 0.02, 0.03]
    )
    system.setVirtualSite(3, place)
    system.setDefaultPeriodicBoxVectors(*SIDES)
    for force in (pairs("q1*q2/r", groups=[([3, 4], range(ATOMS))]), torsion, bond, centre):
        system.addForce(force)
    return system


def placed(system, positions):
    """Return positions with virtual sites where they belong."""
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions)
    context.computeVirtualSites()
    return context.getState(positions=True).getPositions(asNumpy=True)._value


def assert_agrees(potential, structure, system, positions):
    positions = placed(system, positions)
    energy, forces = energy_and_forces(potential, structure.position)
    expected, expected_forces = reference(system, positions)
    moving = [k for k in range(ATOMS) if not system.isVirtualSite(k)]
    scale = np.abs(expected_forces).max()
    assert abs(energy - expected) <= 1e-9 * max(abs(expected), scale)
    assert np.abs(forces - expected_forces[moving]).max() <= 1e-7 * scale


def changed(potential, factor):
    """Scale the numbers that are no kinds."""
    with torch.no_grad():
        for name, x in potential.named_parameters():
            if not name.endswith((".t", ".w")):
                x.mul_(factor)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SYSTEMS, "sites"])
def test_odd_systems(name):
    """Energies and forces, gradients to every number, and OpenMM's with changed numbers."""
    if name == "sites":
        system, positions = with_sites(), sites()
    else:
        make, box, far = SYSTEMS[name]
        system, positions = openmm.System(), sites()
        for k in range(ATOMS):
            system.addParticle(10.0 + k % 3)
        system.setDefaultPeriodicBoxVectors(*box)
        system.addForce(make())
        if far:
            positions += np.random.default_rng(2).integers(-2, 3, (ATOMS, 3)) @ box
    # Each system would compile kernels of its own.
    with patch.object(base, "unsupported", lambda *_: Refusal("left out")):
        potential, structure = from_openmm(system, placed(system, positions))
        assert_agrees(potential, structure, system, positions)
        changed(potential, 1.02)
        written = to_openmm(potential, system)
        assert_agrees(potential, structure, written, positions)
        check_gradient(potential, structure.position)
        again, _ = from_openmm(written, placed(written, positions))
        energies = [x(structure.position).item() for x in (again, potential)]
        assert energies[0] == pytest.approx(energies[1], rel=1e-12)


def check_gradient(potential, position):
    """Compare the gradient of the force along a vector to every number with differences."""
    v = torch.randn(position.shape, generator=torch.Generator().manual_seed(0)).double()
    named = {k: x for k, x in potential.named_parameters() if not k.endswith((".t", ".w"))}
    force = (adjsim.force(potential, position) * v).sum()
    grads = torch.autograd.grad(force, list(named.values()), allow_unused=True)
    for (name, x), grad in zip(named.items(), grads, strict=True):
        along, ends, h = x.detach().cos() * (x.detach().abs().mean() + 0.1), [], 1e-5
        for sign in (h, -h):
            with torch.no_grad():
                x += sign * along
                ends.append(float((adjsim.force(potential, position) * v).sum()))
                x -= sign * along
        found = 0.0 if grad is None else float((grad * along).sum())
        expected = (ends[0] - ends[1]) / (2 * h)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-8 * abs(float(force.detach()))), (
            name
        )
