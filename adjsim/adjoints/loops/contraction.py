"""The growth of reversed steps along the first steps of a run, in compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.loops.forward import STORING, ForwardCarry
from adjsim.adjoints.loops.loop import Loop, LoopConstants, LoopKind, lengthened
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.stepper import prepare
from adjsim.compiler import LoopSpec, clone
from adjsim.core.cache_key import CacheKey
from adjsim.core.reading import Reading
from adjsim.core.run_report import RunReport
from adjsim.core.state import State, detached
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.reversible.increment import (
    AHEAD,
    PARTS,
    largest_exponent,
    normalised,
    pulled_back,
)
from adjsim.solvers.run import Run
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta


class GrowthCarry(NamedTuple):
    """A perturbation of the size of one, and the logarithm of its growth so far, by system."""

    perturbation: tuple[Tensor, ...]
    total: Tensor


@torch.no_grad()
def reversed_growth_in_loops(
    reading: Reading[Dynamics[State]],
    tensors: tuple[Tensor, ...],
    key: CacheKey | None,
    dynamics: Dynamics[State],
    tableau: Tableau,
    sizes: Sequence[float],
    state: State,
    t: float,
) -> float:
    """Return what :func:`~adjsim.solvers.reversible.increment.reversed_growth` does.

    ``dynamics`` holds ``tensors``, the values of ``reading``; its ``key`` may be known. Steps of
    varying size do not compile.
    """
    times = torch.tensor([t, t + len(sizes) * sizes[0]], dtype=torch.float64)
    solver = RungeKutta(tableau, sizes[0])
    start = detached(state)
    # Nothing is recorded here.
    key = None if key is None else key._replace(function=None)
    run = Run(reading, tensors, dynamics, start, times, solver, None, compile=True, key=key)
    stepper, inputs = prepare(run, RunReport())
    runner = LoopRunner(stepper, inputs, run, RunReport(), AHEAD)
    fields, stored = runner.pack_state(run.state), list[tuple[Tensor, ...]]()
    for first in range(0, runner.clock.last, runner.length):
        count = min(runner.length, runner.clock.last - first)
        carry, rows = runner.run_loop(
            STORING, first, count, ForwardCarry((), (), (), (), (), fields)
        )
        stored.append(tuple(x[:count] for x in rows))
        fields = carry.state
    # The states after the steps, of which those up to the first that is not finite count.
    after = [torch.cat([*x, last[None]])[1:] for *x, last in zip(*stored, fields, strict=True)]
    stored.clear()
    finite = torch.stack([torch.isfinite(x[..., None]).flatten(1).all(1) for x in after]).all(0)
    count = int(finite.cumprod(0).sum())

    def grow(part: range, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        # Loops are compiled for rows of one length.
        rows = tuple(lengthened(x[part.start : part.stop], AHEAD // PARTS) for x in after)
        given = runner.fixed._replace(states=rows)
        total = torch.zeros(runner.batch, dtype=w[0].real.dtype, device=runner.device)
        before = GrowthCarry(tuple(map(runner.pack, w)), total)
        carry, _ = runner.run_loop(REVERSED, part.start, len(part), before, given)
        return list(map(runner.unpack, carry.perturbation)), carry.total

    times = [runner.clock.time(k) for k in range(count + 1)]
    return largest_exponent(run.dynamics, run.state, times, grow)


def _specify(runner: LoopRunner, loop: Loop) -> LoopSpec[LoopConstants, GrowthCarry]:
    """Specify an iteration: the product with the transposed Jacobian of one reversed step."""
    solver = runner.run.solver

    def start(constants: LoopConstants, carry: GrowthCarry) -> tuple[Tensor, GrowthCarry]:
        return constants.steps - 1, carry

    def body(
        constants: LoopConstants, k: Tensor, carry: GrowthCarry
    ) -> tuple[Tensor, GrowthCarry, tuple[()]]:
        # The stored rows are the states after the steps.
        state, end = runner.state_before(constants, k), runner.time(constants, k)(1.0)
        w = tuple(map(runner.unpack, carry.perturbation))
        w = pulled_back(runner.dynamics, solver.tableau, end, -solver.dt, state, w)
        w, size = normalised(runner.dynamics, state, w)
        return k - 1, GrowthCarry(tuple(map(runner.pack, w)), clone(carry.total + size.log())), ()

    return LoopSpec(start, lambda k, _: k >= 0, body, lambda steps: steps)


REVERSED = LoopKind(_specify)
