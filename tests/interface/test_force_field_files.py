"""Fitted numbers as ForceField files of OpenMM, and tables of the numbers that changed."""

from __future__ import annotations

import copy
import csv
import re
from xml.etree import ElementTree

import numpy as np
import openmm
import pytest
import torch
from openmm import app, unit
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim.io import from_openmm, parameter_changes, to_openmm, write_force_field
from adjsim.io._openmm.force_field_sections import wells_of
from tests.openmm_systems import AMBER14, GBN2, OBC2, molecule, reference, structure

FREE = {"constraints": None, "rigidWater": False}
# Numbers of each atom, which are one number in a row of a type.
SHAPE = ("solvent.alpha", "solvent.beta", "solvent.gamma")
BY_ATOM = ("coulomb.charge", "solvent.charge", "solvent.radius", "solvent.scale", *SHAPE)


def change(potential, without=()):
    """Change the numbers of a potential, those of atoms by one function of their values."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in potential.named_parameters():
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            if not name.startswith(tuple(without)):
                x.mul_(1 + 0.01 * (torch.sin(1e3 * x) if name in BY_ATOM else noise))


def read(topology, positions, files, **options):
    system = app.ForceField(*map(str, files)).createSystem(topology, **options)
    return system, from_openmm(system, positions, topology)[0]


def read_by_term(topology, positions, name):
    system = app.ForceField(name).createSystem(topology)
    return system, from_openmm(system, positions)[0]


def plain(positions):
    return np.array([list(row) for row in positions._value])


def assert_same_in_openmm(path, potential, positions, topology, system, **options):
    """The file makes a system with the energies of the fitted potential, at other places too."""
    found = app.ForceField(str(path)).createSystem(topology, **options)
    off = positions + 0.005 * np.random.default_rng(1).standard_normal(positions.shape)
    molecule = from_openmm(found, off, topology)[1]
    with torch.no_grad():
        # Sites follow their atoms.
        off = molecule.all_positions(molecule.position).numpy() / 10
    energy, forces = reference(found, off)
    expected, expected_forces = reference(to_openmm(potential, system), off)
    scale = np.abs(expected_forces).max()
    assert abs(energy - expected) < 1e-11 * max(abs(expected), scale)
    np.testing.assert_allclose(forces, expected_forces, rtol=0, atol=1e-10 * scale)
    with torch.no_grad():
        assert abs(potential(molecule.position).item() - energy) < 1e-9 * max(abs(energy), scale)
    assert abs(energy - reference(system, off)[0]) > 1e-4
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "files",
    [
        [AMBER14, OBC2],
        pytest.param(["amber19/protein.ff19SB.xml", "implicit/gbn2.xml"], marks=pytest.mark.slow),
    ],
)
def test_a_fitted_dipeptide(files, tmp_path):
    pdb, path = structure("dipeptide.pdb"), tmp_path / "fitted.xml"
    positions = plain(pdb.positions)
    system, potential = read(pdb.topology, positions, files, **FREE)
    before = copy.deepcopy(potential)
    change(potential)
    write_force_field(path, potential, pdb.topology, files, **FREE)
    assert_same_in_openmm(path, potential, positions, pdb.topology, system, **FREE)
    # A second fit starts from the file, in which the solvent has rows now.
    again, more = read(pdb.topology, positions, [path], **FREE)
    change(more)
    write_force_field(tmp_path / "more.xml", more, pdb.topology, [path], **FREE)
    assert_same_in_openmm(tmp_path / "more.xml", more, positions, pdb.topology, again, **FREE)
    # Every kind of number has changed.
    names = {row.parameter for row in parameter_changes(before, potential).rows}
    assert names == {name for name, _ in potential.named_parameters()}
    # The file serves a molecule with the same types, whose numbers change with those of the fit.
    other = structure("trialanine.pdb")
    new, old = (
        app.ForceField(*x).createSystem(other.topology, **FREE) for x in ([str(path)], files)
    )
    assert 1e-3 < abs(reference(new, other.positions)[0] - reference(old, other.positions)[0]) < 1


@pytest.mark.marathon
def test_a_fitted_protein_of_charmm(tmp_path):
    """Patches, Urey-Bradley terms, harmonic impropers and maps, beside wells that stay."""
    pdb = app.PDBFile(str(app.forcefield._getDataDirectories()[0]) + "/test.pdb")
    model, path = app.Modeller(pdb.topology, pdb.positions), tmp_path / "fitted.xml"
    model.delete([x for x in model.topology.residues() if x.name in ("HOH", "Cl")])
    positions = np.array(model.positions._value)
    system, potential = read(model.topology, positions, ["charmm36.xml"], constraints=None)
    change(potential, ["custom_pairs.", "custom_bonds."])
    write_force_field(path, potential, model.topology, ["charmm36.xml"], constraints=None)
    assert_same_in_openmm(path, potential, positions, model.topology, system, constraints=None)


def of_templates(field, *names):
    """Make a topology of residues of a force field."""
    topology = app.Topology()
    for name in names:
        template = field._templates[name]
        residue = topology.addResidue(name, topology.addChain())
        atoms = [topology.addAtom(x.name, x.element, residue) for x in template.atoms]
        for i, j in template.bonds:
            topology.addBond(atoms[i], atoms[j])
    return topology


def relaxed(system):
    """Return positions of low energy, from random ones."""
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    drawn = np.random.default_rng(0).random((system.getNumParticles(), 3))
    context.setPositions(0.7 * drawn)
    openmm.LocalEnergyMinimizer.minimize(context, maxIterations=200)
    return context.getState(positions=True).getPositions(asNumpy=True)._value


@pytest.mark.marathon
def test_wells_of_pairs_in_charmm(tmp_path):
    """The file of CHARMM36 has an NBFixPair for atoms of cholesterol and of a bromide each."""
    field = app.ForceField("charmm36.xml")
    topology = of_templates(field, "CHM1", "DBRE")
    templates = {residue: residue.name for residue in topology.residues()}
    path, options = tmp_path / "fitted.xml", {"constraints": None, "residueTemplates": templates}
    positions = relaxed(field.createSystem(topology, **options))
    system, potential = read(topology, positions, ["charmm36.xml"], **options)
    atoms = [atom.type for name in ("CHM1", "DBRE") for atom in field._templates[name].atoms]
    old, pairs = wells_of(system, atoms), potential.custom_pairs
    kinds = dict(zip(atoms, pairs.species.tolist(), strict=True))
    fixed = {("CTL1", "HGA1"): 1.03, ("HAL1", "HGA1"): 0.96, ("HAL2", "HGA1"): 1.02}
    # Wells of types, by which the others are mixed, are those of their own pairs.
    size = {
        one: ((a / b) ** (1 / 6) * (1 + 0.01 * np.sin(9 * k)), b * b / (4 * a) * 1.05)
        for k, ((one, other), (a, b)) in enumerate(sorted(old.items()))
        if one == other
    }
    with torch.no_grad():
        for (one, other), (a, b) in old.items():
            if (one, other) in fixed:
                a, b = a * fixed[one, other], b * fixed[one, other] ** 2
            else:
                (s1, e1), (s2, e2) = size[one], size[other]
                depth, power = 4 * np.sqrt(e1 * e2), ((s1 + s2) / 2) ** 6
                a, b = depth * power**2, depth * power
            m, n = kinds[one], kinds[other]
            for table, value in ((pairs.acoef, a), (pairs.bcoef, b)):
                table[m, n] = table[n, m] = value
    write_force_field(path, potential, topology, ["charmm36.xml"], **options)
    found = assert_same_in_openmm(path, potential, positions, topology, system, **options)
    wells = wells_of(found, atoms)
    for (one, other), well in wells.items():
        m, n = kinds[one], kinds[other]
        expected = pairs.acoef[m, n].item(), pairs.bcoef[m, n].item()
        assert well == pytest.approx(expected, rel=1e-9), (one, other)
        assert well != pytest.approx(old[one, other], rel=1e-3), (one, other)
    # No pair needs a row beside those of the file.
    assert path.read_text().count("<NBFixPair") == 14


TOY = """<ForceField>
 <AtomTypes>
  <Type name="a" class="A" element="C" mass="12"/> <Type name="b" class="B" element="N" mass="14"/>
  <Type name="c" class="C" element="O" mass="16"/> <Type name="h" class="H" element="H" mass="1"/>
 </AtomTypes>
 <Residues><Residue name="TOY">
  <Atom name="1" type="a" charge="0.1"/> <Atom name="2" type="a" charge="0.2"/>
  <Atom name="3" type="b" charge="-0.3"/> <Atom name="4" type="c" charge="-0.1"/>
  <Atom name="5" type="a" charge="0.1"/> <Atom name="6" type="h" charge="0"/>
  <Bond from="0" to="1"/> <Bond from="1" to="2"/> <Bond from="2" to="3"/> <Bond from="3" to="4"/>
  <Bond from="2" to="5"/>
 </Residue></Residues>
 <HarmonicBondForce>
  <Bond class1="A" class2="A" length="0.15" k="1000"/> <Bond class1="A" class2="B" length="0.14"
  k="900"/> <Bond class1="B" class2="C" length="0.13" k="800"/> <Bond class1="A" class2="C"
  length="0.12" k="700"/> <Bond class1="B" class2="H" length="0.1" k="600"/>
 </HarmonicBondForce>
 <HarmonicAngleForce>
  <Angle class1="A" class2="A" class3="B" angle="1.9" k="100"/>
  <Angle class1="" class2="B" class3="" angle="2.0" k="0"/>
 </HarmonicAngleForce>
 <AmoebaUreyBradleyForce>
  <UreyBradley class1="A" class2="B" class3="C" d="0.23" k="300"/>
 </AmoebaUreyBradleyForce>
 <PeriodicTorsionForce ordering="amber">
  <Proper class1="" class2="A" class3="B" class4="" periodicity1="2" phase1="0" k1="3"
   periodicity2="1" phase2="3.0" k2="0" periodicity3="3" phase3="0.5" k3="1"/>
  <Proper type1="a" type2="b" type3="c" type4="a" periodicity1="1" phase1="0" k1="2"/>
  <Improper class1="B" class2="" class3="" class4="C" periodicity1="2" phase1="3.1" k1="4"/>
 </PeriodicTorsionForce>
 <RBTorsionForce>
  <Proper class1="A" class2="B" class3="C" class4="A" c0="1" c1="0" c2="2" c3="3" c4="-1" c5="2"/>
 </RBTorsionForce>
 <CustomBondForce energy="D*(1-exp(-s*(r-r0)))^2"><GlobalParameter name="s" defaultValue="9"/>
  <PerBondParameter name="D"/><PerBondParameter name="r0"/>
  <Bond class1="A" class2="B" D="50" r0="0.14"/>
 </CustomBondForce>
 <CustomAngleForce energy="q*(theta-2)^4"><PerAngleParameter name="q"/>
  <Angle class1="A" class2="B" class3="C" q="20"/>
 </CustomAngleForce>
 <CustomTorsionForce energy="k*(theta-theta0)^2">
  <PerTorsionParameter name="k"/><PerTorsionParameter name="theta0"/>
  <Improper class1="B" class2="A" class3="C" class4="H" k="5" theta0="0.1"/>
 </CustomTorsionForce>
 <CMAPTorsionForce>
  <Map>0 1 2 3 1 5 2 1 4 3 2 1 0 1 0 2</Map> <Map>0 1 2 3 1 2 2 1 4 3 2 1 0 1 0 2</Map>
  <Torsion class1="A" class2="A" class3="B" class4="C" class5="A" map="1"/>
 </CMAPTorsionForce>
 <NonbondedForce coulomb14scale="0.8" lj14scale="0.6"><UseAttributeFromResidue name="charge"/>
  <Atom class="A" sigma="0.3" epsilon="0.4"/> <Atom class="B" sigma="0.31" epsilon="0.5"/>
  <Atom class="C" sigma="0.32" epsilon="0.6"/> <Atom class="H" sigma="0" epsilon="0"/>
 </NonbondedForce>
 <GBSAOBCForce><UseAttributeFromResidue name="charge"/>
  <Atom type="a" radius="0.17" scale="0.7"/> <Atom type="b" radius="0.16" scale="0.8"/>
  <Atom type="c" radius="0.15" scale="0.9"/> <Atom type="h" radius="0.12" scale="0.8"/>
 </GBSAOBCForce>
</ForceField>"""


@pytest.fixture
def toy(tmp_path):
    """A molecule with every kind of row, its file, and the positions of its atoms in nm."""
    path, topology = tmp_path / "toy.xml", app.Topology()
    path.write_text(TOY)
    residue = topology.addResidue("TOY", topology.addChain())
    atoms = [
        topology.addAtom(str(k), app.Element.getBySymbol(symbol), residue)
        for k, symbol in enumerate("CCNOCH", 1)
    ]
    for i, j in ((0, 1), (1, 2), (2, 3), (3, 4), (2, 5)):
        topology.addBond(atoms[i], atoms[j])
    positions = 0.1 * np.array(
        [
            [0, 0, 0],
            [1.5, 0.2, 0],
            [2.1, 1.4, 0.3],
            [3.4, 1.5, 0.1],
            [3.9, 2.4, 1.0],
            [1.6, 2.2, 0.5],
        ]
    )
    return path, topology, positions


def test_every_kind_of_row(toy, tmp_path):
    path, topology, positions = toy
    system, potential = read(topology, positions, [path])
    change(potential, ["solvent.surface"])
    fitted = tmp_path / "fitted.xml"
    write_force_field(fitted, potential, topology, [path])
    found = assert_same_in_openmm(fitted, potential, positions, topology, system)
    parts = {name for name, _ in potential.named_children()}
    assert parts >= {
        "bonds", "angles", "torsions", "ryckaert_bellemans", "maps", "custom_bonds",
        "custom_angles", "custom_torsions", "lennard_jones", "coulomb", "coulomb_14",
        "lennard_jones_14", "solvent",
    }  # fmt: skip
    # Four torsions of one row for any atom have numbers of their own now, and the row stays.
    text = fitted.read_text()
    assert text.count("<Proper") == 3 + 2
    assert (
        '<Proper class1="" class2="A" class3="B" class4="" periodicity1="2" phase1="0" k1="3"'
        in text
    )
    # A second fit starts from the file, and a file of unchanged numbers is a copy.
    again, same = read(topology, positions, [fitted])
    write_force_field(tmp_path / "same.xml", same, topology, [fitted])
    texts = [(tmp_path / name).read_text() for name in ("same.xml", "fitted.xml")]
    rows = [re.sub(r"<Info>.*?</Info>\s*", "", text, flags=re.DOTALL) for text in texts]
    assert rows[0] == rows[1]
    assert again.getNumForces() == found.getNumForces()


@pytest.mark.slow
def test_numbers_of_a_solvent_that_differ_in_a_type(tmp_path):
    """They are of residues: the radius of H is another one in NME, and so are its coefficients."""
    files = [AMBER14, GBN2]
    system, positions, topology = molecule("dipeptide.pdb", *files)
    potential, _ = from_openmm(system, positions, topology)
    atoms = [(atom.residue.name, atom.name) for atom in topology.atoms()]
    with torch.no_grad():
        for name in ("radius", "alpha", "beta", "gamma"):
            getattr(potential.solvent, name)[atoms.index(("NME", "H"))] *= 1.1
    path = tmp_path / "fitted.xml"
    write_force_field(path, potential, topology, files, **FREE)
    assert_same_in_openmm(path, potential, positions, topology, system, **FREE)
    section = ElementTree.parse(path).find("CustomGBForce")
    of_residues = {row.get("name") for row in section.iterfind("UseAttributeFromResidue")}
    assert of_residues == {"charge", "or", "sr", "alpha", "beta", "gamma"}
    # A second fit starts from the file.
    again, more = read(topology, positions, [path], **FREE)
    with torch.no_grad():
        more.solvent.scale.mul_(0.99)
    write_force_field(tmp_path / "more.xml", more, topology, [path], **FREE)
    assert_same_in_openmm(tmp_path / "more.xml", more, positions, topology, again, **FREE)


def test_settings_of_a_solvent_are_in_its_expressions(tmp_path):
    """The file has the salt and the permittivity, and OpenMM refuses others."""
    files, salt = [AMBER14, OBC2], 0.9 / unit.nanometer
    options = {**FREE, "implicitSolventKappa": salt, "solventDielectric": 60.0, "sasaMethod": None}
    system, positions, topology = molecule("dipeptide.pdb", *files, **options)
    potential, _ = from_openmm(system, positions, topology)
    with torch.no_grad():
        potential.solvent.scale.mul_(0.99)
    path = tmp_path / "fitted.xml"
    write_force_field(path, potential, topology, files, **options)
    assert_same_in_openmm(path, potential, positions, topology, system, **FREE)
    with pytest.raises(ValueError, match="'implicitSolventKappa' was specified"):
        app.ForceField(str(path)).createSystem(topology, **FREE, implicitSolventKappa=salt)


@pytest.mark.slow
def test_negative_numbers_of_a_solvent(tmp_path):
    """Expressions with them are read as the same solvent, and so they are written in files."""
    files = [AMBER14, GBN2]
    system, positions, topology = molecule("dipeptide.pdb", *files)
    potential, _ = from_openmm(system, positions, topology)
    names = ("surface", "offset", "neck")
    with torch.no_grad():
        for name in names:
            getattr(potential.solvent, name).mul_(-0.5)
    again, _ = from_openmm(to_openmm(potential, system), positions, topology)
    assert type(again.solvent) is adjsim.GeneralizedBorn
    for name in names:
        value, expected = (getattr(x.solvent, name).detach() for x in (again, potential))
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    # The file is read again before it is kept.
    write_force_field(tmp_path / "fitted.xml", potential, topology, files, **FREE)


EXPRESSIONS = """<ForceField>
<CustomNonbondedForce energy="level*q1*q2*g(r)*k(t1,t2)" bondCutoff="2">
 <PerParticleParameter name="q"/><PerParticleParameter name="t"/>
 <GlobalParameter name="level" defaultValue="3.5"/>
 <Function name="g" type="Continuous1D" min="0" max="3">1 2 1.5 1</Function>
 <Function name="k" type="Discrete2D" xsize="2" ysize="2">1 2 2 3</Function>
 <Atom type="tip3p-O" q="0.5" t="0"/><Atom type="tip3p-H" q="0.2" t="1"/>
</CustomNonbondedForce>
<CustomGBForce>
 <PerParticleParameter name="s"/><GlobalParameter name="depth" defaultValue="3.5"/>
 <Function name="f" type="Continuous1D" min="0" max="3" periodic="true">1 2 1.5 1</Function>
 <Function name="h" type="Discrete2D" xsize="2" ysize="1">1 3</Function>
 <ComputedValue name="I" type="ParticlePair">s2*exp(-r/s1)</ComputedValue>
 <EnergyTerm type="SingleParticle">depth*I^2*f(I)*h(1,0)</EnergyTerm>
 <Atom type="tip3p-O" s="0.15"/><Atom type="tip3p-H" s="0.12"/>
</CustomGBForce>
<CustomHbondForce energy="w*u*v*h(distance(d1,a1))*cos(angle(d2,d1,a1))^2*cos(angle(d1,a1,a2))"
  particlesPerDonor="2" particlesPerAcceptor="3" bondCutoff="2">
 <PerDonorParameter name="u"/><PerAcceptorParameter name="v"/>
 <GlobalParameter name="w" defaultValue="2.5"/>
 <Function name="h" type="Continuous1D" min="0" max="3">4 2 1.5 1</Function>
 <Donor type1="tip3p-H" type2="tip3p-O" u="0.7"/>
 <Acceptor type1="tip3p-H" type2="tip3p-O" type3="tip3p-H" v="1.2"/>
</CustomHbondForce></ForceField>"""


def plain_water():
    topology, positions = water()
    found = app.Modeller(topology, positions * unit.nanometer)
    found.delete([atom for atom in found.topology.atoms() if atom.name == "M"])
    return found.topology, plain(found.positions)


@pytest.mark.slow
def test_a_solvent_and_pairs_of_expressions(tmp_path):
    """Their global numbers, tables and numbers of types."""
    (tmp_path / "custom.xml").write_text(EXPRESSIONS)
    files, fitted = ["amber14/tip3p.xml", tmp_path / "custom.xml"], tmp_path / "fitted.xml"
    topology, positions = plain_water()
    system, potential = read(topology, positions, files)
    with torch.no_grad():
        for name in ("q", "level", "g.values", "k"):
            potential.custom_pairs.get_parameter(name).mul_(1.01)
        potential.solvent.s.mul_(1.01)
        potential.solvent.depth.mul_(0.9)
        potential.solvent.f.values[1] += 0.1
        potential.solvent.h.values[1] += 0.1
        for name in ("u", "v", "w", "h.values"):
            potential.hydrogen_bonds.get_parameter(name).mul_(1.02)
    write_force_field(fitted, potential, topology, files)
    assert_same_in_openmm(fitted, potential, positions, topology, system)


SCRIPT = """<ForceField><Script>
import openmm
pair = openmm.CustomCompoundBondForce(2, "k*distance(p1,p2)^2")
centres = openmm.CustomCentroidBondForce(2, "k*distance(g1,g2)^2")
centres.addGroup([0, 1])
centres.addGroup([3, 4])
place = openmm.CustomExternalForce("k*x^4")
harmonic = openmm.CustomExternalForce("k*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
for force in (pair, centres):
    force.addPerBondParameter("k")
    force.addBond([0, 1], [2.0])
place.addPerParticleParameter("k")
place.addParticle(0, [2.0])
for name in ("k", "x0", "y0", "z0"):
    harmonic.addPerParticleParameter(name)
harmonic.addParticle(0, [2.0, 0.0, 0.0, 0.0])
for force in (pair, centres, place, harmonic):
    sys.addForce(force)
</Script></ForceField>"""


def test_forces_for_which_files_have_no_section(tmp_path):
    (tmp_path / "script.xml").write_text(SCRIPT)
    path, files = tmp_path / "fitted.xml", ["amber14/tip3p.xml", tmp_path / "script.xml"]
    topology, positions = plain_water()
    system, potential = read(topology, positions, files)
    # Unchanged numbers are those of the script.
    write_force_field(path, potential, topology, files)
    path.unlink()
    rule = "ForceField files have no section for a {}, so .*{}.* would be lost: .*XmlSerializer"
    found = rule.format("CustomCompoundBondForce", "part 'custom_compounds'")
    with pytest.raises(ValueError, match=found):
        write_force_field(path, potential, topology, files[:1])
    for part, kind in (
        ("custom_compounds", "CustomCompoundBondForce"),
        ("custom_centroids", "CustomCentroidBondForce"),
        ("custom_externals", "CustomExternalForce"),
        ("restraints", "CustomExternalForce"),
    ):
        assert kind not in app.forcefield.parsers
        fitted = copy.deepcopy(potential)
        with torch.no_grad():
            fitted.get_parameter(f"{part}.k").mul_(1.1)
        with pytest.raises(ValueError, match=rule.format(kind, "in the potential")):
            write_force_field(path, fitted, topology, files)
        assert not path.exists()
        # The way out.
        text = openmm.XmlSerializer.serialize(to_openmm(fitted, system))
        energy = reference(openmm.XmlSerializer.deserialize(text), positions)[0]
        with torch.no_grad():
            assert abs(fitted(10 * torch.from_numpy(positions)) - energy) < 1e-9 * abs(energy)


def test_one_row_of_a_solvent_has_one_number(tmp_path):
    topology, positions = plain_water()
    files = ["amber14/tip3p.xml", OBC2]
    _, potential = read(topology, positions, files)
    with torch.no_grad():
        potential.solvent.radius[3] *= 1.01
    with pytest.raises(ValueError, match=r"or of the solvent is .* atom 0 .* atom 3, which have"):
        write_force_field(tmp_path / "no.xml", potential, topology, files)


def water(count=2):
    """Waters with a virtual site each."""
    pdb = structure("water.pdb")
    model = app.Modeller(pdb.topology, pdb.positions)
    model.delete(list(pdb.topology.residues())[count:])
    model.topology.setPeriodicBoxVectors(None)
    model.addExtraParticles(app.ForceField("tip4pew.xml"))
    return model.topology, plain(model.positions)


def test_rigid_water_with_sites(tmp_path):
    topology, positions = water()
    system, potential = read(topology, positions, ["tip4pew.xml"])
    change(potential)
    path = tmp_path / "fitted.xml"
    write_force_field(path, potential, topology, ["tip4pew.xml"])
    assert_same_in_openmm(path, potential, positions, topology, system)


@pytest.mark.parametrize(("name", "count"), [("tip5p.xml", 2), ("opc.xml", 1)])
def test_rows_of_sites(name, count, tmp_path):
    """Two sites of one type have a row each, found by the numbers that it had."""
    pdb, path = structure("water.pdb"), tmp_path / "fitted.xml"
    model = app.Modeller(pdb.topology, pdb.positions)
    model.delete(list(pdb.topology.residues())[2:])
    model.topology.setPeriodicBoxVectors(None)
    model.addExtraParticles(app.ForceField(name))
    positions = plain(model.positions)
    system, potential = read(model.topology, positions, [name])
    change(potential)
    write_force_field(path, potential, model.topology, [name])
    assert_same_in_openmm(path, potential, positions, model.topology, system)
    assert path.read_text().count("<VirtualSite") == count
    # Sites of one row with different numbers.
    _, alone = read_by_term(model.topology, positions, name)
    with torch.no_grad():
        for group in alone.sites.groups:
            for x in group.parameters():
                x[0] *= 1.01
    with pytest.raises(ValueError, match=r"sites . and . are of one row of the file"):
        write_force_field(tmp_path / "other.xml", alone, model.topology, [name])
    assert not (tmp_path / "other.xml").exists()


WELLS = (
    '<NonbondedForce coulomb14scale="1" lj14scale="1"><UseAttributeFromResidue name="charge"/>'
    '<Atom class="A" sigma="1" epsilon="0"/><Atom class="B" sigma="1" epsilon="0"/>'
    '<Atom class="C" sigma="1" epsilon="0"/><Atom class="H" sigma="1" epsilon="0"/>'
    '</NonbondedForce> <LennardJonesForce lj14scale="0.9" useDispersionCorrection="False">'
    '<Atom class="A" sigma="0.3" epsilon="0.4" sigma14="0.29" epsilon14="0.2"/>'
    '<Atom type="b" sigma="0.31" epsilon="0.5"/> <Atom type="c" sigma="0.32" epsilon="0.6"/>'
    '<Atom type="h" sigma="0.2" epsilon="0"/>'
    '<NBFixPair type1="a" type2="a" sigma="0.33" epsilon="0.7"/> </LennardJonesForce>'
)


@pytest.mark.slow
def test_wells_of_types(toy, tmp_path):
    """Wells that mixing gives are those of types, and others are of two types."""
    path, topology, positions = toy
    text = path.read_text()
    begin, end = text.index("<NonbondedForce"), text.index("<GBSAOBCForce")
    path.write_text(text[:begin] + WELLS + text[end:])
    system, potential = read(topology, positions, [path])
    fitted, pairs = tmp_path / "fitted.xml", potential.custom_pairs
    wells_14 = potential.custom_bonds_2
    with torch.no_grad():
        pairs.acoef.mul_(1.1)
        pairs.bcoef.mul_(1.05)
        # An NBFixPair is that of the 1-4 pairs of its types too.
        fixed = wells_14.sigma == 0.33
        wells_14.sigma.mul_(torch.where(fixed, (1.1 / 1.05) ** (1 / 6), 1.02))
        wells_14.epsilon[fixed] *= 1.05**2 / 1.1
    write_force_field(fitted, potential, topology, [path])
    assert_same_in_openmm(fitted, potential, positions, topology, system)
    assert fitted.read_text().count("<NBFixPair") == 1
    # A well of two types that are no 1-4 pair, in a second fit.
    again, more = read(topology, positions, [fitted])
    changed = more.custom_bonds_2
    with torch.no_grad():
        more.custom_pairs.acoef.mul_(1.01)
        with pytest.raises(ValueError, match="wells of 1-4 pairs that no mixing gives"):
            write_force_field(tmp_path / "other.xml", more, topology, [fitted])
        fixed = torch.isclose(changed.sigma, wells_14.sigma[fixed].max())
        changed.sigma[fixed] *= 1.01 ** (1 / 6)
        changed.epsilon[fixed] /= 1.01
    write_force_field(tmp_path / "more.xml", more, topology, [fitted])
    assert_same_in_openmm(tmp_path / "more.xml", more, positions, topology, again)
    with torch.no_grad():
        more.custom_pairs.bcoef.mul_(-1)
    with pytest.raises(ValueError, match="has no sigma and epsilon"):
        write_force_field(tmp_path / "other.xml", more, topology, [fitted])


@pytest.mark.parametrize(
    ("name", "factor", "reason"),
    [
        (
            "coulomb.charge",
            None,
            r"charge of the row .* for atoms 0 .* for atoms 1",
        ),
        ("solvent.surface", 1.5, r"surfaceAreaEnergy .* would differ"),
        ("bonds.k", 0.0, r"strengths of zero"),
        ("bonds.k", float("nan"), r"bonds.k has numbers that are not finite"),
    ],
)
def test_numbers_without_a_row_are_refused(toy, tmp_path, name, factor, reason):
    path, topology, positions = toy
    if name == "coulomb.charge":
        text = path.read_text().replace(
            '<UseAttributeFromResidue name="charge"/>\n  <Atom class="A"',
            '<Atom class="A" charge="0.1"',
        )
        for kind in "BCH":
            text = text.replace(f'<Atom class="{kind}" ', f'<Atom class="{kind}" charge="-0.1" ')
        path.write_text(text)
    _, potential = read(topology, positions, [path])
    with torch.no_grad():
        x = potential.get_parameter(name)
        x.mul_(torch.linspace(1, 2, 6) if factor is None else factor)
    with pytest.raises(ValueError, match=reason):
        write_force_field(tmp_path / "no.xml", potential, topology, [path])
    assert sorted(x.name for x in tmp_path.iterdir()) == ["toy.xml"]


def test_wrong_arguments_are_refused(toy, tmp_path):
    path, topology, positions = toy
    _, potential = read(topology, positions, [path])
    with pytest.raises(ValueError, match=r"not of the system .* options of createSystem"):
        write_force_field(tmp_path / "x.xml", potential, topology, [path], constraints=app.AllBonds)
    with pytest.raises(ValueError, match=r"'absent.xml' is no file"):
        write_force_field(tmp_path / "x.xml", potential, topology, ["absent.xml"])
    with pytest.raises(TypeError, match="names of XML files"):
        write_force_field(tmp_path / "x.xml", potential, topology, app.ForceField(str(path)))


def test_a_table_of_changes(toy, tmp_path):
    path, topology, positions = toy
    _, potential = read(topology, positions, [path])
    before = copy.deepcopy(potential)
    assert str(parameter_changes(before, potential)) == "no number has changed"
    with torch.no_grad():
        potential.bonds.length[1] *= 1.1
        potential.coulomb.charge[3] += 0.05
        potential.coulomb_14.scale.mul_(0.9)
    register_parametrization(potential.angles, "k", adjsim.Positive())
    with torch.no_grad():
        potential.angles.parametrizations.k.original.add_(0.1)
    errors = {"bonds.length": torch.full((6,), 0.01), "coulomb_14.scale": torch.tensor(0.02)}
    changes = parameter_changes(before, potential, errors)
    found = {row.parameter: row for row in changes.rows}
    assert set(found) == {"bonds.length", "coulomb.charge", "coulomb_14.scale", "angles.k"}
    assert found["bonds.length"].label == potential.labels["bonds"][1] == "TOY 2-3"
    assert found["bonds.length"].entry == (1,)
    assert found["bonds.length"].after == pytest.approx(1.1 * found["bonds.length"].before)
    assert found["angles.k"].after == pytest.approx(np.exp(0.1) * found["angles.k"].before)
    assert (found["coulomb.charge"].error, found["coulomb_14.scale"].error) == (None, 0.02)
    # A state is taken as well, and an error for all numbers of a parameter.
    assert (
        parameter_changes(before.state_dict(), potential, {"bonds.length": 0.01}).rows[0][:5]
        == (changes.rows[0][:5])
    )
    lines = str(changes).splitlines()
    assert lines[0].split() == ["parameter", "entry", "label", "before", "after", "error"]
    assert len({len(line) for line in lines}) <= 2
    assert len(lines) == 1 + len(changes.rows)
    file = tmp_path / "changes.csv"
    changes.save(file)
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [float(row["after"]) for row in rows] == [row.after for row in changes.rows]
    assert rows[0]["label"] == "TOY 2-3"
    with pytest.raises(ValueError, match=r"errors has 'bond.k', which is no parameter"):
        parameter_changes(before, potential, {"bond.k": 1.0})
    with pytest.raises(ValueError, match=r"bonds.k has shape .* absent before"):
        parameter_changes({}, potential)
    with pytest.raises(ValueError, match="is a parameter before and none after"):
        parameter_changes(before, potential.bonds)
    with pytest.raises(ValueError, match=r"the error of bonds.length has shape \(3,\)"):
        parameter_changes(before, potential, {"bonds.length": np.ones(3)})


def test_every_number_that_parametrisations_make_is_listed():
    module = nn.Module()
    for k in range(8):
        module.register_parameter(f"x{k}", nn.Parameter(torch.ones(1, dtype=torch.float32)))
        register_parametrization(module, f"x{k}", adjsim.Positive())
    before = copy.deepcopy(module)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(0.1)
    names = [row.parameter for row in parameter_changes(before, module).rows]
    assert names == [f"x{k}" for k in range(8)]
