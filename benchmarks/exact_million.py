"""A million exact, compiled steps of BAOAB on thirteen Lennard-Jones atoms: time, memory, proof.

Prints the growth of the resident set since a warm-up. A second run stores ten states forward and
goes backward from each of them, in ten pieces. The largest difference between the two gradients is
printed. Run: python benchmarks/exact_million.py [steps]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import adjsim
from adjsim.adjoints import Adjoint, ReversibleAdjoint
from adjsim.adjoints.base import Result
from adjsim.adjoints.reversible import ExactInversion, Fingerprints
from adjsim.adjoints.sweep.history import Rewind, SweepStart
from adjsim.adjoints.sweep.passes import run_swept
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState
from adjsim.dynamics.buffer import Spill
from adjsim.io.systems import cluster
from adjsim.solvers.run import Run

DT, PIECES = 0.005, 10


class StoredPieces(Fingerprints):
    """The history of an exact run, with states stored every so many steps."""

    def __init__(self, stepper: Stepper, every: int | None, run: Run) -> None:
        super().__init__(stepper, every, run)
        self.stored: dict[int, AnyState] = {}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        super().visit(step, state, spills)
        if self.every is not None and step % self.every == 0:
            self.stored[step] = state

    def rewind(self, given: SweepStart) -> Rewind:
        return InversionInPieces(self)


class InversionInPieces(ExactInversion):
    """Continues from a stored state where there is one, instead of the recovered state."""

    def __init__(self, history: StoredPieces) -> None:
        super().__init__(history)
        self.stored = history.stored

    def restore(self, step: int, state: AnyState) -> AnyState:
        return super().restore(step, self.stored.get(step, state))


class ReversibleInPieces(ReversibleAdjoint):
    def run(self, run: Run, report: RunReport) -> Result:
        every = self.checkpoint_every
        return run_swept(run, report, lambda stepper: StoredPieces(stepper, every, run))


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def main(steps: int) -> None:
    torch.set_num_threads(1)
    epsilon, sigma, kT, friction = (
        nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 1.0, 0.1, 1.0)
    )
    dynamics = adjsim.Langevin(adjsim.LennardJones(epsilon, sigma), kT=kT, friction=friction)
    with torch.no_grad():
        start = dynamics.init(cluster().position, generator=torch.Generator().manual_seed(0))
    solver, kinetic = (
        adjsim.Splitting("BAOAB", DT, exact=True),
        adjsim.TimeAverage(dynamics.kinetic_energy),
    )

    def work(count: int, adjoint: Adjoint) -> tuple[list[torch.Tensor], dict[str, object]]:
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

    _, stats = work(5000, ReversibleAdjoint())
    print(f"compiled in {stats['compile_seconds']:.0f} s")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident("VmRSS"), time.perf_counter()
    grads, stats = work(steps, ReversibleAdjoint())
    seconds, growth = time.perf_counter() - begun, resident("VmHWM") - before
    print(
        f"{steps} steps: {seconds:.1f} s, {1e6 * seconds / steps:.1f} us a step, resident set + "
        f"{growth / 1e6:.1f} MB"
    )
    print({key: stats[key] for key in ("reconstruction_error", "buffer_bits", "buffer_bound")})
    pieces, _ = work(steps, ReversibleInPieces(checkpoint_every=steps // PIECES))
    print(
        "gradient with respect to epsilon, sigma, kT, friction:",
        ", ".join(f"{float(g):.6e}" for g in grads),
    )
    print(
        f"largest difference to {PIECES} pieces: "
        f"{max(float((a - b).abs()) for a, b in zip(grads, pieces, strict=True)):g}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
