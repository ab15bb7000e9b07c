"""Gradients compared with peers: one table, with both sides of every ratio on the same work in one
process.

Float64, one thread, warm; medians of alternating rounds, and their range without the extremes. A
gradient is a whole run: forward and backward, with respect to the parameters and the initial state.
Peers are jitted JAX (a scan of steps whose force is the gradient of the energy, plain and
checkpointed in about the root of the steps; vmapped for replicas), diffrax, torchsde, torchdiffeq,
and torch's own backpropagation through the steps. Before any timing, all sides of a case that take
the same steps are checked to have the same gradient.

Needs ``pip install -c constraints.txt -e ".[bench]"``. Run: python benchmarks/suite.py [word of a
case ...]
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import diffrax
import jax
import jax.numpy as jnp
import torch
import torchsde
from clusters import DT, Work, lattice, ours
from jax_md import energy as jax_energy, smap, space
from torch import Tensor, nn
from torchdiffeq import odeint_adjoint

import adjsim
from adjsim.io.systems import cluster

jax.config.update("jax_enable_x64", True)
ROUNDS = 7


@dataclass
class Case:
    """One comparison; the ratio is to the fastest of the peers."""

    name: str
    steps: int
    ours: dict[str, Callable[[], Work]]
    peers: dict[str, Callable[[], Work]]
    target: float
    # Allowed difference between gradients of the same steps; None where steps differ.
    agree: float | None = 1e-6
    notes: list[str] = field(default_factory=list)


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def energy(q, epsilon, sigma):  # type: ignore[no-untyped-def]
    i, j = jnp.triu_indices(q.shape[0], 1)
    x = (sigma**2 / ((q[i] - q[j]) ** 2).sum(-1)) ** 3
    return (4 * epsilon * x * (x - 1)).sum()


def in_jax(loss: Callable, atoms: int, replicas: int | None) -> Callable[[], Work]:
    total = (
        loss
        if replicas is None
        else lambda e, s, q, p: jax.vmap(lambda a, b: loss(e, s, a, b))(q, p).sum()
    )
    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    inputs = (1.0, 1.0, *(jnp.asarray(x.numpy()) for x in lattice(atoms, replicas)))

    def work() -> Work:
        begun = time.perf_counter()
        grads = jax.block_until_ready(gradient(*inputs))
        return Work(float(grads[1]), time.perf_counter() - begun)

    return work


def energy_of_jax_md(q, epsilon, sigma):  # type: ignore[no-untyped-def]
    # Its sums over matrices of pairs have no second derivative, for each atom beside itself.
    pairs = jnp.stack(jnp.triu_indices(q.shape[0], 1), -1)
    metric = space.canonicalize_displacement_or_metric(space.free()[0])
    found = smap.bond(jax_energy.lennard_jones, metric, pairs)
    return found(q, epsilon=epsilon, sigma=sigma)


def scan(
    atoms: int, steps: int, replicas: int | None, checkpointed: bool, energy: Callable = energy
) -> Callable[[], Work]:
    def loss(epsilon, sigma, q, p):  # type: ignore[no-untyped-def]
        force_function = jax.grad(energy)

        def step(carry, _):  # type: ignore[no-untyped-def]
            q, p, f = carry
            p = p - 0.5 * DT * f
            q = q + DT * p
            f = force_function(q, epsilon, sigma)
            return (q, p - 0.5 * DT * f, f), None

        carry = (q, p, force_function(q, epsilon, sigma))
        if checkpointed:
            inner = next(n for n in range(math.isqrt(steps), 0, -1) if steps % n == 0)
            segment = jax.checkpoint(lambda c, _: jax.lax.scan(step, c, None, length=inner))
            carry, _ = jax.lax.scan(segment, carry, None, length=steps // inner)
        else:
            carry, _ = jax.lax.scan(step, carry, None, length=steps)
        return (carry[0] ** 2).sum()

    return in_jax(loss, atoms, replicas)


def symplectic_euler(atoms: int, steps: int) -> Callable[[], Work]:
    def loss(epsilon, sigma, q, p):  # type: ignore[no-untyped-def]
        terms = (
            diffrax.ODETerm(lambda t, p, args: p),
            diffrax.ODETerm(lambda t, q, args: -jax.grad(energy)(q, epsilon, sigma)),
        )
        found = diffrax.diffeqsolve(
            terms,
            diffrax.SemiImplicitEuler(),
            0.0,
            steps * DT,
            DT,
            (q, p),
            max_steps=steps + 1,
            saveat=diffrax.SaveAt(t1=True),
        )
        return (found.ys[0] ** 2).sum()

    return in_jax(loss, atoms, None)


def lennard_jones(atoms: int, steps: int, replicas: int | None, target: float) -> Case:
    return Case(
        f"{atoms} Lennard-Jones atoms{f', {replicas} replicas' if replicas else ''}, velocity "
        "Verlet",
        steps,
        {
            name: ours(atoms, steps, replicas, "BAB", exact)
            for name, exact in (("adjsim", False), ("adjsim, exact", True))
        },
        {
            "JAX scan": scan(atoms, steps, replicas, False),
            "JAX checkpointed scan": scan(atoms, steps, replicas, True),
            "jax-md checkpointed scan": scan(atoms, steps, replicas, True, energy_of_jax_md),
        },
        target,
    )


def backpropagation(atoms: int, steps: int) -> Case:
    return Case(
        f"{atoms} Lennard-Jones atoms, velocity Verlet",
        steps,
        {"adjsim": ours(atoms, steps, None, "BAB")},
        {"torch backpropagation": ours(atoms, steps, None, "BAB", adjoint=adjsim.DirectAdjoint())},
        1.0,
    )


def euler(atoms: int, steps: int) -> Case:
    return Case(
        f"{atoms} Lennard-Jones atoms, symplectic Euler",
        steps,
        {"adjsim": ours(atoms, steps, None, "AB")},
        {"diffrax SemiImplicitEuler, RecursiveCheckpointAdjoint": symplectic_euler(atoms, steps)},
        0.2,
    )


# BAOAB beside torchsde.

REPLICAS, SDE_DT, FRICTION, KT = 32, 1 / 128, 0.2, 1.0


def baoab(steps: int, compile: bool) -> Callable[[], Work]:
    barrier = parameter(1.0)
    dynamics = adjsim.Langevin(adjsim.DoubleWell(barrier), kT=KT, friction=FRICTION)
    zeros = torch.zeros(REPLICAS, 1, 3, dtype=torch.float64)
    start = dynamics.init(zeros + 1, zeros)

    def work() -> Work:
        begun = time.perf_counter()
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, steps * SDE_DT],
            solver=adjsim.BAOAB(SDE_DT),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=compile,
        )
        forward = time.perf_counter() - begun
        (grad,) = torch.autograd.grad(run.final.position.square().sum(), barrier)
        return Work(
            float(grad), time.perf_counter() - begun, forward, run.stats.get("compile_seconds")
        )

    return work


class DoubleWellSDE(nn.Module):
    """dq = p dt, dp = (-4 b q (q^2 - 1) - friction p) dt + sqrt(2 friction kT) dW, diagonal noise,
    zero on q.
    """

    noise_type, sde_type = "diagonal", "stratonovich"

    def __init__(self) -> None:
        super().__init__()
        self.barrier = parameter(1.0)
        self.amplitude = torch.tensor(
            [0.0] * 3 + [(2 * FRICTION * KT) ** 0.5] * 3, dtype=torch.float64
        )

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        q, p = y.split(3, -1)
        return torch.cat([p, -4 * self.barrier * q * (q**2 - 1) - FRICTION * p], -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.amplitude.expand_as(y)


def reversible_heun(steps: int, told_the_step: bool) -> Callable[[], Work]:
    sde = DoubleWellSDE()
    y0 = torch.cat([torch.ones(REPLICAS, 3), torch.zeros(REPLICAS, 3)], -1).double()
    ts = torch.tensor([0.0, steps * SDE_DT], dtype=torch.float64)

    def work() -> Work:
        begun, noise = time.perf_counter(), None
        if told_the_step:
            noise = torchsde.BrownianInterval(
                0.0, steps * SDE_DT, size=tuple(y0.shape), dtype=y0.dtype, dt=SDE_DT
            )
        ys = torchsde.sdeint_adjoint(
            sde,
            y0,
            ts,
            bm=noise,
            dt=SDE_DT,
            method="reversible_heun",
            adjoint_method="adjoint_reversible_heun",
        )
        (grad,) = torch.autograd.grad(ys[-1, :, :3].square().sum(), sde.barrier)
        return Work(float(grad), time.perf_counter() - begun)

    return work


def stochastic(steps: int) -> Case:
    return Case(
        f"{REPLICAS} replicas of a 3-D double well, BAOAB",
        steps,
        {"adjsim": baoab(steps, True), "adjsim, not compiled": baoab(steps, False)},
        {
            "torchsde reversible Heun and adjoint": reversible_heun(steps, False),
            "torchsde, its noise told the step": reversible_heun(steps, True),
        },
        1 / 20,
        agree=None,
    )


# A Nose-Hoover chain beside torchdiffeq.


class Rates(nn.Module):
    """The drift of a dynamics, in the form that torchdiffeq takes."""

    def __init__(self, dynamics: adjsim.Dynamics) -> None:
        super().__init__()
        self.dynamics = dynamics

    def forward(self, t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.dynamics.drift(t, self.dynamics.state_type(*state)))


def chain(steps: int, dt: float) -> Case:
    epsilon, sigma = parameter(1.0), parameter(1.0)
    dynamics = adjsim.NoseHooverChain(adjsim.LennardJones(epsilon, sigma), kT=0.2)
    start = dynamics.init(cluster().position, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.0, steps * dt], dtype=torch.float64)

    def split() -> Work:
        begun = time.perf_counter()
        run = adjsim.simulate(
            dynamics,
            start,
            times,
            solver=adjsim.Splitting("NBABN", dt),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
        )
        forward = time.perf_counter() - begun
        grads = torch.autograd.grad(run.final.position.square().sum(), [epsilon, sigma])
        return Work(
            float(grads[1]), time.perf_counter() - begun, forward, run.stats["compile_seconds"]
        )

    def solved(method: str, tolerance: float) -> Callable[[], Work]:
        rates = Rates(dynamics)

        def work() -> Work:
            begun = time.perf_counter()
            states = odeint_adjoint(
                rates, tuple(start), times, rtol=tolerance, atol=tolerance / 100, method=method
            )
            grads = torch.autograd.grad(states[0][-1].square().sum(), [epsilon, sigma])
            return Work(float(grads[1]), time.perf_counter() - begun)

        return work

    truth = solved("dopri8", 1e-9)().gradient
    error = abs(split().gradient - truth)
    peers, notes = (
        {},
        [f"gradient by sigma {truth:.9g} at tolerance 1e-9; the steps' error is {error:.1e}"],
    )
    for method in ("dopri5", "dopri8"):
        for power in range(2, 8):
            side = solved(method, 10.0**-power)
            theirs = abs(side().gradient - truth)
            if theirs <= error:
                peers[f"torchdiffeq {method}, adjoint, rtol 1e-{power}"] = side
                notes.append(f"{method} at rtol 1e-{power}: {theirs:.1e}")
                break
    return Case(
        f"13 atoms, Nose-Hoover chain, dt {dt:g}, at equal error",
        steps,
        {"adjsim": split},
        peers,
        1 / 20,
        None,
        notes,
    )


CASES: dict[str, Callable[[], Case]] = {
    "lj108": lambda: lennard_jones(108, 256, None, 0.2),
    "lj256": lambda: lennard_jones(256, 100, None, 0.12),
    "lj13": lambda: lennard_jones(13, 1024, None, 1.0),
    "replicas": lambda: lennard_jones(13, 1024, 64, 0.5),
    "diffrax": lambda: euler(108, 256),
    "torch": lambda: backpropagation(13, 1024),
    "torchsde": lambda: stochastic(1024),
    "torchdiffeq": lambda: chain(200, 0.01),
    "torchdiffeq-fine": lambda: chain(400, 0.005),
}


def measure(case: Case) -> None:
    sides = {**case.ours, **case.peers}
    first = {name: side() for name, side in sides.items()}
    if case.agree is not None:
        expected = first[next(iter(case.peers))].gradient
        worst = max(abs(work.gradient / expected - 1) for work in first.values())
        assert worst < case.agree, f"{case.name}: gradients are {worst:.1e} apart"
    rounds = [{name: side() for name, side in sides.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(row[name].seconds for row in rounds) for name in sides}
    best = min(medians[name] for name in case.peers)
    print(f"\n{case.name}, {case.steps} steps; target {case.target:.3g} of the best peer")
    for note in case.notes:
        print(f"  {note}")
    for name in sides:
        times = sorted(1e6 * row[name].seconds / case.steps for row in rounds)
        middle = f"{1e6 * medians[name] / case.steps:9.1f} ({times[1]:.1f} to {times[-2]:.1f})"
        line = f"  {name:54} {middle:30} {medians[name] / best:7.3f}"
        if first[name].compiling:
            over = statistics.median(
                row[name].seconds / (row[name].forward or math.nan) for row in rounds
            )
            line += f"  {over:.2f} times forward alone, compiled in {first[name].compiling:.0f} s"
        print(line, flush=True)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    unknown = [word for word in words if word not in CASES]
    if unknown:
        raise SystemExit(f"no case {unknown[0]!r}; there are {', '.join(CASES)}.")
    if len(words) != 1:
        print(
            "microseconds a step, median and range without the extremes; ratio to the best peer",
            flush=True,
        )
    # Each in a process of its own: what others leave in the heap makes the allocations of small
    # systems slower.
    for word in words or CASES:
        if len(words) == 1:
            measure(CASES[word]())
        else:
            subprocess.run([sys.executable, __file__, word], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
