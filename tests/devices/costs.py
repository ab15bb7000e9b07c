"""What a step costs on a pretended device: synchronisations, copies and kernels, forward and back.

Prints a line of JSON for each row. Run: python -m tests.devices.costs [row ...]
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adjsim
from adjsim.potentials.pairs import formula, listed
from tests.devices.pretended import DEVICE, Log, Pretended, pretended
from tests.devices.systems import SYSTEMS, System

# Lists are for tensors of torch's own class, and on a GPU for larger systems than these.
vars(listed)["Tensor"] = Pretended
formula.LISTED_ON_GPU = 0
STEPS = 4
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


def cost(name: str) -> dict[str, Any]:
    """Return what each adjoint of a row costs a step, and what it does in a wrong place."""
    found: dict[str, Any] = {}
    system = SYSTEMS[name]()
    with pretended():
        system.dynamics.to(DEVICE)
    for label, (solver, adjoint) in adjoints(system).items():
        try:
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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SYSTEMS:
        print(json.dumps({name: cost(name)}), flush=True)
    # Torch's backend of the pretended device does not survive the end of the interpreter.
    os._exit(0)
