"""The increment of a Runge-Kutta step as a source of shears, and the growth of reversed steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import AnyState, State, detached
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.sources import Differentiated, Linearised, MoveContext, Time
from adjsim.solvers.runge_kutta.runge_kutta import increment

# Steps along which growth is estimated, and their parts, of which the strongest counts.
AHEAD, PARTS = 256, 4

# Takes numbers of steps and a perturbation after them to one before them, of the size of one, and
# the logarithm of its growth in each system.
Grow = Callable[[range, Sequence[Tensor]], tuple[Sequence[Tensor], Any]]


@dataclass(frozen=True)
class Increment(Differentiated):
    """The increment of a Runge-Kutta step of the field ``index``, as a function of other fields::

        sign step_h(x)  or, with a coefficient w,  w x + sign step_h(x)

    ``reads`` stand for the fields of a state of the type ``kind``. A step of direction -1 goes
    backward in time, and without ``h`` its size is the coefficient "h".
    """

    dynamics: Dynamics[Any]
    tableau: Tableau
    h: float | None
    kind: type[Any]
    reads: tuple[str, ...]
    index: int
    direction: int = 1
    sign: int = 1
    weight: str | None = None

    reads_parameters = True
    what = "the vector field"

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        context.forces.record(len(self.tableau.b))
        return super().value(state, context)

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        value, accumulate = super().vjp(state, context, cotangents)
        if accumulate is not None:
            context.forces.count(len(self.tableau.b))
        return value, accumulate

    def evaluate(self, inputs: Sequence[Tensor], state: AnyState, context: MoveContext) -> Tensor:
        context.forces.count(len(self.tableau.b))
        t, inner = Time().value(state, context), self.kind._make(inputs)
        # A size is a constant of a run, so a coefficient of it is read as a number.
        h = self.direction * (float(context.coefficients["h"]) if self.h is None else self.h)
        step = increment(self.dynamics, self.tableau, t, h, inner)[self.index]
        if self.weight is None:
            return step if self.sign > 0 else -step
        return torch.add(
            context.coefficients[self.weight] * inputs[self.index], step, alpha=self.sign
        )


def reversed_growth(
    dynamics: Dynamics[State], tableau: Tableau, sizes: Sequence[float], state: State, t: float
) -> float:
    """Estimate the growth exponent (1/time) of the reversed linear flow along the next steps.

    A perturbation d of reversed steps obeys ``d <- DPhi_{-h}(y_n) d``. Its growth is that of the
    transposed products from the last state to the first. The largest growth counts, over parts of
    the run and systems of the batch.
    """
    states: list[Any] = []
    y: Any = detached(state)
    times = [t + x for x in accumulate(sizes, initial=0.0)]
    with torch.no_grad():
        for n, h in enumerate(sizes):
            after = added(y, increment(dynamics, tableau, times[n], h, y))
            if not all(bool(torch.isfinite(x).all()) for x in after):
                break
            states.append(after)
            y = after

    def grow(part: range, w: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
        total = 0.0
        for n in reversed(part):
            w = pulled_back(dynamics, tableau, times[n + 1], -sizes[n], states[n], w)
            w, size = normalised(dynamics, y, w)
            total = total + size.log()
        return w, total

    return largest_exponent(dynamics, y, times[: len(states) + 1], grow)


def largest_exponent(
    dynamics: Dynamics[Any], like: AnyState, times: Sequence[float], grow: Grow
) -> float:
    """Return the largest growth exponent over parts of the steps between some times."""
    generator = torch.Generator().manual_seed(0)
    w = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in like]
    w = normalised(dynamics, like, w)[0]
    exponents, count = list[float](), len(times) - 1
    length = max(1, math.ceil(count / PARTS))
    for end in range(count, 0, -length):
        part = range(max(0, end - length), end)
        w, total = grow(part, w)
        time = times[part.stop] - times[part.start]
        exponents.append(float(torch.as_tensor(total).amax()) / time)
    return max(filter(math.isfinite, exponents), default=0.0)


def pulled_back(
    dynamics: Dynamics[Any], tableau: Tableau, t: Any, h: float, state: Any, w: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the product of w with the transposed Jacobian of a step."""
    leaves = type(state)._make(x.detach().requires_grad_() for x in state)
    with torch.enable_grad():
        after = added(leaves, increment(dynamics, tableau, t, h, leaves))
    return torch.autograd.grad(after, tuple(leaves), w, materialize_grads=True)


def added(state: Any, step: tuple[Tensor, ...]) -> Any:
    return type(state)._make(y + x for y, x in zip(state, step, strict=True))


def system_squares(dynamics: Dynamics[Any], state: AnyState, w: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over all fields, for each system of the batch."""
    batch = dynamics.batch_shape(state)
    return torch.stack([x.reshape(*batch, -1).square().sum(-1) for x in w]).sum(0)


def normalised(
    dynamics: Dynamics[Any], state: AnyState, w: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Divide by the norm over all fields, for each system of the batch, and return the norm."""
    batch = dynamics.batch_shape(state)
    size = system_squares(dynamics, state, w).sqrt()
    return [x / size.reshape(*batch, *[1] * (x.ndim - size.ndim)) for x in w], size
