"""Systems of OpenMM to read: molecules from files, and random systems with every force."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit

import adjsim
from adjsim.io._openmm.library import ENERGY, LENGTH

DATA = Path(__file__).resolve().parents[1] / "examples" / "data"
AMBER14, OBC2 = "amber14/protein.ff14SB.xml", "implicit/obc2.xml"
GBN2 = "implicit/gbn2.xml"


@lru_cache
def structure(name: str) -> app.PDBFile:
    return app.PDBFile(str(DATA / name))


def molecule(name: str, *files: str, **options: Any) -> tuple[Any, np.ndarray, Any]:
    """Make a system without constraints, its positions in nm and its topology."""
    pdb = structure(name)
    options = {"constraints": None, "rigidWater": False, **options}
    system = app.ForceField(*files).createSystem(pdb.topology, **options)
    return system, pdb.getPositions(asNumpy=True).value_in_unit(unit.nanometer), pdb.topology


def reference(system: Any, positions: Any, groups: Any = -1) -> tuple[float, np.ndarray]:
    """Return energy and forces of OpenMM's Reference platform, in eV and angstrom."""
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True, groups=groups)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)
    return energy * ENERGY, np.array(forces) * ENERGY / LENGTH


def energy_and_forces(potential: Any, position: torch.Tensor) -> tuple[float, np.ndarray]:
    """Return energy and forces of a potential."""
    with torch.no_grad():
        return potential(position).item(), adjsim.force(potential, position).numpy()


def assert_openmm_agrees(
    system: Any, positions: Any, potential: Any, position: torch.Tensor, rtol: float
) -> None:
    """Assert that energy and forces of a potential are those of OpenMM's Reference platform."""
    energy, forces = energy_and_forces(potential, position)
    expected, expected_forces = reference(system, positions)
    scale = np.abs(expected_forces).max()
    # The energy may be small where large terms cancel: a force over an angstrom is its scale.
    assert abs(energy - expected) <= rtol * max(abs(expected), scale)
    assert np.abs(forces - expected_forces).max() <= rtol * scale


def velocity_verlet(
    system: Any, position: torch.Tensor, velocity: torch.Tensor, dt: float, steps: int
) -> torch.Tensor:
    """Take steps of velocity Verlet with constraints by OpenMM, to positions in angstrom.

    Positions and velocities are in ASE's units, and dt is in picoseconds.
    """
    verlet = openmm.CustomIntegrator(dt)
    verlet.setConstraintTolerance(1e-12)
    verlet.addGlobalVariable("begun", 0)
    verlet.addPerDofVariable("x1", 0)
    # The second half kick of the step before: OpenMM places virtual sites at the end of a step.
    verlet.addComputePerDof("v", "v + begun * 0.5 * dt * f / m")
    verlet.addConstrainVelocities()
    verlet.addComputeGlobal("begun", "1")
    verlet.addComputePerDof("v", "v + 0.5 * dt * f / m")
    verlet.addComputePerDof("x", "x + dt * v")
    verlet.addComputePerDof("x1", "x")
    verlet.addConstrainPositions()
    verlet.addComputePerDof("v", "v + (x - x1) / dt")
    context = openmm.Context(system, verlet, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(position.numpy() / LENGTH)
    context.setVelocities((velocity * 1000 * units.fs / LENGTH).numpy())
    verlet.step(steps)
    found = context.getState(positions=True).getPositions(asNumpy=True)
    return LENGTH * torch.as_tensor(found._value)


METHODS = ("NoCutoff", "CutoffNonPeriodic", "CutoffPeriodic", "Ewald", "PME", "LJPME")
SIDE = 1.6


def random_system(seed: int, method: str, scaled: bool, tilted: bool) -> tuple[Any, np.ndarray]:
    """Make a system of 9 to 14 atoms with every force that is read, and its positions in nm.

    Exceptions follow from the numbers of their atoms if ``scaled``. A tilted box, whose nearest
    images OpenMM takes otherwise beyond half a width, has no periodic bonds; OpenMM has no Ewald
    sum in it. Cutoffs and permittivities are fixed, since each has a kernel of its own.
    """
    rng = np.random.default_rng(seed)
    atoms = int(rng.integers(9, 15))
    periodic = method not in METHODS[:2]
    sites = np.array(np.meshgrid(*3 * [np.arange(3)])).reshape(3, -1).T
    positions = 0.3 * rng.permutation(sites)[:atoms] + 0.06 * rng.random((atoms, 3))
    system = openmm.System()
    for mass in rng.uniform(1, 20, atoms):
        system.addParticle(mass)
    if periodic:
        rows = SIDE * np.eye(3)
        if tilted and method != "Ewald":
            rows[1, 0], rows[2, :2] = 0.4, (-0.3, 0.5)
        system.setDefaultPeriodicBoxVectors(*rows)
        positions = positions + rng.integers(-1, 2, (atoms, 3)) @ rows
    image = bool(periodic and np.count_nonzero(rows) == 3 and rng.random() < 0.5)
    if periodic and not image:
        # Without periodic bonds, their atoms have to be near each other.
        positions = positions - np.round(positions @ np.linalg.inv(rows)) @ rows

    def terms(width: int) -> list[list[int]]:
        return [rng.permutation(atoms)[:width].tolist() for _ in range(5)]

    bonds, angles = openmm.HarmonicBondForce(), openmm.HarmonicAngleForce()
    torsions, series = openmm.PeriodicTorsionForce(), openmm.RBTorsionForce()
    for term in terms(2):
        bonds.addBond(*term, rng.uniform(0.1, 0.5), rng.uniform(100, 1e3))
    for term in terms(3):
        angles.addAngle(*term, rng.uniform(1, 3), rng.uniform(10, 100))
    for term in terms(4):
        torsions.addTorsion(*term, int(rng.integers(1, 6)), rng.uniform(-3, 3), rng.normal())
        series.addTorsion(*term[::-1], *rng.normal(size=6))
    for force in (bonds, angles, torsions, series):
        force.setUsesPeriodicBoundaryConditions(image)
        system.addForce(force)
    system.addForce(_nonbonded(rng, positions, method, scaled, image))
    method = "CutoffPeriodic" if periodic else method
    system.addForce(_solvent(rng, system.getForce(4), method))
    system.addForce(openmm.CMMotionRemover())
    for group, force in enumerate(system.getForces()):
        force.setForceGroup(group)
    return system, positions


def flexible_water(scale: float = 1.0, cutoff: float = 0.6) -> tuple[Any, np.ndarray]:
    """64 flexible waters in a periodic box of 1.24 nm, whole, some of them across its faces.

    Their Lennard-Jones energy is switched, so that the energy is smooth as the box is scaled.
    """
    rng, side = np.random.default_rng(4), 1.24
    sites = np.array(np.meshgrid(*3 * [np.arange(4)])).reshape(3, -1).T * side / 4
    arms = np.array([[0, 0, 0], [0.0957, 0, 0], [-0.024, 0.0927, 0]])
    positions = np.concatenate([
        site + arms @ np.linalg.qr(rng.standard_normal((3, 3)))[0] for site in sites
    ])  # fmt: skip
    system = openmm.System()
    system.setDefaultPeriodicBoxVectors(*(scale * side * np.eye(3)))
    bonds, angles, force = (
        openmm.HarmonicBondForce(), openmm.HarmonicAngleForce(), openmm.NonbondedForce()
    )  # fmt: skip
    force.setNonbondedMethod(openmm.NonbondedForce.PME)
    force.setPMEParameters(7.0, 24, 24, 24)
    force.setCutoffDistance(cutoff)
    force.setUseSwitchingFunction(True)
    force.setSwitchingDistance(0.75 * cutoff)
    for o in range(0, 192, 3):
        for k, mass in enumerate((16.0, 1.0, 1.0)):
            system.addParticle(mass)
            force.addParticle(0.41 if k else -0.82, 0.3166, 0.0 if k else 0.65)
        for i, j in ((o, o + 1), (o, o + 2), (o + 1, o + 2)):
            force.addException(i, j, 0.0, 0.1, 0.0)
        bonds.addBond(o, o + 1, 0.1012, 443153.0)
        bonds.addBond(o, o + 2, 0.1012, 443153.0)
        angles.addAngle(o + 1, o, o + 2, 1.976, 317.6)
    for one in (bonds, angles, force):
        system.addForce(one)
    return system, positions


def _nonbonded(rng: Any, positions: np.ndarray, method: str, scaled: bool, image: bool) -> Any:
    force = openmm.NonbondedForce()
    force.setNonbondedMethod(getattr(openmm.NonbondedForce, method))
    force.setCutoffDistance(0.6)
    force.setUseSwitchingFunction(bool(rng.random() < 0.5) and method != "LJPME")
    force.setSwitchingDistance(0.45)
    force.setUseDispersionCorrection(bool(rng.random() < 0.5))
    force.setExceptionsUsePeriodicBoundaryConditions(image)
    if rng.random() < 0.5:
        force.setPMEParameters(4.0, 12, 15, 16)
        force.setLJPMEParameters(4.5, 12, 14, 15)
    atoms = len(positions)
    charge, sigma, epsilon = rng.normal(size=atoms), rng.uniform(0.1, 0.3, atoms), rng.random(atoms)
    # Some atoms have no charge or no well, as hydrogens in many force fields.
    charge[0], epsilon[1], sigma[1] = 0.0, 0.0, 0.0
    for row in zip(charge, sigma, epsilon, strict=True):
        force.addParticle(*row)
    pairs = {tuple(sorted(rng.permutation(atoms)[:2].tolist())) for _ in range(20)}
    if not image:
        # Excluded charges that are not nearest images are no molecule, see from_openmm.
        near = np.linalg.norm(positions[:, None] - positions, axis=-1) < 0.5
        pairs = {pair for pair in pairs if near[pair]}
    for number, (i, j) in enumerate(sorted(pairs)):
        if number % 2:
            force.addException(i, j, 0.0, 0.2, 0.0)
        elif scaled:
            well = 0.5 * np.sqrt(epsilon[i] * epsilon[j])
            force.addException(i, j, charge[i] * charge[j] / 1.2, (sigma[i] + sigma[j]) / 2, well)
        else:
            force.addException(i, j, rng.normal(), rng.uniform(0.1, 0.3), rng.random())
    return force


def _solvent(rng: Any, nonbonded: Any, method: str) -> Any:
    force = openmm.GBSAOBCForce()
    force.setNonbondedMethod(getattr(openmm.GBSAOBCForce, method))
    force.setCutoffDistance(0.6)
    force.setSolventDielectric(float(rng.uniform(10, 80)))
    force.setSurfaceAreaEnergy(float(rng.uniform(0, 5)))
    for k in range(nonbonded.getNumParticles()):
        charge = nonbonded.getParticleParameters(k)[0]
        force.addParticle(charge, rng.uniform(0.1, 0.2), rng.uniform(0.5, 1.0))
    return force
