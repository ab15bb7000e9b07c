"""The steps that shadowing sweeps: one map of all fields, and checks of its field and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import State
from adjsim.core.trajectory import TimeAverage
from adjsim.core.typing import Times
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.chaos.shadowing_sweep import StepMap
from adjsim.estimators.replicas import checked
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta, increment

# The number of states of a run at which its rate is looked at.
RATES = 1000
# A run that settles has a largest rate in its last quarter below this share of that in its first.
# The share is above 0.1 in each of 2,000 chaotic runs of Lorenz' equations for a time unit or more.
SETTLED = 0.05


def step_map(
    dynamics: Dynamics[Any], solver: RungeKutta, t: float, observable: TimeAverage, start: Any
) -> tuple[StepMap, torch.Size]:
    """Write the steps as a map of the joined fields; also return the shape of the observable."""
    kind = type(start)
    widths = [x.shape[-1] for x in start]

    def unpack(y: Tensor) -> Any:
        # The field gets one batch axis, as the states of the simulation have.
        return kind._make(y.reshape(-1, y.shape[-1]).split(widths, -1))

    def step(y: Tensor) -> Tensor:
        added = torch.cat(increment(dynamics, solver.tableau, t, solver.dt, unpack(y)), -1)
        return y + added.reshape(y.shape)

    @torch.no_grad()
    def rate(y: Tensor) -> Tensor:
        return torch.cat(tuple(dynamics.drift(t, unpack(y))), -1).reshape(y.shape)

    def observe(y: Tensor) -> Tensor:
        states = unpack(y)
        return checked(observable.function(states), states).reshape(*y.shape[:-1], -1)

    with torch.no_grad():
        shape = observable.function(start).shape[1:]
    return StepMap(step, rate, observe, solver.dt), shape


@torch.no_grad()
def refuse_rest(steps: StepMap, states: Tensor) -> None:
    """Refuse a run that settles on a fixed point, where the flow has no direction of its own.

    Shadowing divides by the size of the flow's rate. A run that settles has a rate that falls in
    each quarter of the run, or moves by less than the rounding of its state. A run that comes to
    an attractor has a rate that falls at first only. ``states`` are ``(steps + 1, R, n)``.
    """
    assert steps.rate is not None
    chosen = torch.linspace(0, len(states) - 1, min(len(states), RATES)).long()
    sizes = torch.stack([steps.rate(states[i]).norm(dim=-1) for i in chosen.tolist()])
    first, second, third, last = (part.amax(0) for part in sizes.tensor_split(4))
    falls = (last < SETTLED * first) & (third < second / 2) & (last < third / 2)
    moved = last * (steps.h * len(states) / 4)
    still = moved <= torch.finfo(states.dtype).eps ** 0.5 * states[-1].norm(dim=-1)
    settled = falls | still
    if bool(settled.any()):
        r = int(settled.nonzero()[0])
        raise ValueError(
            "a replica is at rest, or settles on a fixed point: its largest rate is "
            f"{float(first[r]):.2g} in the first quarter of the run, and {float(last[r]):.2g} in "
            "the last. Shadowing follows the flow's own direction, so it needs runs that keep "
            "moving. For a fixed point use Pathwise."
        )


@torch.no_grad()
def refuse_time(dynamics: Dynamics[State], ts: Times, state: State) -> None:
    """Refuse a field that depends on the time, at random times, so that no period is missed."""
    begin, end = float(ts[0]), float(ts[-1])
    shares = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = dynamics.drift(begin, state)
    for t in (begin + shares * (end - begin)).tolist():
        later = dynamics.drift(t, state)
        if not all(torch.equal(a, b) for a, b in zip(first, later, strict=True)):
            raise ValueError(
                "Shadowing is for fields that do not depend on the time, and the field of this "
                f"ODE differs between t = {begin:g} and {t:g}."
            )


def last_finite(states: Tensor, before: int, dt: float) -> Tensor:
    """Return the last state, or refuse a run that, after ``before`` steps, is not finite."""
    finite = torch.isfinite(states).flatten(1).all(1)
    if not bool(finite.all()):
        step = before + int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"the simulation reached NaN or infinity in step {step}. Use a smaller dt (it is "
            f"{dt:g})."
        )
    return states[-1]
