"""From which number of atoms on a neighbour list is faster than all pairs: the ratio of the two.

::

    python benchmarks/lists.py

Langevin runs of a Lennard-Jones liquid, compiled, one thread, minima of five runs. A row has
the number of atoms for each atom in the reach of a list, the microseconds of a step with all pairs
and with a list, their ratio, and the same with the gradient.
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

import adjsim
from adjsim.adjoints.loops.runner import cache
from adjsim.core import box

DENSITY, DT, ROUNDS = 0.8, 0.005, 5
# Atoms and cutoffs.
CASES = [
    *((64, 2.0), (108, 2.0), (108, 2.5), (125, 2.5), (180, 2.5), (216, 2.5), (216, 3.2)),
    *((256, 2.5), (343, 3.7), (500, 3.8), (500, 4.25), (864, 5.0)),
]


def microseconds(atoms: int, cutoff: float, listed: float, gradient: bool) -> float:
    """Measure a step; ``listed`` stands for the limit beyond which a list is used."""
    cache.drop(lambda key: True)
    box.LISTED = listed
    side = (atoms / DENSITY) ** (1 / 3)
    points = torch.arange(float(math.ceil(atoms ** (1 / 3) - 1e-9)))
    position = torch.cartesian_prod(points, points, points)[:atoms] * side / len(points)
    epsilon = nn.Parameter(torch.tensor(1.0))
    potential = adjsim.LennardJones(epsilon, 1.0, cutoff=cutoff, box=[side] * 3)
    dynamics = adjsim.Langevin(potential, 1.0, 1.0, 1.0)
    solver = adjsim.Splitting("BAOAB", DT)

    def run(start: adjsim.PhaseState, steps: int, seed: int) -> adjsim.Trajectory:
        adjoint = adjsim.CheckpointAdjoint()
        return adjsim.simulate(
            dynamics, start, [0.0, steps * DT], solver=solver, adjoint=adjoint, compile=True,
            generator=seed,
        )  # fmt: skip

    with torch.no_grad():
        start = run(dynamics.init(position, generator=1), 400, 2).final
    steps, best = max(100, int(6e7 / atoms**2) // 100 * 100), math.inf
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            final = run(start, steps, 3).final
            if gradient:
                # A gradient that stays finite: chaos has its time, and not its size.
                torch.autograd.grad(1e-30 * final.position.square().sum(), epsilon)
        best = min(best, time.perf_counter() - begun)
    return 1e6 * best / steps


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    chosen = box.LISTED
    print("| atoms | cutoff | atoms a neighbour | all pairs, list | ratio | gradient | ratio |")
    print("|---|---|---|---|---|---|---|")
    for atoms, cutoff in CASES:
        reach = (1 + box.SKIN) * cutoff
        neighbours = DENSITY * 4 / 3 * math.pi * reach**3
        plain, whole = (
            [microseconds(atoms, cutoff, listed, gradient) for listed in (1e9, 0.0)]
            for gradient in (False, True)
        )
        uses = "list" if atoms > chosen * (neighbours + box.LIST_COST) else "all pairs"
        print(
            f"| {atoms} | {cutoff} | {atoms / neighbours:.2f}, {uses} | {plain[0]:.1f}, "
            f"{plain[1]:.1f} | {plain[1] / plain[0]:.2f} | {whole[0]:.1f}, {whole[1]:.1f} | "
            f"{whole[1] / whole[0]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
