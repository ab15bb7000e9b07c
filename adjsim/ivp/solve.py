"""solve_ivp(): SciPy's initial value solver on torch tensors, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolver
from torch import Tensor
from torch.utils._pytree import tree_map

from adjsim.ivp.adjoint import METHODS, AdjointSolver
from adjsim.ivp.events import Event
from adjsim.ivp.piecewise import ADJOINTS, PiecewiseSolve
from adjsim.ivp.result import DenseSolution, OdeResult
from adjsim.ivp.rhs import RightHandSide, as_state, as_times, to_numpy

# SciPy refuses a smaller rtol than this.
SMALLEST_RTOL = 100 * float(np.finfo(float).eps)


def solve_ivp(
    fun: Callable[..., Any],
    t_span: Any,
    y0: Any,
    method: str | type[OdeSolver] = "RK45",
    t_eval: Any = None,
    dense_output: bool = False,
    events: Any = None,
    vectorized: bool = False,
    args: tuple[Any, ...] | None = None,
    *,
    params: Any = (),
    adjoint: str = "interpolate",
    **options: Any,
) -> OdeResult:
    r"""Solve dy/dt = fun(t, y, \*args), y(t0) = y0, as :func:`scipy.integrate.solve_ivp` does,
    differentiably.

    The forward solution is SciPy's own call: its values are those that SciPy gives for the same
    function, to the last bit (or rounded to float32). Gradients are those of the exact solution, to
    the tolerances, by the adjoint equation

    .. math::
        \dot\lambda = -(\partial f/\partial y)^T \lambda, \qquad dL/d\theta = \int \lambda^T
        \partial f/\partial\theta \, dt,

    integrated backward by the same method, or by collocation where that is implicit, with an error
    of its own. They flow to ``y0``, ``t_span``, ``t_eval``, the tensors in ``args``, the parameters
    of ``fun`` where it is a module (or a method of one), tensors and modules declared by
    ``params``, and whatever events and resets read; through ``sol.y``, ``sol.t``, ``sol.sol(t)``,
    ``sol.t_events`` and ``sol.y_events``.

    Args:
        fun: ``fun(t, y, *args)`` of torch tensors, ``t`` of no axis and ``y`` of shape ``(n,)``; it
            returns a tensor of this shape or a list.
        t_span: ``(t0, t1)``, numbers or tensors; t1 may be before t0, and infinite where a terminal
            event ends the solution.
        y0: the start ``(n,)``. Its dtype and device are those of the result and of what ``fun``
            sees; SciPy computes in float64 all the same.
        method: ``"RK23"``, ``"RK45"``, ``"DOP853"``, and for stiff systems ``"Radau"``, ``"BDF"``,
            ``"LSODA"``; or a class of SciPy's ``OdeSolver``.
        t_eval: times at which the solution is wanted; None: those of the solver's steps. Those
            steps are constants.
        dense_output: whether ``sol.sol`` is to be there.
        events: ``event(t, y, *args)`` whose zeros are sought, or several, with SciPy's attributes
            ``terminal`` and ``direction``. Where an event has a function ``event.reset(t, y,
            *args)``, the solution goes on from what this returns; ``terminal`` then counts as ever,
            and the last one ends it without a reset. At the time of a reset ``sol.sol`` and
            ``t_eval`` give the state before it; without ``t_eval`` both are among ``sol.y``. Events
            at one time are taken in their order.
        vectorized: whether ``fun`` takes ``(n, k)`` as well.
        args: more arguments, of ``fun``, events, resets and ``jac``.
        params: what ``fun`` reads besides and a gradient is wanted by. What requires grad and is
            not declared is an error.
        adjoint: ``"interpolate"`` reads the state from the interpolants of the forward steps, and
            memory grows with these. ``"checkpoint"`` keeps SciPy's solver at up to 128 times and
            solves again from one to the next, by the very same steps: flat memory (with
            ``t_eval``), up to twice the time. ``"backsolve"`` integrates the state backward with
            the adjoint and keeps nothing. It loses the gradient where the equation contracts, since
            it expands backward, after some ten of its shortest times: of van der Pol at mu = 5 and
            T = 5 it is -0.09 instead of 1.90 and says nothing; at T = 10 its steps vanish.
        options: SciPy's: ``rtol`` (1e-3), ``atol`` (1e-6), ``max_step``, ``first_step``,
            ``min_step``, ``jac``, ``jac_sparsity``, ``lband``, ``uband``. ``jac="autodiff"`` takes
            the Jacobian by automatic differentiation. Ours: ``adjoint_rtol`` (a tenth of rtol) and
            ``adjoint_atol`` (a thousandth of it, relative to the largest cotangent).

    Returns:
        SciPy's fields: ``t``, ``y`` of shape ``(n, times)``, ``sol``, ``t_events``, ``y_events``,
            ``nfev``, ``njev``, ``nlu``,
        ``status``, ``message``, ``success``.

    Raises:
        RuntimeError: the solver failed, with SciPy's message; or resets accumulate (Zeno).
        GrazingError: an event whose time has no derivative; only where a gradient is asked for, of
            whatever.
        ValueError: a tensor that requires grad and was not declared, by its name; and what SciPy
            refuses.

    DOP853 takes steps that its interpolant of order seven does not follow where an equation is
    almost linear: to 1e-5 at any tolerance. Give it a ``max_step`` there, as for ``sol.sol``
    itself, or take RK45.

    Do not use it for a gradient by time steps themselves, for second derivatives, or in chaos,
    where the gradient of a long solution is right and says nothing: see the estimators. Where the
    gradient of the discrete steps is wanted, :func:`~adjsim.simulate` has it. The gradient of y at
    the side of a kink of ``fun`` takes the side that the steps fell on.
    """
    if torch.is_inference_mode_enabled():
        # Derivatives that events with a reset need are not recorded in inference mode; without
        # gradients they are.
        with torch.inference_mode(False), torch.no_grad():
            return solve_ivp(
                fun, t_span, y0, method, t_eval, dense_output, events, vectorized, _plain(args),
            params=params, adjoint=adjoint,
                **options,
            )  # fmt: skip
    solver = _solver(method)
    if adjoint not in ADJOINTS:
        raise ValueError(f"adjoint must be one of {', '.join(ADJOINTS)}; got {adjoint!r}.")
    if args is not None and not isinstance(args, Sequence):
        raise TypeError(
            "Supplied 'args' cannot be unpacked: args must be a tuple; got "
            f"{type(args).__name__}. For one "
            "argument write args=(x,)."
        )
    start = as_state(y0)
    begin, end = (as_times(t, start).reshape(()) for t in t_span)
    times = None if t_eval is None else as_times(t_eval, start)
    rhs = RightHandSide(fun, tuple(args or ()), params, start, vectorized)
    options, adjoint_solver = _adjoint(rhs, solver, options)
    found = () if events is None else (events,) if callable(events) else tuple(events)
    user_events = [Event(event, rhs, i) for i, event in enumerate(found)]
    _check_span(
        float(begin.detach()),
        float(end.detach()),
        start.numel() > 0 and not any(event.left for event in user_events),
    )
    grad = torch.is_grad_enabled()
    rhs.check(float(begin.detach()), to_numpy(start), grad)
    given = [start, begin, end, *([] if times is None else [times]), *rhs.parameters]
    by_events = [event.reads_gradient(begin, start) for event in user_events]
    wants_gradient = grad and (any(x.requires_grad for x in given) or any(by_events))
    if wants_gradient:
        rhs.check_differentiable(float(begin.detach()), to_numpy(start))
    piecewise = PiecewiseSolve(
        rhs,
        solver,
        adjoint,
        adjoint_solver,
        begin,
        end,
        times,
        dense_output,
        user_events,
        options,
        wants_gradient,
    )
    last = piecewise.run(start)
    return OdeResult(
        t=torch.cat(piecewise.times).to(start.real.dtype),
        y=torch.cat(piecewise.states, 1),
        sol=DenseSolution(piecewise.pieces, start.detach()) if dense_output else None,
        t_events=None if events is None else [event.found_times(start) for event in user_events],
        y_events=None if events is None else [event.found_states(start) for event in user_events],
        **piecewise.counts,
        status=last.status,
        message=last.message,
        success=True,
    )


def _plain(tree: Any) -> Any:
    """Tensors of inference mode, which no derivative may be taken of, as plain ones."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, tree)


def _solver(method: Any) -> type[OdeSolver]:
    """The solver that a user names, or gives as a class, as SciPy takes it."""
    if isinstance(method, type) and issubclass(method, OdeSolver):
        return method
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, or a class of SciPy's OdeSolver; got "
            f"{method!r}."
        )
    return METHODS[method]


def _check_span(begin: float, end: float, endless: bool) -> None:
    """Refuse times that are no numbers, and an infinite one that nothing comes before."""
    if np.isnan(end) or not np.isfinite(begin):
        raise ValueError(f"t_span must be two finite times; got {begin} and {end}.")
    if np.isinf(end) and endless:
        raise ValueError(
            "t_span must be two finite times, unless a terminal event ends the solution; got "
            f"{begin} and {end}."
        )


def _adjoint(
    rhs: RightHandSide, method: type[OdeSolver], options: dict[str, Any]
) -> tuple[dict[str, Any], AdjointSolver]:
    """SciPy's options, and the adjoint that goes with them and with ours."""
    options = {"rtol": 1e-3, "atol": 1e-6, **options}
    for name in ("rtol", "atol"):
        options[name] = _array(options[name])
    rtol = max(float(np.min(options["rtol"])), SMALLEST_RTOL)
    backward = float(options.pop("adjoint_rtol", None) or max(rtol / 10, SMALLEST_RTOL))
    absolute = float(options.pop("adjoint_atol", None) or backward / 1000)
    jac = options.get("jac")
    if isinstance(jac, str):
        if jac != "autodiff":
            raise ValueError(f'jac must be "autodiff", a function, a matrix or None; got {jac!r}.')
        options["jac"] = rhs.jacobian
    elif isinstance(jac, Tensor):
        options["jac"] = to_numpy(jac)
    elif callable(jac):
        options["jac"] = lambda t, y: _array(jac(rhs.time(t), rhs.tensor(y), *rhs.args))
    return options, AdjointSolver(rhs, method, backward, absolute, options.get("max_step", np.inf))


def _array(x: Any) -> Any:
    return to_numpy(x) if isinstance(x, Tensor) else x
