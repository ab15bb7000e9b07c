"""Whether a right-hand side still is the one that a solution was found with.

The adjoint evaluates the right-hand side again. Tensors are those that the run has read
(:mod:`adjsim.ivp.reads`); attributes, global variables and random numbers are the function's own.
So its rates at some states on the way forward are kept, and compared with what it returns at the
same states before a way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolver

from adjsim.ivp.rhs import Array, RightHandSide

# States whose rates are kept, at most.
KEPT = 128


class StepRates:
    """The rate of the state that a SciPy solver has come to, evaluated once a step at the most."""

    def __init__(self, rate: Callable[[float, Array], Array]) -> None:
        self.of = rate
        self._last: tuple[OdeSolver, float, Array] | None = None

    def __call__(self, solver: Any) -> Array:
        known = getattr(solver, "f", None)
        if known is not None:
            return known
        if self._last is None or self._last[0] is not solver or self._last[1] != solver.t:
            self._last = (solver, solver.t, self.of(solver.t, solver.y))
        return self._last[2]


class RateCheck:
    """Rates on the way forward, at :data:`KEPT` states at most: when these become too many every
    second is dropped.

    Args:
        rates: those of a solver's states.
    """

    def __init__(self, rates: StepRates) -> None:
        self.rates, self.every, self.count = rates, 1, 0
        self.kept: list[tuple[float, Array, Array]] = []

    def __call__(self, solver: OdeSolver) -> None:
        if self.count % self.every == 0:
            self.kept.append((float(solver.t), np.array(solver.y), np.array(self.rates(solver))))
            if len(self.kept) > KEPT:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1

    def compare(self, rhs: RightHandSide) -> None:
        """Raise where a field no longer has these rates."""
        for t, y, rate in self.kept[1:]:
            if not alike(rhs.evaluate_checked(t, y), rate, float(torch.finfo(rhs.like.dtype).eps)):
                raise RuntimeError(changed(t))


def alike(found: Array, known: Array, eps: float = float(np.finfo(float).eps)) -> bool:
    """Whether two results of one computation differ by no more than another order of its sums would
    make them.
    """
    return bool(np.all(np.abs(found - known) <= eps**0.5 * np.max(np.abs(known), initial=0.0)))


def changed(t: float) -> str:
    return (
        f"fun is not what it was when the solution was found: at t = {t:.9g} it gives another "
        "result for the same state. It "
        "draws random numbers (a dropout: call eval()), or reads an attribute or a variable that "
        "has been changed since. Call "
        "backward() before the change, or give what changes as a tensor in args."
    )
