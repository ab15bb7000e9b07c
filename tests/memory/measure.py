"""Growth of the resident set over one forward and backward pass, or one estimate, in bytes.

A case is an adjoint, a number of steps and a problem ("exact", "batch", "langevin", "generalised"
or "graph"); "score" or "pathwise", a number of steps and one of replicas; or an adjoint of
solve_ivp, a number of periods and "ivp".
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable
from pathlib import Path

import torch

import adjsim
from adjsim.io.systems import cluster
from adjsim.potentials import MessagePassing
from adjsim.potentials.learnt.graph import GraphPotential


def resident(which: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since the last reset; in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def growth(work: Callable[[int], object], steps: int) -> int:
    """Over work of so many steps, once kernels and allocators are in place."""
    work(20)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    work(steps)
    return resident("VmHWM") - before


def estimate(name: str, replicas: int) -> Callable[[int], object]:
    """Estimate a time average by the score function, or pathwise by reversal."""
    dynamics = adjsim.Langevin(adjsim.DoubleWell(torch.nn.Parameter(torch.tensor(1.0))), kT=0.5)

    def initial(count, generator):
        return dynamics.init(torch.ones(count, 1, 3, dtype=torch.float64), generator=generator)

    observable = adjsim.TimeAverage(lambda state: (state.position**2).sum((-1, -2)))
    estimator = {
        "score": adjsim.ScoreFunction(),
        "pathwise": adjsim.Pathwise(adjsim.ReversibleAdjoint()),
    }[name]

    def work(count: int) -> object:
        simulation = adjsim.Simulation(dynamics, initial, [0.0, count * 0.01], adjsim.BAOAB(0.01))
        return estimator(
            simulation,
            observable,
            replicas=replicas,
            chunks=4,
            generator=torch.Generator().manual_seed(0),
        )

    return work


def differentiated(adjoint_name: str, problem: str) -> Callable[[int], object]:
    adjoint = {
        "direct": adjsim.DirectAdjoint(),
        "checkpoint": adjsim.CheckpointAdjoint(),
        "reversible": adjsim.ReversibleAdjoint(),
        "backsolve": adjsim.BacksolveAdjoint(),
    }[adjoint_name]
    if problem == "exact":
        system = cluster()
        kT, friction = (torch.nn.Parameter(torch.tensor(x)) for x in (0.1, 10.0))
        dynamics = adjsim.Langevin(system.potential, kT=kT, friction=friction)
        position = system.position.repeat(64, 1, 1)
        start, dt = dynamics.init(position, torch.zeros_like(position)), 0.005
    elif problem == "langevin":
        number = torch.nn.Parameter(torch.tensor(1.0))
        dynamics = adjsim.Langevin(adjsim.DoubleWell(number), friction=1.0)
        zeros = torch.zeros(4096, 1, 3, dtype=torch.float64)
        start, dt = dynamics.init(zeros + 1, zeros), 0.01
    elif problem == "generalised":
        number = torch.nn.Parameter(torch.tensor(1.0))
        dynamics = adjsim.GeneralizedLangevin(
            adjsim.DoubleWell(number), rates=(1.0,), strengths=(1.0,)
        )
        zeros = torch.zeros(4096, 1, 3, dtype=torch.float64)
        start, dt = dynamics.init(zeros + 1, zeros), 0.01
    elif problem == "graph":
        model = MessagePassing(2.2, hidden=16)
        sites = 1.5 * torch.cartesian_prod(*[torch.arange(4.0)] * 3)
        dynamics = adjsim.Hamiltonian(GraphPotential(model, 2.2, box=[6.0] * 3), 10.0)
        noise = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
        position, momentum = (sites + 0.1 * noise[0]).double(), noise[1].double()
        start, dt = dynamics.init(position, momentum), 0.01
    else:
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(torch.nn.Parameter(torch.tensor(1.0))))
        zeros = torch.zeros(512, 13, 3, dtype=torch.float64)
        start, dt = dynamics.init(zeros + 1, zeros), 0.01
    scheme = {"langevin": "BAOAB", "exact": "BAOAB", "generalised": "BAGAB"}.get(problem, "BAB")
    splitting = adjsim.Splitting(scheme, dt, exact=problem == "exact")
    solver = adjsim.ODESolver("rk4", dt=dt) if adjoint_name == "backsolve" else splitting

    def work(count: int) -> None:
        run = adjsim.simulate(dynamics, start, [0.0, count * dt], solver=solver, adjoint=adjoint)
        run.final.position.square().sum().backward()

    return work


def oscillator(adjoint: str) -> Callable[[int], object]:
    """Some 700 steps of RK23 a period; the backward pass is made loose, since memory is all that is
    looked at.
    """

    def work(periods: int) -> None:
        k = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        end = 2 * math.pi * periods / 20
        solution = adjsim.solve_ivp(
            lambda t, y, k: torch.stack([y[1], -k * y[0]]),
            (0, end),
            [1.0, 0.0],
            "RK23",
            [end],
            args=(k,),
            adjoint=adjoint,
            rtol=1e-9,
            atol=1e-9,
            adjoint_rtol=1e-3,
        )
        solution.y[0, -1].backward()

    return work


def measured(method: str, steps: int, problem: str | int) -> int:
    """Growth of the resident set, for a process that has run nothing else."""
    torch.set_num_threads(1)
    if problem == "ivp":
        work = oscillator(method)
    elif isinstance(problem, int):
        work = estimate(method, problem)
    else:
        work = differentiated(method, problem)
    return growth(work, steps)
