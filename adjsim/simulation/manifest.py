"""The description and the numbers of a run, by which its store knows that it is called again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.agreement import perturbed
from adjsim.core.durable.manifest import (
    describe_module,
    describe_object,
    tensor_fingerprint,
    versions,
)
from adjsim.core.state import State, detached, position_of
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics.base import Dynamics, named_rates
from adjsim.dynamics.fields.base import FieldDynamics
from adjsim.potentials.base import force
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.run import Run


def run_manifest(run: Run[State], adjoint: Adjoint) -> dict[str, str]:
    """Describe a run by everything that its numbers depend on."""
    if not isinstance(run.solver, SteppingSolver):
        raise TypeError(
            f"store= is for solvers that take steps, such as Splitting; not for {run.solver!r}."
        )
    if isinstance(adjoint, DirectAdjoint) and run.needs_gradient and not run.compile:
        raise TypeError(
            "store=: the graph of DirectAdjoint() cannot be saved. Use ReversibleAdjoint() or "
            "CheckpointAdjoint(), or run under torch.no_grad()."
        )
    record, noise, end, times = run.record, run.noise, run.continues, run.times
    fields = run.state._asdict()
    average = isinstance(record, TimeAverage)
    return {
        "the computation": "a run",
        **versions(),
        **describe_module(run.dynamics, record.function if average else record),
        **{f"{name} of the start": tensor_fingerprint(x) for name, x in fields.items()},
        "ts": f"{times.tolist()}" if len(times) < 5 else tensor_fingerprint(times),
        "the solver": describe_object(run.solver, "the solver"),
        "the adjoint": describe_object(adjoint, "the adjoint"),
        "the record": f"a time average after {record.burn_in}" if average else f"{type(record)}",
        "the seed": "none" if noise is None else f"{noise.seed}",
        "the step that it continues": "none" if end is None else f"{end.step}",
        "compile": f"{run.compile}",
        "whether a gradient is wanted": f"{run.needs_gradient}",
    }


@torch.no_grad()
def rates_at_start(
    dynamics: Dynamics[State],
    state: State,
    t: float,
    function: Callable[[State], Tensor] | None,
    change: float,
) -> dict[str, Tensor]:
    """Evaluate the force or the rates at a start, and a function of it, such as a record.

    Each number of the start is changed by a part of itself.
    """
    start = detached(state)
    if change:
        start = type(state)._make(perturbed(x, change) for x in start)
    if isinstance(dynamics, FieldDynamics):
        found = named_rates("drift", dynamics.drift(t, start))
        if dynamics.stochastic:
            found |= named_rates("diffusion", dynamics.diffusion(t, start))
    else:
        found = {"the force": force(dynamics.potential, position_of(start), t)}
    return found if function is None else {**found, "the record": function(start)}
