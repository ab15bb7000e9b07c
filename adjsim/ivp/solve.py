"""solve_ivp(): SciPy's initial value solver on torch tensors, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.integrate
import torch
from scipy.integrate import BDF, DOP853, RK23, RK45, OdeSolver, Radau
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from adjsim.core.arguments import as_flag, as_number, outside_inference_mode
from adjsim.core.state import in_transform
from adjsim.core.transforms import in_forward_mode, outside_transforms
from adjsim.ivp.columns import COLUMN_METHODS, check_columns, solve_columns
from adjsim.ivp.connection import is_tracked, plain
from adjsim.ivp.events import Event
from adjsim.ivp.march import LSODA
from adjsim.ivp.piecewise import ADJOINTS, DenseSolution, OdeResult, PiecewiseSolve
from adjsim.ivp.radau import MassRadau, MassRightHandSide
from adjsim.ivp.rhs import (
    SMALLEST_RTOL,
    RightHandSide,
    as_state,
    as_times,
    check_tolerance,
    to_numpy,
)
from adjsim.ivp.samples import (
    OneRightHandSide,
    SampleRightHandSide,
    as_rows,
    one_of,
    samples_first,
)
from adjsim.ivp.sweep import AdjointSettings

METHODS: dict[str, type[OdeSolver]] = {
    method.__name__: method for method in (RK23, RK45, DOP853, Radau, BDF, LSODA)
}


@outside_inference_mode()
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
    batch_first: bool = False,
    mass_matrix: Any = None,
    **options: Any,
) -> OdeResult:
    r"""Solve an initial value problem with SciPy, and differentiate it by the adjoint method.

    The problem is dy/dt = fun(t, y, \*args), y(t0) = y0. The forward solution is computed by
    SciPy's solvers: its values are those of :func:`scipy.integrate.solve_ivp` for the same
    function, to the last bit (or rounded to float32). Times of events in steps shorter than 1e-3
    are more accurate. A step of LSODA to a state that is not finite is taken again. Gradients are
    those of the exact solution, to the tolerances, by the adjoint equation

    .. math::
        \dot\lambda = -(\partial f/\partial y)^T \lambda, \qquad dL/d\theta = \int \lambda^T
        \partial f/\partial\theta \, dt,

    which is integrated backward with an error control of its own: by collocation, or for large
    states by the same method. Gradients flow to ``y0``, ``t_span``, ``t_eval``, the
    tensors in ``args``, the parameters of ``fun`` if it is a module (or a method of one), tensors
    and modules declared by ``params``, and all tensors that events and resets read. They flow
    through ``sol.y``, ``sol.t``, ``sol.sol(t)``, ``sol.t_events`` and ``sol.y_events``.

    With ``y0`` of shape ``(n, batch)`` the columns are problems of their own, which are solved
    together, each with its own step size. Everything that differs in this case is under "Columns"
    below.

    Args:
        fun: ``fun(t, y, *args)`` of torch tensors, where ``t`` has no axes and ``y`` has shape
            ``(n,)``; it returns a tensor of this shape or a list.
        t_span: ``(t0, t1)``, numbers or tensors; t1 may be before t0, and infinite if a terminal
            event ends the solution.
        y0: the initial state ``(n,)``, or states ``(n, batch)``. The result and the arguments of
            ``fun`` have its dtype and device; SciPy itself computes in float64.
        method: ``"RK23"``, ``"RK45"``, ``"DOP853"``, and for stiff systems ``"Radau"``, ``"BDF"``,
            ``"LSODA"``; or a subclass of SciPy's ``OdeSolver``. ``"Rodas4"`` solves stiff systems
            and those with a mass matrix as one column; see "Columns" below for its options and its
            gradient.
        t_eval: times at which the solution is returned; None: the times of the solver's steps,
            which are constants in differentiation except at the ends and at resets.
        dense_output: whether ``sol.sol`` is returned.
        events: a function ``event(t, y, *args)`` whose zeros are sought, or several, with SciPy's
            attributes ``terminal`` and ``direction``. If an event has a function ``event.reset(t,
            y, *args)``, the solution continues from the state that it returns; ``terminal`` then
            counts occurrences as usual, and the last one ends the solution without a reset. At the
            time of a reset ``sol.sol`` and ``t_eval`` give the state before the reset; without
            ``t_eval`` both states are in ``sol.y``. Simultaneous events are handled in their order.
        vectorized: whether ``fun`` also takes states ``(n, k)``.
        args: further arguments of ``fun``, events, resets and ``jac``. Gradients flow to tensors
            and to the parameters of modules.
        params: tensors and modules that ``fun`` reads in addition, and with respect to which a
            gradient is wanted. An undeclared tensor that requires grad is an error.
        adjoint: ``"interpolate"`` reads the state from the interpolants of the forward steps;
            memory grows with their number. ``"checkpoint"`` stores SciPy's solver at up to 128
            times and repeats the steps from one to the next, bit for bit: constant memory (with
            ``t_eval``), up to twice the time. ``"backsolve"`` integrates the state backward with
            the adjoint and stores nothing. Where the equation contracts, errors grow backward
            in time, and the gradient is lost after about ten of the shortest time scales.
            For van der Pol at mu = 5 and T = 5 the gradient is -0.09 instead of 1.90, which a
            warning tells; at T = 10 the step size vanishes.
        batch_first: whether ``y0`` is ``(batch, n)``, and ``fun`` takes a time that is one number;
            see "Batches" below.
        mass_matrix: M of M dy/dt = fun(t, y), a tensor ``(n, n)`` or a function of (t, \*args), for
            ``method="Rodas4"``, or ``"Radau"`` for one state without resets. With columns a
            function of t returns ``(n, n, batch)``. M may be singular if the equation has index
            one, and its null space must not depend on t. The algebraic unknowns of ``y0`` are
            replaced by consistent ones. Gradients flow to M too.
        options: SciPy's options ``rtol`` (1e-3), ``atol`` (1e-6), ``max_step``, ``first_step``,
            ``min_step``, ``jac``, ``jac_sparsity``, ``lband``, ``uband``. ``jac="autodiff"``
            computes the Jacobian by automatic differentiation. In addition: ``adjoint_rtol`` (a
            tenth of rtol) and ``adjoint_atol`` (a thousandth of adjoint_rtol, relative to the
            largest cotangent).

    Returns:
        SciPy's fields: ``t``, ``y`` of shape ``(n, times)``, ``sol``, ``t_events``, ``y_events``,
        ``nfev``, ``njev``, ``nlu``, ``status``, ``message``, ``success``.

    Raises:
        RuntimeError: the solver failed, with SciPy's message; or resets accumulate (Zeno).
        GrazingError: the time of an event has no derivative; raised only if a gradient is
            wanted.
        ValueError: an undeclared tensor that requires grad, named in the message; or an argument
            that SciPy refuses.

    **Columns.** Every call of ``fun`` takes the times ``(batch,)`` and states ``(n, batch)`` of all
    columns, so tensors with an axis ``batch``, in ``args`` or captured, are parameters of the
    columns. A column that is finished waits for the others with steps of size zero. ``fun`` must
    compute each column from this column alone.

    - ``method="RK45"`` takes for each column SciPy's steps, up to rounding. ``"Rodas4"``, for stiff
      systems, is the L-stable Rosenbrock method RODAS of order 4(3) with the same step control. Its
      Jacobians take n backward passes a step, and its matrices are dense, so it is for small n.
    - Each end of ``t_span`` is one time for all columns or has shape ``(batch,)``. ``t_eval`` has
      shape ``(times,)`` or ``(times, batch)``; None: the two ends of ``t_span``.
    - ``sol.y`` has shape ``(n, times, batch)``. ``sol.sol(t)`` takes a time, times ``(k,)`` or
      ``(k, batch)`` and returns ``(n, batch)`` or ``(n, k, batch)``; it does not extrapolate.
      ``sol.steps`` and ``sol.rejections`` count the steps of each column ``(batch,)``; ``nfev``
      counts calls of ``fun``.
    - The gradient is that of the steps, with their sizes as constants, to rounding; it equals that
      of the exact solution to the tolerances. ``adjoint="interpolate"`` stores the states before
      all steps, ``"checkpoint"`` at most 128 of them, from which it repeats the steps bit for bit;
      with ``dense_output`` all are stored. Each step is evaluated once more, with its derivative.
      The gradient of Rodas4 needs second derivatives of ``fun``.
    - ``rtol`` is a number, ``atol`` a number or of shape ``(n,)``; the other options are
      ``max_step`` and ``first_step``. Complex states and functions of NumPy are refused. So is a
      jump of ``fun`` where a gradient is wanted, unless it is at a fixed time or at an event.
    - Events return one value for each column ``(batch,)``, and resets the states ``(n, batch)``.
      Both are evaluated for all columns, and apply to those in which the event happens. A terminal
      event ends its column, and later states of the column are NaN; with ``t_eval=None`` the last
      time ``sol.t[1]`` ``(batch,)`` and the last state are those of the event.
      ``sol.t_events[k][j]`` and ``sol.y_events[k][j]`` belong to event k and column j, and
      ``sol.status`` ``(batch,)`` is 1 where a terminal event ended the column.
    - A column whose steps become too short, or whose rates are not finite, is named in the error.

    **Batches.** With ``batch_first=True`` the samples are solved as columns are, each with its own
    step size. ``fun``, events and resets are those of :func:`~adjsim.simulate`: they take a time
    that is one number and states ``(batch, n)``. By ``torch.vmap`` they see one sample at a time,
    ``(1, n)``. Tensors in ``args`` whose first axis has the length of the batch have one row a
    sample. ``sol.y`` has shape ``(batch, times, n)``, and ``sol.sol(t)`` returns ``(batch, n)`` or
    ``(batch, k, n)``; times of samples are ``(batch, times)``.

    Where an equation is almost linear, DOP853 takes steps that are too long for its interpolant of
    order seven, whose error is then about 1e-5 at any tolerance. This limits the accuracy of
    the gradient and of ``sol.sol``. Give DOP853 a ``max_step`` there, or use RK45.

    Do not use this function for gradients with respect to the time steps themselves, for second
    derivatives, or in chaos, where the gradient of a long solution is correct but useless: see the
    estimators. For the gradient of the discrete steps use :func:`~adjsim.simulate`. Where ``fun``
    has a kink, the gradient is that of the side on which the steps fell.
    """
    made = {id(x) for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_inference()}
    if made:
        # Inference tensors cannot be differentiated, which events with a reset need.
        args = tree_map(lambda x: x.clone() if id(x) in made else x, args)
    if args is not None and not isinstance(args, Sequence):
        raise TypeError(
            "Supplied 'args' cannot be unpacked: args must be a tuple; got "
            f"{type(args).__name__}. For a single argument write args=(x,)."
        )
    start = as_state(y0)
    columns = start.ndim == 2
    _refuse_forward_mode("columns", columns)
    if as_flag("batch_first", batch_first):
        if not columns:
            raise ValueError(
                f"batch_first=True takes y0 of shape (batch, n); got {tuple(start.shape)}."
            )
        start, t_eval = start.T, as_rows(t_eval, start)
    if columns:
        check_columns(start)
    found = () if events is None else (events,) if callable(events) else tuple(events)
    if mass_matrix is not None and not callable(mass_matrix):
        mass_matrix = torch.as_tensor(mass_matrix, device=start.device)
    marks = None if events is None else found
    settings = t_eval, dense_output, adjoint, marks, options
    if batch_first:
        rhs = SampleRightHandSide(fun, tuple(args or ()), params, start, mass=mass_matrix)
        first, last = (as_times(t, start).detach().reshape(-1)[0] for t in t_span)
        rhs.check_samples(first, last, start.detach(), found)
        return samples_first(solve_columns(rhs, t_span, start, method, *settings))
    has_mass = mass_matrix is not None and not columns and method in ("Radau", Radau)
    one = mass_matrix is not None or method in COLUMN_METHODS.keys() - METHODS
    if one and not columns and not has_mass:
        _refuse_forward_mode("Rodas4", True)
        start = start[:, None]
        check_columns(start)
        rhs = OneRightHandSide(fun, tuple(args or ()), params, start, mass=mass_matrix)
        return one_of(solve_columns(rhs, t_span, start, method, *settings))
    several = vectorized and not columns
    made_by = MassRightHandSide if has_mass else RightHandSide
    rhs = made_by(fun, tuple(args or ()), params, start, several and not has_mass, mass_matrix)
    if columns:
        return solve_columns(rhs, t_span, start, method, *settings)
    solver = MassRadau if has_mass else _solver(method)
    if adjoint not in ADJOINTS:
        raise ValueError(f"adjoint must be one of {', '.join(ADJOINTS)}; got {adjoint!r}.")
    begin, end = (as_times(t, start).reshape(()) for t in t_span)
    first, last = float(plain(begin)), float(plain(end))
    times = None if t_eval is None else as_times(t_eval, start)
    settings = _adjoint_settings(rhs, solver, options)
    sign = 1.0 if last >= first else -1.0
    user_events = [Event(event, rhs, i, sign) for i, event in enumerate(found)]
    if np.isnan(last) or not np.isfinite(first):
        raise ValueError(f"t_span must be two finite times; got {first} and {last}.")
    endless = start.numel() > 0 and not any(event.terminal_left for event in user_events)
    if np.isinf(last) and endless:
        raise ValueError(
            "t_span must be two finite times, unless a terminal event ends the solution; got "
            f"{first} and {last}."
        )
    with outside_transforms():
        rhs.check(first, to_numpy(start), torch.is_grad_enabled())
    if isinstance(rhs, MassRightHandSide):
        _refuse_forward_mode("mass_matrix", True)
        start = rhs.begin(start, begin, adjoint, user_events, settings.options)
    rhs.inputs.histories.close()
    differentiable = [start, begin, end, *([] if times is None else [times]), *rhs.parameters]
    _refuse_forward_mode("events", bool(user_events))
    reads = [event.reads_gradient(begin, start) for event in user_events]
    reads_gradient = torch.is_grad_enabled() and any(reads)
    wants_gradient = reads_gradient or any(map(is_tracked, differentiable))
    if wants_gradient:
        with outside_transforms():
            rhs.check_differentiable(first, to_numpy(start))
    piecewise = PiecewiseSolve(
        settings, adjoint, begin, end, sign, times, dense_output, user_events, wants_gradient
    )
    final = piecewise.run(start)
    happened = [event.found(start) for event in user_events]
    return OdeResult(
        t=torch.cat(piecewise.times).to(start.real.dtype),
        y=torch.cat(piecewise.states, 1),
        sol=DenseSolution(piecewise.pieces, start.detach()) if dense_output else None,
        t_events=None if events is None else [times for times, _ in happened],
        y_events=None if events is None else [states for _, states in happened],
        **piecewise.counts,
        status=final.status,
        message=final.message,
        success=True,
    )


def _refuse_forward_mode(what: str, present: bool) -> None:
    if present and (in_transform() or in_forward_mode()):
        raise ValueError(
            f"torch.func (jacrev, jacfwd, jvp, grad) and forward-mode tensors do not take {what}: "
            "use torch.autograd.grad, with is_grads_batched=True for a Jacobian."
        )


def _solver(method: Any) -> type[OdeSolver]:
    """Return the solver class for a name or a class, as SciPy does."""
    if isinstance(method, type) and issubclass(method, OdeSolver):
        return LSODA if method is scipy.integrate.LSODA else method
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, or a class of SciPy's OdeSolver; got "
            f"{method!r}."
        )
    return METHODS[method]


def _adjoint_settings(
    rhs: RightHandSide, method: type[OdeSolver], options: dict[str, Any]
) -> AdjointSettings:
    """Separate SciPy's options from those of the adjoint."""
    options = {"rtol": 1e-3, "atol": 1e-6, **options}
    for name in ("rtol", "atol"):
        options[name] = _array(options[name])
        check_tolerance(name, options[name])
    rtol = max(float(np.min(options["rtol"])), SMALLEST_RTOL)
    relative = _backward_tolerance("adjoint_rtol", options)
    absolute = _backward_tolerance("adjoint_atol", options)
    backward = max(rtol / 10 if relative is None else relative, SMALLEST_RTOL)
    absolute = backward / 1000 if absolute is None else absolute
    jac = options.get("jac")
    if isinstance(jac, str):
        if jac != "autodiff":
            raise ValueError(f'jac must be "autodiff", a function, a matrix or None; got {jac!r}.')
        options["jac"] = rhs.jacobian
    elif isinstance(jac, Tensor):
        options["jac"] = to_numpy(jac)
    elif callable(jac):
        options["jac"] = lambda t, y: _array(jac(rhs.time(t), rhs.tensor(y), *rhs.args))
    return AdjointSettings(rhs, method, backward, absolute, options)


def _backward_tolerance(name: str, options: dict[str, Any]) -> float | None:
    """Take a tolerance of the adjoint, which is one number, out of the options."""
    given = options.pop(name, None)
    if given is None:
        return None
    number = as_number(name, given)
    check_tolerance(name, number)
    return number


def _array(x: Any) -> Any:
    return to_numpy(x) if isinstance(x, Tensor) else x
