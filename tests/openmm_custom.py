"""Systems with OpenMM's custom forces of several atoms, of groups and of places."""

from __future__ import annotations

from typing import Any

import numpy as np
import openmm

SIDE = (2.0, 2.1, 2.2)


def sites(count: int = 12, seed: int = 0) -> np.ndarray:
    """Positions in nm, of atoms that are not in a line."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3)
    return 0.3 * grid[:count] + 0.08 * rng.random((count, 3))


def system_with(force: Any, count: int = 12) -> Any:
    """Make a system of atoms of several masses, in a box if the force is periodic."""
    system = openmm.System()
    for k in range(count):
        system.addParticle(10.0 + k % 3)
    system.setDefaultPeriodicBoxVectors(*np.diag(SIDE))
    system.addForce(force)
    return system


def compound(periodic: bool) -> Any:
    force = openmm.CustomCompoundBondForce(
        4,
        "k*(distance(p1,p2)-r0)^2*(2+cos(angle(p2,p3,p4)-c)) + c*u"
        "+ e*pointdistance(x1,y1,z1+0.1*c,(x3+x4)/2,y3,z3) + y2*x4^2;"
        "u=1+cos(2*dihedral(p1,p2,p3,p4)-phase)",
    )
    for name in ("k", "r0", "phase"):
        force.addPerBondParameter(name)
    force.addGlobalParameter("c", 1.7)
    force.addGlobalParameter("e", 20.0)
    rng = np.random.default_rng(1)
    for _ in range(5):
        atoms = rng.permutation(12)[:4].tolist()
        force.addBond(atoms, [100 * rng.random(), 0.2 + 0.1 * rng.random(), rng.normal()])
    force.setUsesPeriodicBoundaryConditions(periodic)
    return force


def centroid(periodic: bool) -> Any:
    force = openmm.CustomCentroidBondForce(
        3,
        "k*(distance(g1,g2)-r0)^2 + k*angle(g1,g2,g3)^2 + 0.3*k*x1*z2"
        "+ bend*pointangle(x1,y1,z1,x2,y2,z2,x3,y3,z3)",
    )
    for name in ("k", "r0"):
        force.addPerBondParameter(name)
    force.addGlobalParameter("bend", 7.0)
    force.addGroup([0, 1, 2, 5])
    force.addGroup([3, 5], [1.0, 2.5])
    force.addGroup([7])
    force.addGroup([8, 9, 11])
    force.addBond([0, 1, 3], [90.0, 0.2])
    force.addBond([3, 0, 2], [30.0, 0.3])
    force.setUsesPeriodicBoundaryConditions(periodic)
    return force


def external(periodic: bool) -> Any:
    distance = "periodicdistance(x,y,z,x0,0.3,z0)" if periodic else "sqrt((x-x0)^2+y^2+z0*z^2)"
    force = openmm.CustomExternalForce(f"k*{distance}^3 + well*select(step(z-0.2), z^2, 0)")
    for name in ("k", "x0", "z0"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("well", 11.0)
    for atom in (2, 5, 11):
        force.addParticle(atom, [200.0 + atom, 0.1 * atom, 0.4])
    return force


def steep(periodic: bool) -> Any:
    """A restraint by its form, whose stiffness is that of another force too."""
    square = "periodicdistance(x,y,z,x0,y0,z0)^2" if periodic else "((x-x0)^2+(y-y0)^2+(z-z0)^2)"
    force = openmm.CustomExternalForce(f"0.5*k/2*{square}")
    for name in ("x0", "y0", "z0"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("k", 300.1)
    force.addParticle(3, [0.1, 0.2, 0.3])
    force.addParticle(7, [0.5, 0.6, 0.1])
    return force


def balls(text: str) -> Any:
    """Restraints to balls, with a radius of all particles."""
    force = openmm.CustomExternalForce(text)
    for name in ("k", "x0", "y0", "z0"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("r0", 0.15)
    for k, atom in enumerate((3, 7, 0)):
        force.addParticle(atom, [300.0 + k, 0.1, 0.2 + 0.1 * k, 0.3])
    return force


def tables(periodic: bool) -> Any:
    """Every kind of table, of coordinates and of numbers of terms."""
    force = openmm.CustomCompoundBondForce(
        3,
        "kind1(t)*smooth1(distance(p1,p2)) + smooth2(distance(p2,p3),angle(p1,p2,p3))"
        "+ smooth3(x1,y2,z3) + kind2(t,1)*distance(p1,p3)^2 + kind3(t,0,1)",
    )
    rng = np.random.default_rng(5)
    force.addPerBondParameter("t")

    def values(*sizes: int) -> list[float]:
        found = rng.normal(size=sizes)
        if periodic:
            for axis, size in enumerate(sizes):
                last = (slice(None),) * axis + (size - 1,)
                found[last] = found[(slice(None),) * axis + (0,)]
        return found.flatten("F").tolist()

    one, two, three = values(7), values(5, 6), values(4, 5, 6)
    for name, table in (
        ("smooth1", openmm.Continuous1DFunction(one, 0.1, 1.5, periodic)),
        ("smooth2", openmm.Continuous2DFunction(5, 6, two, 0.1, 1.6, 0.0, 3.2, periodic)),
        ("smooth3", openmm.Continuous3DFunction(
            4, 5, 6, three, -0.1, 1.0, -0.1, 1.1, -0.1, 1.2, periodic
        )),
        ("kind1", openmm.Discrete1DFunction(rng.normal(size=3).tolist())),
        ("kind2", openmm.Discrete2DFunction(3, 2, rng.normal(size=6).tolist())),
        ("kind3", openmm.Discrete3DFunction(3, 1, 2, rng.normal(size=6).tolist())),
    ):  # fmt: skip
        force.addTabulatedFunction(name, table)
    for k in range(6):
        force.addBond(rng.permutation(12)[:3].tolist(), [k % 3])
    force.setUsesPeriodicBoundaryConditions(periodic)
    return force


def pair_tables(periodic: bool) -> Any:
    """Every kind of table in pairs, and one by types of both atoms."""
    force = openmm.CustomNonbondedForce(
        "q1*q2*f(r) + h(t1)*h(t2)*g(r,q1*q2) + k(t1,t2)*f(2*r) + c*d(t1,t2,u1*u2) + types(t1,t2)/r"
    )
    rng = np.random.default_rng(4)
    for name in ("q", "t", "u"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("c", 1.3)
    line, grid, kinds = rng.normal(size=8), rng.normal(size=(5, 6)), rng.normal(size=(3, 3, 2))
    line[-1], grid[-1], grid[:, -1] = line[0], grid[0], grid[:, 0]
    grid[-1, -1] = grid[0, 0]
    kinds += kinds.transpose(1, 0, 2)
    flat = [x.flatten("F").tolist() for x in (line, grid, kinds[..., 0], kinds[..., 1], kinds)]
    for name, table in (
        ("f", openmm.Continuous1DFunction(flat[0], 0.05, 1.2, periodic)),
        ("g", openmm.Continuous2DFunction(5, 6, flat[1], 0.0, 1.5, -4.0, 4.0, periodic)),
        ("h", openmm.Discrete1DFunction(rng.normal(size=3).tolist())),
        ("k", openmm.Discrete2DFunction(3, 3, flat[2])),
        ("types", openmm.Discrete2DFunction(3, 3, flat[3])),
        ("d", openmm.Discrete3DFunction(3, 3, 2, flat[4])),
    ):
        force.addTabulatedFunction(name, table)
    for k in range(12):
        force.addParticle([rng.normal(), k % 3, k % 2])
    force.addExclusion(0, 1)
    force.setCutoffDistance(0.7)
    force.setNonbondedMethod(2 if periodic else 1)
    return force


def computed_values(periodic: bool) -> Any:
    """Numbers of atoms by expressions, of which one defines a name that is a number too."""
    force = openmm.CustomNonbondedForce("1e-3*w*c1*c2*k(t1,t2)/r^2; w=b1+b2+0.1*c1*c2")
    for name in ("t", "q"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("w", 1.4)
    force.addComputedValue("b", "sqrt(q)*w*1e-1")
    force.addComputedValue("c", "f(t)*k(t,1)*q + d; d=t*1.e0; t=0.1*t+w")
    force.addTabulatedFunction("k", openmm.Discrete2DFunction(3, 3, [1, 2, 3, 2, 4, 5, 3, 5, 6]))
    force.addTabulatedFunction("f", openmm.Discrete1DFunction([1.0, 2.0, 1.5]))
    for k in range(12):
        force.addParticle([k % 2, 1.0 + 0.1 * k])
    force.addExclusion(0, 1)
    force.setCutoffDistance(0.7)
    force.setNonbondedMethod(2 if periodic else 1)
    return force


def hydrogen_bonds(periodic: bool) -> Any:
    force = openmm.CustomHbondForce(
        "depth*q*p*(1/distance(d1,a1)^2 + angle(d2,d1,a1)^2) + f(distance(a1,d2))*q"
        "+ p*cos(dihedral(a2,a1,d1,d2))"
    )
    force.addPerDonorParameter("q")
    force.addPerAcceptorParameter("p")
    force.addGlobalParameter("depth", 0.4)
    table = openmm.Continuous1DFunction([3.0, -1.0, 0.5, 0.0], 0.1, 1.6)
    force.addTabulatedFunction("f", table)
    for k in range(4):
        force.addDonor(k, k + 4, -1, [1.0 + k])
    for k in range(3):
        force.addAcceptor(k + 9, k + 5, 4 - k, [0.5 + k])
    force.addExclusion(1, 2)
    force.addExclusion(3, 0)
    force.setCutoffDistance(0.6)
    force.setNonbondedMethod(2 if periodic else 1)
    return force


def solvent(periodic: bool) -> Any:
    """Stages and terms of every kind, with a table and excluded pairs."""
    force = openmm.CustomGBForce()
    for name in ("q", "s", "t"):
        force.addPerParticleParameter(name)
    force.addGlobalParameter("c", 1.3)
    single, pairs, all_pairs = (
        force.SingleParticle,
        force.ParticlePair,
        force.ParticlePairNoExclusions,
    )
    force.addComputedValue(
        "I",
        "select(step(r+sr2-s1),0.5*(1/L-1/U+0.25*(r-sr2^2/r)*(1/(U^2)-1/(L^2))+0.5*log(L/U)/r),0)"
        "*kind(t1,t2);U=r+sr2;L=max(s1,D);D=abs(r-sr2);sr2=0.8*s2",
        all_pairs,
    )
    force.addComputedValue("B", "1/(1/s-tanh(c*psi-psi^3)/(s+0.01));psi=I*s", single)
    force.addComputedValue("A", "B*I+x*y-z", single)
    force.addEnergyTerm("-60*q^2/B+depth(B)*A^2", single)
    force.addEnergyTerm("-120*c*q1*q2/f;f=sqrt(r^2+B1*B2*exp(-r^2/(4*B1*B2)))", all_pairs)
    force.addEnergyTerm("min(A1*A2,c)*exp(-r/s1-r/s2)", pairs)
    rng = np.random.default_rng(6)
    for name, table in (
        ("kind", openmm.Discrete2DFunction(2, 2, [1.0, 0.8, 0.9, 1.1])),
        ("depth", openmm.Continuous1DFunction(rng.normal(size=6).tolist(), 0.05, 1.5)),
    ):
        force.addTabulatedFunction(name, table)
    for k in range(12):
        force.addParticle([rng.normal(), rng.uniform(0.1, 0.2), k % 2])
    for pair in ((0, 1), (5, 2), (3, 4)):
        force.addExclusion(*pair)
    force.setCutoffDistance(0.7)
    force.setNonbondedMethod(2 if periodic else 0)
    return force


FORCES = {
    "compound": compound,
    "centroid": centroid,
    "external": external,
    "tables": tables,
    "hydrogen bonds": hydrogen_bonds,
    "solvent": solvent,
}


def offsets(method: str) -> Any:
    """Charges, wells and exceptions that follow two global numbers, one of them from zero."""
    force = openmm.NonbondedForce()
    rng = np.random.default_rng(2)
    for k in range(12):
        # The last atom has no well, and so needs no length.
        sigma = 0.0 if k == 11 else 0.2 + 0.02 * (k % 3)
        force.addParticle(rng.normal(), sigma, 0.0 if k in (4, 11) else 0.4)
    for k in range(5):
        force.addException(k, k + 1, 0.2 * k, 0.25, 0.1 * (k % 2))
    # This pair has no well, and so needs no length either.
    force.addException(7, 9, 0.1, 0.0, 0.0)
    force.addGlobalParameter("electric", 0.3)
    force.addGlobalParameter("unused", 2.0)
    force.addGlobalParameter("steric", 0.0)
    for k in (1, 2, 5):
        force.addParticleParameterOffset("electric", k, 0.7, 0.01, 0.3)
        force.addParticleParameterOffset("steric", k + 1, -0.2, 0.02, 0.5)
    force.addParticleParameterOffset("electric", 4, 0.0, 0.0, 1.5)
    force.addExceptionParameterOffset("electric", 0, 0.5, 0.02, 0.8)
    force.addExceptionParameterOffset("steric", 3, 0.1, 0.0, 0.4)
    force.setNonbondedMethod(getattr(openmm.NonbondedForce, method))
    force.setCutoffDistance(0.9)
    force.setPMEParameters(4.0, 24, 24, 24)
    force.setLJPMEParameters(4.0, 16, 16, 16)
    return force
