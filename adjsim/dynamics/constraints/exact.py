"""The drift of RATTLE as a bijection of a lattice.

The multipliers x and y are rounded to multiples of a grid, which is ``COARSE`` times as wide as the
error of a multiplier by the spacing of positions. With [ ] the rounding to the lattice::

    p_half = p + [G(q)^T x]    q' = q + [h M^-1 p_half]    p' = p_half - [G(q')^T y]

The inverse finds y from the lengths at q, and x from the tangency of p, as real numbers that differ
from x and y by rounding and by the grid of the drift before. They round to the same multiples, or
to neighbours. The drift computes the multiples that its inverse will find, and writes the
differences, as integers, into an information buffer, from which the inverse reads them. With an
integer B for each multiplier, a difference of zero, which nearly all are, is written as one of 120
numbers of 128, any other as one::

    B <- 128 (B div 120) + 8 + B mod 120        B <- 128 B + (0, 1, ... 7 for -4, ... -1, 1, ... 4)

So a zero takes 0.09 bits and another difference takes 7. Both lines are bijections onto their
remainders by 128 (asymmetric numeral systems, Duda, arXiv:1311.2540).

Each multiplier has four such integers, and each drift writes into the next of them: a buffer is
checked when an integer may be full, and a compiled loop runs from check to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from adjsim.core.derived import has_values
from adjsim.core.rounding import Rounding, straight_through
from adjsim.core.state import AnyState, State, position_of
from adjsim.dynamics.buffer import buffer_name
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.moves import BufferedFlow
from adjsim.dynamics.sources import MoveContext

# The grid of multipliers over their errors by the spacing of positions.
COARSE = 2.0**8
# The same by that of momenta, which a scale by n/d takes off the constraints by up to n units: at
# least, and up to a grid of FINE units, at which constraints hold to 1e-8. Differences are rare on
# a wide grid: at twice the error one in ten multipliers has one.
COARSE_MOMENTUM, WIDE_MOMENTUM, FINE = 2.0, 64.0, 2.0**17
RADIX, RARE = 128, 8
ZERO = RADIX - RARE
# The integers of each multiplier.
WORDS = 4


@dataclass(frozen=True)
class Drift(BufferedFlow):
    """The drift over a time h, which on a lattice is a :class:`LatticeDrift`."""

    buffered = "multiplier"
    # Of 29 bits an integer takes four differences, so that 16 drifts fill none.
    bits = 29 / 4 / WORDS
    constraints: DistanceConstraints = field(kw_only=True)
    h: float = field(kw_only=True)

    def empty_buffer(self, state: AnyState) -> Tensor:
        # Of x, and of y.
        q, entries = position_of(state), 2 * WORDS * len(self.constraints.index)
        return q.new_zeros((*q.shape[:-2], entries), dtype=torch.int64)

    def on_lattice(self, roundings: Mapping[str, Rounding]) -> LatticeDrift:
        shared: Any = {x.name: getattr(self, x.name) for x in fields(self)}
        return LatticeDrift(
            **shared, position=roundings["position"], momentum=roundings["momentum"]
        )


@dataclass(frozen=True)
class LatticeDrift(Drift):
    """The drift on a lattice, with the differences of its inverse in a buffer."""

    position: Rounding = field(kw_only=True)
    momentum: Rounding = field(kw_only=True)

    @torch.no_grad()
    def _moved(self, state: Any, context: MoveContext) -> Any:
        held, c, h, w = self.constraints, context.coefficients, self.h, context.coefficients["1/m"]
        q, p, grid = state.position, state.momentum, self._grid(context)
        d = held.differences(q)
        x = (held.length_multipliers(c, d + h * held.differences(w * p), d, h) / grid).round()
        half = p + self._impulse(x * grid, d, w, p)
        end = q + self.position.round(h * w * half)
        e = held.differences(end)
        y = (held.tangent_multipliers(c, e, held.differences(w * half)) / grid).round()
        p = half - self._impulse(y * grid, e, w, p)
        off = (x - self._of_start(c, d, half, grid), y - self._of_end(c, e, p, grid))
        off = torch.cat(off, -1).to(torch.int64)
        oldest, *others = getattr(state, buffer_name(self.buffered)).chunk(WORDS, -1)
        buffer = torch.cat([*others, _written(oldest, off)], -1)
        # A sum, which compiled loops print, where the maximum of a long row would be a call.
        beyond = (off.abs() > RARE // 2).sum(-1) > 0
        if has_values() and bool(beyond.any()):
            raise FloatingPointError(
                "exact=True: the inverse of a constrained drift finds other multipliers than the "
                "drift. If lengths are off at the start, make it by init. Or use a smaller dt: "
                "atoms turn too far about each other in a step."
            )
        p = torch.where(beyond[..., None, None], torch.nan, p)
        return self._stored(state, end, p, buffer)

    @torch.no_grad()
    def _undone(self, state: Any, context: MoveContext) -> Any:
        held, c, h, w = self.constraints, context.coefficients, self.h, context.coefficients["1/m"]
        end, p, grid = state.position, state.momentum, self._grid(context)
        *others, last = getattr(state, buffer_name(self.buffered)).chunk(WORDS, -1)
        oldest, off = _read(last)
        buffer = torch.cat([oldest, *others], -1)
        off_x, off_y = off.chunk(2, -1)
        e = held.differences(end)
        y = self._of_end(c, e, p, grid) + off_y
        half = p + self._impulse(y * grid, e, w, p)
        q = end - self.position.round(h * w * half)
        d = held.differences(q)
        x = self._of_start(c, d, half, grid) + off_x
        return self._stored(state, q, half - self._impulse(x * grid, d, w, p), buffer)

    def flow(self, state: State, context: MoveContext) -> State:
        found: Any = self._moved(state, context)
        inputs = [*(getattr(state, x) for x in self.fields), *context.coefficients.values()]
        if not any(x.requires_grad for x in inputs) or not torch.is_grad_enabled():
            return found
        smooth: Any = super().flow(state, context)
        values = ((getattr(smooth, name), getattr(found, name)) for name in self.fields)
        joined = map(straight_through, *zip(*values, strict=True))
        return found._replace(**dict(zip(self.fields, joined, strict=True)))

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        before = self._undone(after, context) if before is None else before
        return super().backward(after, context, cotangents, before)

    def _of_end(self, c: Any, e: Tensor, p: Tensor, grid: Tensor) -> Tensor:
        """Return y / grid as the inverse finds it, from the lengths at its end."""
        u = e - self.h * self.constraints.differences(c["1/m"] * p)
        return (self.constraints.length_multipliers(c, u, e, -self.h) / grid).round()

    def _of_start(self, c: Any, d: Tensor, half: Tensor, grid: Tensor) -> Tensor:
        """Return x / grid as the inverse finds it, from the momenta at its end."""
        v = self.constraints.differences(c["1/m"] * half)
        return (self.constraints.tangent_multipliers(c, d, v) / grid).round()

    def _impulse(self, multipliers: Tensor, d: Tensor, w: Tensor, p: Tensor) -> Tensor:
        return self.momentum.round(self.constraints.forces(multipliers, d, w, p.shape[-2]))

    def _grid(self, context: MoveContext) -> Tensor:
        """Return the grid of each multiplier, ``(*batch, n)``."""
        c = context.coefficients
        by_position = COARSE * self.position.spacing[..., 0] / (abs(self.h) * c["1/m of pairs"])
        units = c["units"]
        width = torch.maximum(COARSE_MOMENTUM * units, (WIDE_MOMENTUM * units).clamp(max=FINE))
        by_momentum = width * self.momentum.spacing[..., 0]
        return torch.maximum(by_position, by_momentum) / c["length"]

    def _stored(self, state: Any, q: Tensor, p: Tensor, buffer: Tensor) -> Any:
        return state._replace(**{"position": q, "momentum": p, buffer_name(self.buffered): buffer})


def _written(buffer: Tensor, difference: Tensor) -> Tensor:
    """Write differences into buffers."""
    common = torch.div(buffer, ZERO, rounding_mode="floor")
    # B mod 120 + 8 + 128 (B div 120).
    zero = buffer + common * (RADIX - ZERO) + RARE
    rare = buffer * RADIX + difference + torch.where(difference < 0, RARE // 2, RARE // 2 - 1)
    return torch.where(difference == 0, zero, rare)


def _read(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Read differences from buffers; return the buffers before they were written."""
    quotient = torch.div(buffer, RADIX, rounding_mode="floor")
    place = buffer - quotient * RADIX
    is_zero = place >= RARE
    rare = place - torch.where(place < RARE // 2, RARE // 2, RARE // 2 - 1)
    before = torch.where(is_zero, quotient * ZERO + place - RARE, quotient)
    return before, torch.where(is_zero, 0, rare)
