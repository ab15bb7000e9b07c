"""adjsim beside OpenMM's Reference platform, over the force-field files of OpenMM.

Each row of openmm_force_fields.csv is a force field and a structure: the number of its
parameters, and the largest relative errors of energy, forces and gradients. The scale
of a force is the largest force. The gradient of each parameter is compared with central
differences of fourth order, at its entry of most effect and at a random one. The error
is relative to the largest change of energy by a relative change of an entry.

Periodic systems have particle-mesh Ewald sums, whose part of pairs is below rounding at
the cutoff: the energy would jump there as weights of virtual sites change.

Run: python examples/data/make_openmm_table.py [NUMBER ...]
"""

import csv
import sys
from pathlib import Path

import numpy as np
import openmm
import torch
from openmm import app, unit
from studies import commit

import adjsim
from adjsim.io import from_openmm

HERE = Path(__file__).parent
OUT = HERE / "openmm_force_fields.csv"
SHIPPED = Path(app.__file__).parent / "data"
PERIODIC = {"nonbondedMethod": app.PME, "nonbondedCutoff": 0.9}
WATERS = {
    "spce.pdb": ("tip3p.xml", "tip3pfb.xml", "spce.xml", "opc3.xml"),
    "tip4pew.pdb": ("tip4pew.xml", "tip4pfb.xml", "opc.xml"),
    "tip5p.pdb": ("tip5p.xml",),
    "swm4ndp.pdb": ("swm4ndp.xml",),
}
PROTEIN = "test.pdb without water"
# Names of the columns and of the limits that tests hold.
LIMITS = {"energy": 1e-9, "forces": 1e-7, "gradients": 1e-6}
COLUMNS = ("force field", "structure", "atoms", "numbers", *LIMITS, "commit")
CASES = [
    ("amber14-all.xml amber14/tip3pfb.xml", "test.pdb"),
    ("amber19-all.xml amber19/opc.xml", "test.pdb"),
    ("charmm36.xml charmm36/water.xml", "test.pdb"),
    ("amberfb15.xml tip3pfb.xml", "test.pdb"),
    *((field, name) for name, fields in WATERS.items() for field in fields),
    *(
        (f"amber14-all.xml implicit/{name}.xml", PROTEIN)
        for name in ("hct", "obc1", "obc2", "gbn", "gbn2")
    ),
    ("charmm36.xml", "dipeptide.pdb"),
    *(
        (field, "DPPC.pdb")
        for field in (
            "amber14/lipid17.xml amber14/tip3p.xml",
            "amber19/lipid21.xml amber19/tip3p.xml",
            "charmm36.xml charmm36/water.xml",
        )
    ),
]


def joined(topology):
    """Make one residue of a capped one: CHARMM's caps are patches of the residue."""
    made = app.Topology()
    residue, atoms = made.addResidue("ALA", made.addChain()), {}
    for atom in topology.atoms():
        atoms[atom] = made.addAtom(atom.name, atom.element, residue)
    for first, second in topology.bonds():
        made.addBond(atoms[first], atoms[second])
    return made, {"residueTemplates": {residue: "ALAD"}}


def system(files, structure):
    """Make a system of OpenMM, its positions and its topology."""
    name = structure.partition(" ")[0]
    path = SHIPPED / name
    pdb = app.PDBFile(str(path if path.exists() else HERE / name))
    field = app.ForceField(*files)
    model = app.Modeller(pdb.topology, pdb.positions)
    options = dict(PERIODIC if pdb.topology.getPeriodicBoxVectors() else {})
    if structure == PROTEIN:
        model.delete([x for x in model.topology.residues() if x.name in ("HOH", "Cl")])
        options = {}
    if structure == "dipeptide.pdb":
        model.topology, options = joined(pdb.topology)
    else:
        model.addExtraParticles(field)
    options |= {"constraints": None, "rigidWater": False}
    made = field.createSystem(model.topology, **options)
    for force in made.getForces():
        if isinstance(force, openmm.NonbondedForce) and "nonbondedMethod" in options:
            sides = model.topology.getUnitCellDimensions()
            force.setPMEParameters(5.5, *(2 * round(8 * x) for x in sides._value))
    return made, model.positions, model.topology


def reference(made, positions):
    """Return the energy and the forces of the Reference platform, in kJ/mol and nm."""
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(made, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True)
    return state.getPotentialEnergy()._value, state.getForces(asNumpy=True)._value


def gradient_error(potential, position):
    """Compare the gradient of two entries of each parameter with differences."""
    draw, worst = np.random.default_rng(0), 0.0
    parameters = list(potential.parameters())
    grads = torch.autograd.grad(potential(position), parameters)
    with torch.no_grad():
        for x, grad in zip(parameters, grads, strict=True):
            effect = (grad * x).abs().flatten()
            if not effect.max() > 0:
                continue
            places = torch.arange(x.numel()).reshape(x.shape)
            # A table of pairs stays symmetric.
            table = x.ndim == 2 and torch.equal(x, x.T)
            mirrored = (places.T if table else places).flatten()
            acting = effect.nonzero().flatten().tolist()
            for k in {int(effect.argmax()), int(draw.choice(acting))}:
                at, flat, energies = [*{k, int(mirrored[k])}], x.view(-1), []
                value = flat[k].item()
                h = 1e-3 * value
                for step in (2, 1, -1, -2):
                    flat[at] = value + step * h
                    energies.append(potential(position).item())
                flat[at] = value
                far, near, back, farther = energies
                found = (8 * (near - back) - (far - farther)) / (12 * h)
                error = abs((found - grad.flatten()[at].sum().item()) * value)
                worst = max(worst, error / effect.max().item())
    return worst


def row(number):
    """Compute the cells of a row, after the names of force field and structure."""
    files, structure = CASES[number]
    made, positions, topology = system(files.split(), structure)
    try:
        potential, molecule = from_openmm(made, positions, topology)
    except ValueError as refusal:
        return [
            files,
            structure,
            made.getNumParticles(),
            f"refused: {refusal}",
            "",
            "",
            "",
        ]
    # Sites are where the atoms have them.
    with torch.no_grad():
        particles = molecule.all_positions(molecule.position).numpy() / 10
    energy, forces = reference(made, particles * unit.nanometer)
    kJ = energy_unit()
    found = potential(molecule.position).item() / kJ
    own = adjsim.force(potential, molecule.position).detach().numpy() * 10 / kJ
    atoms = [k for k in range(len(particles)) if not made.isVirtualSite(k)]
    return [
        files,
        structure,
        made.getNumParticles(),
        sum(x.numel() for x in potential.parameters()),
        f"{abs(found - energy) / abs(energy):.0e}",
        f"{np.abs(own - forces[atoms]).max() / np.abs(forces).max():.0e}",
        f"{gradient_error(potential, molecule.position):.0e}",
    ]


def energy_unit():
    """Return a kilojoule per mole in electronvolts."""
    from ase import units

    return units.kJ / units.mol


def stored():
    """Read the rows of the file, by force field and structure."""
    if not OUT.exists():
        return {}
    with OUT.open() as file:
        return {(x[0], x[1]): x for x in list(csv.reader(file))[1:]}


if __name__ == "__main__":
    rows = stored()
    for number in map(int, sys.argv[1:]) if sys.argv[1:] else range(len(CASES)):
        done = [*map(str, row(number)), commit(__file__)[:10]]
        print(*done, sep=" | ", flush=True)
        rows[done[0], done[1]] = done
    with OUT.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [COLUMNS, *(rows[case] for case in CASES if case in rows)]
        )
