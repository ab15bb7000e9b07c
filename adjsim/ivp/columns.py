r"""Many initial value problems in one solution, with a step size for each column.

``y0`` of shape ``(n, batch)`` holds independent problems in its columns. All columns step together,
but each by its own step size (:mod:`adjsim.ivp.column_steps`). The gradient is that of the steps
with their sizes as constants: with cotangents :math:`\lambda_{k+1}` of the states after step k,

.. math:: \lambda_k = \left(\frac{\partial y_{k+1}}{\partial y_k}\right)^T \lambda_{k+1}, \qquad
   \frac{dL}{d\theta} = \sum_k \left(\frac{\partial y_{k+1}}{\partial\theta}\right)^T
   \lambda_{k+1},

where a state that is read inside of a step adds the cotangents of the step's interpolant. Both
products come from automatic differentiation of one step at a time, so memory for graphs does not
grow with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.ivp.column_crossings import ColumnEvent
from adjsim.ivp.column_events import ColumnEvents
from adjsim.ivp.column_solution import (
    CheckpointedSteps,
    ColumnSolution,
    StoredSteps,
    per_column,
    refuse_outside,
)
from adjsim.ivp.column_steps import ColumnStepper, Step
from adjsim.ivp.dormand_prince import DormandPrince
from adjsim.ivp.march import ENDED, STOPPED
from adjsim.ivp.mass import Mass
from adjsim.ivp.nearby import near_start, nudged
from adjsim.ivp.piecewise import OdeResult
from adjsim.ivp.rhs import SMALLEST_RTOL, RightHandSide, as_times, check_tolerance, to_numpy
from adjsim.ivp.rodas4 import Rodas4

COLUMN_METHODS: dict[str, type[Step]] = {step.name: step for step in (DormandPrince, Rodas4)}
COLUMN_ADJOINTS = ("interpolate", "checkpoint")
OPTIONS = ("rtol", "atol", "max_step", "first_step")


def check_columns(y0: Tensor) -> None:
    """Refuse states ``(n, batch)`` that are complex, empty or not finite."""
    if y0.is_complex():
        raise ValueError("y0 of shape (n, batch) must be real: stack real and imaginary parts.")
    if not y0.numel():
        raise ValueError(f"y0 has no entries: its shape is {tuple(y0.shape)}.")
    wrong = (~y0.detach().isfinite()).T.nonzero()
    if len(wrong):
        column, k = wrong[0].tolist()
        value = float(y0.detach()[k, column])
        raise ValueError(f"y0 must be finite; got {value} in entry {k} of column {column}.")


def solve_columns(
    rhs: RightHandSide,
    t_span: Any,
    start: Tensor,
    method: Any,
    t_eval: Any,
    dense_output: bool,
    adjoint: str,
    events: Sequence[Callable[..., Any]] | None,
    options: dict[str, Any],
) -> OdeResult:
    """Solve initial value problems in the columns of a state; see :func:`solve_ivp`."""
    if rhs.mass is not None and method != "Rodas4":
        raise ValueError(
            f'mass_matrix takes method="Rodas4", or "Radau" for one state; got {method!r}.'
        )
    if method not in COLUMN_METHODS:
        raise ValueError(
            f"for y0 of shape (n, batch) method must be one of {', '.join(COLUMN_METHODS)}; got "
            f'{method!r}. "Rodas4" is for stiff problems. SciPy\'s methods take one column a call.'
        )
    if adjoint not in COLUMN_ADJOINTS:
        raise ValueError(
            "for y0 of shape (n, batch) and with Rodas4 adjoint must be one of "
            f"{', '.join(COLUMN_ADJOINTS)}; got {adjoint!r}."
        )
    for name in options:
        if name not in OPTIONS:
            raise ValueError(
                "y0 of shape (n, batch) and Rodas4 take the options "
                f"{', '.join(OPTIONS)}; got {name!r}."
            )
    ends = [as_times(t, start) for t in t_span]
    begin, end = (per_column(t, start[0], 1, "each end of t_span") for t in ends)
    shared = all(t.ndim == 0 for t in ends)
    times = torch.stack(ends if shared else [begin, end])
    times = times if t_eval is None else as_times(t_eval, start)
    grid = per_column(times, start[0], 2, "t_eval")
    first, last = begin.detach(), end.detach()
    direction = torch.where(last >= first, 1.0, -1.0).to(last)
    _check_times(first, last, direction, None if t_eval is None else grid.detach())
    rate = _Rate(rhs)
    _check_function(rhs, rate, first, last, start.detach())
    mass = None if rhs.mass is None else Mass(rhs, first, rate)
    marks = [ColumnEvent(event, rhs, k) for k, event in enumerate(events or ())]
    _check_events(marks, first, _nearby(rhs, first, last), start.detach())
    rhs.inputs.histories.close()
    reads = [x for event in marks for x in event.reads.values()]
    reads += [] if mass is None else mass.reads
    wants_gradient = torch.is_grad_enabled() and any(
        x.requires_grad for x in (start, begin, end, grid, *rhs.parameters, *reads)
    )
    if wants_gradient:
        at = to_numpy(begin), to_numpy(start)
        rhs.check_differentiable(*at)
    stepper = _stepper(rate, method, last, direction, start, options)
    if mass is not None:
        start = mass.consistent(start, begin, stepper.tolerance)
        stepper.mass, stepper.rate = mass, mass.rate
    if wants_gradient:
        start = rhs.with_start_time(start, begin, stepper.rate(first, start.detach().double()))
    if marks:
        stepper.events = ColumnEvents(
            marks, rhs, first, stepper.tolerance if wants_gradient else None
        )
    keeps_all = dense_output or adjoint == "interpolate"
    history = StoredSteps() if keeps_all else CheckpointedSteps(stepper)
    solution = ColumnSolution(rhs, stepper, first, start, history, marks, mass)
    rate.calls = 0
    with torch.no_grad():
        states = solution.solve(
            grid.detach(), options.get("first_step"), wants_gradient or dense_output, wants_gradient
        )
    jacobians = solution.attempts if method == "Rodas4" else 0
    found = OdeResult(
        t=times.to(start.dtype),
        sol=solution if dense_output else None,
        t_events=None,
        y_events=None,
        nfev=rate.calls,
        njev=jacobians,
        nlu=jacobians,
        steps=solution.steps,
        rejections=solution.rejections,
        status=0,
        message=ENDED,
        success=True,
    )
    if events is None:
        found.y = solution.connected(grid, states)
        return found
    found.y, kinds, columns, at, hits = solution.connected_hits(grid, states)
    ended = solution.ended_by >= 0
    if ended.any():
        found.message, number = STOPPED, solution.ended_by.clamp(min=0)
        if t_eval is None:
            # A column ends at the time and in the state of its terminal event.
            last = torch.where(ended, at[number], end)
            found.t = torch.stack([begin, last]).to(start.dtype)
            final = torch.where(ended, hits[number].T, found.y[:, -1])
            found.y = torch.stack([found.y[:, 0], final], 1)
    found.status = ended.long()
    place = kinds * len(ended) + columns
    order = place.argsort(stable=True)
    counts = place.bincount(minlength=len(marks) * len(ended)).tolist()
    times_of, states_of = at.to(start.dtype)[order].split(counts), hits[order].split(counts)
    found.t_events, found.y_events = (
        [list(x[k * len(ended) : (k + 1) * len(ended)]) for k in range(len(marks))]
        for x in (times_of, states_of)
    )
    return found


@dataclass
class _Rate:
    """The rates in double precision, whatever the dtype of the states; counts its calls."""

    rhs: RightHandSide
    calls: int = 0

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        dtype = self.rhs.like.dtype
        return self.rhs(t.to(dtype), y.to(dtype)).double()


def _stepper(
    rate: _Rate, method: str, end: Tensor, direction: Tensor, start: Tensor, options: dict[str, Any]
) -> ColumnStepper:
    """Make the stepper, with SciPy's default tolerances."""
    for name in ("max_step", "first_step"):
        value = options.get(name)
        if value is not None and not float(value) > 0:
            raise ValueError(f"{name} must be positive; got {value}.")
    atol = torch.as_tensor(options.get("atol", 1e-6), dtype=torch.float64, device=start.device)
    if atol.ndim and atol.shape != start.shape[:1]:
        raise ValueError(
            f"atol must be a number or of shape ({len(start)},); got {tuple(atol.shape)}."
        )
    rtol = float(options.get("rtol", 1e-3))
    check_tolerance("rtol", rtol)
    check_tolerance("atol", to_numpy(atol))
    tolerances = max(rtol, SMALLEST_RTOL), atol[:, None] if atol.ndim else atol
    max_step = float(options.get("max_step", np.inf))
    return ColumnStepper(rate, COLUMN_METHODS[method], end, direction, *tolerances, max_step)


def _check_times(begin: Tensor, end: Tensor, direction: Tensor, times: Tensor | None) -> None:
    """Refuse infinite spans, and times outside of them or in another order."""
    wrong = (~(begin.isfinite() & end.isfinite())).nonzero()
    if len(wrong):
        column = int(wrong[0, 0])
        raise ValueError(
            f"t_span must be two finite times; got {float(begin[column])} and "
            f"{float(end[column])} in column {column}."
        )
    if times is not None:
        refuse_outside(times, begin, end, "t_eval")
        if bool((direction * times.diff(dim=0) < 0).any()):
            raise ValueError("t_eval must be sorted from the start of t_span to its end.")


def _check_function(
    rhs: RightHandSide, rate: _Rate, begin: Tensor, end: Tensor, start: Tensor
) -> None:
    """Refuse a function of another shape, of NumPy, or that mixes columns."""
    given = start.clone()
    rhs.check(to_numpy(begin), to_numpy(given), torch.is_grad_enabled())
    if rhs.uses_numpy:
        raise TypeError(
            "fun computes with NumPy, but for y0 of shape (n, batch) it is called with tensors: "
            "write it with torch."
        )
    with torch.no_grad():
        rate(begin, given)
    found = _mixing(rate, _nearby(rhs, begin, end), start)
    if not torch.equal(given, start):
        raise ValueError(
            "fun writes into y (an operation in place, such as y *= 2), and y is the state of the "
            "solution: compute new tensors."
        )
    if found is not None:
        raise ValueError(
            f"the rate of column {found} of y0 changes when only other columns change: fun must "
            "treat each column by itself, and draw no random numbers. For a coupled system pass "
            "one state of shape (n,)."
        )


def _check_events(
    events: Sequence[ColumnEvent], begin: Tensor, nearby: Tensor, start: Tensor
) -> None:
    """Refuse events and resets that mix columns, and find what they read."""
    for event in events:
        both = [("event", event), ("the reset of event", event.after if event.reset else None)]
        for what, function in both:
            found = None if function is None else _mixing(function, nearby, start)
            if found is not None:
                raise ValueError(
                    f"{what} {event.number} of column {found} changes when only other columns "
                    "change: it must treat each column by itself."
                )
        event.slope(begin, start)
        if event.reset is not None:
            event.reset_state(begin, start)


def _nearby(rhs: RightHandSide, begin: Tensor, end: Tensor) -> Tensor:
    """Return the times at which columns are compared: the start, where a past may end behind it."""
    return begin if rhs.inputs.histories.reads_any else near_start(begin, end)


def _mixing(
    function: Callable[[Tensor, Tensor], Tensor], times: Tensor, start: Tensor
) -> int | None:
    """Return a column whose value depends on other columns, if any.

    The numbers of any two columns differ in a bit, so each change of all columns with one value of
    a bit is seen by all others. The states are moved off the start, where rates may vanish.
    """
    columns, base = torch.arange(start.shape[1], device=start.device), nudged(start)
    moved = nudged(base)
    with torch.no_grad():
        known = torch.atleast_2d(function(times, base.clone()))
        for bit in range(max(1, (len(columns) - 1).bit_length())):
            for side in (0, 1):
                stays = columns >> bit & 1 == side
                others = torch.atleast_2d(function(times, torch.where(stays, base, moved)))
                scale = torch.finfo(start.dtype).eps ** 0.5 * known.abs().amax(0)
                wrong = (((known - others).abs() > scale).any(0) & stays).nonzero()
                if len(wrong):
                    return int(wrong[0, 0])
    return None
