"""The steps that shadowing sweeps: one map of all fields, and checks of its field and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim._state import State
from adjsim._trajectory import TimeAverage
from adjsim.estimators.base import Simulation
from adjsim.estimators.shadowing_sweep import StepMap
from adjsim.solvers.runge_kutta import RungeKutta, increment


def step_map(
    simulation: Simulation[Any], observable: TimeAverage, start: Any
) -> tuple[StepMap, torch.Size]:
    """Write the steps of a simulation as a map of the fields joined into one tensor.

    Returns:
        The map, and the shape of the observable of one system.

    Raises:
        ValueError: (by the map) a replica at rest, an observable without the axis of states.
    """
    assert isinstance(simulation.solver, RungeKutta)
    dynamics, solver = simulation.dynamics, simulation.solver
    t, kind = float(simulation.ts[0]), type(start)
    widths = [x.shape[-1] for x in start]

    def unpack(y: Tensor) -> Any:
        return kind._make(y.split(widths, -1))

    # The field gets one batch axis, as the states of the simulation have.
    def step(y: Tensor) -> Tensor:
        flat = unpack(y.reshape(-1, y.shape[-1]))
        added = torch.cat(increment(dynamics, solver.tableau, t, solver.dt, flat), -1)
        return y + added.reshape(y.shape)

    def rate(y: Tensor) -> Tensor:
        with torch.no_grad():
            flat = unpack(y.reshape(-1, y.shape[-1]))
            found = torch.cat(tuple(dynamics.drift(t, flat)), -1).reshape(y.shape)
        if not bool(found.any(-1).all()):
            raise ValueError(
                "a replica is at rest, where the flow has no direction of its own: Shadowing needs "
                "runs that keep moving. For a fixed point use Pathwise."
            )
        return found

    def observe(y: Tensor) -> Tensor:
        flat = y.reshape(-1, y.shape[-1])
        value = observable.function(unpack(flat))
        if value.shape[:1] != flat.shape[:1]:
            raise ValueError(
                f"the observable has shape {tuple(value.shape)}; its leading axis must be the "
                f"{len(flat)} states."
            )
        return value.reshape(*y.shape[:-1], -1)

    with torch.no_grad():
        shape = observable.function(start).shape[1:]
    return StepMap(step, rate, observe, solver.dt), shape


@torch.no_grad()
def refuse_time(simulation: Simulation[State], state: State) -> None:
    """Refuse a field that depends on the time at a state.

    The times are at random, so that no period is missed.

    Raises:
        ValueError: the rates at two times differ.
    """
    begin, end = float(simulation.ts[0]), float(simulation.ts[-1])
    shares = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = simulation.dynamics.drift(begin, state)
    for t in (begin + shares * (end - begin)).tolist():
        later = simulation.dynamics.drift(t, state)
        if not all(torch.equal(a, b) for a, b in zip(first, later, strict=True)):
            raise ValueError(
                "Shadowing is for fields that do not depend on the time, and the field of this "
                f"ODE differs between t = {begin:g} and {t:g}."
            )


def last_finite(states: Tensor, before: int, dt: float) -> Tensor:
    """Return the last state, or refuse a run that left the finite numbers.

    Args:
        states: the states of the run, ``(steps + 1, R, n)``.
        before: the number of steps before the first state.
        dt: the size of a step.

    Raises:
        FloatingPointError: names the first step whose state is not finite.
    """
    finite = torch.isfinite(states).flatten(1).all(1)
    if not bool(finite.all()):
        step = before + int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"the simulation reached NaN or infinity in step {step}. Use a smaller dt (it is "
            f"{dt:g})."
        )
    return states[-1]
