"""Splittings, whose step is a word over the terms of the dynamics."""

from __future__ import annotations

from collections import Counter

from adjsim.core.arguments import as_flag, describe_type
from adjsim.core.state import State
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.sources import Coefficients
from adjsim.solvers.base import Stage, SteppingSolver, StepPlan
from adjsim.solvers.clock import check_dt


class Splitting(SteppingSolver):
    """Compose the flows of the terms in the order of a word.

    Examples are "BAB" and "NBABN". A letter that occurs n times advances its term by dt/n each
    time. A palindrome is symmetric and second order; any other word is in general first order (see
    ``trajectory.stats["order"]``). Adjacent flows of one term at the same position share one force
    evaluation, so "BAB" costs one force a step. Every scheme whose flows have inverses is
    reversible.

    Args:
        scheme: a word that uses each term of the dynamics, such as A (stream), B (kick), N
            (Nose-Hoover chain), E (turn).
        dt: the step, time.
        exact: run the steps on a fixed-point lattice inside float64, where each step is a bijection
            and is undone bit for bit (see :mod:`adjsim.dynamics.lattice`). ``ReversibleAdjoint``
            then equals ``DirectAdjoint`` at any length, in chaos and under friction. The path is as
            accurate as the floating-point path, from which it first differs by rounding. Flows have
            to be made of shears and scales, which excludes :class:`~adjsim.ESH`. A factor such as
            exp(-friction dt) is replaced by a fraction, with an error of at most 1e-7 times the
            factor's distance from one. So the trajectory is piecewise constant in the friction at
            that level, and unfit for difference quotients. ``trajectory.stats["buffer_bits"]`` are
            the bits per step and degree of freedom that information buffers took, and
            ``["buffer_bound"]`` those that friction removes, friction dt / ln 2 (None where it
            depends on the path).

    Raises:
        ValueError: a letter without a term, or a term that the word does not use; with ``exact``, a
            state that is not float64, or a factor without a fraction near it.
        TypeError: with ``exact``, a flow that is not made of shears and scales.
        OverflowError: in an exact run, a number that leaves the lattice.
    """

    def __init__(self, scheme: str, dt: float, *, exact: bool = False) -> None:
        if not isinstance(scheme, str):
            raise TypeError(f"scheme must be a word such as 'BAB'; got {describe_type(scheme)}.")
        if not scheme:
            raise ValueError("scheme is empty; 'BAB' is velocity Verlet.")
        self.scheme, self.dt, self.exact = scheme, check_dt(dt), as_flag("exact", exact)

    @property
    def order(self) -> int:
        return 2 if self.scheme == self.scheme[::-1] else 1

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        terms, shares = dynamics.terms, self._shares(dynamics)
        moves = {letter: tuple(terms[letter].moves(h, state)) for letter, h in shares.items()}
        stages, elapsed, passed, draws = [], 0.0, Counter(), 0
        clocks = sum(term.advances_time for term in terms.values())
        for letter in self.scheme:
            count = terms[letter].draws
            stages.append(Stage(letter, moves[letter], elapsed, draws, count))
            draws += count
            if terms[letter].advances_time:
                passed[letter] += 1
                elapsed = sum(n / self.scheme.count(a) for a, n in passed.items()) / clocks
        return StepPlan(tuple(stages), self.dt, self.order, draws)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        terms, shares = dynamics.terms, self._shares(dynamics)
        return {letter: terms[letter].coefficients(h, state) for letter, h in shares.items()}

    def check(self, plan: StepPlan, dynamics: Dynamics[State], state: State, t: float) -> None:
        # A word with n kicks and n streams is as stable as n steps of dt/n at best.
        terms = dynamics.terms
        moves = zip(plan.moves, plan.force_reads, strict=True)
        reads = {stage.letter for (stage, _), reads in moves if reads}
        shares = [
            share
            for letter, share in self._shares(dynamics).items()
            if terms[letter].advances_time or letter in reads
        ]
        dynamics.check_step(max(shares, default=self.dt), state, t)

    def _shares(self, dynamics: Dynamics[State]) -> dict[str, float]:
        count, known = Counter(self.scheme), dynamics.terms
        unknown = [letter for letter in count if letter not in known]
        missing = [letter for letter in known if letter not in count]
        if unknown or missing:
            problem = "has no term {!r}" if unknown else "has a term {!r} that it leaves out"
            raise ValueError(
                f"scheme {self.scheme!r} does not fit {type(dynamics).__name__}, which "
                f"{problem.format((unknown or missing)[0])}; its terms are {', '.join(known)}."
            )
        return {letter: self.dt / n for letter, n in count.items()}

    def __repr__(self) -> str:
        return f"Splitting({self.scheme!r}, dt={self.dt:g}{', exact=True' if self.exact else ''})"


def BAOAB(dt: float) -> Splitting:
    """Make the splitting "BAOAB": kick, stream, Ornstein-Uhlenbeck, stream, kick.

    It is the first choice for :class:`~adjsim.Langevin` (Leimkuhler and Matthews 2013). It costs
    one force a step, and its configurational averages are exact for harmonic forces and fourth
    order at large friction.
    """
    return Splitting("BAOAB", dt)


def VelocityVerlet(dt: float) -> Splitting:
    """Make the splitting "BAB": kick, stream, kick, the standard integrator of molecular dynamics.

    It is second order, symplectic and time-reversible.
    """
    return Splitting("BAB", dt)
