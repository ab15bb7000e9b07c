"""Compiled gradients of a Lennard-Jones run beside jitted JAX's on the same work.

Velocity Verlet, all pairs, float64, one thread; the gradient is by epsilon, sigma and the initial state. JAX runs a scan of
steps whose force is the gradient of its energy: as it is, and checkpointed in segments of about the root of the steps. Both
sides in one process, warm, medians of seven alternating runs with the spread of all but the extremes. Needs
``pip install -e ".[bench]"``. Run: python benchmarks/compiled.py
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from torch import nn

import adjsim

jax.config.update("jax_enable_x64", True)
DT, ROUNDS = 0.002, 7
CASES = [(108, 256, None), (256, 100, None), (13, 1024, None), (13, 256, 64)]  # atoms, steps, replicas


def start(atoms: int, replicas: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A cubic lattice, disturbed, and slow momenta."""
    generator = torch.Generator().manual_seed(0)
    side = math.ceil(round(atoms ** (1 / 3), 9))
    lattice = 1.2 * torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)[:atoms]
    shape = (atoms, 3) if replicas is None else (replicas, atoms, 3)
    shift, momentum = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return lattice + 0.02 * shift, 0.1 * momentum


def ours(atoms: int, steps: int, replicas: int | None, exact: bool) -> Callable[[], dict[str, float]]:
    epsilon, sigma = (nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) for _ in range(2))
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(epsilon, sigma))
    position, momentum = (x.requires_grad_() for x in start(atoms, replicas))

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        path = adjsim.simulate(
            dynamics,
            dynamics.init(position, momentum),
            [0.0, steps * DT],
            solver=adjsim.Splitting("BAB", DT, exact=exact),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
        )
        forward = time.perf_counter()
        grads = torch.autograd.grad(path.final.position.square().sum(), [epsilon, sigma, position, momentum])
        end = time.perf_counter()
        return {
            "forward": (forward - begun) / steps,
            "both": (end - begun) / steps,
            "compile": path.stats["compile_seconds"],
            "sigma": float(grads[1]),
        }

    return run


def theirs(atoms: int, steps: int, replicas: int | None, checkpointed: bool) -> Callable[[], dict[str, float]]:
    i, j = jnp.triu_indices(atoms, 1)

    def energy(q, epsilon, sigma):  # type: ignore[no-untyped-def]
        x = (sigma**2 / ((q[i] - q[j]) ** 2).sum(-1)) ** 3
        return (4 * epsilon * x * (x - 1)).sum()

    def loss(epsilon, sigma, q, p):  # type: ignore[no-untyped-def]
        push = jax.grad(energy)

        def step(carry, _):  # type: ignore[no-untyped-def]
            q, p, f = carry
            p = p - 0.5 * DT * f
            q = q + DT * p
            f = push(q, epsilon, sigma)
            return (q, p - 0.5 * DT * f, f), None

        carry = (q, p, push(q, epsilon, sigma))
        if checkpointed:
            inner = next(n for n in range(math.isqrt(steps), 0, -1) if steps % n == 0)
            segment = jax.checkpoint(lambda c, _: jax.lax.scan(step, c, None, length=inner))
            carry, _ = jax.lax.scan(segment, carry, None, length=steps // inner)
        else:
            carry, _ = jax.lax.scan(step, carry, None, length=steps)
        return (carry[0] ** 2).sum()

    total = loss if replicas is None else lambda e, s, q, p: jax.vmap(lambda a, b: loss(e, s, a, b))(q, p).sum()
    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    inputs = (1.0, 1.0, *(jnp.asarray(x.numpy()) for x in start(atoms, replicas)))

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        grads = jax.block_until_ready(gradient(*inputs))
        return {"both": (time.perf_counter() - begun) / steps, "sigma": float(grads[1])}

    return run


def main() -> None:
    torch.set_num_threads(1)
    print("microseconds a step, medians and all rounds but the extremes; ratio to the better of JAX's two; seconds to compile")
    for atoms, steps, replicas in CASES:
        sides = {
            "adjsim": ours(atoms, steps, replicas, False),
            "adjsim exact": ours(atoms, steps, replicas, True),
            "jax": theirs(atoms, steps, replicas, False),
            "jax checkpointed": theirs(atoms, steps, replicas, True),
        }
        first = {name: run() for name, run in sides.items()}
        # Chaos has not set in: all differentiate the same path.
        assert max(abs(r["sigma"] / first["jax"]["sigma"] - 1) for r in first.values()) < 1e-6
        rounds = [{name: run() for name, run in sides.items()} for _ in range(ROUNDS)]
        medians = {name: statistics.median(r[name]["both"] for r in rounds) for name in sides}
        best = min(medians["jax"], medians["jax checkpointed"])
        print(f"\n{atoms} atoms, {steps} steps" + (f", {replicas} replicas" if replicas else ""))
        for name in sides:
            times = sorted(1e6 * r[name]["both"] for r in rounds)
            line = f"  {name:17} {1e6 * medians[name]:8.1f} ({times[1]:.1f} to {times[-2]:.1f})  {medians[name] / best:5.2f}"
            if name.startswith("adjsim"):
                forward = statistics.median(r[name]["forward"] for r in rounds)
                line += f"  over forward alone {medians[name] / forward:.2f}, compiled in {first[name]['compile']:.0f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
