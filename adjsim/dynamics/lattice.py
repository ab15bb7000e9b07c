"""Exact reversal: coupling steps as bijections of a fixed-point lattice.

Every field y holds integer multiples of its spacing ``2^-k``, none larger than ``2^(51-k)``. Sums
and differences of such numbers are exact in float64, so the state stays an ordinary tensor. On the
lattice

* a shear adds the increment rounded to the lattice, ``y' = y + [c g(x)]``. The inverse computes the
  same bits from the same x and subtracts them;
* a shear of columns adds multiples of other columns, rounded, one column after another, and a shear
  of rows a rounded function of other rows;
* a reflection, ``y' = 2 x - y``, needs no rounding where x and y have one spacing;
* a scale by n/d, n and d integers, is not a bijection: d/n states go to one. An integer B for each
  entry, the information buffer, keeps the bits that distinguish them (Maclaurin, Duvenaud and
  Adams, arXiv:1502.03492). With y = X spacing::

      q, r = X div d, X mod d        B <- B d + r
      u    = B mod n                 B <- B div n        X' = q n + u

  Each line is a bijection of (X, B), for n below d as well as above. The inverse is the same with n
  and d exchanged. X' is less than n units from X n/d, and B grows by the log2(d/n) bits that X
  loses. Under constraints, which see the error, a product of two fractions stands for one of a
  large n. When a buffer is full, 32 bits of it go to a stack (:mod:`adjsim.dynamics.buffer`).

Gradients are those of the unrounded flow at the lattice states: rounding has the derivative of the
identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from adjsim.core.rounding import LARGEST, Rounding, Roundings, power_of_two, straight_through
from adjsim.core.state import AnyState, State, in_transform
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import (
    FULL,
    LONGEST,
    SIMPLE_NUMERATOR,
    BufferGrowth,
    Spill,
    buffer_name,
    fractions,
    refill,
    rescaled,
    simpler_products,
    spill,
)
from adjsim.dynamics.copies import Copies, copy_name, extended, typical_sizes
from adjsim.dynamics.cotangents import select_link
from adjsim.dynamics.moves import (
    BufferedFlow,
    Move,
    RatioScale,
    Scale,
    Shear,
    replace_field,
)
from adjsim.dynamics.sources import Coefficient, Coefficients, MoveContext, forces_read
from adjsim.potentials.base import Potential

# The factor by which a field may outgrow its scale. Scaled fields get a finer lattice, since a
# scale by n/d has an error of up to n units.
ROOM, ROOM_SCALED = 2.0**11, 2.0**7
# Largest number of steps between two checks of the buffers.
LONGEST_WAIT = 4096
# The denominator of factors that depend on the state.
DENOMINATOR = 2**22
# How far the function of a ratio is assumed to rise above one.
LARGEST_RATIO = 8
# The integers n and d of a fraction, tensors or numbers.
Pair: TypeAlias = tuple[Any, Any]


class Lattice:
    """The lattice of one run from a start at t, for the moves of a step, by letter.

    Spacings are powers of two, one for each system of a batch (and each link of a field). They
    follow from the largest entry of the start, the thermal momentum, and the change over 256 steps
    at the initial drift.
    """

    def __init__(
        self,
        dynamics: Dynamics[State],
        t: float,
        state: State,
        moves: Mapping[str, tuple[Move, ...]],
        dt: float,
        copies: Copies | None = None,
    ) -> None:
        _check_supported(dynamics, state, moves)
        all_moves = [(letter, move) for letter, group in moves.items() for move in group]
        scales = [(letter, move) for letter, move in all_moves if isinstance(move, Scale)]
        self.scaled = tuple(dict.fromkeys(move.field for _, move in scales))
        self._flows = [(a, move) for a, move in all_moves if isinstance(move, BufferedFlow)]
        self._buffered = {move.buffered: move for _, move in self._flows}
        start: Any = state if copies is None else copies.add(state)
        self.width, self.systems = len(start), dynamics.batch_shape(state).numel()
        self._kind: type[AnyState] = type(start)
        self.kind = extended(self._kind, "OnLattice", tuple(map(buffer_name, self.buffered)))
        sizes = typical_sizes(dynamics, t, state, dt)
        self.roundings: dict[str, Rounding] = {}
        for name, size in sizes.items():
            room = ROOM_SCALED if name in self.scaled else ROOM
            self.roundings[name] = Rounding(power_of_two(size) * (room / LARGEST))
        if copies is not None:
            self.roundings |= {copy_name(name): x for name, x in self.roundings.items()}
        # The roundings of contributions to the force, and to that along a strain.
        self.force_roundings: dict[str, Rounding] = {}
        shears = [move for _, move in all_moves if isinstance(move, Shear)]
        for m, read in ((move, read) for move in shears for read in forces_read(move)):
            _check_force(dynamics.potential)
            # Contributions to forces have one axis more, and a spacing at least as fine as that of
            # the momentum increments.
            spacing = power_of_two(self.roundings[m.field].spacing / dt).unsqueeze(-1) / 2
            name = Roundings._fields[read.which]
            if name in self.force_roundings:
                spacing = torch.minimum(spacing, self.force_roundings[name].spacing)
            self.force_roundings[name] = Rounding(spacing)
        self._constant_factors = [
            (letter, m.source.name, m.field)
            for letter, m in scales
            if isinstance(m.source, Coefficient)
        ]
        self._state_dependent = len(self._constant_factors) < len(scales)
        # A ratio scales centres of bodies alone, and leaves relative momenta as they are.
        self._coarse = any(
            not (isinstance(move, RatioScale) or isinstance(move.source, Coefficient))
            for _, move in scales
        )
        self._half = torch.tensor(0.5, dtype=torch.float64, device=state[0].device)

    @property
    def buffered(self) -> tuple[str, ...]:
        """The names of the buffers: those of fields that are scaled, and of other flows."""
        return (*self.scaled, *self._buffered)

    def spacings(self) -> dict[str, Tensor]:
        """Return the spacing of each field, and of contributions to forces, by name."""
        roundings = self.roundings | self.force_roundings
        return {name: rounding.spacing for name, rounding in roundings.items()}

    def with_spacings(self, spacings: Mapping[str, Tensor]) -> Lattice:
        """Return the same lattice with these spacings, as inputs of compiled code."""
        other = copy(self)
        other.roundings = {name: Rounding(spacings[name]) for name in self.roundings}
        other.force_roundings = {name: Rounding(spacings[name]) for name in self.force_roundings}
        return other

    def on_lattice(self, move: Move) -> Move:
        """Convert a move to its form on this lattice."""
        if not isinstance(move, Shear | Scale):
            return move.on_lattice(self.roundings)
        rounding = self.roundings[move.field].link(move.link)
        if isinstance(move, Shear):
            return LatticeShear(
                move.field, move.source, move.coefficient, move.link, rounding=rounding
            )
        scale: Any = (move.field, move.source, move.link, move.bits)
        given: Any = {"rounding": rounding, "half": self._half}
        if isinstance(move, RatioScale):
            shear: Any = self.on_lattice(move.shear)
            return LatticeRatioScale(*scale, **given, of=move.of, shear=shear)
        return LatticeScale(*scale, **given)

    def rationals(self, coefficients: dict[str, Coefficients]) -> dict[str, Coefficients]:
        """Add to the coefficients a fraction n/d for each coefficient that scales a field."""
        found: dict[str, Coefficients] = dict(coefficients)
        largest = DENOMINATOR if self._coarse else 1
        flowing = {name for _, flow in self._flows for name in flow.fields}
        for letter, name, scaled in dict.fromkeys(self._constant_factors):
            factor = found[letter][name].detach()
            n, d = fractions(f"{name!r} of term {letter!r}", factor)
            found[letter] = {**found[letter], f"{name} n": n, f"{name} d": d}
            if scaled in flowing:
                if int(n.max()) > SIMPLE_NUMERATOR:
                    n, d = simpler_products(factor, n, d)
                    parts = {"n": n[0], "d": d[0], "n 2": n[1], "d 2": d[1]}
                    named = {f"{name} {part}": value for part, value in parts.items()}
                    found[letter] = {**found[letter], **named}
                    n = n.sum(0)
                largest = max(largest, int(n.max()))
        for letter, _ in self._flows:
            units = torch.tensor(float(largest), dtype=torch.float64, device=self._half.device)
            found[letter] = {**found[letter], "units": units}
        return found

    def buffer_growth(
        self, coefficients: dict[str, Coefficients], moves: Sequence[tuple[str, Move]]
    ) -> BufferGrowth:
        """Compute how fast the scales of a step fill the buffers."""
        bits = dict.fromkeys(self.scaled, torch.zeros((), dtype=torch.float64))
        largest = DENOMINATOR if self._state_dependent else 1
        if any(isinstance(move, RatioScale) for _, move in moves):
            largest *= LARGEST_RATIO
        for letter, move in moves:
            if isinstance(move, Scale) and isinstance(move.source, Coefficient):
                for n, d in _fractions(coefficients[letter], move.source.name):
                    bits[move.field] = bits[move.field] + torch.log2(d.double() / n.double())
                    largest = max(largest, int(d.max()), int(n.max()))
        # The check of the buffers finds factors that are smaller than those that are planned with.
        rates = [float(x.abs().max()) for x in bits.values()]
        assumed = [
            move.bits
            for _, move in moves
            if isinstance(move, Scale) and not isinstance(move.source, Coefficient)
        ]
        fastest = max([*assumed, *rates], default=0.0)
        spare_bits = LONGEST - FULL - math.log2(largest)
        if fastest > spare_bits:
            raise ValueError(
                f"exact=True: friction moves {fastest:.3g} bits a step from the momenta into an "
                f"information buffer, which can take {spare_bits:.3g}. Use a smaller dt, or "
                "exact=False."
            )
        check_every = max(1, min(LONGEST_WAIT, int(spare_bits / max(fastest, 1e-9))))
        written = sum(move.bits for _, move in moves if isinstance(move, BufferedFlow))
        if written > LONGEST - FULL:
            raise ValueError(
                f"exact=True: the flows of a step write up to {written:g} bits into a buffer, "
                f"which can take {LONGEST - FULL}. Use a word with fewer constrained drifts."
            )
        check_every = min(check_every, int((LONGEST - FULL) / max(written, 1e-3)))
        # Half a bit above the planned growth, so that a buffer that grew as planned is below it.
        limit = 2.0 ** (FULL + spare_bits + 0.5)
        return BufferGrowth(None if self._state_dependent else bits, check_every, limit)

    def to_lattice(self, state: AnyState) -> AnyState:
        """Round a state to the lattice, and add empty buffers."""
        values = state._asdict()
        fields = [self.roundings[name].round(value) for name, value in values.items()]
        buffers = [torch.zeros_like(values[name], dtype=torch.int64) for name in self.scaled]
        buffers += [move.empty_buffer(state) for move in self._buffered.values()]
        return self.kind._make((*fields, *buffers))

    def from_lattice(self, state: AnyState) -> AnyState:
        """Return the state without its buffers."""
        return self._kind._make(state[: self.width])

    def in_range(self, state: AnyState) -> bool:
        """Return whether every number is finite and small enough for sums to be exact."""
        return max(self._used_fractions(state).values()) <= 1.0

    def describe(self, state: AnyState) -> str:
        """Describe, for an error message, which field has left the lattice, and its limit."""
        used = self._used_fractions(state)
        name = max(used, key=lambda n: used[n])
        limit = self.roundings[name].limit
        return f"{name} left the lattice of the exact run, which reaches to {limit:.3g},"

    def _used_fractions(self, state: AnyState) -> dict[str, float]:
        fields = self.from_lattice(state)._asdict().items()
        return {name: self.roundings[name].used_fraction(value) for name, value in fields}

    def is_full(self, state: AnyState) -> Tensor:
        """Return whether :meth:`spill` would move bits."""
        tops = [getattr(state, buffer_name(name)).amax() for name in self.buffered]
        return reduce(torch.maximum, tops) >= 2**FULL

    def spill(self, state: State, limit: float) -> tuple[State, list[Spill]]:
        """Move the low bits of full buffers to spills."""
        entries = []
        for name in self.buffered:
            most = limit if name in self.scaled else 2.0**LONGEST
            state, entry = spill(state, name, self.systems, most)
            if entry is not None:
                entries.append(entry)
        return state, entries

    def refill(self, state: State, entries: Sequence[Spill]) -> State:
        """Undo :meth:`spill`."""
        for entry in entries:
            state = refill(state, entry, self.systems)
        return state

    def buffered_bits(self, state: AnyState) -> float:
        """Count the bits in the buffers of a state."""
        buffers = (getattr(state, buffer_name(name)).double() for name in self.buffered)
        return sum(float(torch.log2(buffer + 1).sum()) for buffer in buffers)


@dataclass(frozen=True)
class LatticeShear(Shear):
    """A shear whose increment is rounded to the lattice."""

    rounding: Rounding = field(kw_only=True)

    def moved(self, state: State, value: Tensor, context: MoveContext, sign: int) -> State:
        if self.coefficient is not None:
            value = context.coefficients[self.coefficient] * value
        y, increment = self._part(state), self.rounding.round(value)
        y = y + increment if sign > 0 else y - increment
        return replace_field(state, self.field, self.link, y)


@dataclass(frozen=True)
class LatticeScale(Scale):
    """A scale by a fraction, with the remainders in the buffer."""

    rounding: Rounding = field(kw_only=True)
    half: Tensor = field(kw_only=True)

    def moved(self, state: State, value: Tensor, context: MoveContext, sign: int) -> State:
        y, fractions = self._part(state), self._fractions(state, value, context)
        if sign < 0:
            # The inverse is the scale by d/n.
            fractions = [(d, n) for n, d in reversed(fractions)]
        buffer = select_link(getattr(state, buffer_name(self.field)), self.link)
        x = ((y.detach() if y.requires_grad else y) / self.rounding.spacing).to(torch.int64)
        for n, d in fractions:
            x, buffer = rescaled(x, buffer, n, d)
        out = x * self.rounding.spacing
        if sign > 0 and (y.requires_grad or value.requires_grad):
            out = straight_through(y * value, out)
        state = replace_field(state, self.field, self.link, out)
        return replace_field(state, buffer_name(self.field), self.link, buffer)

    def _fractions(self, state: AnyState, factor: Tensor, context: MoveContext) -> list[Pair]:
        if isinstance(self.source, Coefficient):
            return _fractions(context.coefficients, self.source.name)
        # A constant power of two divides by a shift of bits, several times as fast.
        return [(self._numerator(factor), DENOMINATOR)]

    def _numerator(self, factor: Tensor) -> Tensor:
        # Adding a half before truncation rounds to the nearest integer.
        return torch.add(self.half, factor.detach(), alpha=DENOMINATOR).to(torch.int64).clamp(min=1)


@dataclass(frozen=True)
class LatticeRatioScale(LatticeScale):
    """A scale by the ratio of the integers nearest to g after and before a shear."""

    of: Callable[[Tensor], Tensor] = field(kw_only=True)
    shear: LatticeShear = field(kw_only=True)

    def _fractions(self, state: AnyState, factor: Tensor, context: MoveContext) -> list[Pair]:
        shear, after = self.shear, getattr(state, self.shear.field).detach()
        value = shear.source.value(state, context).detach()
        if shear.coefficient is not None:
            value = context.coefficients[shear.coefficient].detach() * value
        before = after - shear.rounding.round(value)
        return [(self._numerator(self.of(after)), self._numerator(self.of(before)))]


def _fractions(c: Coefficients, name: str) -> list[Pair]:
    """Return the fraction n/d of a factor, or the two of which it is the product."""
    found: list[Pair] = [(c[f"{name} n"], c[f"{name} d"])]
    if f"{name} n 2" in c:
        found.append((c[f"{name} n 2"], c[f"{name} d 2"]))
    return found


def _check_supported(
    dynamics: Dynamics[State], state: State, moves: Mapping[str, tuple[Move, ...]]
) -> None:
    for letter, group in moves.items():
        if not all(move.has_lattice_form for move in group):
            reversible = "ReversibleAdjoint() or " if all(m.invertible for m in group) else ""
            raise TypeError(
                f"exact=True needs flows made of shears and scales, and term {letter!r} of "
                f"{type(dynamics).__name__} is neither. Use exact=False with {reversible}"
                "CheckpointAdjoint()."
            )
    if state[0].dtype != torch.float64:
        raise ValueError(
            f"exact=True needs a float64 state, not {state[0].dtype}: the lattice uses the "
            "53 bits of a float64, and the 24 of a float32 would leave it coarser than the steps."
        )
    if in_transform():
        raise RuntimeError(
            "exact=True does not go through torch.func transforms (grad, vmap, jvp): use "
            "exact=False there."
        )


def _check_force(potential: nn.Module | None) -> None:
    if isinstance(potential, Potential) and "rounding" not in signature(potential.force).parameters:
        raise TypeError(
            f"exact=True: {type(potential).__name__}.force(position) must also take rounding="
            "UNROUNDED, and round each contribution with rounding.round before it sums them (see "
            "adjsim.potentials.Potential.force); so must its force_vjp."
        )
