"""Cost of a step, forward and backward: BAOAB with ReversibleAdjoint against torchsde's own reversible Heun and its adjoint.

32 replicas of a particle in a three-dimensional double well, not compiled, one thread, all in one process, warm, medians of
alternating runs. torchsde is given closed-form forces, which is to its advantage, and is called in two ways: with the Brownian
motion it makes by default, and with one that was told the step. Run: python benchmarks/langevin_against_torchsde.py
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torchsde
from torch import Tensor, nn

import adjsim

REPLICAS, STEPS, DT, ROUNDS = 32, 200, 1 / 128, 7
FRICTION, KT = 0.2, 1.0


def baoab() -> Callable[[], None]:
    barrier = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    dynamics = adjsim.Langevin(adjsim.DoubleWell(barrier), kT=KT, friction=FRICTION)
    zeros = torch.zeros(REPLICAS, 1, 3, dtype=torch.float64)
    start = dynamics.init(zeros + 1, zeros)

    def work() -> None:
        run = adjsim.simulate(dynamics, start, [0.0, STEPS * DT], solver=adjsim.BAOAB(DT), adjoint=adjsim.ReversibleAdjoint())
        run.final.position.square().sum().backward()

    return work


class DoubleWellSDE(nn.Module):
    """dq = p dt, dp = (-4 b q (q^2 - 1) - friction p) dt + sqrt(2 friction kT) dW, diagonal noise, zero on q."""

    noise_type, sde_type = "diagonal", "stratonovich"

    def __init__(self) -> None:
        super().__init__()
        self.barrier = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.amplitude = torch.tensor([0.0] * 3 + [(2 * FRICTION * KT) ** 0.5] * 3, dtype=torch.float64)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        q, p = y.split(3, -1)
        return torch.cat([p, -4 * self.barrier * q * (q**2 - 1) - FRICTION * p], -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.amplitude.expand_as(y)


def reversible_heun(told_the_step: bool) -> Callable[[], None]:
    sde = DoubleWellSDE()
    y0 = torch.cat([torch.ones(REPLICAS, 3), torch.zeros(REPLICAS, 3)], -1).double()
    ts = torch.tensor([0.0, STEPS * DT], dtype=torch.float64)

    def work() -> None:
        noise = None
        if told_the_step:
            noise = torchsde.BrownianInterval(0.0, STEPS * DT, size=tuple(y0.shape), dtype=y0.dtype, dt=DT)
        ys = torchsde.sdeint_adjoint(
            sde, y0, ts, bm=noise, dt=DT, method="reversible_heun", adjoint_method="adjoint_reversible_heun"
        )
        ys[-1, :, :3].square().sum().backward()

    return work


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    works = {
        "BAOAB, reversible adjoint": baoab(),
        "torchsde reversible Heun and adjoint, its default noise": reversible_heun(False),
        "torchsde reversible Heun and adjoint, noise told the step": reversible_heun(True),
    }
    for work in works.values():
        seconds(work)
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(ROUNDS)]
    ours = next(iter(works))
    for name in works:
        cost = statistics.median(row[name] for row in rounds) / STEPS * 1e6
        ratio = statistics.median(row[name] / row[ours] for row in rounds)
        print(f"{name:58s} {cost:7.0f} us a step, {ratio:5.2f} times ours")


if __name__ == "__main__":
    main()
