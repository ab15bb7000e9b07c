"""Detection of right-hand sides that changed between the forward solution and a backward pass.

The adjoint evaluates the right-hand side again. Its tensors are the input tensors of the run
(:mod:`adjsim.ivp.input_tensors`), but its attributes, global variables and random numbers are not
controlled. So its rates at some states of the forward solution are stored, and are compared with
newly evaluated rates before each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import OdeSolver

from adjsim.ivp.rhs import Array, RightHandSide
from adjsim.ivp.thinned import Thinned

# Largest number of stored rates.
KEPT = 128


class StepRates:
    """The rate at a SciPy solver's current state, evaluated at most once per step.

    Args:
        rate: the right-hand side, for one state.
    """

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


class RateCheck(Thinned[tuple[float, Array, Array]]):
    """Stored rates at up to :data:`KEPT` states of the forward solution.

    Args:
        rates: the rates at a solver's states.
    """

    def __init__(self, rates: StepRates) -> None:
        super().__init__(KEPT, 1, lambda x: (float(x.t), np.array(x.y), np.array(rates(x))))

    def compare(self, rhs: RightHandSide) -> None:
        """Raise an error if the right-hand side returns other rates than the stored ones."""
        for t, y, rate in self.kept[1:]:
            if not agree_to_rounding(rhs.evaluate_checked(t, y), rate, rhs.eps):
                raise RuntimeError(changed_message(t))


def agree_to_rounding(found: Array, known: Array, eps: float = float(np.finfo(float).eps)) -> bool:
    """Test whether two results of one computation differ by no more than rounding.

    Rounding depends on the order in which sums are evaluated.
    """
    return bool(np.all(np.abs(found - known) <= eps**0.5 * np.max(np.abs(known), initial=0.0)))


def changed_message(t: float) -> str:
    """Explain that the right-hand side has changed since the forward solution."""
    return (
        f"fun has changed since the forward solution: at t = {t:.9g} it returns another rate for "
        "the same state. Either it draws random numbers (dropout: call eval()), or it reads an "
        "attribute or a variable that has been modified. Call backward() before the change, or "
        "pass the changing quantity as a tensor in args."
    )
