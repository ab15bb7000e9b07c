"""Functions of time, whose numbers are parameters: schedules of actuators, paths and controls.

A signal x maps a time to a tensor, ``signal(t)``, and ``signal.rate(t)`` is dx/dt. The time is a
number, or in compiled loops a tensor. So the value is a sum over nodes with weights that depend on
the time, without a branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import wrong_shape
from adjsim.core.declared import declared
from adjsim.core.derived import has_values
from adjsim.core.parameters import check_numbers, register
from adjsim.core.typing import Number
from adjsim.potentials.evaluated import DeclaredModule


class Signal(DeclaredModule):
    """A function of time, ``x(t)``. Subclasses write ``forward``, and may write ``rate``."""

    def __call__(self, t: Any) -> Tensor:
        if has_values():
            check_numbers(self)
        return super().__call__(t)

    def forward(self, t: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no value: write forward(t).")

    def rate(self, t: Any) -> Tensor:
        """Compute dx/dt, of the shape of the value."""
        raise TypeError(
            f"{type(self).__name__} has no rate(t), which the velocity of a path needs."
        )


class _Nodes(Signal):
    """A signal through values at given times."""

    times: Tensor = declared(
        "``(n,)``, increasing, at least two; ``(n, *batch)`` where each sample has times of its own"
    )
    values: Tensor = declared("``(n, *shape)``, or ``(n, *batch, *shape)``")

    def validate(self) -> None:
        """Refuse times that do not increase, and values of another length."""
        found = self.times.detach()
        if found.ndim < 1 or len(found) < 2:
            raise ValueError(
                f"times must be at least two increasing numbers; got shape {tuple(found.shape)}."
            )
        wrong = ~(found[1:] > found[:-1])
        if bool(wrong.any()):
            k, *sample = wrong.nonzero()[0].tolist()
            place = tuple(sample)
            of = f" of sample {sample}" if sample else ""
            raise ValueError(
                f"times must be at least two increasing numbers; times[{k + 1}]{of} is "
                f"{float(found[k + 1][place]):g} after {float(found[k][place]):g}."
            )
        if self.values.shape[: found.ndim] != found.shape:
            lead = ", ".join(map(str, found.shape))
            raise wrong_shape("values", f"({lead}, ...), one entry for each time", self.values)

    def _shares(self, t: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each interval, the share that has passed, whether t is in it, and its width.

        At a node the interval that begins there counts, so that one interval has a derivative. At
        the last time it is the last interval: a step that ends there reads its slope, and times of
        steps are rounded.
        """
        begin, end = self.times[:-1], self.times[1:]
        width = end - begin
        share = torch.where(t >= begin, (t - begin) / width, 0.0)
        dtypes = [x.dtype for x in (t, width) if isinstance(x, Tensor) and x.is_floating_point()]
        rounding = 8 * max(torch.finfo(x).eps for x in dtypes)
        slack = rounding * (self.times[:1].abs() + self.times[-1:].abs()).detach()
        after = t >= torch.cat([begin[:1] - slack, begin[1:]])
        before = t < torch.cat([end[:-1], end[-1:] + slack])
        inside = torch.where(after, torch.where(before, 1.0, 0.0), 0.0)
        return torch.where(t < end, share, 1.0), inside.to(width), width


class PiecewiseLinear(_Nodes):
    """Straight lines between nodes, ``x(t_k) = values_k``.

    Before the first time and after the last one, x is the first and the last value. At a node
    derivatives are those of the interval that begins there, and at the last time those of the last
    interval. So a step of an equation with :meth:`rate` that ends at a node between reads the slope
    behind it: its error is of the first order in the step, at any order of the method. A
    :class:`CubicSpline` has no such jumps.

    Args:
        {parameters}
    """

    def forward(self, t: Any) -> Tensor:
        share, _, _ = self._shares(t)
        return _combined(_hats(share), self.values)

    def rate(self, t: Any) -> Tensor:
        _, inside, width = self._shares(t)
        return _combined(inside / width, self.values[1:] - self.values[:-1])


class CubicSpline(_Nodes):
    """The cubic spline through nodes, twice continuously differentiable between its ends.

    With h the width of an interval, a and b the shares of it before and behind t (a + b = 1), and
    M_k the second derivatives at the nodes::

        x(t) = b x_k + a x_(k+1) + h^2/6 ((b^3 - b) M_k + (a^3 - a) M_(k+1))

    M solves a tridiagonal system. See de Boor, A Practical Guide to Splines (Springer 1978),
    chapter 4. Before the first time and after the last one, x is the first and the last value; it
    has a kink there unless the slope is zero. At the two times themselves the derivative is that of
    the spline.

    Args:
        {parameters}
        slopes: dx/dt at the first and the last time, ``(2, *shape)`` or one number for both ends (a
            clamped spline). None: the second derivatives are zero there (a natural spline).

    Raises:
        ValueError: times that do not increase, or values or slopes of another shape.
    """

    slopes: Tensor | None

    def __init__(self, times: Number, values: Number, *, slopes: Number | None = None) -> None:
        super().__init__(times, values)
        if slopes is None:
            self.register_buffer("slopes", None)
        else:
            register(self, "slopes", slopes, shapes=[(), (2, *self.values.shape[1:])])

    def forward(self, t: Any) -> Tensor:
        share, _, width = self._shares(t)
        rest = 1 - share
        weight = _pairs((rest**3 - rest) * width**2 / 6, (share**3 - share) * width**2 / 6)
        return _combined(_hats(share), self.values) + self._bent(weight, width)

    def rate(self, t: Any) -> Tensor:
        share, inside, width = self._shares(t)
        rest, scale = 1 - share, inside * width / 6
        weight = _pairs((1 - 3 * rest**2) * scale, (3 * share**2 - 1) * scale)
        straight = _combined(inside / width, self.values[1:] - self.values[:-1])
        return straight + self._bent(weight, width)

    def _bent(self, weight: Tensor, width: Tensor) -> Tensor:
        """Compute the sum of weight_k M_k."""
        # The matrix is symmetric, so the system is solved for the weights, of which there are few.
        values, h = self.values, width.to(self.values)
        slope = (values[1:] - values[:-1]) / _columns(h, values)
        none = torch.zeros_like(width[:1])
        if self.slopes is None:
            end = torch.zeros_like(values[:1])
            right = torch.cat([end, 6 * (slope[1:] - slope[:-1]), end])
            one = torch.ones_like(width[:1])
            diagonal = torch.cat([one, 2 * (width[:-1] + width[1:]), one])
            # The second derivative at an end is known, so its column moves to the right side.
            beside = torch.cat([none, width[1:-1], none]) if len(width) > 1 else none
            weight = torch.cat([none, weight[1:-1], none])
        else:
            ends = self.slopes.to(values).expand(2, *values.shape[1:])
            right = 6 * (torch.cat([slope, ends[1:]]) - torch.cat([ends[:1], slope]))
            diagonal = 2 * (torch.cat([width, none]) + torch.cat([none, width]))
            beside = width
        return _combined(_solve(diagonal, beside, weight), right)


class Harmonics(Signal):
    """A sum of harmonics, ``x(t) = offset + sum_k amplitude_k sin(2 pi frequency_k t + phase_k)``.

    A gait is one: each entry of the shape is an actuator with a phase of its own.

    Args:
        amplitude: ``(harmonics, *shape)``, or a number for one harmonic.
        frequency: cycles per time; a number, ``(harmonics,)`` or ``(harmonics, *shape)``.
        phase: radians; as frequency.
        offset: a number or ``(*shape)``.

    Raises:
        ValueError: shapes that do not fit the amplitude.
    """

    amplitude: Tensor
    frequency: Tensor
    phase: Tensor
    offset: Tensor

    def __init__(
        self, amplitude: Number, frequency: Number, phase: Number = 0.0, offset: Number = 0.0
    ) -> None:
        super().__init__()
        register(self, "amplitude", amplitude)
        lead, *shape = self.amplitude.shape or (1,)
        shapes = [(), (lead,), (lead, *shape)]
        register(self, "frequency", frequency, shapes=shapes, each="as the amplitude")
        register(self, "phase", phase, shapes=shapes, each="as the amplitude")
        each = "as the amplitude of one harmonic"
        register(self, "offset", offset, shapes=[(), tuple(shape)], each=each)

    def forward(self, t: Any) -> Tensor:
        amplitude, _, turn = self._turns(t)
        return self.offset.to(amplitude) + (amplitude * torch.sin(turn)).sum(0)

    def rate(self, t: Any) -> Tensor:
        amplitude, speed, turn = self._turns(t)
        return (amplitude * speed * torch.cos(turn)).sum(0)

    def _turns(self, t: Any) -> tuple[Tensor, Tensor, Tensor]:
        amplitude = self.amplitude if self.amplitude.ndim else self.amplitude.reshape(1)
        speed = 2 * torch.pi * _columns(self.frequency.to(amplitude), amplitude)
        return amplitude, speed, speed * t + _columns(self.phase.to(amplitude), amplitude)


def _columns(x: Tensor, like: Tensor) -> Tensor:
    """Add axes behind those of x, so that its first axis is that of ``like``."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)) if x.ndim else x


def _combined(weight: Tensor, values: Tensor) -> Tensor:
    """Compute the sum of ``weight_k values_k``."""
    return (_columns(weight.to(values), values) * values).sum(0)


def _hats(share: Tensor) -> Tensor:
    """Return the weight of each node in straight lines, from the share of each interval."""
    whole = torch.cat([torch.ones_like(share[:1]), share, torch.zeros_like(share[:1])])
    return whole[:-1] - whole[1:]


def _pairs(before: Tensor, behind: Tensor) -> Tensor:
    """Return the weight of each node, from the weights of both ends of each interval."""
    none = torch.zeros_like(before[:1])
    return torch.cat([before, none]) + torch.cat([none, behind])


def _solve(diagonal: Tensor, beside: Tensor, right: Tensor) -> Tensor:
    """Solve a symmetric tridiagonal system of dominant diagonal by parallel cyclic reduction.

    All rows together are added to those at the distances 1, 2, 4, ...
    """
    none, distance = torch.zeros_like(diagonal[:1]), 1
    lower, upper = torch.cat([none, beside]), torch.cat([beside, none])
    while distance < len(diagonal):
        back = -lower / _shifted(diagonal, distance, 1.0)
        ahead = -upper / _shifted(diagonal, -distance, 1.0)
        diagonal = diagonal + back * _shifted(upper, distance) + ahead * _shifted(lower, -distance)
        right = right + back * _shifted(right, distance) + ahead * _shifted(right, -distance)
        lower, upper = back * _shifted(lower, distance), ahead * _shifted(upper, -distance)
        distance *= 2
    return right / diagonal


def _shifted(x: Tensor, distance: int, fill: float = 0.0) -> Tensor:
    """Return ``x[k - distance]``, and ``fill`` where there is no such entry."""
    rest = torch.full_like(x[: abs(distance)], fill)
    return torch.cat([rest, x[:-distance]] if distance > 0 else [x[-distance:], rest])
