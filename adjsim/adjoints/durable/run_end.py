"""The end of a run, from which another run goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.state import AnyState, State
from adjsim.core.trajectory import RunEnd, check_times
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.clock import VaryingClock
from adjsim.solvers.run import Run


def run_end(
    run: Run[State], stepper: Stepper, state: AnyState, force: tuple[Tensor, ...] | None
) -> RunEnd | None:
    """Describe the end of a run, from which another can go on.

    It is None for steps of varying size and for noise of a path. ``force`` are the forces with
    which the next step begins, if they are not evaluated again.
    """
    clock, noise = stepper.clock, run.noise
    lattice, growth = stepper.plan.lattice, stepper.buffer_growth
    if isinstance(clock, VaryingClock) or not (noise is None or noise.continues):
        return None
    known, box = run.state._fields, run.dynamics.reference_box
    box = None if box is None else box.detach().clone()
    return RunEnd(
        clock.begin,
        clock.before + clock.last,
        None if noise is None else noise.seed,
        0 if noise is None else noise.first,
        describe_solver(run.solver),
        {} if lattice is None else lattice.spacings(),
        None if growth is None else growth.check_every,
        {name: x.detach() for name, x in state._asdict().items() if name not in known},
        force,
        box,
    )


def describe_solver(solver: SteppingSolver) -> str:
    """Describe a solver, for comparison with another."""
    return f"{solver!r}, dt = {solver.dt!r}"


def check_continues(
    end: RunEnd | None, state: Any, ts: Any, solver: Any, generator: Any, box: Tensor | None
) -> RunEnd:
    """Check the arguments of a run that goes on from the end of another; return this end."""
    if end is None or not isinstance(solver, SteppingSolver):
        raise TypeError(
            "continues= takes a trajectory of steps of a fixed size, such as those of Splitting. "
            "On a BrownianPath a new run from trajectory.final reads the same path."
        )
    if state is not None:
        raise ValueError("continues= takes the start from the trajectory: give None as state.")
    if generator is not None:
        raise ValueError("continues= takes the noise from the trajectory: leave generator out.")
    copies = [name for name in end.fields if not name.endswith("_buffer")]
    if copies:
        raise TypeError(
            f"continues=: the steps of {solver!r} have a second copy of the state, which a "
            "trajectory does not hand on. Run the whole time at once, with store= if it is long."
        )
    if end.box is not None and (box is None or not torch.equal(end.box, box.to(end.box))):
        raise ValueError(
            "continues=: the strain of the run is that of a box "
            f"{end.box.tolist()}, and the potential has {None if box is None else box.tolist()}. "
            "Give a potential with the same box, or make a new start by "
            "dynamics.init(position, momentum, box=)."
        )
    described = describe_solver(solver)
    if described != end.solver:
        raise ValueError(
            f"continues= is a run of {end.solver}, and solver is {described}: give the same solver."
        )
    begin, now = float(check_times(ts)[0]), end.begin + end.step * solver.dt
    if abs(begin - now) > 1e-3 * solver.dt:
        raise ValueError(f"continues= ends at t = {now:.12g}, and ts begins at {begin:.12g}.")
    return end
