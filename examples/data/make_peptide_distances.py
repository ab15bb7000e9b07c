"""Make peptide_distances.json: the long runs behind plot_peptide_distances.py.

Run: python examples/data/make_peptide_distances.py [part ...]. Without a part, all of
them are run, which takes about eight minutes on one core. Each part replaces its own
entry of the file. The structure, ``trialanine.pdb``, is built by
``build_dipeptide.py``; the argument ``structure`` writes it again.
"""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openmm.app as app
import torch
from ase import units
from build_dipeptide import build, write_pdb
from openmm import unit
from studies import commit

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.estimators.memory import PeakMemory
from adjsim.io import from_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "peptide_distances.json"
PS, DT, KT, FRICTION = 1000 * units.fs, 2 * units.fs, 300 * units.kB, 1.0
TRAINED = "ALA N-CA-C-N"
LENGTH, FRAMES, STARTS, COPIES = 0.3, 25, 16, 8
EPOCHS, RATE = 20, 0.01
GROWTH = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
STEPS = {"exact": [500, 2000, 8000, 32000, 128000], "direct": [25, 50, 100]}


class Peptide:
    """Trialanine in OBC2 water, and the distances between its residues."""

    def __init__(self):
        pdb = app.PDBFile(str(HERE / "trialanine.pdb"))
        forces = app.ForceField("amber14-all.xml", "implicit/obc2.xml")
        system = forces.createSystem(
            pdb.topology,
            nonbondedMethod=app.NoCutoff,
            constraints=None,
            rigidWater=False,
            # Masses do not change the distribution, and heavy hydrogens allow 2 fs.
            hydrogenMass=4 * unit.amu,
        )
        self.potential, self.structure = from_openmm(
            system, pdb.positions, pdb.topology
        )
        self.residues = [atom.residue.index for atom in pdb.topology.atoms()]
        count = self.residues[-1] + 1
        self.pairs = torch.triu_indices(count, count, 1)
        labels = self.potential.labels["torsions"]
        self.types = [i for i, label in enumerate(labels) if label == TRAINED]
        self.k = self.potential.torsions.k
        self.warm, self.hot = (
            adjsim.Langevin(
                self.potential,
                self.structure.mass,
                t * units.kB,
                friction=FRICTION / PS,
            )
            for t in (300.0, 900.0)
        )
        self.known = self.k.detach()[self.types].clone()

    def set(self, k):
        with torch.no_grad():
            self.k[self.types] = torch.as_tensor(k)

    def only(self, *names):
        """Make these parameters trainable, and no others."""
        for name, parameter in self.potential.named_parameters():
            parameter.requires_grad_(name in names)

    def distances(self, position):
        """Return the distances between the centres of residues, (..., pairs)."""
        found = adjsim.residue_distances(position, self.residues)
        return found[..., self.pairs[0], self.pairs[1]]

    def differences(self, start, reference, duration, seed, **options):
        """Return distance minus reference, (times, replicas, pairs), and the run."""
        generator = torch.Generator().manual_seed(seed)
        run = adjsim.simulate(
            self.warm,
            self.warm.init(start, generator=generator),
            torch.linspace(0, duration * PS, FRAMES + 1),
            generator=seed,
            **{
                "solver": adjsim.Splitting("BAOAB", DT, exact=True),
                "adjoint": adjsim.ReversibleAdjoint(),
                "compile": True,
                **options,
            },
        )
        return self.distances(run.position[1:]) - reference, run

    def losses(self, kind, start, reference, duration, seed):
        """Return the loss of each start, in square angstrom.

        "square" is the mean of squared differences over pairs and saved times, for one
        run of each start. "product" is the mean of the products of the differences of
        two runs, whose expectation is the square of the mean difference.
        """
        if kind == "square":
            found, _ = self.differences(start, reference, duration, seed)
            return (found**2).mean((0, 2))
        twice = start.repeat(2, 1, 1), reference.repeat(2, 1)
        found, _ = self.differences(*twice, duration, seed)
        one, other = found.unflatten(1, (2, -1)).unbind(1)
        return (one * other).mean((0, 2))

    def starts(self, count, seed):
        """Return conformations of runs at 900 K, cooled for a short time."""
        dynamics = self.hot
        generator = torch.Generator().manual_seed(seed)
        start = self.structure.position.repeat(count, 1, 1)
        with torch.no_grad():
            hot = adjsim.simulate(
                dynamics,
                dynamics.init(start, generator=generator),
                [0.0, 9 * PS],
                solver=adjsim.BAOAB(DT),
                generator=seed,
                compile=True,
            ).final.position
            dynamics = self.warm
            return adjsim.simulate(
                dynamics,
                dynamics.init(hot, generator=generator),
                [0.0, 0.6 * PS],
                solver=adjsim.BAOAB(DT),
                generator=seed + 1,
                compile=True,
            ).final.position

    def reference(self, starts, duration, copies, seed):
        """Return the mean distances of each start with the present numbers."""
        dynamics = self.warm
        generator = torch.Generator().manual_seed(seed)
        many = starts.repeat(copies, 1, 1)
        with torch.no_grad():
            position = adjsim.simulate(
                dynamics,
                dynamics.init(many, generator=generator),
                torch.linspace(0, duration * PS, FRAMES + 1),
                solver=adjsim.BAOAB(DT),
                generator=seed,
                compile=True,
            ).position[1:]
        return self.distances(position).unflatten(1, (copies, -1)).mean((0, 1))


def problem(model, seed):
    """Return starts, and their mean distances with the known numbers."""
    starts = model.starts(STARTS, seed)
    return starts, model.reference(starts, LENGTH, COPIES, seed + 10)


def train(model, kind, starts, reference, seed):
    """Train the torsions of psi, from zero, on distances that known ones made."""
    k = torch.nn.Parameter(torch.zeros(len(model.types)))
    adam = torch.optim.Adam([k], lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS, RATE / 10)
    rows = []
    for epoch in range(EPOCHS):
        model.set(k.detach())
        loss = model.losses(kind, starts, reference, LENGTH, seed + 100 + epoch).mean()
        (gradient,) = torch.autograd.grad(loss, model.k)
        rows.append({"k": k.detach().clone(), "loss": loss.item()})
        k.grad = gradient[model.types]
        adam.step()
        rate.step()
    print(kind, k.tolist(), flush=True)
    return {"kind": kind, "seed": seed, "rows": rows, "trained": k.detach().clone()}


def compared(model, trainings, starts, reference, seed):
    """Compare the numbers before and after with the known ones, with the same noise."""
    numbers = {
        "before": torch.zeros(len(model.types)),
        **{each["kind"]: each["trained"] for each in trainings},
        "known": model.known,
    }
    found = {}
    for name, k in numbers.items():
        model.set(k)
        with torch.no_grad():
            found[name] = {
                "square": model.losses("square", starts, reference, LENGTH, seed),
                "distances": model.reference(starts, LENGTH, COPIES, seed + 1),
            }
    model.set(model.known)
    return found


def at_known(model, starts, reference, seed):
    """Return the gradients of both losses with the known numbers, of each start."""
    model.set(model.known)
    found = {}
    for kind in ("square", "product"):
        rows = []
        for i, (start, own) in enumerate(zip(starts, reference, strict=True)):
            many = start.repeat(COPIES, 1, 1), own.repeat(COPIES, 1)
            loss = model.losses(kind, *many, LENGTH, seed + i).mean()
            rows.append(torch.autograd.grad(loss, model.k)[0][model.types])
        found[kind] = torch.stack(rows)
        print(kind, found[kind].mean(0), found[kind].std(0) / 4, flush=True)
    return found


def training(seeds=(1000, 3000)):
    """Train with both losses, for two groups of starts."""
    model = Peptide()
    model.only("torsions.k")
    groups = []
    for seed in seeds:
        starts, reference = problem(model, seed)
        trainings = [
            train(model, kind, starts, reference, seed)
            for kind in ("square", "product")
        ]
        groups.append(
            {
                "seed": seed,
                "starts": starts,
                "reference": reference,
                "trainings": trainings,
                "compared": compared(model, trainings, starts, reference, seed + 500),
                "at known": at_known(model, starts, reference, seed + 600),
            }
        )
    return {"seed": list(seeds), "known": model.known, "groups": groups}


def growth(seed=5000):
    """Take gradients of single runs of several lengths, and central differences.

    The gradient is that of the steps without the rounding of exact runs, so the
    differences are of plain runs.
    """
    model, h = Peptide(), 1e-5
    model.only("torsions.k")
    starts, reference = problem(model, 3000)
    solver, middle = adjsim.BAOAB(DT), model.types[1]
    gradients, quotients = [], []
    for duration in GROWTH:
        rows = []
        for r in range(12):
            part = starts[r : r + 1], reference[r : r + 1], duration, seed + r
            loss = model.losses("square", *part)
            rows.append(torch.autograd.grad(loss.sum(), model.k)[0][middle])
        gradients.append(torch.stack(rows))
        pair, part = [], (starts[:1], reference[:1], duration, seed)
        for k in (model.known[1] + h, model.known[1] - h):
            with torch.no_grad():
                model.k[middle] = k
                found, _ = model.differences(*part, solver=solver)
                pair.append((found**2).mean().item())
        model.set(model.known)
        quotients.append((pair[0] - pair[1]) / (2 * h))
        print(duration, gradients[-1].tolist(), quotients[-1], flush=True)
    return {
        "seed": seed,
        "lengths": GROWTH,
        "gradients": gradients,
        "step (eV)": h,
        "differences": quotients,
    }


def memory_of(kind, steps):
    """Return the bytes by which a gradient lets memory grow, and its seconds."""
    model = Peptide()
    model.only("torsions.k")
    start = model.structure.position.unsqueeze(0)
    reference = model.distances(start) - 0.5
    options = (
        {} if kind == "exact" else {"adjoint": adjsim.DirectAdjoint(), "compile": False}
    )

    def once(steps):
        part = start, reference, steps * DT / PS, 7
        found, _ = model.differences(*part, **options)
        torch.autograd.grad((found**2).mean(), model.k)

    once(25)
    begun = time.perf_counter()
    with PeakMemory(start.device) as memory:
        once(steps)
    return memory.bytes, time.perf_counter() - begun


def memory():
    """Measure the memory of gradients of several lengths, each in a fresh process."""
    rows = []
    for kind, lengths in STEPS.items():
        for steps in lengths:
            found = subprocess.run(
                [sys.executable, __file__, "measure", kind, str(steps)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            rows.append([kind, steps, int(found[-2]), float(found[-1])])
            print(*rows[-1], flush=True)
    return {"seed": 7, "rows": rows}


def short(x):
    """Return tensors and arrays as lists, and floats with six digits."""
    if isinstance(x, torch.Tensor | np.ndarray):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [short(y) for y in x]
    if isinstance(x, dict):
        return {key: short(y) for key, y in x.items()}
    return float(f"{x:.6g}") if isinstance(x, float) else x


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    if sys.argv[1:2] == ["structure"]:
        helix = build(["ACE", "ALA", "ALA", "ALA", "NME"], phi=-57.4, psi=-47.5)
        write_pdb("trialanine.pdb", *helix)
        return
    if sys.argv[1:2] == ["measure"]:
        print(*memory_of(sys.argv[2], int(sys.argv[3])))
        return
    head = commit(__file__)  # before the runs, since the code is that of now
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    study["settings"] = {
        "dt (fs)": DT / units.fs,
        "kT (eV)": KT,
        "friction (1/ps)": FRICTION,
        "length (ps)": LENGTH,
        "starts": STARTS,
        "copies": COPIES,
        "rate (eV)": RATE,
    }
    parts = {f.__name__: f for f in (training, growth, memory)}
    for name in sys.argv[1:] or parts:
        begun = time.process_time()
        study[name] = {
            "made_by": "examples/data/make_peptide_distances.py",
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
