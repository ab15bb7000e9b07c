"""Measurements behind SDESolver's limits: where friction breaks the continuous adjoint and
reversible Heun.

Langevin dynamics in a double well, kT = 1. First table: relative difference between the gradient
(barrier, kT, friction) of the continuous adjoint and that of backpropagation on the same path, one
save time, midpoint rule at dt = 1/64. Second table: the largest distance in momentum between
reversible Heun and the midpoint rule on the same noise at dt = 1/256. The library refuses such
runs, so the script lifts the limits. Run: python benchmarks/sde_limits.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import adjsim
from adjsim.solvers.continuous import sde

FRICTIONS = (1.0, 4.0)
PRODUCTS = (0.2, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)


def start(friction: float, replicas: int) -> tuple[adjsim.Langevin, adjsim.PhaseState]:
    one, kT, rate = (
        nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 1.0, friction)
    )
    dynamics = adjsim.Langevin(adjsim.DoubleWell(one), kT=kT, friction=rate)
    zeros = torch.zeros(replicas, 1, 1, dtype=torch.float64)
    return dynamics, dynamics.init(zeros + 1, zeros)


def simulate(
    friction: float,
    time: float,
    method: str,
    dt: float,
    adjoint: adjsim.DirectAdjoint | adjsim.BacksolveAdjoint,
):
    dynamics, state = start(friction, 8)
    steps = max(1, round(time / dt))
    generator = torch.Generator().manual_seed(1)
    solver = adjsim.SDESolver(method, dt=dt)
    return dynamics, adjsim.simulate(
        dynamics, state, [0.0, steps * dt], solver=solver, adjoint=adjoint, generator=generator
    )


def gradient_difference(friction: float, product: float) -> float:
    grads: list[Tensor] = []
    for adjoint in (adjsim.DirectAdjoint(), adjsim.BacksolveAdjoint()):
        dynamics, run = simulate(friction, product / friction, "midpoint", 1 / 64, adjoint)
        grads.append(
            torch.stack(
                torch.autograd.grad((run.final.position**2).mean(), list(dynamics.parameters()))
            )
        )
    return float((grads[1] - grads[0]).norm() / grads[0].norm())


def heun_distance(friction: float, product: float) -> float:
    ends = []
    for method in ("reversible_heun", "midpoint"):
        try:
            with torch.no_grad():
                ends.append(
                    simulate(friction, product / friction, method, 1 / 256, adjsim.DirectAdjoint())[
                        1
                    ].final.momentum
                )
        except FloatingPointError:
            return float("nan")
    return float((ends[0] - ends[1]).abs().max())


def main() -> None:
    sde.BACKSOLVE_LIMIT = sde.REVERSIBLE_HEUN_LIMIT = float("inf")
    torch.set_num_threads(1)
    console = Console()
    for title, measure in (
        ("continuous adjoint", gradient_difference),
        ("reversible Heun", heun_distance),
    ):
        table = Table(
            "friction x time", *(f"friction {friction:g}" for friction in FRICTIONS), title=title
        )
        for product in PRODUCTS:
            table.add_row(
                f"{product:g}", *(f"{measure(friction, product):.1e}" for friction in FRICTIONS)
            )
        console.print(table)


if __name__ == "__main__":
    main()
