"""The cost of saved frames: a neural ODE that saves every step, every fifth and every twentieth.

200 RK4 steps of two states, 16 hidden units, float64, one thread: forward and backward in
milliseconds, minima of alternating runs, compiled and not. Run: python benchmarks/frames.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import adjsim

STEPS, DT, ROUNDS = 200, 0.01, 7
SOLVERS = {
    "direct": (adjsim.RungeKutta("rk4", DT), adjsim.DirectAdjoint()),
    "checkpoint": (adjsim.RungeKutta("rk4", DT), adjsim.CheckpointAdjoint()),
    "reversible": (adjsim.Coupled("rk4", DT), adjsim.ReversibleAdjoint()),
}


class Network(nn.Module):
    """A vector field of two states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y)


def milliseconds(
    dynamics: adjsim.ODE, name: str, every: int, compiled: bool
) -> tuple[float, float]:
    """Return the times of a run and of its gradient."""
    solver, adjoint = SOLVERS[name]
    start = dynamics.init(torch.tensor([[0.3, -0.2]], dtype=torch.float64))
    times = torch.arange(0, STEPS + 1, every) * DT
    begin = time.perf_counter()
    run = adjsim.simulate(dynamics, start, times, solver=solver, adjoint=adjoint, compile=compiled)
    loss, middle = run.y.square().mean(), time.perf_counter()
    torch.autograd.grad(loss, list(dynamics.parameters()))
    return 1e3 * (middle - begin), 1e3 * (time.perf_counter() - middle)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dynamics, ways = adjsim.ODE(Network()), (False, True)
    print(f"{'adjoint':12s} {'saved':>9s} {'uncompiled':>18s} {'compiled':>18s}  ms")
    for name in SOLVERS:
        for every in (1, 5, 20):
            rounds = [
                [milliseconds(dynamics, name, every, on) for on in ways] for _ in range(ROUNDS)
            ]
            columns = [
                " + ".join(f"{min(x):7.2f}" for x in zip(*way, strict=True))
                for way in zip(*rounds[1:], strict=True)
            ]
            print(f"{name:12s} {'every ' + str(every):>9s} {columns[0]:>18s} {columns[1]:>18s}")


if __name__ == "__main__":
    main()
