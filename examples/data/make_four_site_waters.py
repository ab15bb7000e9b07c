"""The structure of rigid TIP4P-Ew and OPC water at 298 K, by adjsim and by OpenMM.

216 molecules with particle-mesh Ewald in the box of water.pdb, each with a virtual
site. Both sides begin with the same positions and take the same force field. The radial
distributions of oxygens, with errors from blocks, are in four_site_waters.json.

Run: python examples/data/make_four_site_waters.py tip4pew|opc adjsim|openmm PICOSECONDS
SEED
"""

import json
import sys
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit
from studies import commit, rounded

import adjsim
from adjsim.io import from_openmm

HERE = Path(__file__).parent
FS, KELVIN, DT = units.fs, 298, 2
# Femtoseconds between frames, picoseconds of equilibration, and blocks of what follows.
EVERY, EQUILIBRATION, BLOCKS = 50, 4, 8
EDGES = np.linspace(2.2, 8.2, 61)
OUT = HERE / "four_site_waters.json"


def system(model):
    """Return OpenMM's system, constrained positions in nm, and topology."""
    pdb = app.PDBFile(str(HERE / "water.pdb"))
    field = app.ForceField(f"amber14/{model}.xml")
    box = app.Modeller(pdb.topology, pdb.positions)
    box.addExtraParticles(field)
    made = field.createSystem(
        box.topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.85 * unit.nanometer,
        rigidWater=True,
        removeCMMotion=False,
    )
    context = openmm.Context(made, openmm.VerletIntegrator(0.001))
    context.setPositions(box.positions)
    context.applyConstraints(1e-8)
    positions = context.getState(positions=True).getPositions(asNumpy=True)
    return made, positions._value, box.topology


def distribution(oxygens, box):
    """Return the radial distribution of one frame."""
    return adjsim.radial_distribution(oxygens, torch.from_numpy(EDGES), box)


def by_adjsim(model, picoseconds, seed):
    """Return radial distributions every EVERY femtoseconds."""
    torch.set_num_threads(1)
    potential, waters = from_openmm(*system(model))
    inner = adjsim.Langevin(potential, waters.mass, KELVIN * units.kB, 1 / (1000 * FS))
    dynamics = adjsim.Constrained(inner, waters.constraints)
    start = dynamics.init(waters.position, generator=seed)
    duration = round(1000 * picoseconds)
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start,
            np.arange(0, duration + 1, EVERY) * FS,
            solver=adjsim.BAOAB(DT * FS),
            generator=seed,
            compile=True,
            record=lambda state: state.position[::3],
        )
    return [distribution(oxygens, waters.box) for oxygens in run.record]


def by_openmm(model, picoseconds, seed):
    """Return radial distributions every EVERY femtoseconds."""
    made, positions, _ = system(model)
    integrator = openmm.LangevinMiddleIntegrator(
        KELVIN * unit.kelvin, 1 / unit.picosecond, DT * unit.femtosecond
    )
    integrator.setRandomNumberSeed(seed)
    platform = openmm.Platform.getPlatformByName("CPU")
    context = openmm.Context(made, integrator, platform, {"Threads": "1"})
    context.setPositions(positions)
    context.setVelocitiesToTemperature(KELVIN * unit.kelvin, seed)
    rows = [row._value for row in made.getDefaultPeriodicBoxVectors()]
    box = 10 * torch.tensor(rows, dtype=torch.float64).diagonal()
    frames = []
    for _ in range(round(1000 * picoseconds) // EVERY):
        integrator.step(EVERY // DT)
        state = context.getState(positions=True)
        particles = state.getPositions(asNumpy=True)._value
        frames.append(distribution(10 * particles[::4], box))
    return frames


def main(model, side, picoseconds, seed):
    picoseconds, seed, made_at = float(picoseconds), int(seed), commit(__file__)
    sides = {"adjsim": by_adjsim, "openmm": by_openmm}
    frames = torch.stack(sides[side](model, picoseconds, seed))
    blocks = frames[1000 * EQUILIBRATION // EVERY :].chunk(BLOCKS)
    means = torch.stack([block.mean(0) for block in blocks])
    study = json.loads(OUT.read_text()) if OUT.exists() else {}
    results = study.setdefault(model, {})
    results[f"{side}, seed {seed}"] = {
        "r": ((EDGES[1:] + EDGES[:-1]) / 2).tolist(),
        "g": means.mean(0).tolist(),
        "stderr": (means.std(0) / BLOCKS**0.5).tolist(),
        "picoseconds": picoseconds,
        "commit": made_at,
    }
    OUT.write_text(json.dumps(rounded(study, 5), indent=1) + "\n")
    compare(results)


def compare(results):
    """Print differences over errors of each run from the mean of OpenMM's runs."""
    g, stderr = (
        {name: torch.tensor(run[key]) for name, run in results.items()}
        for key in ("g", "stderr")
    )
    theirs = [name for name in results if name.startswith("openmm")]
    mine = [name for name in results if name not in theirs]

    def mean(names):
        errors = torch.stack([stderr[name] for name in names]).square().sum(0).sqrt()
        return torch.stack([g[name] for name in names]).mean(0), errors / len(names)

    if theirs and mine:
        for names in ([x] for x in mine):
            show(", ".join(names), mean(names), mean(theirs))
        show("all", mean(mine), mean(theirs))


def show(name, one, two):
    """Print the root mean square of differences over errors, of shells with pairs."""
    error = one[1].hypot(two[1])
    share = ((one[0] - two[0]) / error)[error > 0].square().mean().sqrt()
    print(f"{name}: differences over errors, root mean square: {float(share):.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
