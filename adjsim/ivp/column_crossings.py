r"""Events of problems in columns, and their derivatives.

The gradient is that of :mod:`adjsim.ivp.events`. In an attempt of size h from t, whose interpolant
y(t + x h) crosses the surface of an event at x, let :math:`\dot g` and :math:`f^\pm` be the rates
there, which are evaluated forward and are constants. Then

.. math:: t_e = t + x h - \frac{g(t_e, y(t + x h)) - \mathrm{const}}{\dot g}, \qquad
   y^- = y(t + x h) + f^- dt_e, \qquad y^+ = r(t_e, y^-) - f^+ dt_e .

The last term moves the start of the next piece back to a constant time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.parameters import leaves
from adjsim.core.rows import pulled
from adjsim.ivp.column_steps import interpolate
from adjsim.ivp.events import event_settings
from adjsim.ivp.rhs import RightHandSide, describe_shape


class Slope(NamedTuple):
    """The value of an event ``(batch,)``, and its derivatives in the time and the state."""

    value: Tensor
    by_time: Tensor
    by_state: Tensor

    def along(self, flow: Tensor) -> Tensor:
        """Return the rate of the value along rates ``(n, batch)``."""
        return self.by_time + (self.by_state * flow).sum(0)


class ColumnEvent:
    """A user's event of all columns, with SciPy's attributes and a reset; its ``number`` counts."""

    def __init__(self, function: Callable[..., Any], rhs: RightHandSide, number: int) -> None:
        self.function: Any = rhs.inputs.histories.twins_in(function)
        self.rhs, self.number = rhs, number
        self.terminal, self.direction, self.reset = event_settings(self.function)
        # Leaf tensors that the event and its reset read, other than those of the run. They are
        # collected where gradients are recorded.
        self.reads: dict[int, Tensor] = {}
        self._noted = torch.is_grad_enabled()

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the values ``(batch,)`` at times ``(batch,)`` and states ``(n, batch)``."""
        dtype = self.rhs.like.dtype
        value = self.rhs.called(self.function, t.to(dtype), y.to(dtype))
        if not isinstance(value, Tensor) or value.shape != t.shape:
            raise ValueError(
                f"event {self.number} must return a tensor with one value for each of the "
                f"{len(t)} columns; got {describe_shape(value)}."
            )
        return value.double()

    def after(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the states after the reset."""
        assert self.reset is not None
        dtype = self.rhs.like.dtype
        found = self.rhs.called(self.reset, t.to(dtype), y.to(dtype))
        found = torch.stack(tuple(found)) if isinstance(found, list | tuple) else found
        if not isinstance(found, Tensor) or found.shape != y.shape:
            raise ValueError(
                f"reset returned shape {describe_shape(found)} for a state of shape "
                f"{tuple(y.shape)}."
            )
        return found.double()

    def reset_state(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the states after the reset, without a graph."""
        with torch.set_grad_enabled(self._noted):
            found = self.after(t, y)
        self._note(found)
        return found.detach()

    def _note(self, found: Tensor, *points: Tensor) -> None:
        if self._noted:
            known = {id(x) for x in (*self.rhs.parameter_leaves, *points)}
            self.reads |= {id(x): x for x in leaves(found) if id(x) not in known}

    def slope(self, t: Tensor, y: Tensor) -> Slope:
        """Return the value with its derivatives in time and state."""
        with torch.enable_grad():
            at, x = t.detach().requires_grad_(), y.detach().requires_grad_()
            value = self(at, x)
        self._note(value, at, x)
        # The event may read a tensor with a graph of the user's, which is kept.
        found = pulled([value], [at, x], [torch.ones_like(value)])
        return Slope(value.detach(), *found)

    def happens(self, before: Tensor, after: Tensor) -> Tensor:
        """Test whether the event happens between two of its values, as SciPy does."""
        up, down = (before <= 0) & (after >= 0), (before >= 0) & (after <= 0)
        return up if self.direction > 0 else down if self.direction < 0 else up | down


class Root(NamedTuple):
    """An event of an attempt, with times ``(hits,)`` and states ``(hits, n)`` of its ``columns``.

    ``speed`` is :math:`\\dot g` and ``flow`` is :math:`f^-`, in all columns. ``offset`` counts the
    hits of all events before.
    """

    event: int
    columns: Tensor
    x: Tensor
    speed: Tensor
    flow: Tensor
    offset: int
    time: Tensor
    state: Tensor


@dataclass(frozen=True)
class Crossing:
    """The events of one attempt.

    ``stop`` is the number of the event at which a column ends or is reset, or -1; ``again`` marks
    the columns that are reset, ``flow`` are their rates after it, ``shift`` moves their states off
    the surface of a jump of the rates.
    """

    roots: Sequence[Root]
    stop: Tensor
    again: Tensor
    flow: Tensor
    shift: Tensor

    def connected(
        self,
        events: Sequence[ColumnEvent],
        t: Tensor,
        h: Tensor,
        y: Tensor,
        end: Tensor,
        coefficients: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the states after the attempt, and the times and states of its events.

        Without events the states would be ``end``.
        """
        times, states, at = [], [], t + h
        for root in self.roots:
            inside, begin = interpolate(y, coefficients, root.x), t + root.x * h
            event = events[root.event]
            value = event(*_regular(event, begin, inside, root.columns))
            time = begin - torch.where(root.columns, (value - value.detach()) / root.speed, 0.0)
            state = inside + root.flow * (time - begin)
            times.append(time[root.columns])
            states.append(state[:, root.columns].T)
            stops = root.columns & (self.stop == root.event)
            end, at = torch.where(stops, state, end), torch.where(stops, time, at)
        found = end
        for root in self.roots:
            columns = root.columns & (self.stop == root.event) & self.again
            if columns.any():
                reset = events[root.event].after
                moved = reset(*_regular(reset, at, end, columns))
                moved = moved + self.shift - self.flow * (at - at.detach())
                found = torch.where(columns, moved, found)
        return found, times, states


def _regular(
    function: Callable[[Tensor, Tensor], Tensor], t: Tensor, y: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace times and states of columns that are not ``wanted`` where there is no derivative.

    Autograd would multiply an infinite derivative by the cotangent zero, and the gradient of a
    parameter would be NaN. These columns get the time and the state of a wanted one.
    """
    at, x = t.detach().requires_grad_(), y.detach().requires_grad_()
    value = function(at, x)
    slopes = pulled([value], [at, x], [torch.ones_like(value)])
    known = [x.isfinite().reshape(-1, len(t)).all(0) for x in (value, *slopes)]
    wrong = ~(wanted | torch.stack(known).all(0))
    if not wrong.any():
        return t, y
    k = wanted.nonzero()[0]
    return torch.where(wrong, t[k].detach(), t), torch.where(wrong, y[:, k].detach(), y)
