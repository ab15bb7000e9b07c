"""Explicit Runge-Kutta steps of a fixed size, for any dynamics without noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import describe_type
from adjsim.core.state import AnyState, State
from adjsim.core.tableaus import TABLEAUS, Tableau
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.base import SteppingSolver, StepPlan, refuse_no_equation
from adjsim.solvers.clock import check_dt
from adjsim.solvers.stochastic.drift_move import drift_plan


def increment(
    dynamics: Dynamics[State], tableau: Tableau, t: Any, h: float, state: State
) -> tuple[Tensor, ...]:
    """Compute ``h sum_i b_i k_i``, the increment of a step of any size h, by field."""
    return combined(h, tableau.b, stage_rates(dynamics, tableau, t, h, state))


def stage_rates(
    dynamics: Dynamics[State], tableau: Tableau, t: Any, h: float, state: State
) -> list[tuple[Tensor, ...]]:
    """Compute the rates k of all stages, by field."""
    rates: list[tuple[Tensor, ...]] = []
    for row, node in zip(tableau.a, tableau.nodes, strict=True):
        at = type(state)._make(advanced(state, h, row, rates)) if any(row) else state
        rates.append(tuple(dynamics.drift(t + node * h if node else t, at)))
    return rates


def combined(
    h: float, weights: Sequence[float], rates: Sequence[tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Compute ``h sum_j weights_j rates_j`` by field."""
    return tuple(add_rates(None, h, weights, part) for part in zip(*rates, strict=True))


def advanced(
    state: AnyState, h: float, weights: Sequence[float], rates: Sequence[tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Compute ``y + h sum_j weights_j rates_j`` by field."""
    parts = zip(*rates, strict=True)
    return tuple([add_rates(y, h, weights, part) for y, part in zip(state, parts, strict=True)])


def add_rates(y: Any, h: float, weights: Sequence[float], rates: Sequence[Tensor]) -> Any:
    """Compute ``y + h sum_j weights_j rates_j``; without a y, the sum alone."""
    for weight, rate in zip(weights, rates, strict=True):
        if weight != 0:
            y = h * weight * rate if y is None else torch.add(y, rate, alpha=h * weight)
    return y


class RungeKutta(SteppingSolver):
    """Take explicit Runge-Kutta steps of size dt::

        k_i = f(t + c_i dt, y + dt sum_{j<i} a_ij k_j)        y' = y + dt sum_i b_i k_i

    f is the drift of the dynamics, so any dynamics without noise is taken, :class:`~adjsim.ODE` as
    well as :class:`~adjsim.Hamiltonian`. A step has no inverse: gradients come from
    :class:`~adjsim.DirectAdjoint` or :class:`~adjsim.CheckpointAdjoint`.

    ==================== ======= ===== =========================================
    method               stages  order source
    ==================== ======= ===== =========================================
    "euler"              1       1     Euler (1768)
    "midpoint"           2       2     Runge (1895)
    "heun"               2       2     Heun (1900)
    "ralston"            2       2     Ralston (1962), smallest error bound
    "ssp3"               3       3     Shu and Osher (1988), keeps stability
    "bogacki-shampine"   3       3     Bogacki and Shampine (1989)
    "rk4"                4       4     Kutta (1901)
    "dormand-prince"     6       5     Dormand and Prince (1980), order five
    ==================== ======= ===== =========================================

    Steps are explicit, so stiff equations need steps below about two over their fastest rate. For
    Newton's equations prefer a splitting, whose energy does not drift.
    :class:`~adjsim.ODESolver` chooses the steps from an error.

    Args:
        method: a name from the table, or a :class:`Tableau`.
        dt: the step, time.

    Raises:
        ValueError: an unknown method.
        TypeError: dynamics with noise, or with a term that is not an equation (when a run begins).
    """

    def __init__(self, method: str | Tableau, dt: float) -> None:
        self.method, self.tableau, self.dt = method, find_tableau(method), check_dt(dt)

    @property
    def order(self) -> int:
        return self.tableau.order

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        refuse_no_equation(self, dynamics)
        tableau = self.tableau

        def step(h: float, t: Tensor, at: State) -> tuple[Tensor, ...]:
            return advanced(at, h, tableau.b, stage_rates(dynamics, tableau, t, h, at))

        loses = "the stages of an explicit step"
        return drift_plan(step, state, self.dt, self.order, evaluations=len(tableau.b), loses=loses)

    def __repr__(self) -> str:
        return f"RungeKutta({self.method!r}, dt={self.dt:g})"


def find_tableau(method: str | Tableau) -> Tableau:
    """Return the tableau of a method, a name or the tableau itself."""
    if isinstance(method, str) and method not in TABLEAUS:
        raise ValueError(
            f"unknown Runge-Kutta method {method!r}; choose from {', '.join(TABLEAUS)}, or "
            "give a Tableau(a, b, c)."
        )
    if not isinstance(method, str | Tableau):
        raise TypeError(
            f"method must be a name such as 'rk4' or a Tableau; got {describe_type(method)}."
        )
    return TABLEAUS[method] if isinstance(method, str) else method
