"""What a step costs on a pretended device: synchronisations, copies and kernels, forward and back.

In rows that end with TILES pairs are summed by the programs for a GPU, which NumPy runs, and where
they end with LISTS these programs take pairs from a list. Their loops are compiled too, as for a
GPU: the device repeats one traced iteration.

Prints a line of JSON for each row. Run: python -m tests.devices.costs [row ...]
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import adjsim
from adjsim.compiler import inductor, loops
from adjsim.compiler.replays import replayed
from adjsim.core import box
from adjsim.core.noise import Noise
from adjsim.potentials.pairs import base, formula, listed
from adjsim.potentials.pairs.kernels import gpu
from tests import tiles
from tests.devices.calls import CALLS
from tests.devices.pretended import DEVICE, Log, Pretended, pretended
from tests.devices.systems import SYSTEMS, TILED, System

# Lists are for tensors of torch's own class, and on a GPU for larger systems than these.
vars(listed)["Tensor"] = Pretended
TILES, LISTS, LOOPS = ", by tiles", ", by lists of programs", ", compiled"
BENCHMARK, DRAWN, CALLED = "benchmark", "drawn", "calls"
# Torch's backend of the pretended device does not survive its forward-mode derivatives.
UNKNOWN_CALL = "ForwardSensitivity"
formula.LISTED_ON_GPU = 0
STEPS = 3
# The smallest share of the largest gradient that is one.
ZERO = 1e-6
PARTS = ("waits", "copies", "kernels")


def adjoints(system: System) -> dict[str, tuple[Any, Any]]:
    """The solver and the adjoint of each way to a gradient."""
    found = {
        "direct": (system.solver, adjsim.DirectAdjoint()),
        "checkpoint": (system.solver, adjsim.CheckpointAdjoint()),
    }
    if system.exact is not None:
        found["exact"] = (system.exact, adjsim.ReversibleAdjoint())
    return found


def run(system: System, solver: Any, adjoint: Any, steps: int) -> tuple[Log, Log, list[Tensor]]:
    """Run and differentiate; return the logs of both, and the results."""
    with pretended():
        state = type(system.state)._make(
            x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for x in system.state
        )
    with pretended() as forward:
        path = adjsim.simulate(
            system.dynamics,
            state,
            [0.0, steps * solver.dt],
            solver=solver,
            adjoint=adjoint,
            generator=1,
        )
        final = path.final[0]
    wanted = [x for x in (*state, *system.dynamics.parameters()) if x.requires_grad]
    with pretended() as backward:
        gradients = torch.autograd.grad(final.square().sum(), wanted, allow_unused=True)
    return forward, backward, [final, *(x for x in gradients if x is not None)]


def cost(make: Callable[[], System], warm: bool = False) -> dict[str, Any]:
    """Return what each adjoint of a row costs a step, and what it does in a wrong place.

    ``warm``: a run before has made kernels.
    """
    found: dict[str, Any] = {}
    system = make()
    with pretended():
        system.dynamics.to(DEVICE)
    for label, (solver, adjoint) in adjoints(system).items():
        try:
            if warm:
                run(system, solver, adjoint, 1)
            once, twice = (run(system, solver, adjoint, n) for n in (STEPS, 2 * STEPS))
        except Exception as error:  # One row that fails is a result, and the others are run.
            lines = [
                f"{Path(f.filename).name}:{f.lineno}"
                for f in traceback.extract_tb(error.__traceback__)
                if "adjsim" in f.filename
            ]
            found[label] = {"error": f"{type(error).__name__}: {error}", "lines": lines[-4:]}
            continue
        row: dict[str, Any] = {
            "mixes": [f"{a} @ {b}" for log in twice[:2] for a, b in log.mixes],
            "on the CPU": sum(x.device != DEVICE for x in twice[2]),
        }
        for part in PARTS:
            for side, one, two in zip(("forward", "backward"), once[:2], twice[:2], strict=True):
                more = Counter(getattr(two, part))
                more.subtract(getattr(one, part))
                row[f"{part} {side}"] = sum(more.values()) / STEPS
                if part != "kernels":
                    row[f"{part} {side} at"] = {
                        f"{a} @ {b}": n / STEPS for (a, b), n in more.items() if n > 0
                    }
        found[label] = row
    return found


def gradients(
    system: System, solver: Any, adjoint: Any, compiled: bool
) -> tuple[list[Tensor], dict[str, str]]:
    """Return the end of a run on the CPU and its gradients, and how pairs were evaluated."""
    state = type(system.state)._make(
        x.detach().requires_grad_(x.is_floating_point()) for x in system.state
    )
    path = adjsim.simulate(
        system.dynamics, state, [0.0, STEPS * solver.dt], solver=solver, adjoint=adjoint,
        generator=1, compile=compiled,
    )  # fmt: skip
    wanted = [x for x in (*state, *system.dynamics.parameters()) if x.requires_grad]
    loss = path.final[0].square().sum()
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [path.final[0].detach(), *found], path.stats.get("pairs") or {}


def on_device(logs: list[Log]) -> Any:
    """Return a compiler of loops whose iterations the device repeats; note what they do."""

    def noted(iterate: Any) -> Any:
        def again() -> None:
            with pretended() as log:
                iterate()
            logs.append(log)

        # A GPU runs an iteration once before it is captured, and the host builds its lists.
        with pretended():
            iterate()
        return again

    def moved(tensors: Any) -> list[Tensor]:
        return [x.to(DEVICE) for x in tensors]

    def compiled(
        parts: Any, constants: Any, carry: Any, exact: bool, threads: int, capacity: int = 0
    ) -> Any:
        with pretended():
            there = inductor.on_device(parts, DEVICE)
            loop = replayed(
                there,
                there.start.graph,
                there.body.graph,
                moved(constants),
                moved(carry),
                capacity,
                noted,
            )

        def called(constants: Any, carry: Any) -> Any:
            with pretended():
                final, rows = loop(moved(constants), moved(carry))
                return [x.cpu() for x in final], [x.cpu() for x in rows]

        return called, "torch", None

    return compiled


def loop_cost(make: Callable[[], System]) -> dict[str, Any]:
    """Return what iterations of compiled loops do, and how far results are from those of C++."""
    found: dict[str, Any] = {}
    for label, settings in adjoints(make()).items():
        logs: list[Log] = []
        expected, _ = gradients(make(), *settings, False)
        with tiles.by_tiles("cpu"), patch.object(loops, "compile_to_cpp", on_device(logs)):
            results, paths = gradients(make(), *settings, True)
        # A gradient that cancels to zero keeps the rounding of its terms.
        least = ZERO * max(float(y.abs().max()) for y in expected[1:])
        errors = [
            float((x - y).abs().max() / y.abs().max().clamp(min=least))
            for x, y in zip(results, expected, strict=True)
        ]
        found[label] = {
            "error": max(errors),
            "paths": sorted({*paths.values()}),
            "iterations": len(logs),
            "noted": [
                f"{part}: {a} @ {b}"
                for log in logs
                for part in ("mixes", "waits", "copies")
                for a, b in getattr(log, part)
            ],
        }
    return found


def dry_run() -> dict[str, Any]:
    """Run the part of the benchmark of a GPU that compares the ways to sum pairs."""
    place = Path(__file__).parents[2] / "benchmarks"
    with patch.object(sys, "path", [str(place), *sys.path]):
        benchmark: Any = importlib.import_module("gpu")
    benchmark.ROUNDS = 1
    (row,) = benchmark.pairs(str(DEVICE), True)
    return row


def drawn() -> dict[str, Any]:
    """Return whether numbers that the device draws have the bits of the CPU, and what is mixed."""
    path, steps = adjsim.BrownianPath(3, 2.0**-12), [(-16, 0), (0, 16), (16, 23), (0, 16)]
    seed, columns = Noise(3), range(3, 5)
    expected = path.reader(300).rows(steps)
    tiles = [seed._tile(7, column, 2) for column in columns]
    with pretended() as log:
        rows = path.reader(300, DEVICE).rows(steps)
        block = seed._on_device(7, columns, 2, DEVICE)
    same = [torch.equal(x.cpu(), y) for x, y in zip(rows, expected, strict=True)]
    same.append(bool((block.cpu().numpy() == np.concatenate(tiles, axis=1)).all()))
    return {
        "same": all(same),
        "there": all(x.device == DEVICE for x in [*rows, block]),
        "mixes": list(log.mixes),
    }


def called(name: str) -> dict[str, Any]:
    """Return how far a call's results are from those of the CPU, and what it mixes."""
    with pretended() as log:
        found = CALLS[name](DEVICE)
    both = zip(found, CALLS[name]("cpu"), strict=True)
    return {
        "error": max(float((x.cpu() - y).abs().max() / y.abs().max()) for x, y in both),
        "there": all(x.device == DEVICE for x in found),
        "mixes": list(log.mixes),
    }


def measured(name: str) -> dict[str, Any]:
    """Return what a row costs, in the way that its name says."""
    if name == DRAWN:
        return drawn()
    if name == BENCHMARK:
        by_tiles = tiles.by_tiles(DEVICE.type)
        tensors = patch.object(base, "Tensor", Pretended)
        with by_tiles, tensors, redirect_stdout(sys.stderr), pretended():
            return dry_run()
    if name == CALLED:
        return {call: called(call) for call in CALLS if call != UNKNOWN_CALL}
    if name.endswith(LOOPS):
        with patch.object(box, "LISTED", math.inf):
            return loop_cost(SYSTEMS[name.removesuffix(LOOPS)])
    if name.endswith(LISTS):
        few = patch.object(formula, "LISTED_BESIDE_TILES", 0)
        with tiles.by_tiles(DEVICE.type), patch.object(base, "Tensor", Pretended), few:
            found = cost(TILED[name.removesuffix(LISTS)], warm=True)
        loops_of_row = loop_cost(TILED[name.removesuffix(LISTS)])
        return found | {f"{label}, compiled": row for label, row in loops_of_row.items()}
    if not name.endswith(TILES):
        return cost(SYSTEMS[name])
    name = name.removesuffix(TILES)
    with tiles.by_tiles(DEVICE.type), patch.object(base, "Tensor", Pretended):
        found = cost(TILED[name], warm=True)
    # The CPU has lists for fewer atoms than a GPU.
    with patch.object(box, "LISTED", math.inf):
        loops_of_row = loop_cost(TILED[name])
    return found | {f"{label}, compiled": row for label, row in loops_of_row.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # NumPy takes a microsecond for each operation, so tiles are large.
    gpu.TILE, gpu.COLUMNS = 2**16, 2**8
    for name in sys.argv[1:] or SYSTEMS:
        print(json.dumps({name: measured(name)}), flush=True)
    # Torch's backend of the pretended device does not survive the end of the interpreter.
    os._exit(0)
