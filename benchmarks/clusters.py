"""Lennard-Jones atoms and the gradients of their runs, which several benchmarks time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import adjsim

DT = 0.002


@dataclass
class Work:
    """The result of one side of a case: a number of its gradient, the seconds in total and in
    parts.
    """

    gradient: float
    seconds: float
    forward: float | None = None
    compiling: float | None = None


def lattice(atoms: int, replicas: int | None, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Make a disturbed cubic lattice and slow momenta."""
    generator = torch.Generator().manual_seed(0)
    side = math.ceil(round(atoms ** (1 / 3), 9))
    sites = 1.2 * torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)[:atoms]
    shape = (atoms, 3) if replicas is None else (replicas, atoms, 3)
    shift, momentum = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return (sites + 0.02 * shift).to(device), (0.1 * momentum).to(device)


def ours(
    atoms: int,
    steps: int,
    replicas: int | None,
    scheme: str,
    exact: bool = False,
    adjoint: adjsim.Adjoint | None = None,
    device: str = "cpu",
) -> Callable[[], Work]:
    epsilon, sigma = (
        nn.Parameter(torch.tensor(1.0, dtype=torch.float64, device=device)) for _ in range(2)
    )
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(epsilon, sigma)).to(device)
    position, momentum = (x.requires_grad_() for x in lattice(atoms, replicas, device))

    def work() -> Work:
        begun = time.perf_counter()
        path = adjsim.simulate(
            dynamics,
            dynamics.init(position, momentum),
            [0.0, steps * DT],
            solver=adjsim.Splitting(scheme, DT, exact=exact),
            adjoint=adjoint or adjsim.ReversibleAdjoint(),
            compile=adjoint is None,
        )
        forward = time.perf_counter() - begun
        grads = torch.autograd.grad(
            path.final.position.square().sum(), [epsilon, sigma, position, momentum]
        )
        return Work(
            float(grads[1]), time.perf_counter() - begun, forward, path.stats.get("compile_seconds")
        )

    return work
