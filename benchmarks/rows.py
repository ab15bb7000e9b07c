"""The gradient of 25 rows of cotangents at once, over the backward run of one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import adjsim

ROWS, ROUNDS, DT = 25, 5, 0.02
# Width and batch of a network of two hidden layers, with eight inputs and outputs.
NETWORKS = [(16, 1), (16, 16), (64, 1), (64, 16), (128, 4), (256, 1)]
STEPS: dict[str, tuple[Any, Any]] = {
    "RungeKutta, Checkpoint": (adjsim.RungeKutta("rk4", DT), adjsim.CheckpointAdjoint()),
    "Coupled, Reversible": (adjsim.Coupled("rk4", DT), adjsim.ReversibleAdjoint()),
}
METHODS = ["RK45", "BDF", "Radau", "Rodas4"]


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(second(first(y).tanh()).tanh())


def rows() -> list[list[str]]:
    return [row for width, batch in NETWORKS for row in of_network(width, batch)]


def of_network(width: int, batch: int) -> Iterator[list[str]]:
    network = Network(width)
    start = torch.randn(batch, 8, generator=torch.Generator().manual_seed(1))
    ode, weights = adjsim.ODE(network), list(network.parameters())
    size = f"width {width}, batch {batch}"
    for name, (solver, adjoint) in STEPS.items():
        runs = [
            adjsim.simulate(
                ode, ode.init(start), [0.0, 1.0], solver=solver, adjoint=adjoint, compile=compiled
            )
            for compiled in (False, True)
        ]
        yield [size, name, *(ratio(run.final.y, weights) for run in runs)]
    for method in METHODS if batch == 1 else []:
        found = adjsim.solve_ivp(
            network, (0.0, 3.0), start[0], method, [1.0, 2.0, 3.0], rtol=1e-6, atol=1e-8
        )
        yield [size, f"solve_ivp, {method}", ratio(found.y, weights), ""]


def ratio(output: Tensor, weights: list[Tensor]) -> str:
    """Return the time of all rows over that of one, by medians, and that of one."""
    drawn = torch.Generator().manual_seed(2)
    cotangents = torch.randn(ROWS, *output.shape, generator=drawn)

    def seconds(rows: Tensor, batched: bool) -> float:
        begun = time.perf_counter()
        torch.autograd.grad(output, weights, rows, is_grads_batched=batched, retain_graph=True)
        return time.perf_counter() - begun

    pairs = [(seconds(cotangents[0], False), seconds(cotangents, True)) for _ in range(ROUNDS + 1)]
    one, all_ = (statistics.median(x) for x in zip(*pairs[1:], strict=True))
    return f"{all_ / one:.1f} ({1e3 * one:.1f} ms)"
