"""A run with a store, in a process that may be killed, and its numbers as bytes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

import adjsim

# Processes are forked from one that has imported adjsim, so that each starts in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.reach.long_run"])


def problem(steps: int, kind: str) -> tuple[adjsim.Langevin, Any, torch.Tensor, dict[str, Any]]:
    """Return dynamics, start, save times and arguments of a run of some kind.

    The kind lists words: exact, compiled, frames, checkpoint, direct, average, reset.
    """
    words = kind.split()
    grid = torch.linspace(0, 3.3, 4, dtype=torch.float64)[:-1]
    position = torch.cartesian_prod(grid, grid) + 0.05 * torch.arange(18).reshape(9, 2).sin()
    sigma = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    box = torch.tensor([3.6, 3.6], dtype=torch.float64)
    potential = adjsim.LennardJones(1.0, sigma, cutoff=1.75, box=box)
    kT = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    dynamics = adjsim.Langevin(potential, kT=kT, friction=1.0)
    start = dynamics.init(position.expand(2, 9, 2), generator=1)
    adjoint = (
        adjsim.CheckpointAdjoint()
        if "checkpoint" in words
        else adjsim.DirectAdjoint()
        if "direct" in words
        else adjsim.ReversibleAdjoint(checkpoint_every=64 if "reset" in words else None, tol=1e-3)
    )
    record: Any = None
    if "average" in words:
        record = adjsim.TimeAverage(_size, burn_in=0.1)
    elif "frames" not in words:
        record = _size
    options = {
        "solver": adjsim.Splitting("BAOAB", 0.005, exact="exact" in words),
        "adjoint": adjoint,
        "record": record,
        "compile": "compiled" in words,
    }
    times = torch.linspace(0, steps * 0.005, 5, dtype=torch.float64)
    return dynamics, start, times, options


def _size(state: Any) -> torch.Tensor:
    return state.position.square().mean((-1, -2))


def numbers(run: Any, dynamics: Any) -> list[bytes]:
    """Take the gradient, and return the bits of the results and the gradients."""
    saved = run.position if run.record is None else run.record
    saved.square().sum().backward()
    found = [saved, *run.final, *(p.grad for p in dynamics.parameters())]
    return [x.detach().contiguous().numpy().tobytes() for x in found]


def work(steps: int, kind: str, store: str | None, every: float, pipe: Connection) -> None:
    """Run in a process of its own; send "ready", then "forward", then the numbers."""
    torch.set_num_threads(1)
    dynamics, start, times, options = problem(steps, kind)
    pipe.send("ready")
    run = adjsim.simulate(dynamics, start, times, generator=2, store=store, every=every, **options)
    pipe.send("forward")
    pipe.send(numbers(run, dynamics))


def started(
    steps: int, kind: str, store: str | None, every: float = 60.0
) -> tuple[BaseProcess, Connection]:
    """Start :func:`work`, and return its process and the end of its pipe."""
    mine, its = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(steps, kind, store, every, its))
    process.start()
    its.close()
    return process, mine
