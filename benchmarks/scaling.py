"""The cost model of ensembles over many processes: its constants, measured, and what it predicts.

    python benchmarks/scaling.py

runs two ensembles on one and on two processes of one thread, times a store, and writes
`scaling.json` beside this file and the table of `docs/scaling.rst`. A quiet machine with two free
cores is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import adjsim
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Store, to_bytes

HERE = Path(__file__).resolve().parent
RESULT, TABLE = HERE / "scaling.json", HERE.parent / "docs" / "scaling_table.inc"
# Of alternating launches the least time counts.
ROUNDS, LAUNCHES = 1, 3
# The least efficiency of two processes, and the largest share of time that a store may take.
LEAST_EFFICIENCY, LARGEST_COST = 0.9, 0.02
# What is predicted: replicas, steps of each, numbers in a gradient, and processes.
REPLICAS, STEPS, PARAMETERS = 10**6, 10**6, 10**5
PROCESSES = {"1,000 GPUs": 1000, "10,000 cores": 10_000}
# Bytes a second of memory: of one GPU by its maker (H100 SXM), and of one core here, measured.
GPU_BANDWIDTH = 3.35e12


def liquid() -> tuple[adjsim.Simulation[Any], Any, int, int, int]:
    """64 replicas of 108 Lennard-Jones atoms with friction and noise."""
    side, atoms = (108 / 0.8) ** (1 / 3), 108
    corners = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    basis = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    lattice = ((corners[:, None] + basis).reshape(-1, 3) * (side / 3)).double()
    sigma = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    potential = adjsim.LennardJones(1.0, sigma, cutoff=2.5, box=torch.tensor([side] * 3).double())
    dynamics = adjsim.Langevin(potential, kT=1.0, friction=1.0)

    def initial(replicas: int, generator: Any) -> Any:
        return dynamics.init(lattice.expand(replicas, atoms, 3), generator=generator)

    solver, steps = adjsim.BAOAB(0.002), 2000
    simulation = adjsim.Simulation(dynamics, initial, [0.0, steps * 0.002], solver, compile=True)
    return simulation, adjsim.Final(_spread), 64, 4, steps


def wells() -> tuple[adjsim.Simulation[Any], Any, int, int, int]:
    """65,536 particles in a double well with friction and noise."""
    well = adjsim.DoubleWell(nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    dynamics = adjsim.Langevin(well, kT=1.0, friction=1.0)

    def initial(replicas: int, generator: Any) -> Any:
        zeros = torch.zeros(replicas, 1, 1, dtype=torch.float64)
        return dynamics.init(zeros, generator=generator)

    solver, steps = adjsim.BAOAB(0.02), 3000
    simulation = adjsim.Simulation(dynamics, initial, [0.0, steps * 0.02], solver, compile=True)
    # A chunk of 8,192 replicas stays in the caches of its core.
    return simulation, adjsim.Final(_spread), 65_536, 8, steps


def _spread(state: Any) -> torch.Tensor:
    return state.position.square().mean((-1, -2))


CASES: dict[str, Callable[[], tuple[adjsim.Simulation[Any], Any, int, int, int]]] = {
    "liquid": liquid,
    "wells": wells,
}


def work(name: str) -> None:
    """Time an estimate; the first rank prints the seconds."""
    torch.set_num_threads(1)
    simulation, observable, replicas, chunks, _ = CASES[name]()
    estimator, ranks = adjsim.Pathwise(adjsim.ReversibleAdjoint(tol=1e-3)), Ranks.of()

    def once() -> float:
        begun = time.perf_counter()
        estimator(simulation, observable, replicas=replicas, chunks=chunks, generator=1)
        return time.perf_counter() - begun

    once()
    best = min(once() for _ in range(ROUNDS))
    if ranks.first:
        print(best)


def launch(name: str, ranks: int, copies: int = 1) -> float:
    """Run :func:`work` in new processes; return the seconds.

    Args:
        name: the case.
        ranks: the number of ranks.
        copies: how often it runs at the same time, by processes that share nothing.
    """
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    running = [
        subprocess.Popen(
            [*start, __file__, name],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(copies)
    ]
    printed = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, printed, strict=True):
        if process.returncode:
            raise RuntimeError(errors)
    return max(float(output.strip().splitlines()[-1]) for output, _ in printed)


def store_seconds(parameters: int) -> float:
    """Return the least time of writing and reading a chunk."""
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        store, chunk = Store(folder), tree_of_chunk(parameters)
        for i in range(20):
            begun = time.perf_counter()
            store.write(f"chunk-{i}", chunk)
            store.read(f"chunk-{i}")
            best = min(best, time.perf_counter() - begun)
    return best


def tree_of_chunk(parameters: int) -> Any:
    """Make the tree of a chunk with a gradient of so many numbers."""
    grad = torch.zeros(parameters, dtype=torch.float64)
    return [torch.zeros(()), {"network": grad}, {"energy_evaluations": 0}, [0.0, True]]


def bandwidth() -> float:
    """Return the bytes a second that one core reads and writes in a copy of 256 megabytes."""
    torch.set_num_threads(1)
    a = torch.zeros(2**25, dtype=torch.float64)
    b, best = torch.empty_like(a), float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - begun)
    return 2 * a.nbytes / best


def measured() -> dict[str, Any]:
    """Measure the constants of the cost model."""
    result: dict[str, Any] = {"commit": _commit(), "bandwidth": bandwidth(), "cases": {}}
    for name, make in CASES.items():
        _, _, replicas, chunks, steps = make()
        ways = ((1, 1), (2, 1), (1, 2))
        launches: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
        for _ in range(LAUNCHES):
            for way, found in launches.items():
                found.append(launch(name, *way))
        one, two, apart = (min(launches[way]) for way in ways)
        result["cases"][name] = {
            "replica-steps a second and core": replicas * steps / one,
            "seconds a chunk": one / chunks,
            "efficiency of two ranks": one / (2 * two),
            "the same of two processes that share nothing": one / apart,
            "cost of a store": store_seconds(PARAMETERS) / (one / chunks),
        }
    result["bytes a chunk"] = {
        f"{count}": len(to_bytes(tree_of_chunk(count))) for count in (1, PARAMETERS)
    }
    return result


def predictions(result: dict[str, Any]) -> list[list[str]]:
    """Evaluate the cost model for the ensemble of the issue, one row for each case and machine."""
    rows = [["ensemble", "processes", "days", "exchanged a process / GB", "starts a process / GB"]]
    per_chunk = result["bytes a chunk"][f"{PARAMETERS}"]
    numbers = {"liquid": 2 * 3 * 108, "wells": 2}
    for name, found in result["cases"].items():
        for label, count in PROCESSES.items():
            rate = found["replica-steps a second and core"]
            if "GPU" in label:
                rate *= GPU_BANDWIDTH / result["bandwidth"]
            days = REPLICAS * STEPS / (rate * count) / 86_400
            starts = REPLICAS * numbers[name] * 8 / 1e9
            exchanged = count * per_chunk / 1e9
            rows.append([name, label, f"{days:.2g}", f"{exchanged:.2g}", f"{starts:.2g}"])
    return rows


def table(rows: list[list[str]]) -> str:
    """Write rows as a list-table of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def constants(result: dict[str, Any]) -> list[list[str]]:
    """List the measured constants, one row for each."""
    rows = [["constant", *result["cases"]]]
    formats = {
        "replica-steps a second and core": "{:.2g}",
        "seconds a chunk": "{:.2g}",
        "efficiency of two ranks": "{:.2f}",
        "the same of two processes that share nothing": "{:.2f}",
        "cost of a store": "{:.2%}",
    }
    for key, form in formats.items():
        rows.append([key, *(form.format(found[key]) for found in result["cases"].values())])
    return rows


def document(result: dict[str, Any]) -> str:
    """Write the tables of the documentation."""
    sizes = ", ".join(
        f"{size:,} for {int(count):,} {'number' if count == '1' else 'numbers'}"
        for count, size in result["bytes a chunk"].items()
    )
    return (
        f"Measured at commit {result['commit']}, one thread a process, float64, compiled.\n"
        f"Bytes of a chunk, in a store and in an exchange: {sizes} in the gradient.\n\n"
        f"{table(constants(result))}\n"
        f"The model for {REPLICAS:,} replicas of {STEPS:,} steps, whose gradient has "
        f"{PARAMETERS:,} numbers, one chunk a process. A GPU is taken as faster than a core by the "
        f"bandwidth of its memory, {GPU_BANDWIDTH / 1e12:.3g} TB/s over "
        f"{result['bandwidth'] / 1e9:.2g} GB/s, which is an assumption: no GPU was measured.\n\n"
        f"{table(predictions(result))}"
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    return found.stdout.strip()


def main() -> None:
    result = measured()
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    TABLE.write_text(document(result))
    print(document(result))
    for name, found in result["cases"].items():
        efficiency, cost = found["efficiency of two ranks"], found["cost of a store"]
        met = efficiency >= LEAST_EFFICIENCY and cost <= LARGEST_COST
        print(
            f"{name}: efficiency {efficiency:.3f} (at least {LEAST_EFFICIENCY}), store "
            f"{cost:+.2%} (at most {LARGEST_COST:.0%}): {'met' if met else 'MISSED'}"
        )


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) > 1 else main()
