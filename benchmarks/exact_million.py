"""A million exact steps of BAOAB on thirteen Lennard-Jones atoms, compiled, forward and backward: time, memory, and the proof.

Prints the growth of the resident set from after a warm-up. A second run stores ten states on the way forward and takes each way
back from them, in ten pieces; the largest difference of the two gradients is printed.
Run: python benchmarks/exact_million.py [steps]
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

import adjsim
from adjsim.adjoints.retrace import Retrace
from adjsim.adjoints.sweep import run_swept
from adjsim.systems import cluster

DT, PIECES = 0.005, 10


class Pieces(Retrace):
    """Goes back from states that were stored, instead of those that were found."""

    def __init__(self, problem, every):  # type: ignore[no-untyped-def]
        super().__init__(problem, every)
        self.stored: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(self, march, step, state):  # type: ignore[no-untyped-def]
        super().keep(march, step, state)
        if self.every is not None and step % self.every == 0:
            self.stored[step] = state

    def arrive(self, step, state, grads):  # type: ignore[no-untyped-def]
        return super().arrive(step, self.stored.get(step, state), grads)


class InPieces(adjsim.ReversibleAdjoint):
    def run(self, problem):  # type: ignore[no-untyped-def]
        return run_swept(problem, Pieces(problem, self.checkpoint_every))


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def main(steps: int) -> None:
    torch.set_num_threads(1)
    epsilon, sigma, kT, friction = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 1.0, 0.1, 1.0))
    dynamics = adjsim.Langevin(adjsim.LennardJones(epsilon, sigma), kT=kT, friction=friction)
    with torch.no_grad():
        start = dynamics.init(cluster().position, generator=torch.Generator().manual_seed(0))
    solver, kinetic = adjsim.Splitting("BAOAB", DT, exact=True), adjsim.TimeAverage(dynamics.kinetic_energy)

    def work(count: int, adjoint: adjsim.Adjoint) -> tuple[list[torch.Tensor], dict[str, object]]:
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, count * DT],
            solver=solver,
            adjoint=adjoint,
            record=kinetic,
            generator=torch.Generator().manual_seed(1),
            progress=True,
            compile=True,
        )
        return list(torch.autograd.grad(run.record, (epsilon, sigma, kT, friction))), run.stats

    _, stats = work(5000, adjsim.ReversibleAdjoint())
    print(f"compiled in {stats['compile_seconds']:.0f} s")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident("VmRSS"), time.perf_counter()
    grads, stats = work(steps, adjsim.ReversibleAdjoint())
    seconds, growth = time.perf_counter() - begun, resident("VmHWM") - before
    print(f"{steps} steps: {seconds:.1f} s, {1e6 * seconds / steps:.1f} us a step, resident set + {growth / 1e6:.1f} MB")
    print({key: stats[key] for key in ("reconstruction_error", "buffer_bits", "buffer_bound")})
    pieces, _ = work(steps, InPieces(checkpoint_every=steps // PIECES))
    print("gradient by epsilon, sigma, kT, friction:", ", ".join(f"{float(g):.6e}" for g in grads))
    print(f"largest difference to {PIECES} pieces: {max(float((a - b).abs()) for a, b in zip(grads, pieces, strict=True)):g}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
