"""A dipeptide in rigid water at 300 K and 1 bar, by a piston and by OpenMM.

Amber14 with TIP3P-FB, constrained bonds of hydrogen, rigid water, particle-mesh Ewald
and steps of 2 fs. Both sides begin with the states of one run of OpenMM. One moves the
box by adjsim.LangevinPiston, the other by OpenMM's Monte Carlo barostat. The last part
takes exact gradients of paths. The results are in solvated_dipeptide.json.

Run: python examples/data/make_solvated_dipeptide.py [part ...], parts in this order:
starts, openmm, piston, path
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit
from studies import commit, rounded
from torch import nn

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.io import from_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "solvated_dipeptide.json"
FS, PS, KELVIN = units.fs, 1000 * units.fs, 300
DT, EVERY, TAU = 2, 50, 500  # fs, steps, fs
REPLICAS, MELT, APART = 4, 40, 20  # ps to melt, and between starts
LENGTH, BURN_IN = 40, 5  # ps, of each replica
STEPS = (100, 300, 1000, 5000)  # of paths
SEEDS = {"starts": 1, "openmm": 10, "piston": 20, "path": 30}
GRAMS, KILOJOULE = 1 / units.mol * 1e24, units.kJ / units.mol


def made():
    """Return OpenMM's system with a barostat, positions and topology."""
    pdb = app.PDBFile(str(HERE / "dipeptide.pdb"))
    field = app.ForceField("amber14-all.xml", "amber14/tip3pfb.xml")
    model = app.Modeller(pdb.topology, pdb.positions)
    model.addSolvent(field, boxSize=openmm.Vec3(2.1, 2.1, 2.1) * unit.nanometer)
    system = field.createSystem(
        model.topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.9 * unit.nanometer,
        constraints=app.HBonds,
        rigidWater=True,
    )
    system.addForce(openmm.MonteCarloBarostat(1 * unit.bar, KELVIN * unit.kelvin, 25))
    return system, model.positions, model.topology


def context(system, seed):
    """Return a context of OpenMM's CPU platform on one thread."""
    integrator = openmm.LangevinMiddleIntegrator(
        KELVIN * unit.kelvin, 1 / unit.picosecond, DT * unit.femtosecond
    )
    integrator.setRandomNumberSeed(seed)
    for force in system.getForces():
        if isinstance(force, openmm.MonteCarloBarostat):
            force.setRandomNumberSeed(seed)
    platform = openmm.Platform.getPlatformByName("CPU")
    return openmm.Context(system, integrator, platform, {"Threads": "1"})


def dihedrals(topology):
    """Return the atoms of phi and psi, ``(2, 4)``."""
    atoms = [(atom.residue.name, atom.name) for atom in topology.atoms()]
    names = ("ACE", "C"), ("ALA", "N"), ("ALA", "CA"), ("ALA", "C"), ("NME", "N")
    c, n, ca, carbonyl, last = map(atoms.index, names)
    return torch.tensor([[c, n, ca, carbonyl], [n, ca, carbonyl, last]])


class Solvated:
    """The constrained dynamics at constant pressure, with trainable lengths."""

    def __init__(self):
        system, positions, topology = made()
        self.potential, atoms = from_openmm(system, positions, topology)
        self.lengths = nn.Parameter(atoms.constraints.length.clone())
        self.piston = adjsim.LangevinPiston(
            self.potential,
            atoms.mass,
            atoms.temperature * units.kB,
            friction=1 / PS,
            pressure=atoms.pressure,
            tau=TAU * FS,
        )
        self.dynamics = adjsim.Constrained(
            self.piston,
            adjsim.DistanceConstraints(atoms.constraints.index, self.lengths),
        )
        self.atoms, self.dihedrals = atoms, dihedrals(topology)
        # Rows of the two bonds of waters, and of the distances of their hydrogens.
        waters = torch.tensor([x.residue.name == "HOH" for x in topology.atoms()])
        oxygens = torch.tensor([symbol == "O" for symbol in atoms.symbols])
        ends = atoms.constraints.index
        self.bonds = waters[ends].all(-1) & oxygens[ends].any(-1)
        self.sides = waters[ends].all(-1) & ~self.bonds

    def solver(self, **options):
        return adjsim.Splitting(self.piston.scheme, DT * FS, **options)

    def record(self, state):
        """Return density (g/cm3), potential energy (kJ/mol), phi and psi."""
        energy = self.dynamics.potential_energy(state) / KILOJOULE
        work = self.piston.pressure * self.piston.volume(state) / KILOJOULE
        angles = adjsim.dihedrals(state.position, self.dihedrals)
        found = [self.piston.density(state) * GRAMS, energy - work, *angles.unbind(-1)]
        return torch.stack(found, -1)

    def start(self, states):
        """Return the batch of starts of stored positions (nm), velocities and boxes."""
        position, velocity, box = (
            torch.as_tensor(np.array([x[name] for x in states]))
            for name in ("position", "velocity", "box")
        )
        # Of a molecule whose velocities are in nm/ps.
        momentum = velocity * 10 / PS * self.atoms.mass[:, None]
        return self.dynamics.init(position * 10, momentum, box=box * 10)


def frames(length=LENGTH):
    """Return the save times of a run of so many picoseconds."""
    return np.arange(round(length * 1000 / (DT * EVERY)) + 1) * DT * EVERY * FS


def starts(seed):
    """Melt the box by OpenMM and keep states that are APART picoseconds apart."""
    system, positions, _ = made()
    run = context(system, seed)
    run.setPositions(positions)
    openmm.LocalEnergyMinimizer.minimize(run)
    run.setVelocitiesToTemperature(KELVIN * unit.kelvin, seed)
    kept = []
    for length in (MELT, *[APART] * (REPLICAS - 1)):
        run.getIntegrator().step(round(length * 1000 / DT))
        state = run.getState(getPositions=True, getVelocities=True)
        kept.append(
            {
                "position": state.getPositions(asNumpy=True)._value,
                "velocity": state.getVelocities(asNumpy=True)._value,
                "box": state.getPeriodicBoxVectors(asNumpy=True)._value.diagonal(),
            }
        )
    return kept


def stored_starts():
    return json.loads(FILE.read_text())["starts"]["results"]


def by_openmm(seed):
    """Return the records, (replicas, frames, 4), and seconds a step."""
    system, _, topology = made()
    index = dihedrals(topology)
    mass = sum(
        system.getParticleMass(k)._value for k in range(system.getNumParticles())
    )
    records, begun = [], time.process_time()
    for k, kept in enumerate(stored_starts()):
        run = context(system, seed + k)
        run.setPeriodicBoxVectors(*np.diag(kept["box"]))
        run.setPositions(np.array(kept["position"]))
        run.setVelocities(np.array(kept["velocity"]))
        rows = []
        for _ in frames()[1:]:
            run.getIntegrator().step(EVERY)
            state = run.getState(getEnergy=True, getPositions=True)
            grams = mass / (state.getPeriodicBoxVolume() / unit.angstrom**3) * GRAMS
            position = torch.tensor(state.getPositions(asNumpy=True)._value)
            rows.append(
                [
                    grams,
                    state.getPotentialEnergy()._value,
                    *adjsim.dihedrals(position, index).tolist(),
                ]
            )
        records.append(rows)
        print(k, np.mean(rows, 0), flush=True)
    steps = REPLICAS * (len(frames()) - 1) * EVERY
    return {"records": records, "seconds a step": (time.process_time() - begun) / steps}


@torch.no_grad()
def by_piston(seed):
    """Return the records, (replicas, frames, 4), and seconds a step."""
    solvated, records, begun = Solvated(), [], time.process_time()
    for k, kept in enumerate(stored_starts()):
        run = adjsim.simulate(
            solvated.dynamics,
            solvated.start([kept]),
            frames(),
            solver=solvated.solver(),
            generator=seed + k,
            compile=True,
            record=solvated.record,
            progress=True,
        )
        records.append(run.record[1:, 0])
        print(k, records[-1].mean(0), flush=True)
    steps = REPLICAS * (len(frames()) - 1) * EVERY
    seconds = (time.process_time() - begun) / steps
    return {"records": torch.stack(records), "seconds a step": seconds}


def path(seed):
    """Differentiate the density at the end of exact paths, and time it."""
    solvated, rows = Solvated(), []
    for steps in STEPS:
        solvated.dynamics.zero_grad()
        # The start follows the lengths too.
        start = solvated.start(stored_starts()[:1])
        begun = time.process_time()
        run = adjsim.simulate(
            solvated.dynamics,
            start,
            [0.0, steps * DT * FS],
            solver=solvated.solver(exact=True),
            adjoint=adjsim.ReversibleAdjoint(),
            generator=seed,
            compile=True,
        )
        forward = time.process_time() - begun
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        solvated.piston.density(run.final).sum().mul(GRAMS).backward()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        slope = solvated.lengths.grad
        rows.append(
            {
                "steps": steps,
                "by bonds of water": slope[solvated.bonds].sum(),
                "by H-H of water": slope[solvated.sides].sum(),
                "norm": slope.norm(),
                "reconstruction error": run.stats["reconstruction_error"],
                "growth": run.stats["cotangent_growth"],
                "buffer bits": run.stats["buffer_bits"],
                "seconds forward": forward,
                "seconds backward": time.process_time() - begun - forward,
                "megabytes of backward": (after - before) / 1024,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    head = commit(__file__)  # before the runs, since the code is that of now
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    parts = {"starts": starts, "openmm": by_openmm, "piston": by_piston, "path": path}
    for name in sys.argv[1:] or SEEDS:
        begun = time.process_time()
        results = parts[name](SEEDS[name])
        study[name] = {
            "seed": SEEDS[name],
            "commit": head,
            "minutes": round((time.process_time() - begun) / 60, 1),
            "results": rounded(results, 7),
        }
        with replacing(FILE) as partial:
            partial.write_text(json.dumps(study) + "\n")


if __name__ == "__main__":
    main()
