"""The cost of an exact step against that of the plain step: forward, and forward and backward.

Thirteen Lennard-Jones atoms, not compiled, one thread, all in one process, warm, medians of
alternating runs. Run: python benchmarks/exact_against_plain.py
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import adjsim
from adjsim.dynamics import Dynamics
from adjsim.io.systems import cluster

STEPS, DT, ROUNDS, KT = 300, 0.005, 9, 0.25


def number(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64))


def systems() -> dict[str, Dynamics]:
    potential, kT = adjsim.LennardJones(number(1.0), number(1.0)), number(KT)
    return {
        "BAB": adjsim.Hamiltonian(potential),
        "BAOAB": adjsim.Langevin(potential, kT=kT, friction=number(1.0)),
        "BAGAB": adjsim.GeneralizedLangevin(
            potential, kT=kT, rates=number(1.0, 4.0), strengths=number(1.0, 8.0)
        ),
        "NBABN": adjsim.NoseHooverChain(potential, kT=kT, tau=number(0.3)),
    }


def seconds(dynamics: Dynamics, scheme: str, exact: bool) -> tuple[float, float]:
    """Return the seconds of a step forward, and forward and backward."""
    position = cluster().position
    momentum = KT**0.5 * torch.randn(
        13, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    start = dynamics.init(position, momentum, torch.Generator().manual_seed(1))
    begun = time.perf_counter()
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, STEPS * DT],
        solver=adjsim.Splitting(scheme, DT, exact=exact),
        adjoint=adjsim.ReversibleAdjoint(),
        generator=torch.Generator().manual_seed(2),
    )
    forward = time.perf_counter() - begun
    run.final.position.square().sum().backward()
    return forward / STEPS, (time.perf_counter() - begun) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    print(
        "microseconds a step: plain, exact, ratio (median of each; ratio of runs next to each "
        "other)"
    )
    for scheme, dynamics in systems().items():
        seconds(dynamics, scheme, False), seconds(dynamics, scheme, True)
        pairs = [
            (seconds(dynamics, scheme, False), seconds(dynamics, scheme, True))
            for _ in range(ROUNDS)
        ]
        for i, what in enumerate(("forward", "forward and back")):
            plain, exact = (
                1e6 * statistics.median(pair[side][i] for pair in pairs) for side in (0, 1)
            )
            ratios = sorted(pair[1][i] / pair[0][i] for pair in pairs)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(
                f"{scheme:6s} {what:17s} {plain:6.0f} {exact:6.0f}   "
                f"{statistics.median(ratios):.2f} ({spread})"
            )


if __name__ == "__main__":
    main()
