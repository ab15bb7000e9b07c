"""Ordinary differential equations of any vector field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from adjsim.core.state import AnyState
from adjsim.dynamics.fields.base import FieldDynamics, evaluated, refuse_shape, register_function
from adjsim.dynamics.terms import Term


class Rate(Term[Any]):
    """The whole drift, Y, without a flow in closed form, and the draws of noise of an SDE."""

    advances_time = True

    def __init__(self, name: str, fun: Callable[..., Any], draws: int = 0) -> None:
        self.name, self.fun, self.draws = name, fun, draws

    def drift(self, t: Any, state: AnyState) -> Mapping[str, Tensor]:
        rates = dict(zip(state._fields, evaluated(self.name, self.fun, t, state), strict=True))
        for (field, rate), y in zip(rates.items(), state, strict=True):
            refuse_shape(self.name, field, rate, y.shape, y)
        return rates

    def moves(self, h: float, state: AnyState) -> NoReturn:
        raise TypeError(
            "a vector field has no flow to split: use RungeKutta(method, dt) or ODESolver() for an "
            "ODE, and EulerMaruyama(dt) or SDESolver(dt=...) for an SDE."
        )


class ODE(FieldDynamics):
    """An ordinary differential equation of any vector field::

        dy/dt = fun(t, y)

    ``fun`` is a module, a method of one, or a function; t is a scalar tensor in the dtype of y. A
    neural ODE is ``ODE(net)`` with ``net(t, y)``. The parameters of a module are those of the
    dynamics, under the names ``fun.*``. Its term is called "Y". Solvers:
    :class:`~adjsim.RungeKutta`, which goes with direct and checkpoint adjoints,
    :class:`~adjsim.Coupled`, which can also be undone, :class:`~adjsim.BackwardEuler` and
    :class:`~adjsim.ImplicitMidpoint` for stiff equations, and :class:`~adjsim.ODESolver`, which
    goes with direct and continuous adjoints. The systems of a batch must not depend on each other.
    For Newton's equations of a potential use :class:`~adjsim.Hamiltonian`, whose splittings are
    reversible and conserve its invariants.

    In ``trajectory.stats`` an evaluation of ``fun`` counts as one of ``energy_evaluations``.

    Args:
        fun: maps ``(t, y)`` to dy/dt, with y ``(*batch, n)`` or a named tuple of such tensors. For
            a named tuple it returns the same named tuple, or a tuple of as many tensors.

    Raises:
        TypeError: a class, an object that cannot be called, a function that does not take (t, y).
        ValueError: a rate of another shape or dtype than y (when a run begins).
    """

    fun: Callable[..., Any]

    def __init__(self, fun: Callable[..., Any]) -> None:
        super().__init__()
        register_function(self, "fun", fun)

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {"Y": Rate(self.drift_name, self.fun)}
