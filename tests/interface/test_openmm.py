"""Force fields from OpenMM: energies, forces, gradients of every number, and the way back."""

from __future__ import annotations

import copy
import itertools
import re
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import openmm
import pytest
import torch
from ase import units
from hypothesis import HealthCheck, example, given, settings, strategies as st
from openmm import app, unit

import adjsim
from adjsim.core.arguments import as_number
from adjsim.core.refusal import Refusal
from adjsim.io import from_openmm, to_openmm, write_force_field
from adjsim.potentials.bonded.pairs import ExplicitPairs, ScaledPairs
from adjsim.potentials.force_field import ForceFieldPotential
from adjsim.potentials.pairs import base
from tests.openmm_systems import (
    AMBER14,
    DATA,
    GBN2,
    METHODS,
    OBC2,
    assert_openmm_agrees,
    energy_and_forces,
    flexible_water,
    molecule,
    random_system,
    reference,
    structure,
)
from tests.problems import slow_but

# Both sides sum the same terms in float64 and in another order.
ROUNDING = 1e-10


def displaced(positions, seed=0, size=0.005):
    """Positions off the built geometry, so that no bond or angle is at rest."""
    return positions + size * np.random.default_rng(seed).standard_normal(positions.shape)


def assert_equal_to_openmm(system, positions, topology=None, rtol=ROUNDING):
    potential, structure = from_openmm(system, positions, topology)
    assert_openmm_agrees(system, positions, potential, structure.position, rtol)
    return potential, structure


@pytest.mark.parametrize(
    "files",
    [
        (AMBER14,),
        pytest.param(("amber14/protein.ff15ipq.xml",), marks=pytest.mark.slow),
        pytest.param(("amber03.xml", "amber03_obc.xml"), marks=pytest.mark.slow),
        pytest.param(("amber96.xml", "amber96_obc.xml"), marks=pytest.mark.slow),
        pytest.param(("amber99sbildn.xml", "amber99_obc.xml"), marks=pytest.mark.slow),
        pytest.param(("amberfb15.xml",), marks=pytest.mark.slow),
    ],
)
def test_dipeptide(files):
    system, positions, topology = molecule("dipeptide.pdb", *files)
    assert_equal_to_openmm(system, displaced(positions), topology)


PARTS = {
    "HarmonicBondForce": ("bonds",),
    "HarmonicAngleForce": ("angles",),
    "PeriodicTorsionForce": ("torsions",),
    "RBTorsionForce": ("ryckaert_bellemans",),
    "CMAPTorsionForce": ("maps",),
    "CustomTorsionForce": ("custom_torsions",),
    "LennardJones": ("custom_pairs",),
    "LennardJones14": ("custom_bonds",),
    "NonbondedForce": (
        "lennard_jones",
        "coulomb",
        "lennard_jones_14",
        "coulomb_14",
        "pairs_14",
        "dispersion",
    ),
    "GBSAOBCForce": ("solvent",),
    "CustomGBForce": ("solvent",),
    "CMMotionRemover": (),
}


def assert_equal_by_term(system, positions, topology=None):
    potential, structure = from_openmm(system, positions, topology)
    assert all(x.is_contiguous() for x in potential.parameters())
    seen = set()
    for group, force in enumerate(system.getForces()):
        force.setForceGroup(group)
    for group, force in enumerate(system.getForces()):
        names = [name for name in PARTS[force.getName()] if hasattr(potential, name)]
        seen.update(names)
        if not names:
            continue
        part = ForceFieldPotential(**{name: getattr(potential, name) for name in names})
        energy, forces = energy_and_forces(part, structure.position)
        expected, expected_forces = reference(system, positions, {group})
        scale = np.abs(expected_forces).max()
        assert abs(energy - expected) <= ROUNDING * max(abs(expected), scale), force.getName()
        assert np.abs(forces - expected_forces).max() <= ROUNDING * scale, force.getName()
    assert seen == {name for name, _ in potential.named_children()}
    return potential


def test_dipeptide_by_term():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, OBC2)
    potential = assert_equal_by_term(system, displaced(positions), topology)
    # Charges move Coulomb's law, the 1-4 pairs and the solvent together.
    assert potential.solvent.charge is potential.coulomb.charge
    assert potential.coulomb_14.potential.charge is potential.coulomb.charge
    names = [name for name, _ in potential.named_parameters()]
    assert names.count("coulomb.charge") == 1
    assert "solvent.charge" not in names


def test_maps_of_torsions():
    """Every residue of the force field has a map of its own."""
    system, positions, topology = molecule("dipeptide.pdb", "amber19/protein.ff19SB.xml", GBN2)
    potential = assert_equal_by_term(system, displaced(positions), topology)
    assert potential.maps.energy.shape == (1, 24, 24)
    assert potential.labels["maps"] == ("ACE C-N-CA-C-N",)
    with torch.no_grad():
        potential.maps.energy.mul_(1.1)
    written = to_openmm(potential, system)
    again, _ = from_openmm(written, positions)
    assert torch.allclose(again.maps.energy, potential.maps.energy, rtol=1e-15)


def with_custom_forces():
    """A dipeptide with a custom force of each kind, two of one kind, and restraints."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    morse = openmm.CustomBondForce("D*(1-exp(-a*(r-r0)))^2+select(step(x), far*x^3, 0); x=r-0.2")
    wall = openmm.CustomBondForce("0.5*k*max(0, r-far)^2")
    bend = openmm.CustomAngleForce("k*(cos(theta)-cos(t0))^2/max(0.1, sin(t0)^2)")
    improper = openmm.CustomTorsionForce("k*min(d, 2*pi-d)^2; d=abs(theta-t0); pi=3.1415926535")
    for name in ("D", "r0"):
        morse.addPerBondParameter(name)
    morse.addGlobalParameter("a", 18.0)
    morse.addGlobalParameter("far", 0.2)
    for k in range(5):
        morse.addBond(k, k + 3, [20.0 + k, 0.15])
    for name, value in (("k", 300.0), ("far", 0.2)):
        wall.addGlobalParameter(name, value)
    wall.addBond(2, 9)
    wall.addBond(1, 12)
    for force in (bend, improper):
        add = "Angle" if force is bend else "Torsion"
        for name in ("k", "t0"):
            getattr(force, f"addPer{add}Parameter")(name)
    bend.addAngle(0, 1, 4, [50.0, 1.7])
    bend.addAngle(4, 5, 6, [60.0, 2.0])
    improper.addTorsion(4, 1, 5, 6, [40.0, 0.1])
    improper.addTorsion(14, 8, 15, 16, [30.0, -3.0])
    points = openmm.CustomExternalForce("kp*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
    points.addGlobalParameter("kp", 500.0)
    held = openmm.CustomExternalForce("stiff/2*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
    held.addPerParticleParameter("stiff")
    for force in (points, held):
        for name in ("x0", "y0", "z0"):
            force.addPerParticleParameter(name)
    for k in (1, 5):
        points.addParticle(k, list(positions[k] + 0.01))
        held.addParticle(k + 2, [100.0 * k, *(positions[k + 2] - 0.02)])
    for force in (morse, wall, bend, improper, points, held):
        system.addForce(force)
    return system, displaced(positions), topology


@pytest.mark.parametrize("typed", [True, False])
def test_custom_bonded_forces(typed):
    system, positions, topology = with_custom_forces()
    potential, structure = assert_equal_to_openmm(system, positions, topology if typed else None)
    names = {name for name, _ in potential.named_parameters()}
    assert {"custom_bonds.D", "custom_bonds.a", "custom_bonds_2.k"} <= names
    assert {"custom_angles.t0", "custom_torsions.k", "restraints.k"} <= names
    # Forces of one context share a global number.
    assert potential.custom_bonds_2.far is potential.custom_bonds.far
    assert potential.custom_bonds.D.tolist() == [20.0, 21.0, 22.0, 23.0, 24.0]
    assert potential.restraints.k.numel() == 1
    perturb(potential)
    energy, forces = energy_and_forces(potential, structure.position)
    expected, expected_forces = reference(to_openmm(potential, system), positions)
    assert energy == pytest.approx(expected, rel=ROUNDING)
    np.testing.assert_allclose(
        forces, expected_forces, rtol=0, atol=ROUNDING * np.abs(expected_forces).max()
    )


@pytest.mark.slow
def test_a_protein_of_charmm():
    """Maps, harmonic impropers, and Lennard-Jones numbers and 1-4 pairs of types."""
    pdb = app.PDBFile(str(Path(app.__file__).parent / "data" / "test.pdb"))
    model = app.Modeller(pdb.topology, pdb.positions)
    model.delete([x for x in model.topology.residues() if x.name in ("HOH", "Cl")])
    system = app.ForceField("charmm36.xml").createSystem(model.topology, constraints=None)
    positions = np.array(model.positions.value_in_unit(unit.nanometer))
    potential = assert_equal_by_term(system, displaced(positions), model.topology)
    assert potential.custom_pairs.numbers == ("acoef", "bcoef")


def with_custom_pairs(box):
    """Charges that screen each other, and wells by types, with a switch and exclusions."""
    rng, count = np.random.default_rng(3), 40
    system = openmm.System()
    for _ in range(count):
        system.addParticle(20.0)
    wells = openmm.CustomNonbondedForce(
        "select(far, 1, 0)*(c*q1*q2*exp(-r/screen)/r) + 4*depth(kind1, kind2)*(x^12-x^6);"
        "x=0.5*(s1+s2)/r; far=step(r-0.05)"
    )
    wells.addTabulatedFunction("depth", openmm.Discrete2DFunction(2, 2, [0.6, 0.9, 0.9, 0.3]))
    for name in ("q", "kind", "s"):
        wells.addPerParticleParameter(name)
    for name, value in (("c", 80.0), ("screen", 0.3)):
        wells.addGlobalParameter(name, value)
    for k in range(count):
        wells.addParticle([rng.normal(), k % 2, 0.2 + 0.05 * rng.random()])
    for k in range(5):
        wells.addExclusion(k, k + 1)
    wells.setCutoffDistance(0.9)
    wells.setUseSwitchingFunction(True)
    wells.setSwitchingDistance(0.6)
    wells.setNonbondedMethod(2 if box else 1)
    if box:
        system.setDefaultPeriodicBoxVectors(*np.diag([2.0, 2.1, 2.2]))
        # Some pairs are in both groups, and the last atoms interact with few.
        wells.addInteractionGroup(range(3), range(count))
        wells.addInteractionGroup(range(20), range(2, 30))
    system.addForce(wells)
    sites = np.stack(np.meshgrid(*[np.arange(4.0)] * 3), -1).reshape(-1, 3)[:count]
    return system, 0.5 * sites + 0.02 * rng.normal(size=(count, 3))


@pytest.mark.slow
@pytest.mark.parametrize("box", [pytest.param(False, marks=pytest.mark.slow), True])
def test_custom_pairs(box):
    system, positions = with_custom_pairs(box)
    potential, structure = assert_equal_to_openmm(system, positions)
    assert potential.custom_pairs.numbers == ("c", "screen", "depth", "q", "s")
    # Numbers of atoms, of types and of all are read by the printed kernels.
    assert "torch" not in potential.custom_pairs.path(structure.position)
    with torch.no_grad():
        for parameter in potential.parameters():
            parameter.mul_(1.05)
    energy, forces = energy_and_forces(potential, structure.position)
    written = to_openmm(potential, system)
    expected, expected_forces = reference(written, positions)
    assert energy == pytest.approx(expected, rel=ROUNDING)
    np.testing.assert_allclose(
        forces, expected_forces, rtol=0, atol=ROUNDING * np.abs(expected_forces).max()
    )
    assert energy_and_forces(from_openmm(written, positions)[0], structure.position)[0] == energy


# As the files of OPLS, Gromacs, Charmm and Amber are made, the last one with 1/r^4.
MIXING = {
    "geometric": "4*e*((s/r)^12-(s/r)^6); s=sqrt(s1*s2); e=sqrt(e1*e2)",
    "products": "a1*a2/r^12-c1*c2/r^6",
    "tables": "acoef(type1, type2)/r^12 - bcoef(type1, type2)/r^6;",
    "definitions": "(a/r6)^2-b/r6-c/r^4; r6=r^6;a=acoef(type1, type2);b=bcoef(type1, type2);"
    "c=ccoef(type1, type2);",
    "screened": "-138.9*q1*q2*(1.0+0.5*screen*r)*exp(-1.0*screen*r)/r; "
    "screen=bcoef(type1, type2) * p1*p2*10.0",
}


@pytest.mark.parametrize("form", MIXING)
def test_mixing_rules_as_expressions(form):
    rng, count, text = np.random.default_rng(5), 27, MIXING[form]
    system, force = openmm.System(), openmm.CustomNonbondedForce(text)
    names = {
        "s": rng.uniform(0.25, 0.35, count),
        "e": rng.uniform(0.2, 0.9, count),
        "a": rng.uniform(1e-3, 2e-3, count),
        "c": rng.uniform(0.02, 0.05, count),
        "q": rng.normal(size=count),
        "p": rng.uniform(0.5, 1.5, count),
        "type": rng.integers(0, 3, count),
    }
    used = [name for name in names if f"{name}1" in text]
    for name in used:
        force.addPerParticleParameter(name)
    for name in ("acoef", "bcoef", "ccoef"):
        if name in text:
            table = rng.uniform(1e-3, 3e-3, (3, 3)) * (1e-3 if name == "acoef" else 1)
            values = (table + table.T).flatten().tolist()
            force.addTabulatedFunction(name, openmm.Discrete2DFunction(3, 3, values))
    for k in range(count):
        system.addParticle(12.0)
        force.addParticle([float(names[name][k]) for name in used])
    force.addExclusion(3, 1)
    force.setNonbondedMethod(2)
    force.setCutoffDistance(0.55)
    system.setDefaultPeriodicBoxVectors([1.2, 0, 0], [0, 1.2, 0], [0, 0, 1.2])
    system.addForce(force)
    sites = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3)
    positions = 0.4 * sites + 0.03 * rng.normal(size=(count, 3))
    # Each form would compile kernels of its own.
    with patch.object(base, "unsupported", lambda *_: Refusal("left out")):
        potential, _ = assert_equal_to_openmm(system, positions)
    written = to_openmm(potential, system)
    assert openmm.XmlSerializer.serialize(written) == openmm.XmlSerializer.serialize(system)


@pytest.mark.parametrize("groups", [False, True])
def test_the_long_range_correction_of_custom_pairs(groups):
    system, positions = with_custom_pairs(True)
    force = system.getForce(0)
    if not groups:
        force = openmm.CustomNonbondedForce("4*e*((s/r)^12-(s/r)^6);s=0.5*(s1+s2);e=sqrt(e1*e2)")
        for name in "es":
            force.addPerParticleParameter(name)
        for k in range(len(positions)):
            force.addParticle([0.5 + 0.3 * (k % 3), 0.2 + 0.02 * (k % 2)])
        force.setNonbondedMethod(2)
        system.removeForce(0)
        system.addForce(force)
    without, _ = reference(system, positions)
    force.setUseLongRangeCorrection(True)
    # The correction has no kernel.
    with patch.object(base, "unsupported", lambda *_: Refusal("left out")):
        potential, structure = from_openmm(system, positions)
    correction = float(potential.long_range(structure.position).detach())
    expected, _ = reference(system, positions)
    # OpenMM integrates in single precision, to 1e-5.
    assert correction == pytest.approx(expected - without, rel=5e-6)
    assert len(list(potential.parameters())) == (5 if groups else 2)
    written = to_openmm(potential, system).getForce(0)
    assert written.getUseLongRangeCorrection()
    assert written.getNumInteractionGroups() == 2 * groups


@pytest.mark.slow
@pytest.mark.parametrize("files", [(AMBER14,), (AMBER14, OBC2)])
def test_peptide_of_20_residues(files):
    system, positions, topology = molecule("peptide.pdb", *files)
    assert topology.getNumResidues() == 20
    assert_equal_by_term(system, displaced(positions), topology)


@pytest.mark.slow
@pytest.mark.parametrize("method", [app.CutoffPeriodic, app.Ewald, app.PME])
@pytest.mark.parametrize("switch", [None, 0.75])
def test_water(method, switch):
    system, positions, topology = molecule(
        "water.pdb",
        str(DATA / "spcfw.xml"),
        nonbondedMethod=method,
        nonbondedCutoff=0.9,
        switchDistance=switch,
    )
    potential, structure = assert_equal_to_openmm(system, positions, topology)
    assert potential.bonds.k.shape == potential.angles.k.shape == (1,)
    mass = float(structure.mass.sum()) / units._Nav
    assert mass / float(structure.box.prod()) * 1e24 == pytest.approx(1.0, rel=1e-3)


SYSTEMS = given(
    seed=st.integers(0, 10**6),
    method=st.sampled_from(METHODS),
    scaled=st.booleans(),
    tilted=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@SYSTEMS
@example(seed=0, method="LJPME", scaled=True, tilted=True)
@example(seed=2, method="LJPME", scaled=False, tilted=False)
def test_random_systems(seed, method, scaled, tilted):
    # Each system would compile kernels of its own.
    with patch.object(base, "unsupported", lambda *_: Refusal("left out")):
        check_random_system(seed, method, scaled, tilted)


@pytest.mark.marathon
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@SYSTEMS
def test_random_systems_with_kernels(seed, method, scaled, tilted):
    check_random_system(seed, method, scaled, tilted)


def check_random_system(seed, method, scaled, tilted):
    """Term by term, and again in OpenMM after every number has changed."""
    system, positions = random_system(seed, method, scaled, tilted)
    potential = assert_equal_by_term(system, positions)
    pairs = [part for part in potential.parts if isinstance(part, ScaledPairs | ExplicitPairs)]
    assert all(isinstance(part, ScaledPairs) == scaled for part in pairs)
    assert pairs
    perturb(potential)
    written, position = to_openmm(potential, system), torch.from_numpy(10 * positions)
    assert_openmm_agrees(written, positions, potential, position, ROUNDING)


def perturb(potential, seed=0):
    """Change every number of a force field by about a hundredth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in potential.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + 0.01 * noise)


@pytest.mark.parametrize(
    "files", [(AMBER14, OBC2), (AMBER14, GBN2), ("amber99sb.xml", "amber99_obc.xml")]
)
def test_fitted_numbers_run_in_openmm(files):
    system, positions, topology = molecule("dipeptide.pdb", *files)
    positions = displaced(positions)
    before = openmm.XmlSerializer.serialize(system)
    potential, structure = from_openmm(system, positions, topology)
    same = to_openmm(potential, system)
    assert reference(same, positions)[0] == pytest.approx(
        reference(system, positions)[0], rel=1e-14
    )
    perturb(potential)
    written = to_openmm(potential, system)
    assert openmm.XmlSerializer.serialize(system) == before
    energy, forces = energy_and_forces(potential, structure.position)
    expected, expected_forces = reference(written, positions)
    assert energy == pytest.approx(expected, rel=ROUNDING)
    np.testing.assert_allclose(
        forces, expected_forces, rtol=0, atol=ROUNDING * np.abs(expected_forces).max()
    )
    assert abs(energy - reference(system, positions)[0]) > 1e-3
    # What was written is read again.
    again, _ = from_openmm(written, positions)
    assert energy_and_forces(again, structure.position)[0] == pytest.approx(energy, rel=1e-12)


@pytest.mark.parametrize("options", [{"implicitSolventKappa": 1.5}, {"sasaMethod": None}])
def test_options_of_the_custom_solvent(options):
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, OBC2, **options)
    potential, _ = assert_equal_to_openmm(system, displaced(positions), topology)
    assert potential.solvent.kappa == pytest.approx(options.get("implicitSolventKappa", 0.0) / 10)
    assert (potential.solvent.surface.item() == 0) == ("sasaMethod" in options)


def test_signs_of_coefficients_of_the_custom_solvent():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, OBC2)
    potential, structure = from_openmm(system, positions, topology)
    with torch.no_grad():
        for name, value in (("alpha", -0.3), ("beta", -0.7), ("gamma", -1.2)):
            getattr(potential.solvent, name).fill_(value)
    written = to_openmm(potential, system)
    assert_openmm_agrees(written, positions, potential, structure.position, ROUNDING)
    again, _ = from_openmm(written, positions, topology)
    assert again(structure.position).item() == potential(structure.position).item()


CUT = {"nonbondedMethod": app.CutoffNonPeriodic, "nonbondedCutoff": 0.47 * unit.nanometer}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    slow_but(
        lambda name, options: (name, len(options)) in (("gbn2", 3), ("hct", 0)),
        itertools.product(
            ("hct", "obc1", "obc2", "gbn", "gbn2"), ({}, CUT, {"implicitSolventKappa": 1.5, **CUT})
        ),
    ),
)
def test_the_solvents_of_the_files(name, options):
    """All have the same terms of the energy, with a cutoff and a salt or without."""
    files = AMBER14, f"implicit/{name}.xml"
    system, positions, topology = molecule("dipeptide.pdb", *files, **options)
    potential, _ = assert_equal_to_openmm(system, displaced(positions), topology)
    solvent = potential.solvent
    assert (solvent.cutoff is None) == (not options)
    assert (solvent.necks is None) == (not name.startswith("gbn"))
    assert solvent.bounded == (name != "hct")
    trained = {x for x, _ in solvent.named_parameters()} - {"charge"}
    shape = {"alpha", "beta", "gamma"} if name != "hct" else set()
    neck = {"neck"} if name.startswith("gbn") else set()
    assert trained == {"radius", "scale", "surface", "offset"} | shape | neck


def test_a_solvent_of_the_same_form_with_other_numbers():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, GBN2)
    force = next(f for f in system.getForces() if isinstance(f, openmm.CustomGBForce))
    name, text, kind = force.getComputedValueParameters(0)
    for old, new in (("0.826836", "0.7"), ("0.68", "0.3"), ("1+100", "1+90"), ("0.3*", "0.2*")):
        text = text.replace(old, new)
    force.setComputedValueParameters(0, name, text, kind)
    potential, _ = assert_equal_to_openmm(system, displaced(positions), topology)
    found = potential.solvent.necks
    assert (found.reach, found.quadratic, found.sextic) == pytest.approx((3.0, 0.9, 0.2))


def test_a_solvent_of_another_form():
    """It is read by its expressions, beside one that is not, and both are written back."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, OBC2)
    altered = altered_solvent(1, "4.85*psi^3", "psi^5")()
    force = next(x for x in altered.getForces() if isinstance(x, openmm.CustomGBForce))
    system.addForce(copy.deepcopy(force))
    potential, structure = assert_equal_to_openmm(system, displaced(positions), topology)
    assert isinstance(potential.solvent, adjsim.GeneralizedBorn)
    assert potential.solvent_2.numbers == ("charge", "or", "sr")
    with torch.no_grad():
        potential.solvent_2.sr.mul_(1.03)
        # Numbers of each atom, and a term, that the force has not.
        potential.solvent.gamma = torch.nn.Parameter(torch.linspace(4.0, 5.0, 22).double())
        potential.solvent.surface.fill_(0.01)
    written = to_openmm(potential, system)
    assert_openmm_agrees(written, displaced(positions), potential, structure.position, ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("solvent", [OBC2, GBN2])
def test_every_parameter_against_differences(solvent):
    """d/dtheta of the energy and of a projected force, along a random direction of each tensor."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14, solvent)
    potential, structure = from_openmm(system, displaced(positions), topology)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(structure.position.shape, generator=generator, dtype=torch.float64)

    def value():
        return (
            potential(structure.position)
            + (weight * adjsim.force(potential, structure.position)).sum()
        )

    named = dict(potential.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(value(), list(named.values())), strict=True))
    for name, parameter in named.items():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction = noise * parameter.detach()
        start = parameter.detach().clone()
        results = []
        for h in (1e-4, -1e-4):
            with torch.no_grad():
                parameter.copy_(start + h * direction)
                results.append(value().item())
        with torch.no_grad():
            parameter.copy_(start)
        along = float((gradients[name] * direction).sum())
        # The error of a difference is of order h^2, and of the rounding of the value over h.
        size = float((gradients[name] * direction).abs().sum())
        assert abs((results[0] - results[1]) / 2e-4 - along) <= 1e-6 * max(size, 1e-2), name
        assert size > 0, name


def run(potential, structure, adjoint, solver, steps=100, compile=False):
    dynamics = adjsim.Langevin(potential, structure.mass, 300 * units.kB, 0.05)
    generator = torch.Generator().manual_seed(2)
    start = dynamics.init(structure.position, generator=generator)
    times = torch.tensor([0.0, steps * solver.dt])
    return adjsim.simulate(
        dynamics, start, times, solver=solver, adjoint=adjoint, generator=generator, compile=compile
    )


def end_to_end(trajectory):
    q = trajectory.position[-1]
    return (q[0] - q[-1]).norm() + (q[4] - q[12]).norm()


@pytest.mark.slow
def test_gradient_through_20_steps():
    potential, structure, gradient = check_adjoints((AMBER14, OBC2), 20)
    check_differences(potential, structure, gradient, 20, [list(gradient)])


@pytest.mark.marathon
@pytest.mark.parametrize("files", [(AMBER14,), (AMBER14, OBC2)])
def test_gradient_through_100_steps(files):
    potential, structure, gradient = check_adjoints(files, 100)
    check_differences(potential, structure, gradient, 100, [[name] for name in gradient])


DT = 0.5 * units.fs
SOLVER, EXACT = adjsim.BAOAB(DT), adjsim.Splitting("BAOAB", DT, exact=True)


def check_adjoints(files, steps):
    """Compare the adjoints, and return the gradient of the run of floating-point numbers."""
    system, positions, topology = molecule("dipeptide.pdb", *files)
    potential, structure = from_openmm(system, displaced(positions), topology)
    named = dict(potential.named_parameters())

    def gradient(adjoint, solver):
        loss = end_to_end(run(potential, structure, adjoint, solver, steps))
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    direct = gradient(adjsim.DirectAdjoint(), SOLVER)
    checkpoint = gradient(adjsim.CheckpointAdjoint(), SOLVER)
    lattice = gradient(adjsim.DirectAdjoint(), EXACT)
    reversible = gradient(adjsim.ReversibleAdjoint(), EXACT)
    for name in named:
        for x, y, tolerance in (
            (checkpoint[name], direct[name], 1e-12),
            (reversible[name], lattice[name], 1e-10),
        ):
            assert (x - y).abs().max() <= tolerance * y.abs().max(), name
    return potential, structure, direct


def check_differences(potential, structure, gradient, steps, groups):
    """Compare a gradient with differences along a random direction of each group of parameters."""
    named = dict(potential.named_parameters())
    generator = torch.Generator().manual_seed(3)
    start = {name: x.detach().clone() for name, x in named.items()}
    directions = {
        name: x * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for name, x in start.items()
    }
    for group in groups:
        products = torch.cat([(gradient[name] * directions[name]).flatten() for name in group])

        def within(h, group=group, products=products):
            losses = []
            for step in (h, -h):
                with torch.no_grad():
                    for name in group:
                        named[name].copy_(start[name] + step * directions[name])
                    end = run(potential, structure, adjsim.DirectAdjoint(), SOLVER, steps)
                    losses.append(end_to_end(end).item())
                    for name in group:
                        named[name].copy_(start[name])
            difference = (losses[0] - losses[1]) / (2 * h) - products.sum().item()
            # Distances of 10 angstrom are known to 1e-14, and divided by the step.
            return abs(difference) <= 1e-6 * products.abs().sum().item() + 2e-14 / h

        # The force of the solvent has kinks where spheres touch: a step across one is too long.
        assert within(1e-5) or within(1e-6), group


@pytest.mark.marathon
@pytest.mark.parametrize("files", [(AMBER14,), (AMBER14, OBC2)])
def test_compiled_run(files):
    system, positions, topology = molecule("dipeptide.pdb", *files)
    potential, structure = from_openmm(system, displaced(positions), topology)
    ends, gradients = [], []
    for compiled in (False, True):
        trajectory = run(
            potential, structure, adjsim.ReversibleAdjoint(), EXACT, 20, compile=compiled
        )
        ends.append(trajectory.position[-1].detach())
        loss = end_to_end(trajectory)
        gradients.append(torch.autograd.grad(loss, list(potential.parameters())))
    assert trajectory.stats["compiled_forward"] == "C++"
    assert torch.equal(*ends)
    for x, y in zip(*gradients, strict=True):
        assert (x - y).abs().max() <= 1e-10 * y.abs().max()


def test_types():
    """Terms with the same numbers and elements share a type, whose gradient is their sum."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    positions = displaced(positions)
    shared, structure = from_openmm(system, positions, topology)
    alone, _ = from_openmm(system, positions)
    assert structure.symbols.count("H") == 12
    assert alone.bonds.types is None
    assert alone.bonds.k.shape == (21,)
    types = shared.bonds.types
    labels = shared.labels["bonds"]
    assert len(labels) == len(shared.bonds.k) == int(types.max()) + 1
    for term, kind in enumerate(types.tolist()):
        assert shared.bonds.k[kind] == alone.bonds.k[term]
        assert shared.bonds.length[kind] == alone.bonds.length[term]
    # Ten hydrogens are at a carbon, and parm99 has one set of numbers for all.
    symbols = [{structure.symbols[i] for i in term} for term in shared.bonds.index.tolist()]
    assert (
        len(
            {kind for kind, pair in zip(types.tolist(), symbols, strict=True) if pair == {"C", "H"}}
        )
        == 1
    )
    assert "ALA CA-CB" in labels
    gradients = []
    for potential in (shared, alone):
        energy = potential(structure.position)
        gradients.append(torch.autograd.grad(energy, [potential.bonds.k, potential.torsions.k]))
    for x, y, part in zip(*gradients, (shared.bonds, shared.torsions), strict=True):
        summed = torch.zeros_like(x).index_add(0, part.types, y)
        torch.testing.assert_close(summed, x, rtol=1e-12, atol=1e-14)


def test_structure():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    quantity = positions * unit.nanometer
    _, first = from_openmm(system, quantity, topology)
    _, second = from_openmm(system, structure("dipeptide.pdb").positions)
    torch.testing.assert_close(first.position, torch.from_numpy(10 * positions))
    assert torch.equal(first.position, second.position)
    assert first.symbols == second.symbols
    assert first.box is None
    assert float(first.mass.sum()) == pytest.approx(144.17, abs=0.01)
    assert not first.momentum.any()
    trajectory = run(
        from_openmm(system, quantity)[0], first, adjsim.DirectAdjoint(), adjsim.BAOAB(0.05), 2
    )
    assert adjsim.io.to_ase(trajectory, first)[-1].get_chemical_formula() == "C6H12N2O2"


def pair(force=None, **nonbonded):
    """Two argon atoms, with one more force."""
    system = openmm.System()
    base = openmm.NonbondedForce()
    for _ in range(2):
        system.addParticle(39.948)
        base.addParticle(0.0, 0.34, 1.0)
    for name, value in nonbonded.items():
        getattr(base, name)(*value)
    system.addForce(base)
    if force is not None:
        system.addForce(force)
    return system


def without_mass():
    system = pair()
    system.setParticleMass(1, 0.0)
    return system


def altered_solvent(value, old, new):
    """A solvent with a computed value of another form."""

    def make():
        system, *_ = molecule("dipeptide.pdb", AMBER14, OBC2)
        force = next(f for f in system.getForces() if isinstance(f, openmm.CustomGBForce))
        name, text, kind = force.getComputedValueParameters(value)
        force.setComputedValueParameters(value, name, text.replace(old, new), kind)
        return system

    return make


def half_periodic():
    system, periodic, plain = pair(), openmm.HarmonicBondForce(), openmm.HarmonicBondForce()
    for force in (periodic, plain):
        force.addBond(0, 1, 0.3, 1.0)
        system.addForce(force)
    periodic.setUsesPeriodicBoundaryConditions(True)
    return system


def two_sizes():
    force = openmm.CMAPTorsionForce()
    for size in (4, 5):
        force.addTorsion(force.addMap(size, [0.0] * size**2), 0, 1, 2, 3, 4, 5, 6, 7)
    system = molecule("dipeptide.pdb", AMBER14)[0]
    system.addForce(force)
    return system


def unread(text):
    def make():
        system, force = pair(), openmm.CustomBondForce(text)
        force.addGlobalParameter("index", 1.0)
        force.addBond(0, 1)
        system.addForce(force)
        return system

    return make


def wrong_pairs(text):
    def make():
        force = openmm.CustomNonbondedForce(text)
        for name in ("q", "p", "t"):
            force.addPerParticleParameter(name)
        if "f(" in text:
            table = openmm.Discrete2DFunction(2, 2, [1.0, 2.0, 2.0, 3.0])
            force.addTabulatedFunction("f", table)
        _ = [force.addParticle(row) for row in ([1.0, 2.0, 0], [3.0, 5.0, 1])]
        return pair(force)

    return make


NONBONDED = openmm.NonbondedForce


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_mass, r"mass of particle 1 is 0.*PositionRestraint"),
        (
            lambda: pair(openmm.MonteCarloAnisotropicBarostat((1, 1, 1), 300)),
            r"MonteCarloAnisotropicBarostat.*removeForce\(1\)",
        ),
        (
            lambda: pair(openmm.AndersenThermostat(300, 1)),
            r"AndersenThermostat.*dynamics of adjsim",
        ),
        (lambda: pair(openmm.DrudeForce()), r"DrudeForce.*polarisable.*fixed charges"),
        (lambda: pair(openmm.AmoebaMultipoleForce()), r"AmoebaMultipoleForce.*polarisable"),
        (two_sizes, r"maps of the sizes \[4, 5\]"),
        (lambda: pair(openmm.CustomCVForce("r")), r"CustomCVForce 'r', .*removeForce\(1\)"),
        (unread("foo(r)"), r"'foo\(r\)' cannot be read at place 0: foo is no function"),
        (unread("2*index*r"), r"'index' has the name of an attribute.*index.r', .* at place 2"),
        (wrong_pairs("q1*p2/r"), r"exchanging the two atoms changes the expression 'q1\*p2/r'"),
        (wrong_pairs("f(t1,t2)*f;f=3"), r"a table and another number of the name f: .* 'f\(t1"),
        (lambda: pair(openmm.NonbondedForce()), r"more than one NonbondedForce"),
        (
            lambda: pair(setNonbondedMethod=[NONBONDED.LJPME], setUseSwitchingFunction=[True]),
            r"LJPME with a switch.*setUseSwitchingFunction\(False\)",
        ),
        (lambda: pair(setIncludeDirectSpace=[False]), r"setIncludeDirectSpace\(True\)"),
        (lambda: pair(setParticleParameters=[1, 0.0, 0.0, 1.0]), r"particle 1 has epsilon.*sigma"),
        (
            lambda: pair(
                addGlobalParameter=["shared", 1.0],
                addParticleParameterOffset=["shared", 0, 1, 0, 0],
            ),
            r"'shared' has the name of a part or of an attribute",
        ),
        (half_periodic, r"HarmonicBondForce that is periodic and another"),
        (openmm.System, r"no particles"),
        (
            altered_solvent(0, "log(L", "lg(L"),
            r"'select\(step.*' cannot be read at place 76: lg is",
        ),
        (altered_solvent(1, "tanh", "B*tanh"), r"'1/\(1/or-B.tanh.* names B .*place 8\), and form"),
    ],
)
def test_what_is_refused(make, message):
    system = make()
    positions = 0.4 * np.arange(3 * system.getNumParticles()).reshape(-1, 3)
    with pytest.raises(ValueError, match=message):
        from_openmm(system, positions)


def test_wrong_arguments():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    with pytest.raises(TypeError, match=r"must be an openmm.System; got ForceField"):
        from_openmm(app.ForceField(AMBER14), positions)
    with pytest.raises(ValueError, match=r"positions are of 21 atoms; the system has 22"):
        from_openmm(system, positions[1:])
    with pytest.raises(ValueError, match=r"positions must be \(atoms, 3\)"):
        from_openmm(system, positions[:, :2])
    broken = positions.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"positions of atom 3 is .*not finite"):
        from_openmm(system, broken)
    with pytest.raises(ValueError, match=r"topology has 165 atoms and the system 22"):
        from_openmm(system, positions, structure("peptide.pdb").topology)
    potential, _ = from_openmm(system, positions, topology)
    with pytest.raises(TypeError, match=r"potential of from_openmm; got Harmonic"):
        to_openmm(adjsim.Harmonic(), system)
    other = molecule("peptide.pdb", AMBER14)[0]
    with pytest.raises(ValueError, match=r"terms of HarmonicBondForce.*read from"):
        to_openmm(potential, other)
    wet = molecule("dipeptide.pdb", AMBER14, OBC2)[0]
    with pytest.raises(ValueError, match=r"implicit solvents \[\], and the system has 1"):
        to_openmm(potential, wet)
    plain = openmm.GBSAOBCForce()
    _ = [plain.addParticle(0.5, 0.2, 0.8) for _ in range(2)]
    system_of_two = pair(plain)
    solvated, _ = from_openmm(system_of_two, [[0.0, 0.0, 0.0], [0.4, 0.0, 0.0]])
    solvated.solvent.gamma.fill_(4.0)
    with pytest.raises(ValueError, match=r"alpha 1, beta 0.8, gamma 4.85, offset 0.09, without"):
        to_openmm(solvated, system_of_two)
    fewer = copy.deepcopy(system)
    force = next(f for f in fewer.getForces() if isinstance(f, openmm.NonbondedForce))
    pairs = [force.getExceptionParameters(k) for k in range(force.getNumExceptions())]
    k = next(k for k, row in enumerate(pairs) if row[2]._value)
    force.setExceptionParameters(k, *pairs[k][:2], 0.0, 0.1, 0.0)
    with pytest.raises(ValueError, match=r"exceptions of the system are not the pairs"):
        to_openmm(potential, fewer)


def test_a_shared_parameter_is_written_in_place():
    """An assignment to one part would leave the old charges in the 1-4 pairs."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    potential, structure = from_openmm(system, positions, topology)
    charge = potential.coulomb.charge
    potential.coulomb.charge = torch.nn.Parameter(2 * charge.detach())
    calls = (potential, potential.force, lambda q: potential.force_vjp(q, []), potential.virial)
    for call in calls:
        with pytest.raises(ValueError, match=r"coulomb\.charge and .*coulomb_14.*charge were one"):
            call(structure.position)
    potential.coulomb.charge = charge
    before = potential(structure.position)
    with torch.no_grad():
        charge.mul_(2)
    assert abs(float((potential(structure.position) - before).detach())) > 0.1


def water(scale=1.0):
    system, positions = flexible_water(scale)
    return from_openmm(system, scale * displaced(positions))


@pytest.mark.slow
def test_pressure_of_a_liquid_of_whole_molecules():
    """Bonded forces of OpenMM have no box. Against differences as box and positions are scaled."""
    potential, structure = water()
    assert potential.bonds.box is None
    assert potential.coulomb.box is not None
    dynamics = adjsim.Hamiltonian(potential, structure.mass)
    start = dynamics.init(structure.position, structure.momentum)
    h, size = 1e-5, float(structure.box.prod())
    with torch.no_grad():
        energies = [float(other(at.position)) for other, at in (water(1 + h), water(1 - h))]
    slope = (energies[0] - energies[1]) / (2 * h)
    found = float(adjsim.pressure(dynamics, start).detach())
    # Truncation is of order h^2. The parts of the pressure cancel to a few percent.
    assert found == pytest.approx(-slope / (3 * size), rel=1e-6)
    trace = adjsim.stress(dynamics, start).diagonal().sum()
    assert float(trace.detach()) == pytest.approx(-3 * found, rel=1e-12)


def test_mixed_up_units():
    """Nanometres taken for angstrom put atoms on top of each other: two of them are named."""
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    with pytest.raises(ValueError, match=r"energy at the start is .* eV.*atoms \d+ and \d+") as one:
        from_openmm(system, positions / 10, topology)
    assert "units" in str(one.value)
    # Angstrom taken for nanometres stretch each bond tenfold: 1,900 eV an atom.
    with pytest.raises(ValueError, match=r"eV, and must be below 2200 eV for 22 atoms.*units"):
        from_openmm(system, positions * 10, topology)
    together = positions.copy()
    together[21] = together[0] + (1e-4, 0, 0)
    with pytest.raises(ValueError, match=r"atoms 0 and 21, 0.001 angstrom apart"):
        from_openmm(system, together, topology)
    # The same at the start of a run.
    potential, structure = from_openmm(system, positions, topology)
    bad = structure.position.clone()
    bad[21] = bad[0] + torch.tensor([1e-3, 0, 0])
    batch = torch.stack([structure.position, bad])
    dynamics = adjsim.Langevin(potential, structure.mass, 0.025, 0.1)
    for whole in (potential, potential + adjsim.Harmonic(0.01)):
        dynamics = adjsim.Langevin(whole, structure.mass, 0.025, 0.1)
        start = dynamics.init(batch, torch.zeros_like(batch))
        with pytest.raises(ValueError, match=r"start of system 1 is .*atoms 0 and 21, 0.001"):
            adjsim.simulate(dynamics, start, [0.0, 1.0], solver=adjsim.BAOAB(1.0))


# A force constant of OpenMM, and the factor of its unit in eV and angstrom.
STIFF = 443153.0 * unit.kilojoule_per_mole / unit.nanometer**2


@pytest.mark.usefixtures("unchecked")
def test_quantities_are_taken_in_the_units_of_from_openmm():
    """Numbers with units, wherever a number is taken: parameters, lists, settings and times."""
    energy = units.kJ / units.mol
    bond = adjsim.HarmonicBond(
        [[0, 1], [0, 2]], STIFF, [0.1012 * unit.nanometer, 1.012 * unit.angstrom]
    )
    system = openmm.System()
    force = openmm.HarmonicBondForce()
    for _ in range(3):
        system.addParticle(1.0)
    for k in (1, 2):
        force.addBond(0, k, 0.1012, STIFF)
    system.addForce(force)
    positions = [openmm.Vec3(0, 0, 0), openmm.Vec3(0.1, 0, 0), openmm.Vec3(0, 0.11, 0)]
    read, structure = from_openmm(system, positions)
    assert float(bond.k) == pytest.approx(float(read.bonds.k[0].detach()), rel=1e-14)
    torch.testing.assert_close(bond.length, read.bonds.length.detach(), rtol=1e-14, atol=0)
    pair = adjsim.LennardJones(0.65 * unit.kilojoule_per_mole, cutoff=1 * unit.nanometer)
    assert (float(pair.epsilon), pair.cutoff) == (pytest.approx(0.65 * energy, rel=1e-14), 10.0)
    angle = adjsim.HarmonicAngle([[1, 0, 2]], 1.0, 109.5 * unit.degrees)
    assert float(angle.angle) == pytest.approx(np.radians(109.5), rel=1e-14)
    dynamics = adjsim.Langevin(
        bond,
        [16.0 * unit.dalton, 1.0 * unit.dalton, 1.0 * unit.gram / unit.mole],
        300 * unit.kelvin * unit.MOLAR_GAS_CONSTANT_R,
        1 / unit.picosecond,
    )
    assert dynamics.mass.tolist() == [16.0, 1.0, 1.0]
    # The constants of OpenMM and of ASE are of different years.
    assert float(dynamics.kT) == pytest.approx(300 * units.kB, rel=1e-6)
    assert float(dynamics.friction) == pytest.approx(1e-3 / units.fs, rel=1e-8)
    start = dynamics.init(positions * unit.nanometer, generator=1)
    assert torch.equal(start.position, structure.position)
    solver = adjsim.BAOAB(0.5 * unit.femtosecond)
    run = adjsim.simulate(dynamics, start, [0, 1 * unit.femtosecond], solver=solver, generator=1)
    assert float(run.times[-1]) == pytest.approx(units.fs, rel=1e-8)
    with pytest.raises(ValueError, match=r"kT is 300 K.*multiply it by .*MOLAR_GAS_CONSTANT_R"):
        adjsim.Langevin(bond, kT=300 * unit.kelvin)


def test_messages_of_runs_in_electronvolts_give_picoseconds():
    bond = adjsim.HarmonicBond([[0, 1]], 40.0, 1.0)
    for potential, unit_of_time in ((bond, ""), (ForceFieldPotential(bonds=bond), r", 0\.\d+ ps")):
        dynamics = adjsim.Hamiltonian(potential, 1.0)
        start = dynamics.init([[0.0, 0, 0], [1.1, 0, 0]], torch.zeros(2, 3))
        solver = adjsim.VelocityVerlet(5 * units.fs)
        with pytest.raises(FloatingPointError, match=rf"\(t = (\d+\.\d+){unit_of_time}\)") as found:
            adjsim.simulate(dynamics, start, [0.0, 10000 * units.fs], solver=solver)
    time, picoseconds = re.search(r"t = (.*), (.*) ps", str(found.value)).groups()
    assert float(picoseconds) == pytest.approx(float(time) / (1000 * units.fs), rel=1e-5)


def test_quantities_per_molecule_and_per_mole_agree():
    for one, other in (
        (unit.joule, units.J), (unit.bar, units.bar), (unit.elementary_charge, 1.0),
        (unit.kilocalorie_per_mole, units.kcal / units.mol), (unit.kilogram, units.kg),
    ):  # fmt: skip
        # ASE's unit of mass and Avogadro's number are rounded to nine digits.
        assert as_number("x", 2 * one) == pytest.approx(2 * other, rel=1e-9)


def test_without_openmm(monkeypatch):
    monkeypatch.setitem(sys.modules, "openmm", None)
    with pytest.raises(ImportError, match=r"pip install 'adjsim\[openmm\]'"):
        from_openmm(object(), np.zeros((1, 3)))
    with pytest.raises(ImportError, match=r"pip install 'adjsim\[openmm\]'"):
        write_force_field("x.xml", object(), None, ["tip3p.xml"])  # type: ignore


def test_a_barostat_says_what_to_simulate_at():
    system = pair(openmm.MonteCarloBarostat(2.0, 310))
    _, structure = from_openmm(system, [[0.0, 0.0, 0.0], [0.4, 0.0, 0.0]])
    assert structure.pressure == pytest.approx(2.0 * units.bar)
    assert structure.temperature == 310
