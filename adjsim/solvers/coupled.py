"""Algebraically reversible Runge-Kutta steps."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import torch

from adjsim._inputs import as_flag, as_number
from adjsim._state import State, in_transform
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import LARGEST_DENOMINATOR
from adjsim.dynamics.copies import Copies, copy_name
from adjsim.dynamics.couplings import Move, Scale, Shear
from adjsim.dynamics.lattice import Lattice, typical_sizes
from adjsim.dynamics.sources import Coefficient, Coefficients
from adjsim.solvers.base import Program, Stage, SteppingSolver
from adjsim.solvers.increment import Increment, reversed_growth
from adjsim.solvers.runge_kutta import LETTER, RungeKutta, refuse_no_drift
from adjsim.solvers.tableaus import Tableau

# Steps along which the rate is estimated.
AHEAD = 256
# The estimated rate over the strongest contraction.
MARGIN = 1.5
# The smallest estimated rate times dt: the coupling 0.999 of McCallum and Foster.
SMALLEST = 1e-3
# The relative error of 1 - c that makes its fraction simple.
SIMPLE = 0.01


class Coupled(SteppingSolver):
    """Take Runge-Kutta steps of size dt in a form that can be undone::

        y' = c y + (1 - c) z + step_h(z)        z' = z - step_{-h}(y')        c = exp(-rate h)

    Here z is a second copy of the state, equal to y at the start, and step_h is the increment of
    the method (McCallum and Foster 2024, arXiv:2410.11648). The result is y. A step is a scale of
    y, a shear of y by a function of z and a shear of z by a function of y, so it has an inverse and
    a product, and goes with :class:`~adjsim.ReversibleAdjoint`. The order is that of the method. A
    step costs two steps of the method (for a state of k fields 2 k).

    The distance between the copies obeys d' = c DPhi_{-h} d, so it grows as exp((g - rate) t), with
    g the top exponent of the reversed linear flow: the strongest contraction of the flow. ``rate``
    must exceed g, and 2 g keeps the relative precision of a solution that decays at the rate g. A
    run whose copies move apart by a tenth of their size stops, and names a rate.

    In floating point an undone step amplifies rounding by exp((rate + a) t), where a is the largest
    exponent of the flow, so ``ReversibleAdjoint`` stores checkpoints. With ``exact=True`` the steps
    run on a lattice (:mod:`adjsim.dynamics.lattice`) and are undone bit for bit, in chaos and under
    contraction, at any length. This takes rate/ln 2 bits per entry and unit of time, and float64.

    The coupling c is the simplest fraction n/d with 1 - c within one per cent of 1 - exp(-rate dt).

    Steps are stable for dt times the fastest decay up to about rate dt, which is below the limit of
    the method itself: for stiff equations use implicit steps.

    Args:
        method: a name or a :class:`~adjsim.solvers.tableaus.Tableau`, as for ``RungeKutta``.
        dt: the step, time.
        rate: the rate of the coupling, 1/time. None: 1.5 times the strongest contraction along the
            first 256 steps, rounded up to two digits. It is in ``trajectory.stats["rate"]``.
        exact: run the steps on a lattice, where they are undone bit for bit.

    Raises:
        ValueError: an unknown method, a rate that is not positive or too small or large for dt;
            with ``exact``, a state that is not float64.
        TypeError: dynamics with noise, or with a term that is not an equation (when a run begins).
        FloatingPointError: the copies moved apart; the message names the step and a rate.
    """

    def __init__(
        self,
        method: str | Tableau,
        dt: float,
        *,
        rate: float | int | None = None,
        exact: bool = False,
    ) -> None:
        steps = RungeKutta(method, dt)
        self.method, self.tableau, self.dt = steps.method, steps.tableau, steps.dt
        self.rate = None if rate is None else as_number("rate", rate)
        self.exact = as_flag("exact", exact)
        if self.rate is not None:
            if not 0 < self.rate < math.inf:
                raise ValueError(f"rate must be positive; got {rate}.")
            self.coupling = coupling(self.rate, self.dt)

    @property
    def order(self) -> int:
        return self.tableau.order

    def resolved(self, dynamics: Dynamics[State], state: State, t: float) -> Coupled:
        """Return these steps with a rate."""
        if self.rate is not None:
            return self
        refuse_no_drift(self, dynamics)
        if in_transform():
            raise RuntimeError(
                "rate=None reads the numbers of the start, which torch.func transforms (grad, "
                "vmap, jvp) hide: give Coupled a rate."
            )
        rate = self._suggest(dynamics, state, t, AHEAD)
        return Coupled(self.method, self.dt, rate=rate, exact=self.exact)

    def program(self, dynamics: Dynamics[State], state: State) -> Program:
        if self.rate is None:
            return self.resolved(dynamics, state, 0.0).program(dynamics, state)
        refuse_no_drift(self, dynamics)
        names = state._fields
        copied = tuple(map(copy_name, names))
        increment = partial(Increment, dynamics, self.tableau)
        forward: list[Move] = []
        for i, name in enumerate(names):
            step = increment(self.dt, type(state), copied, i, weight="1-c")
            forward += [Scale(name, Coefficient("c")), Shear(name, step)]
        backward = tuple(
            Shear(name, increment(-self.dt, type(state), names, i, sign=-1))
            for i, name in enumerate(copied)
        )
        sizes = {} if in_transform() else typical_sizes(dynamics, state, self.dt)
        remedy = partial(self._remedy, dynamics)
        copies = Copies(state, sizes, remedy, {"rate": self.rate})
        stages = (Stage(LETTER, tuple(forward), 0.0), Stage(LETTER, backward, 1.0))
        lattice = None
        if self.exact:
            moves = {LETTER: (*forward, *backward)}
            lattice = Lattice(dynamics, state, moves, self.dt, copies)
        return Program(stages, self.dt, self.order, lattice=lattice, copies=copies)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        if self.rate is None:
            return self.resolved(dynamics, state, 0.0).coefficients(dynamics, state)
        values = {"c": self.coupling, "1-c": 1 - self.coupling}
        return {
            LETTER: {
                name: torch.tensor(float(x), dtype=state[0].dtype, device=state[0].device)
                for name, x in values.items()
            }
        }

    def damping(self, dynamics: Dynamics[State], state: State) -> float:
        return (self.rate or 0.0) + dynamics.damping(state)

    def _suggest(self, dynamics: Dynamics[State], state: State, t: float, steps: int) -> float:
        """Choose a rate by the contraction along the next steps."""
        growth = reversed_growth(dynamics, self.tableau, self.dt, state, t, steps)
        return _rounded_up(max(MARGIN * growth, SMALLEST / self.dt))

    def _remedy(self, dynamics: Dynamics[State], state: State, t: float) -> str:
        """Say why the copies of a state move apart, and the way out."""
        assert self.rate is not None
        rate = self._suggest(dynamics, state, t, AHEAD)
        found = f"the rate {self.rate:.4g} of the coupling is "
        if rate > self.rate:
            return (
                f"{found}too small for the contraction of the flow. Use rate={rate:.3g}, or a "
                "larger one."
            )
        return (
            f"{found}large enough for the contraction of the flow, so the steps are too coarse. "
            f"Use a smaller dt (it is {self.dt:g})."
        )

    def __repr__(self) -> str:
        rate = "" if self.rate is None else f", rate={self.rate:g}"
        exact = ", exact=True" if self.exact else ""
        return f"Coupled({self.method!r}, dt={self.dt:g}{rate}{exact})"


def coupling(rate: float, dt: float) -> Fraction:
    """Find the simplest fraction c with 1 - c within one per cent of 1 - exp(-rate dt)."""
    gap, limit = -math.expm1(-rate * dt), 2
    while limit <= LARGEST_DENOMINATOR:
        near = Fraction(gap).limit_denominator(limit)
        if near < 1 and abs(float(near) - gap) <= SIMPLE * gap:
            return 1 - near
        limit *= 2
    raise ValueError(
        f"rate = {rate:g} is too small for dt = {dt:g}: the coupling exp(-rate dt) is within "
        f"{gap:.1g} of 1. Use a larger rate."
    )


def _rounded_up(rate: float) -> float:
    """Round up to two digits, so that nearby starts and parameters have the same rate."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.ceil(rate / unit - 1e-9) * unit
