"""Ordinary differential equations of any vector field, and what they share with stochastic ones."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from adjsim.core.arguments import (
    as_tensor,
    describe_type,
    leave_to_python,
    refuse_uncalled_class,
)
from adjsim.core.autocast import under_autocast
from adjsim.core.layout import number_on
from adjsim.core.state import AnyState, FieldState, as_state, check_fields, in_transform, is_finite
from adjsim.core.trajectory import OWN
from adjsim.core.typing import Seed
from adjsim.dynamics.base import Dynamics, named_rates
from adjsim.dynamics.terms import Term


class FieldDynamics(Dynamics[Any]):
    """The base class of ``ODE`` and ``SDE``, whose states have fields ``(*batch, n)``."""

    state_type = FieldState
    system_axes = 1
    potential = None
    drift_name = "fun"

    def __init__(self) -> None:
        # Dynamics.__init__ takes a potential.
        nn.Module.__init__(self)

    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, y: Any, momentum: None = None, generator: Seed = None
    ) -> Any:
        """Make a start from y, ``(*batch, n)``, or from a named tuple of such fields of one batch.

        Integers become float64. A momentum is refused, and nothing is drawn.
        """
        if momentum is not None:
            raise ValueError(
                f"{type(self).__name__} has no momentum: give everything that moves in y."
            )
        state = as_state(y)
        if hasattr(state, "_fields"):
            # A named tuple of tensors is safe to load.
            torch.serialization.add_safe_globals([type(state)])
        else:
            state = FieldState(as_tensor("y", y))
        self.check(state)
        return state

    def check(self, state: AnyState) -> None:
        if not isinstance(state, tuple) or not hasattr(state, "_fields") or not state:
            raise TypeError(
                f"{type(self).__name__} steps a FieldState, or a named tuple of tensors, not a "
                f"{type(state).__name__}: make the start with init(y)."
            )
        check_fields(state)
        for name, x in zip(state._fields, state, strict=True):
            if name in OWN:
                raise ValueError(
                    f"a field of a state may not be named {name}: a trajectory has {name} of its "
                    "own. Name the field otherwise."
                )
            if x.ndim < 1 or x.numel() == 0:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; it must be (*batch, n) with entries. One "
                    "number is (1,)."
                )
            if x.shape[:-1] != state[0].shape[:-1]:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and {state._fields[0]} "
                    f"{tuple(state[0].shape)}; the axes before the last are the batch and must be "
                    "equal."
                )

    @property
    @abstractmethod
    def rate(self) -> Rate:
        """The drift, as the only term."""

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {"Y": self.rate}

    def drift(self, t: Any, state: Any) -> Any:
        # Without the sums over terms, which cost as much as a small network.
        return type(state)._make(self.rate.rates(t, state))

    def check_rates(self, t: float, state: AnyState) -> dict[str, Tensor]:
        return self.checked("drift", self.drift_name, self.drift, t, state)

    def checked(
        self, what: str, name: str, rates: Callable[[Any, Any], AnyState], t: float, state: AnyState
    ) -> dict[str, Tensor]:
        """Return the fields of a drift or a diffusion at the start, by descriptions of them."""
        if in_transform():
            return named_rates(what, rates(t, state))
        start = type(state)._make(x.clone() for x in state)
        written = [x._version for x in start]
        try:
            found = rates(t, start)
        except RuntimeError as error:
            y = state[0]
            for own, x in [*self.named_parameters(), *self.named_buffers()]:
                if x.is_floating_point() and (x.dtype, x.device) != (y.dtype, y.device):
                    raise TypeError(
                        f"{name} failed at the start ({error}): {own} is {x.dtype} on {x.device}, "
                        f"and the start {y.dtype} on {y.device}. Give both the same dtype and "
                        "device."
                    ) from error
            raise
        for field, x, before in zip(state._fields, start, written, strict=True):
            if x._version != before:
                raise ValueError(
                    f"{name} writes into {field} (an operation in place, such as y *= 2, or an "
                    "assignment to y[...]), and y is the state of the run: compute new tensors."
                )
        named = named_rates(what, found)
        for description, rate in named.items():
            if not is_finite(rate):
                raise ValueError(f"{description} has NaN or infinite entries at the start.")
        return named


# Its checks read values, each of which ends a graph of torch.compile.
leave_to_python(FieldDynamics.init)


def register_function(
    module: nn.Module, name: str, function: Callable[..., Any], args: tuple[Any, ...] = ()
) -> None:
    """Store a function of (t, y, *args); a module, or that of a bound method, is registered."""
    refuse_uncalled_class(name, function)
    if not callable(function):
        raise TypeError(
            f"{name} must be a function of (t, y) or a module; got {describe_type(function)}."
        )
    setattr(module, name, function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        setattr(module, f"{name}_module", owner)
    try:
        signature = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        )
    except (TypeError, ValueError):
        # A function written in C has no signature.
        return
    try:
        signature.bind(None, None, *args)
    except TypeError as reason:
        given = getattr(function, "__name__", type(function).__name__)
        if args:
            raise TypeError(
                f"{name} is called with the time, the state and {len(args)} args, and {given} "
                f"takes {signature}."
            ) from reason
        raise TypeError(
            f"{name} is called with the time and the state, {name}(t, y), and {given} takes "
            f"{signature}: wrap it in a module whose forward takes (t, y); it may ignore t."
        ) from reason


def evaluated(
    what: str, function: Callable[..., Any], t: Any, state: AnyState
) -> tuple[Tensor, ...]:
    """Evaluate a function of (t, y), and return its value as one tensor a field."""
    y = state[0]
    time = number_on(t, y.dtype, y.device)
    if isinstance(state, FieldState):
        value = function(time, y)
        # The checks below take as long as a small network.
        if isinstance(value, Tensor):
            return (value,)
        values = (value,)
    else:
        values = value = function(time, state)
    if not isinstance(values, tuple) or len(values) != len(state):
        names = ", ".join(state._fields)
        raise TypeError(
            f"{what} must return a tuple of {len(state)} tensors ({names}), or the named tuple of "
            f"the state; got {describe_type(value)}."
        )
    for name, x in zip(state._fields, values, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{what} must return a tensor for {name}; got {describe_type(x)}.")
    return values


def refuse_shape(what: str, name: str, value: Tensor, expected: tuple[int, ...], y: Tensor) -> None:
    """Refuse a value of another shape, device or dtype than expected."""
    if value.shape != expected:
        raise ValueError(
            f"{what} maps {name} of shape {tuple(y.shape)} to {tuple(value.shape)}; it must be "
            f"{tuple(expected)}."
        )
    if value.device != y.device:
        raise ValueError(
            f"{what} maps {name} on {y.device} to {value.device}: move the module or the start."
        )
    if value.dtype != y.dtype:
        raise ValueError(
            f"{what} maps {name} of {y.dtype} to {value.dtype}: give the start and the module the "
            f"same dtype.{under_autocast(f'return the value of {what} as value.to(y.dtype).')}"
        )


class Rate(Term[Any]):
    """The whole drift, Y, without a flow in closed form, and the draws of noise of an SDE."""

    def __init__(self, name: str, fun: Callable[..., Any], draws: int = 0) -> None:
        self.name, self.fun, self.draws = name, fun, draws

    def rates(self, t: Any, state: AnyState) -> tuple[Tensor, ...]:
        """Evaluate the drift, by field."""
        found = evaluated(self.name, self.fun, t, state)
        for k, (rate, y) in enumerate(zip(found, state, strict=True)):
            if rate.shape != y.shape or rate.dtype != y.dtype or rate.device != y.device:
                refuse_shape(self.name, state._fields[k], rate, y.shape, y)
        return found

    def drift(self, t: Any, state: AnyState) -> Mapping[str, Tensor]:
        return dict(zip(state._fields, self.rates(t, state), strict=True))

    def moves(self, h: float, state: AnyState) -> NoReturn:
        raise TypeError(
            "a vector field has no flow to split: use RungeKutta(method, dt) or ODESolver() for an "
            "ODE, and EulerMaruyama(dt) or SDESolver(dt=...) for an SDE."
        )


class Reversed(nn.Module):
    """A function of an equation at the time -t, times a sign.

    The solution of ``dy/dt = -fun(-t, y)`` at -t is that of ``fun`` at t.
    """

    def __init__(self, equation: FieldDynamics, name: str, sign: int) -> None:
        super().__init__()
        self.equation, self.name, self.sign = equation, name, sign

    def forward(self, t: Tensor, y: Any) -> Any:
        found = getattr(self.equation, self.name)(-t, y)
        if isinstance(found, tuple):
            return tuple(self.sign * x for x in found)
        return self.sign * found if isinstance(found, Tensor) else found


class WithArguments(nn.Module):
    """The function ``fun(t, y, *args)`` of (t, y), with tensors and modules of args registered."""

    fun: Callable[..., Any]

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        register_function(self, "fun", fun, args)
        self.names = tuple(f"args_{k}" for k in range(len(args)))
        for name, x in zip(self.names, args, strict=True):
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                self.register_buffer(name, x)
            else:
                setattr(self, name, x)

    def forward(self, t: Tensor, y: Any) -> Any:
        return self.fun(t, y, *(getattr(self, name) for name in self.names))


def with_arguments(name: str, fun: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Return ``fun(t, y, *args)`` as a function of (t, y)."""
    if not isinstance(args, tuple):
        raise TypeError(
            f"args must be a tuple; got {describe_type(args)}. For a single argument write "
            "args=(x,)."
        )
    if not args:
        return fun
    refuse_uncalled_class(name, fun)
    return WithArguments(fun, args)


class ODE(FieldDynamics):
    """An ordinary differential equation of any vector field::

        dy/dt = fun(t, y, *args)

    ``fun`` is a module, a method of one, or a function; t is a scalar tensor in the dtype of y. A
    neural ODE is ``ODE(net)`` with ``net(t, y)``. The parameters of a module are those of the
    dynamics, under the names ``fun.*``. Its term is called "Y". Solvers:
    :class:`~adjsim.RungeKutta`, which goes with direct and checkpoint adjoints,
    :class:`~adjsim.Coupled`, which can also be undone, :class:`~adjsim.BackwardEuler` and
    :class:`~adjsim.ImplicitMidpoint` for stiff equations, and :class:`~adjsim.ODESolver`, which
    goes with direct and continuous adjoints. The systems of a batch must not depend on each other.
    Save times may decrease: a run from ``[1.0, 0.0]`` begins at the time 1 and goes back to 0.
    For Newton's equations of a potential use :class:`~adjsim.Hamiltonian`, whose splittings are
    reversible and conserve its invariants.

    In ``trajectory.stats`` an evaluation of ``fun`` counts as one of ``energy_evaluations``.

    Args:
        fun: maps ``(t, y)`` to dy/dt, with y ``(*batch, n)`` or a named tuple of such tensors. For
            a named tuple it returns the same named tuple, or a tuple of as many tensors.
        args: further arguments of ``fun``, as of :func:`~adjsim.solve_ivp`. Tensors and modules are
            registered as ``fun.args_0`` and so on, so their gradients are found.

    Raises:
        TypeError: a class, an object that cannot be called, a function that does not take (t, y).
        ValueError: a rate of another shape or dtype than y (when a run begins).
    """

    interpolates = True
    fun: Callable[..., Any]

    def __init__(self, fun: Callable[..., Any], args: Any = ()) -> None:
        super().__init__()
        register_function(self, "fun", with_arguments("fun", fun, args))

    @property
    def rate(self) -> Rate:
        return Rate(self.drift_name, self.fun)

    def in_reverse(self) -> ODE:
        back = ODE(Reversed(self, "fun", -1))
        back.time_sign = -1
        return back
