"""Exact steps of Trp-cage in GBn2 (284 atoms), forward and backward: time, memory and bits.

::

    python benchmarks/protein.py DATA
    python benchmarks/protein.py DATA --steps 1000000 --store FOLDER --kill 1500

DATA is the folder of structures and targets of ``examples/data/make_gb99dms.py``. The gradient is
that of the loss by the means of distances, and its cotangents are clipped every 100 steps to the
norm 0.1 in 1/angstrom, since they leave the range of float64 after 160,000 steps. The steps are
exact: the backward run has to end with the bits of the start. Run it by one thread and by two
(``OMP_NUM_THREADS``). With a store the same command goes on after it was killed, and ``--kill``
kills it after so many seconds. The last line has a digest of the record and of all gradients, by
which runs are compared.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import adjsim

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
sys.path.insert(0, str(DATA))
from gb99dms import Plan, Protein  # noqa: E402

CLIP, SEED = adjsim.Clip(0.1, 100), 1


def resident(which: str) -> float:
    """Return a size of the process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(which))


def planned(steps: int) -> Plan:
    return Plan(steps, steps // 2, max(1, steps // 20), 1)


def repeated(protein: Protein, start: Any, steps: int) -> None:
    """Print the minima of some short runs, forward, and forward and backward."""
    forward, whole, _ = protein.timed(planned(steps), SEED, start=start, clip=CLIP)
    print(
        f"{steps} steps, {torch.get_num_threads()} threads: forward {forward:.2f} s, whole "
        f"gradient {whole:.2f} s, ratio {whole / forward:.2f}"
    )


def once(protein: Protein, start: Any, steps: int, store: str | None) -> None:
    """Print time, memory and bits of a run."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident("VmRSS"), time.perf_counter()
    options = {"clip": CLIP, "store": store, "progress": True}
    run = protein.run(planned(steps), SEED, start, **options)
    forward = time.perf_counter() - begun
    gradients = protein.gradients(run)
    seconds = time.perf_counter() - begun
    growth = resident("VmHWM") - before
    print(f"{steps} steps, {torch.get_num_threads()} threads, resident set + {growth:.1f} MB:")
    print(f"forward {forward:.0f} s, whole gradient {seconds:.0f} s")
    names = ("reconstruction_error", "buffer_bits", "buffer_bound", "resumed_at")
    print({name: run.stats.get(name) for name in names})
    print(f"loss {float(protein.loss(run.record[0].detach())):.6f}")
    digest = hashlib.sha256()
    for x in (run.record, run.final.position, *gradients):
        digest.update(x.detach().numpy().tobytes())
    size = sum(float(x.square().sum()) for x in gradients) ** 0.5
    print(f"norm of the gradient {size:.6g}, digest {digest.hexdigest()[:16]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", help="folder of structures and targets")
    parser.add_argument("--steps", type=int, help="one run of so many steps")
    parser.add_argument("--store", help="folder in which this run saves itself")
    parser.add_argument("--kill", type=float, help="seconds after which the process is killed")
    given = parser.parse_args()
    if given.steps is None and (given.store or given.kill):
        parser.error("--store and --kill are for one run: give --steps.")
    torch.set_default_dtype(torch.float64)
    protein = Protein.read(given.data, "trp-cage")
    generator = torch.Generator().manual_seed(SEED)
    start = protein.simulation(planned(100)).initial(1, generator)
    protein.gradients(protein.run(planned(200), SEED, start, CLIP))
    if given.steps is None:
        repeated(protein, start, 1000)
        return
    if given.kill is not None:
        killing = threading.Timer(given.kill, os.kill, (os.getpid(), signal.SIGKILL))
        killing.daemon = True
        killing.start()
    once(protein, start, given.steps, given.store)


if __name__ == "__main__":
    main()
