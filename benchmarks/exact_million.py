"""A million exact steps of BAOAB on thirteen Lennard-Jones atoms, forward and backward: time, memory, and the proof.

Prints the growth of the resident set from after a warm-up. Run: python benchmarks/exact_million.py [steps]
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

import adjsim
from adjsim.systems import cluster

DT = 0.005


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

    def work(count: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(1)
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, count * DT],
            solver=solver,
            adjoint=adjsim.ReversibleAdjoint(),
            record=kinetic,
            generator=generator,
            progress=True,
        )
        run.record.backward()
        return run.stats

    work(100)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident("VmRSS"), time.perf_counter()
    stats = work(steps)
    seconds, growth = time.perf_counter() - begun, resident("VmHWM") - before
    print(f"{steps} steps: {seconds:.0f} s, {1e6 * seconds / steps:.0f} us a step, resident set + {growth / 1e6:.1f} MB")
    print({key: stats[key] for key in ("reconstruction_error", "buffer_bits", "buffer_bound")})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
