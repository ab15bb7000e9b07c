"""Ranks: processes that run one function together, and what it returns on each of them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import adjsim
from tests.reach.long_run import CONTEXT

CONTEXT.set_forkserver_preload(["tests.reach.ranks"])


def _rank(
    work: Callable[..., Any],
    rank: int,
    size: int,
    meeting: str,
    seconds: float,
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)  # Ranks whose default generators differ.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _wait_for_all(pipe)  # The timeout of the group begins where every process is there,
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
    _wait_for_all(pipe)  # and no rank leaves before every other one is connected.
    try:
        found = work(*args)
    except Exception as error:  # Sent, and compared by the test.
        found = error
    pipe.send(found)


def _wait_for_all(pipe: Connection) -> None:
    pipe.send("here")
    pipe.recv()


def on_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    seconds: float = 60.0,
    hanging: tuple[int, ...] = (),
    kill: tuple[int, float] | None = None,
) -> list[Any]:
    """Run a function on ranks; return its result or its error on each, None where one hung.

    ``seconds`` is the timeout of the process group. Nobody waits for ranks that are ``hanging``.
    ``kill`` is a rank to kill, and the seconds after the start of its work when to do so.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, its = CONTEXT.Pipe()
            meeting = str(Path(folder) / "meeting")
            process = CONTEXT.Process(
                target=_rank, args=(work, rank, size, meeting, seconds, args, its)
            )
            process.start()
            its.close()
            pipes.append(mine)
            processes.append(process)
        found: list[Any] = [None] * size
        for _ in ("processes", "connections"):
            for pipe in pipes:
                assert pipe.recv() == "here"
            for pipe in pipes:
                pipe.send("go on")
        if kill is not None:
            time.sleep(kill[1])
            processes[kill[0]].kill()
        left = dict(enumerate(pipes))
        while left and (ready := wait(list(left.values()), timeout=seconds + 100.0)):
            for rank, pipe in list(left.items()):
                if pipe in ready:
                    del left[rank]
                    try:
                        found[rank] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        continue
            if left and set(left) <= set(hanging):
                break
        for process in processes:
            process.kill()
            process.join()
    return found


def simulation(steps: int = 40, kT: float = 0.5) -> adjsim.Simulation[Any]:
    """A small stochastic simulation with two parameters."""
    well = adjsim.DoubleWell(nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    temperature = nn.Parameter(torch.tensor(kT, dtype=torch.float64))
    dynamics = adjsim.Langevin(well, kT=temperature, friction=1.0)

    def initial(replicas: int, generator: Any) -> Any:
        q = torch.randn(replicas, 1, 1, generator=generator, dtype=torch.float64)
        return dynamics.init(q, generator=generator)

    return adjsim.Simulation(
        dynamics, initial, torch.tensor([0.0, steps * 0.05]), solver=adjsim.BAOAB(0.05)
    )


def square(state: Any) -> torch.Tensor:
    return state.position.square().mean((-1, -2))


AVERAGE = adjsim.TimeAverage(square, burn_in=0.2)
ESTIMATORS: dict[str, Callable[[], adjsim.Estimator]] = {
    "pathwise": lambda: adjsim.Pathwise(adjsim.ReversibleAdjoint(tol=1e-3)),
    "score": lambda: adjsim.ScoreFunction(),
    "girsanov": lambda: adjsim.Girsanov(),
    "reweighting": lambda: adjsim.Reweighting(every=0.1),
    "difference": lambda: adjsim.FiniteDifference(),
    "forward": lambda: adjsim.ForwardSensitivity(),
}


def bits(estimate: adjsim.GradientEstimate) -> list[bytes]:
    """Return the bits of values, gradients and standard errors."""
    found = [estimate.value, estimate.value_stderr]
    found += [*estimate.grad.values(), *estimate.grad_stderr.values()]
    return [x.numpy().tobytes() for x in found]


def estimate(
    name: str, replicas: int, chunks: int, seed: int | None, store: str | None = None
) -> tuple[list[bytes], dict[str, Any]]:
    made = ESTIMATORS[name]()
    estimated = simulation()
    # The path score of a parameter that scales the noise is infinite.
    estimated.dynamics.kT.requires_grad_(name != "girsanov")
    found = made(estimated, AVERAGE, replicas=replicas, chunks=chunks, generator=seed, store=store)
    names = ("ranks", "energy_evaluations", "ess")
    return bits(found), {name: found.diagnostics.get(name) for name in names}
