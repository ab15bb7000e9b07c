"""64 replicas of 108 Lennard-Jones atoms: two threads over one, with a free core and without.

Compiled, 300 steps, the smallest of four runs, microseconds a step: velocity Verlet, and BAOAB with
its noise. A gradient is a whole run, forward and backward, with respect to epsilon and sigma, in
constant memory. The second time another process holds one of the two cores.
Run: OMP_NUM_THREADS=2 python benchmarks/replicas.py
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import adjsim

REPLICAS, CELLS, DENSITY, STEPS, ROUNDS, DT = 64, 3, 0.8, 300, 4, 0.002


def start() -> tuple[adjsim.LennardJones, torch.Tensor]:
    """A crystal of 108 atoms, disturbed."""
    side = (4 * CELLS**3 / DENSITY) ** (1 / 3)
    corners = torch.cartesian_prod(*[torch.arange(float(CELLS))] * 3)
    atoms = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    lattice = (corners[:, None] + atoms).reshape(-1, 3) * side / CELLS
    shifts = torch.randn(REPLICAS, *lattice.shape, generator=torch.Generator().manual_seed(0))
    numbers = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    potential = adjsim.LennardJones(*numbers, cutoff=2.3, box=[side] * 3)
    return potential, lattice + 0.01 * shifts


def measured(dynamics: Any, position: torch.Tensor, word: str, gradient: bool) -> float:
    """Return microseconds a step of the fastest run."""
    begin = dynamics.init(position, torch.zeros_like(position))
    times = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            final = adjsim.simulate(
                dynamics, begin, [0.0, STEPS * DT], solver=adjsim.Splitting(word, DT),
                adjoint=adjsim.ReversibleAdjoint(), generator=1, compile=True,
            ).final.position  # fmt: skip
            if gradient:
                torch.autograd.grad(final.square().mean(), list(dynamics.potential.parameters()))
        times.append((time.perf_counter() - started) / STEPS * 1e6)
    # The first run compiles.
    return min(times[1:])


def hold() -> None:
    """Hold a core."""
    while True:
        pass


def main() -> None:
    torch.set_default_dtype(torch.float64)
    potential, position = start()
    cases = {
        "BAB": adjsim.Hamiltonian(potential),
        "BAOAB": adjsim.Langevin(potential, kT=1.0, friction=1.0),
    }
    table = Table("word", "cores", "gradient", "one thread", "two threads", "two over one")
    for cores in ("free", "one held"):
        other = multiprocessing.Process(target=hold, daemon=True)
        if cores != "free":
            other.start()
        for word, dynamics in cases.items():
            for gradient in (False, True):
                found = []
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    found.append(measured(dynamics, position, word, gradient))
                ratio = f"{found[1] / found[0]:.2f}"
                table.add_row(word, cores, str(gradient), *(f"{x:.0f}" for x in found), ratio)
        if cores != "free":
            other.terminate()
    Console().print(table)


if __name__ == "__main__":
    main()
