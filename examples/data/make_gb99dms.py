"""Train a protein force field on distances, and make gb99dms.json.

Run one of these, with the folder of the data (structures and targets); ``torchrun
--nproc-per-node 2`` in place of ``python`` shares the replicas among two cores::

    python examples/data/make_gb99dms.py train DATA OUT --iterations 5
    python examples/data/make_gb99dms.py gradients DATA OUT --steps 1000 --replicas 16
    python examples/data/make_gb99dms.py differences DATA OUT --steps 10000
    python examples/data/make_gb99dms.py costs DATA OUT --steps 1000
    python examples/data/make_gb99dms.py collect DATA OUT

Each part writes a file of its own in the folder OUT, whole or not at all, after every
iteration or row. Run again with the same arguments, it goes on after the last one, and
from stores within it. The means of ``gradients`` stay in a folder beside its file, for
estimators that are asked for later. ``collect`` adds the files to gb99dms.json, in
place of older ones.
"""

import argparse
import csv
import json
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from ase import units
from gb99dms import CONSTRAINED, ESTIMATORS, FLEXIBLE, SIX, Plan, Protein
from studies import commit, rounded

from adjsim.core.durable.files import replacing
from adjsim.core.durable.ranks import Ranks

FILE = Path(__file__).resolve().parent / "gb99dms.json"
# The kinds of numbers of the published table.
PUBLISHED = {
    "charge scale": "coulomb.charge",
    "LJ \u03f5": "lennard_jones.epsilon",
    "LJ \u03c3": "lennard_jones.sigma",
    "torsion": "torsions.k",
    "GB atom radius": "solvent.radius",
    "GB screening": "solvent.scale",
    "parameter \u03b1": "solvent.alpha",
    "parameter \u03b2": "solvent.beta",
    "parameter \u03b3": "solvent.gamma",
    "GB neck scale": "solvent.neck",
    "GB offset": "solvent.offset",
}


def read(path):
    return json.loads(path.read_text()) if path.exists() else {}


def write(path, data):
    """Write a file whole or not at all, by the first rank."""
    if Ranks.of(None).rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def opened(path, settings):
    """Return the rows of a file, or none; refuse those of other settings."""
    found = read(path) or {"settings": settings, "rows": [], "seconds": 0.0}
    if found["settings"] != json.loads(json.dumps(settings)):
        raise ValueError(f"{path} has other settings: {found['settings']}.")
    return found


def jackknife(protein, means):
    """Return the loss of all replicas, and its standard error."""
    count = len(means)
    total = means.sum(0)
    left = torch.stack([protein.loss((total - m) / (count - 1)) for m in means])
    error = (left.var(correction=0) * (count - 1)).sqrt()
    return float(protein.loss(means.mean(0))), float(error)


def train(protein, plan, kind, iterations, rate, seed, folder, head):
    """Follow a gradient by Adam, from the initial numbers; return all iterations."""
    settings = {"plan": plan._asdict(), "kind": kind, "rate": rate, "seed": seed}
    word = kind.replace(" ", "-")
    path = Path(folder) / f"training-{word}.json"
    found, began = opened(path, settings), time.process_time()
    begun = found["seconds"]
    adam = found.setdefault("adam", {x: [0.0] * len(protein.keys) for x in "mv"})
    scales = found.setdefault("scales", [1.0] * len(protein.keys))
    for k in range(len(found["rows"]), iterations):
        protein.scale(dict(zip(protein.keys, scales, strict=True)))
        store = Path(folder) / f"{word}-{k}"
        means = protein.means(plan, seed + k, store)
        estimate = protein.gradient(kind, plan, means, seed + k, store)
        gradient = estimate.grad["scales"]
        loss, error = jackknife(protein, means)
        row = {
            "loss": loss,
            "stderr": error,
            "gradient norm": float(gradient.norm()),
            "norm of its stderr": float(estimate.grad_stderr["scales"].norm()),
            "ess": estimate.diagnostics["ess"],
            "scales": scales,
            "commit": head,
        }
        m, v = (torch.tensor(adam[x]) for x in "mv")
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        unbiased = m / (1 - 0.9 ** (k + 1)), v / (1 - 0.999 ** (k + 1))
        step = rate * unbiased[0] / (unbiased[1].sqrt() + 1e-12)
        scales = found["scales"] = (torch.tensor(scales) - step).tolist()
        adam = found["adam"] = {"m": m.tolist(), "v": v.tolist()}
        # How many frames are left after this step, if it changes one kind of numbers.
        protein.scale(dict(zip(protein.keys, scales, strict=True)))
        row["shares"] = protein.shares()
        found["rows"].append(row)
        found["seconds"] = begun + time.process_time() - began
        write(path, found)
        if Ranks.of(None).rank == 0:
            shutil.rmtree(store, ignore_errors=True)
            draw(found["rows"], Path(folder) / f"training-{word}.png")
        print(k, {x: y for x, y in row.items() if x != "scales"}, flush=True)
    protein.scale(dict(zip(protein.keys, scales, strict=True)))
    return found


def draw(rows, path):
    """Draw loss, gradient, effective sample size and scales of a training."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 2.6), layout="constrained")
    numbers = range(len(rows))
    losses, errors = ([row[x] for row in rows] for x in ("loss", "stderr"))
    axes[0].errorbar(numbers, losses, errors, marker="o")
    for name in ("gradient norm", "norm of its stderr"):
        axes[1].semilogy(numbers, [row[name] for row in rows], marker="o", label=name)
    axes[1].legend(fontsize="small")
    axes[2].plot(numbers, [row["ess"] for row in rows], marker="o")
    axes[3].plot(numbers, [row["scales"] for row in rows], lw=0.7)
    for axis, title in zip(
        axes, ("loss", "gradient", "effective samples", "scales"), strict=True
    ):
        axis.set(xlabel="iteration", title=title)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    plt.close(figure)


def gradients(protein, plan, kinds, seed, folder, head):
    """Estimate the gradient after runs of one length by several estimators."""
    path = Path(folder) / f"gradients-{plan.steps}.json"
    found = opened(path, {"plan": plan._asdict(), "seed": seed})
    means, store = None, path.with_suffix("")
    known = [row["kind"] for row in found["rows"]]
    for kind in (x for x in kinds if x not in known):
        own = store / kind.replace(" ", "-")
        # The seconds of a process that was killed are not known.
        resumed = own.exists()
        if means is None:
            means = protein.means(plan, seed, store)
        began = time.process_time()
        estimate = protein.gradient(kind, plan, means, seed, store)
        seconds = time.process_time() - began
        loss, error = jackknife(protein, means)
        info = estimate.diagnostics
        row = {"kind": kind, "loss": loss, "loss stderr": error}
        for name in ("scales", "kinds"):
            row[name] = estimate.grad[name].tolist()
            row[f"{name} stderr"] = estimate.grad_stderr[name].tolist()
        row |= {"growth": info.get("growth"), "ess": info["ess"], "seconds": seconds}
        row |= {"resumed": resumed, "commit": head}
        found["rows"].append(row)
        found["seconds"] += seconds
        write(path, found)
        if Ranks.of(None).rank == 0:
            shutil.rmtree(own, ignore_errors=True)
        print(plan.steps, kind, loss, error, seconds, flush=True)
    return found


def differences(protein, plan, h, seed, folder, head):
    """Take differences of the loss by scales of kinds, with errors over replicas."""
    path = Path(folder) / f"differences-{plan.steps}.json"
    found = opened(path, {"plan": plan._asdict(), "h": h, "seed": seed})
    for kind in SIX[len(found["rows"]) :]:
        began = time.process_time()
        means = []
        for scale in (1 + h, 1 - h):
            protein.scale(dict.fromkeys(protein.of_kind(kind), scale))
            means.append(protein.means(plan, seed))
        protein.scale({})
        # The replicas of both sides have the same starts and noise, and are left out
        # together.
        up, down = means
        count = len(up)
        every = [
            [protein.loss((m.sum(0) - m[i]) / (count - 1)) for m in (up, down)]
            for i in range(count)
        ]
        left = torch.tensor([(a - b) / (2 * h) for a, b in every])
        value = protein.loss(up.mean(0)) - protein.loss(down.mean(0))
        error = (left.var(correction=0) * (count - 1)).sqrt()
        row = {"kind": kind, "value": float(value) / (2 * h), "stderr": float(error)}
        row["commit"] = head
        found["rows"].append(row)
        found["seconds"] += time.process_time() - began
        write(path, found)
        print(row, flush=True)
    return found


def costs(data, name, plan, seed, folder, head):
    """Measure exact runs and their gradients, of flexible bonds and of constraints."""
    path = Path(folder) / "costs.json"
    found = opened(path, {"plan": plan._asdict(), "seed": seed})
    models = {"flexible": FLEXIBLE, "bonds of hydrogen constrained": CONSTRAINED}
    known = [row["kind"] for row in found["rows"]]
    for kind in (x for x in models if x not in known):
        protein, begun = Protein.read(data, name, models[kind]), time.perf_counter()
        forward, whole, run = protein.timed(plan, seed)
        length = plan.steps * protein.dt / (1e6 * units.fs)
        row = {
            "kind": kind,
            "dt": protein.dt / units.fs,
            "forward": forward / length,
            "gradient": whole / length,
            "reconstruction error": run.stats["reconstruction_error"],
            "commit": head,
        }
        found["rows"].append(row)
        found["seconds"] += time.perf_counter() - begun
        write(path, found)
        print(row, flush=True)
    return found


def tested(protein, scales, plan, seed, folder, name, head):
    """Compute a loss with the initial and with the trained numbers."""
    path = Path(folder) / f"test-{name}.json"
    found = opened(path, {"plan": plan._asdict(), "seed": seed, "name": name})
    for numbers in ({}, scales)[len(found["rows"]) :]:
        protein.scale(numbers)
        began = time.process_time()
        loss, error = jackknife(protein, protein.means(plan, seed))
        found["rows"].append({"loss": loss, "stderr": error, "commit": head})
        found["seconds"] += time.process_time() - began
        write(path, found)
        print(name, loss, error, flush=True)
    return found


def published(data):
    """Return the published relative changes of each kind of numbers."""
    rows = {}
    with (Path(data) / "GB99dms.csv").open(encoding="utf-8") as lines:
        for name, _, _, _, percent in list(csv.reader(lines))[1:]:
            kind = next((x for key, x in PUBLISHED.items() if key in name), None)
            if kind is not None:
                rows.setdefault(kind, []).append([name, float(percent) / 100])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "part", choices=("train", "gradients", "differences", "costs", "collect")
    )
    parser.add_argument("data", help="folder of structures and targets")
    parser.add_argument("out", help="folder of the results")
    parser.add_argument("--protein", default="trp-cage")
    parser.add_argument("--test", default="bba")
    parser.add_argument("--kind", choices=ESTIMATORS, default="reweighting")
    parser.add_argument("--kinds", choices=ESTIMATORS, nargs="+", default=ESTIMATORS)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--h", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    head = commit(__file__)
    steps, out = given.steps, Path(given.out)
    plan = Plan(steps, steps // 2, max(1, steps // 20), given.replicas)
    if given.part == "collect":
        parts = {path.stem: read(path) for path in sorted(out.glob("*.json"))}
        keys = Protein.read(given.data, given.protein).keys
        study = {
            **read(FILE),
            "made_by": "examples/data/make_gb99dms.py",
            "versions": {x: version(x) for x in ("torch", "openmm")},
            "keys": keys,
            "published": published(given.data),
            **parts,
        }
        for part in parts.values():
            part.pop("adam", None)
        write(FILE, rounded(study, 6))
        return
    if given.part == "costs":
        costs(given.data, given.protein, plan, given.seed, out, head)
        return
    protein = Protein.read(given.data, given.protein)
    if given.part == "gradients":
        gradients(protein, plan, given.kinds, given.seed, out, head)
    elif given.part == "differences":
        differences(protein, plan, given.h, given.seed, out, head)
    else:
        options = given.kind, given.iterations, given.rate, given.seed, out
        found = train(protein, plan, *options, head)
        word = given.kind.replace(" ", "-")
        protein.write(out / f"trained-{word}.xml")
        scales = dict(zip(protein.keys, found["scales"], strict=True))
        for which in (given.protein, given.test):
            other, name = Protein.read(given.data, which), f"{word}-{which}"
            tested(other, scales, plan, 900, out, name, head)


if __name__ == "__main__":
    main()
