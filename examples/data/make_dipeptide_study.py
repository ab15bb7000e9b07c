"""Make dipeptide_study.json: the long runs behind the page plot_dipeptide.py.

Run: python examples/data/make_dipeptide_study.py [part ...]. Without a part, all of
them are run, which takes about five minutes on one core. Each part replaces its own
entry of the file.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openmm.app as app
import torch
from ase import units
from openmm import unit
from studies import commit

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.io import from_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "dipeptide_study.json"
PS, DT, KT = 1000 * units.fs, 3 * units.fs, 900 * units.kB
FRICTION, EVERY, REPLICAS, BINS, ROUNDS = 1 / PS, 0.3 * PS, 32, 36, 3
FILES = {
    "vacuum": ["amber14-all.xml"],
    "OBC2": ["amber14-all.xml", "implicit/obc2.xml"],
}
# Torsions to recover: the label of the type and its periodicity.
CHOSEN = [
    ("ACE C-N-CA-CB", 1),
    ("ACE C-N-CA-CB", 2),
    ("ALA N-CA-C-N", 1),
    ("ALA N-CA-C-N", 2),
    ("ALA N-CA-C-N", 3),
]
DURATIONS = [0.03, 0.06, 0.12, 0.24, 0.36, 0.48, 0.72]


class Dipeptide:
    """The force field with trainable torsions, and the functions of its dihedrals."""

    def __init__(self, solvent):
        pdb = app.PDBFile(str(HERE / "dipeptide.pdb"))
        system = app.ForceField(*FILES[solvent]).createSystem(
            pdb.topology,
            nonbondedMethod=app.NoCutoff,
            constraints=None,
            rigidWater=False,
            # Masses do not change the distribution, and heavy hydrogens allow 3 fs.
            hydrogenMass=4 * unit.amu,
        )
        self.potential, self.structure = from_openmm(
            system, pdb.positions, pdb.topology
        )
        for parameter in self.potential.parameters():
            parameter.requires_grad_(False)
        torsions = self.potential.torsions
        self.k = torsions.k.requires_grad_(True)
        found = list(
            zip(self.potential.labels["torsions"], torsions.periodicity, strict=True)
        )
        self.types = [found.index(wanted) for wanted in CHOSEN]
        self.known = self.k.detach()[self.types].clone()
        self.dynamics = adjsim.Langevin(
            self.potential, self.structure.mass, KT, friction=FRICTION
        )
        atoms = [(atom.residue.name, atom.name) for atom in pdb.topology.atoms()]
        c, n, ca, cb, carbonyl, last = (
            atoms.index(x)
            for x in (
                ("ACE", "C"),
                ("ALA", "N"),
                ("ALA", "CA"),
                ("ALA", "CB"),
                ("ALA", "C"),
                ("NME", "N"),
            )
        )
        self.index = [[c, n, ca, carbonyl], [n, ca, carbonyl, last], [c, n, ca, cb]]

    def set(self, k):
        with torch.no_grad():
            self.k[self.types] = torch.as_tensor(k)

    def angles(self, position):
        """Return phi, psi and the dihedral of CB, (..., 3)."""
        return adjsim.dihedrals(position, self.index)

    def slopes(self, position):
        """Return dU/dk of the chosen torsions, 1 + cos(n angle - phase), (..., 5)."""
        angles = self.angles(position)
        phases = self.potential.torsions.phase[self.types]
        return torch.stack(
            [
                1 + torch.cos(n * angles[..., 1 if "N-CA-C-N" in name else 2] - phase)
                for (name, n), phase in zip(CHOSEN, phases, strict=True)
            ],
            -1,
        )

    def simulation(self, start, duration):
        return adjsim.Simulation(
            self.dynamics,
            lambda count, generator: self.dynamics.init(
                start[:count], generator=generator
            ),
            [0.0, duration],
            solver=adjsim.BAOAB(DT),
            compile=True,
        )

    def run(self, start, duration, seed, frames=1):
        """Return positions, (frames, replicas, atoms, 3), the last at the end."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            made = adjsim.simulate(
                self.dynamics,
                self.dynamics.init(start, generator=generator),
                torch.arange(frames + 1) * (duration / frames),
                solver=adjsim.BAOAB(DT),
                generator=seed,
                compile=True,
            )
        assert made.stats["compiled_forward"] == "C++"
        return made.position[1:]

    def measure(self, start, duration, seed):
        """Return the last positions, an entry of the file, and the frames."""
        frames = self.run(start, duration, seed, round(duration / EVERY))
        edges = np.linspace(-np.pi, np.pi, BINS + 1)
        angles = self.angles(frames)[..., :2].flatten(0, 1).numpy()
        counts, _, _ = np.histogram2d(*angles.T, bins=[edges, edges])
        series = self.slopes(frames)
        return frames, {
            "counts": counts.astype(int),
            "means": series.mean(0),  # of each replica
            "ess": min(adjsim.mean_with_error(x).ess for x in series.unbind(-1)),
            "duration": duration / PS,
            "k": self.k.detach()[self.types],
        }


def mean_and_covariance(replicas):
    """Return the mean of independent replicas, and the covariance of the mean."""
    return replicas.mean(0), torch.cov(replicas.T) / len(replicas)


def short(x, digits=6):
    """Return tensors and arrays as lists, and floats with few digits."""
    if isinstance(x, torch.Tensor | np.ndarray):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [short(y, digits) for y in x]
    if isinstance(x, dict):
        return {key: short(y, digits) for key, y in x.items()}
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def target(solvent, seed):
    """Sample with the known numbers; also return the frames, and a few of them."""
    model = Dipeptide(solvent)
    begin = model.structure.position.repeat(REPLICAS, 1, 1)
    settled = model.run(begin, 60 * PS, seed)[-1]
    frames, entry = model.measure(settled, 90 * PS, seed + 1)
    # Every 3 ps one state of each replica.
    apart = round(3 * PS / EVERY)
    states = frames[apart - 1 :: apart].flatten(0, 1)
    return {"seed": seed, **entry}, frames.flatten(0, 1), states


def fit(solvent, wanted, seed):
    """Recover the torsions from the means of the target, from zero.

    A round samples anew. Within it Newton steps use the same samples, until these are
    worth less than a fifth of their number.
    """
    model = Dipeptide(solvent)
    k, rows = torch.zeros(len(CHOSEN)), []
    at = model.structure.position.repeat(REPLICAS, 1, 1)
    average = adjsim.TimeAverage(lambda state: model.slopes(state.position))
    aim, spread = mean_and_covariance(wanted["means"])
    before = None
    for i in range(ROUNDS):
        own = seed + 10 * i
        model.set(k)
        at = model.run(at, 30 * PS, own)[-1]
        if before is None:
            frames, before = model.measure(at, 30 * PS, own + 1)
            at = frames[-1]
        reweighting = adjsim.Reweighting(every=3 * EVERY, threshold=0.01)
        simulation = model.simulation(at, 30 * PS)
        for _ in range(6):
            estimate = reweighting(
                simulation, average, replicas=REPLICAS, generator=own + 2
            )
            if estimate.diagnostics["weights_ess"] < 0.2:
                break
            jacobian = estimate.grad["potential.torsions.k"][:, model.types]
            change = torch.linalg.solve(jacobian, aim - estimate.value)
            change *= 0.02 / max(0.02, float(change.abs().max()))
            info = estimate.diagnostics
            rows.append(
                {
                    "k": k,
                    "sampled": info["sampled"],
                    "share": info["weights_ess"],
                    "ess": info["ess"],
                    "difference": aim - estimate.value,
                    "difference error": estimate.value_stderr,
                }
            )
            k = k + change
            model.set(k)
        print(solvent, "round", i, k.tolist(), info["ess"], flush=True)
    at = model.run(at, 30 * PS, seed + 90)[-1]
    frames, after = model.measure(at, 60 * PS, seed + 91)
    value, own_spread = mean_and_covariance(after["means"])
    # The derivative of the means, by the covariances of the frames.
    series = model.slopes(frames).flatten(0, 1)
    jacobian = -torch.cov(series.T) / KT
    inverse = torch.linalg.inv(jacobian)
    return {
        "seed": seed,
        "history": rows,
        "last": k,
        "fitted": k + inverse @ (aim - value),
        "covariance": inverse @ (spread + own_spread) @ inverse.T,
        "jacobian": jacobian,
        "known": model.known,
        "before": before,
        "after": after,
        # Some states, from which the page continues.
        "states": [[short(atom, 5) for atom in r] for r in frames[-1].tolist()],
    }


def paths(frames, states, seed, length):
    """Take the response along short runs, and recover the torsions through them.

    The starts are states of the target. Their distribution stays as it is only with
    the numbers that made it, so the fit asks for the same means at the end of the runs.
    """
    model = Dipeptide("vacuum")
    observable = adjsim.Final(lambda state: model.slopes(state.position))
    pathwise = adjsim.Pathwise(adjsim.ReversibleAdjoint())
    first = model.slopes(states)
    equilibrium = torch.cov(model.slopes(frames).T) / -KT

    def response(duration, own):
        simulation = model.simulation(states, duration * PS)
        estimate = pathwise(
            simulation, observable, replicas=len(states), chunks=30, generator=own
        )
        assert estimate.diagnostics["compiled"]
        columns = (estimate.grad, estimate.grad_stderr)
        grad, stderr = (x["potential.torsions.k"][:, model.types] for x in columns)
        return grad, stderr

    rows = []
    for i, duration in enumerate(DURATIONS):
        grad, stderr = response(duration, seed + i)
        share = torch.linalg.solve(equilibrium, grad)
        weights = torch.linalg.inv(equilibrium)
        error = ((weights.T * stderr) ** 2).sum().sqrt()
        rows.append(
            {
                "duration": duration,
                "share": float(share.trace()) / len(CHOSEN),
                "error": float(error) / len(CHOSEN),
                "response": grad,
                "response error": stderr,
            }
        )
        print("paths", duration, rows[-1]["share"], rows[-1]["error"], flush=True)
    k, history = torch.zeros(len(CHOSEN)), []
    for i in range(6):
        model.set(k)
        history.append(k)
        end = model.run(states, length * PS, seed + 100 + i)[-1]
        drift = model.slopes(end) - first
        grad, _ = response(length, seed + 100 + i)
        change = -torch.linalg.solve(grad, drift.mean(0))
        k = k + change * 0.03 / max(0.03, float(change.abs().max()))
    print("path fit", length, k.tolist(), flush=True)
    # Frames of a replica are correlated, so each replica is one sample.
    _, spread = mean_and_covariance(drift.unflatten(0, (-1, REPLICAS)).mean(0))
    inverse = torch.linalg.inv(grad)
    return {
        "seed": seed,
        "replicas": len(states),
        "known": model.known,
        "equilibrium": equilibrium,
        "rows": rows,
        "length": length,
        "history": history,
        "fitted": k,
        "covariance": inverse @ spread @ inverse.T,
    }


def recovered(solvent, seed):
    """Sample with the known numbers, and recover these."""
    wanted, *_ = target(solvent, seed)
    return {"target": wanted, "fit": fit(solvent, wanted, seed + 100)}


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    head = commit(__file__)  # before the runs, since the code is that of now
    parts = {
        "vacuum": lambda: recovered("vacuum", 1000),
        "paths": lambda: paths(*target("vacuum", 1000)[1:], 5000, 0.12),
        "OBC2": lambda: recovered("OBC2", 2000),
    }
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    study["settings"] = {
        "dt (fs)": DT / units.fs,
        "kT (eV)": KT,
        "friction (1/ps)": FRICTION * PS,
        "replicas": REPLICAS,
    }
    study["chosen"] = CHOSEN
    for name in sys.argv[1:] or parts:
        begun = time.process_time()
        study[name] = {
            "made_by": "examples/data/make_dipeptide_study.py",
            "commit": head,
            "versions": {x: version(x) for x in ("torch", "openmm", "numpy")},
            **parts[name](),
            "seconds": time.process_time() - begun,
        }
        print(name, study[name]["seconds"], flush=True)
        with replacing(FILE) as temporary:
            text = json.dumps(short(study), separators=(",", ":"))
            temporary.write_text(text + "\n")


if __name__ == "__main__":
    main()
