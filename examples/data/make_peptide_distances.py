"""Make peptide_distances.json: the long runs behind plot_peptide_distances.py.

Run: python examples/data/make_peptide_distances.py. It takes about ten minutes on one
core. The structure, ``trialanine.pdb``, is built by ``build_dipeptide.py``; the
argument ``structure`` writes it again.
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

import adjsim
from adjsim._files import replacing
from adjsim.estimators.memory import PeakMemory
from adjsim.io import from_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "peptide_distances.json"
PS, DT, KT, FRICTION = 1000 * units.fs, 2 * units.fs, 300 * units.kB, 1.0
TRAINED = "ALA N-CA-C-N"
LENGTH, FRAMES, STARTS, COPIES = 0.3, 25, 16, 8
EPOCHS, RATE = 16, 0.012
GROWTH = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
STEPS = {"exact": [500, 2000, 8000, 32000], "direct": [25, 50, 100]}


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

    def loss(self, start, reference, duration, seed, **options):
        """Return the loss of each replica, and the trajectory.

        The loss is the mean over pairs and saved times of the squared difference of
        distance and reference, in square angstrom.
        """

        dynamics = self.warm
        generator = torch.Generator().manual_seed(seed)
        run = adjsim.simulate(
            dynamics,
            dynamics.init(start, generator=generator),
            torch.linspace(0, duration * PS, FRAMES + 1),
            solver=adjsim.Splitting("BAOAB", DT, exact=True),
            generator=seed,
            **{"adjoint": adjsim.ReversibleAdjoint(), "compile": True, **options},
        )
        difference = self.distances(run.position[1:]) - reference
        return (difference**2).mean((0, -1)), run

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


def train(seed):
    """Train the torsions of psi, from zero, on distances that known ones made."""
    model = Peptide()
    model.only("torsions.k")
    with torch.no_grad():
        starts = model.starts(STARTS, seed)
        reference = model.reference(starts, LENGTH, COPIES, seed + 10)
    k = torch.nn.Parameter(torch.zeros(len(model.types)))
    adam = torch.optim.Adam([k], lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS, RATE / 10)
    rows = []
    for epoch in range(EPOCHS):
        model.set(k.detach())
        losses, run = model.loss(starts, reference, LENGTH, seed + 100 + epoch)
        (gradient,) = torch.autograd.grad(losses.mean().log(), model.k)
        rows.append(
            {
                "k": k.detach().clone(),
                "loss": float(losses.mean()),
                "gradient": gradient[model.types],
            }
        )
        k.grad = gradient[model.types]
        adam.step()
        rate.step()
        print(epoch, rows[-1]["loss"], k.tolist(), run.stats, flush=True)
    # The losses with the same noise, before, after and with the known numbers.
    kept = {}
    with torch.no_grad():
        for name, at in (
            ("before", torch.zeros_like(k)),
            ("after", k.detach()),
            ("known", model.known),
        ):
            model.set(at)
            losses, _ = model.loss(starts, reference, LENGTH, seed + 500)
            kept[name] = losses
            kept[name + " distances"] = model.reference(
                starts, LENGTH, COPIES, seed + 600
            )
    return {
        "seed": seed,
        "rows": rows,
        "trained": k.detach(),
        "known": model.known,
        "reference": reference,
        **kept,
    }, starts


def growth(starts, reference, seed):
    """Take gradients of single runs of several lengths, and compare some of them.

    The central differences are of the same exact runs.
    """
    model, h = Peptide(), 1e-6
    model.only("torsions.k")
    gradients, quotients = [], []
    for duration in GROWTH:
        losses = []
        for r in range(12):
            part = starts[r : r + 1], reference[r : r + 1], duration, seed + r
            loss, _ = model.loss(*part)
            losses.append(torch.autograd.grad(loss.sum(), model.k)[0][model.types])
        gradients.append(torch.stack(losses))
        pair = []
        for sign in (1, -1):
            model.set(model.known + sign * h * torch.tensor([0.0, 1.0, 0.0]))
            pair.append(model.loss(starts[:1], reference[:1], duration, seed)[0].item())
        model.set(model.known)
        quotients.append((pair[0] - pair[1]) / (2 * h))
        print(duration, gradients[-1].abs().median(), quotients[-1], flush=True)
        print("  ", gradients[-1][0], flush=True)
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
        losses, _ = model.loss(start, reference, steps * DT / PS, 7, **options)
        torch.autograd.grad(losses.sum(), model.k)

    once(20)
    begun = time.perf_counter()
    with PeakMemory(start.device) as memory:
        once(steps)
    return memory.bytes, time.perf_counter() - begun


def memory():
    """Measure each length in a fresh process."""
    rows = []
    for kind, lengths in STEPS.items():
        for steps in lengths:
            found = subprocess.run(
                [sys.executable, __file__, "memory", kind, str(steps)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            rows.append([kind, steps, int(found[-2]), float(found[-1])])
            print(*rows[-1], flush=True)
    return rows


def commit():
    """Return the commit of the working tree, which must not have changes."""
    commands = (["git", "status", "--porcelain", "-uno"], ["git", "rev-parse", "HEAD"])
    changes, head = (
        subprocess.run(c, cwd=HERE, check=True, capture_output=True, text=True).stdout
        for c in commands
    )
    if any(not line.endswith(FILE.name) for line in changes.splitlines()):
        raise SystemExit(f"commit the changes first:\n{changes}")
    return head.strip()


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
    if sys.argv[1:2] == ["memory"]:
        print(*memory_of(sys.argv[2], int(sys.argv[3])))
        return
    head, begun = commit(), time.process_time()
    trainings = []
    for seed in (1000, 3000):
        training, starts = train(seed)
        trainings.append(training)
        print("trained", time.process_time() - begun, flush=True)
    study = {
        "made_by": "examples/data/make_peptide_distances.py",
        "commit": head,
        "versions": {x: version(x) for x in ("torch", "openmm", "numpy")},
        "settings": {
            "dt (fs)": DT / units.fs,
            "kT (eV)": KT,
            "friction (1/ps)": FRICTION,
            "length (ps)": LENGTH,
            "starts": STARTS,
            "copies": COPIES,
            "rate (eV)": RATE,
        },
        "trainings": trainings,
        "starts": starts,
        "growth": growth(starts, trainings[-1]["reference"], 5000),
        "memory": memory(),
    }
    study["seconds"] = time.process_time() - begun
    with replacing(FILE) as temporary:
        temporary.write_text(json.dumps(short(study), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
