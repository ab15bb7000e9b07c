"""ODE solvers, by torchdiffeq: the summed drift of all terms as one vector field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive
from adjsim.core.state import State
from adjsim.core.transforms import are_forward
from adjsim.solvers.base import refuse_no_equation
from adjsim.solvers.clock import check_dt
from adjsim.solvers.continuous.backward_equation import Backsolve, BackwardEquation
from adjsim.solvers.continuous.base import ContinuousSolver, Fields, VectorField
from adjsim.solvers.run import Run

ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun")
ONE_STEP = ("euler", "midpoint", "heun2", "heun3", "rk4")
MULTISTEP = ("explicit_adams", "implicit_adams", "fixed_adams")
SCIPY = ("scipy_solver",)


class ODESolver(ContinuousSolver):
    """Solve ``dy/dt = drift(t, y)`` with a method of torchdiffeq.

    Adaptive methods (dopri8, dopri5, bosh3, fehlberg2, adaptive_heun, and scipy_solver, which is
    SciPy's LSODA) choose their steps from the tolerances and interpolate at save times. Fixed-step
    methods (euler, midpoint, heun2, heun3, rk4, explicit_adams, implicit_adams, fixed_adams) take
    steps of dt from ts[0], and save times must lie on them. The path does not depend on the save
    times. Interpolation is of fourth order, coarser than the steps of dopri8 at tight tolerances:
    prefer dopri5 there. explicit_adams is limited to order 4.

    For long molecular runs prefer a splitting: it conserves the invariants of the physics, costs
    one force a step, and has an exact gradient in constant memory.

    Args:
        method: a name of torchdiffeq.
        rtol, atol: error tolerances of adaptive methods (and of the corrector of implicit_adams).
        dt: the step of fixed-step methods, time; required for them, refused for adaptive methods.
    """

    def __init__(
        self,
        method: str = "dopri5",
        *,
        rtol: float = 1e-7,
        atol: float = 1e-9,
        dt: float | None = None,
    ) -> None:
        known = ADAPTIVE + SCIPY + ONE_STEP + MULTISTEP
        if method not in known:
            raise ValueError(f"unknown ODE method {method!r}; torchdiffeq has {', '.join(known)}.")
        self.rtol, self.atol = as_positive("rtol", rtol), as_positive("atol", atol)
        self.fixed_step = method in ONE_STEP + MULTISTEP
        if self.fixed_step and dt is None:
            raise ValueError(f"{method!r} takes fixed steps: give dt.")
        if not self.fixed_step and dt is not None:
            raise ValueError(
                f"{method!r} chooses its own steps: leave dt out and set rtol and atol."
            )
        self.method = method
        self.dt = None if dt is None else check_dt(dt)

    def check(self, run: Run[State], backsolve: dict[str, Any] | None) -> None:
        refuse_no_equation(self, run.dynamics)
        if backsolve is None and self.method in SCIPY and run.needs_gradient:
            raise TypeError(
                "scipy_solver cannot be backpropagated through: use BacksolveAdjoint(), or "
                "another method."
            )
        if self.method in ADAPTIVE + SCIPY and are_forward((*run.state, *run.reading.tensors)):
            raise NotImplementedError(
                f"torchdiffeq's {self.method} has no derivatives forward in time (jvp, jacfwd, "
                "dual tensors): use a method of fixed steps, RungeKutta, or solve_ivp."
            )

    def integrate(self, field: VectorField[State], start: Fields, times: Tensor) -> Fields:
        count, backsolve = len(field.run.state), field.backsolve
        times = times.to(start[0].device)
        if backsolve is not None:
            equation = BackwardEquation(field, start)
            ahead = self._solve(lambda y: _largest(count, equation.fields(y)))
            back = self._solve(equation.norm, backsolve["rtol"], backsolve["atol"])
            inputs = (equation.joined(start), *backsolve["params"])
            return equation.fields(Backsolve.apply(equation, (ahead, back), times, *inputs))
        solve = self._solve(partial(_largest, count))
        # For one field a tensor, since torchdiffeq joins and divides tuples at every stage.
        y: Any = start[0] if len(start) == 1 else start
        if self.method in ONE_STEP:
            # torchdiffeq writes frames into one tensor, whose backward is quadratic in their
            # number. One-step methods have no memory, so solving from save to save gives the
            # same path.
            frames = [_fields(y)]
            for pair in pairwise(times):
                found = solve(field, y, torch.stack(pair))
                frames.append(tuple(x[1] for x in _fields(found)))
                y = frames[-1][0] if len(start) == 1 else frames[-1]
            return tuple(map(torch.stack, zip(*frames, strict=True)))
        return _fields(solve(field, y, times))

    def _solve(
        self, norm: Callable[[Any], Tensor], rtol: float | None = None, atol: float | None = None
    ) -> Callable[[Any, Any, Tensor], Any]:
        """Return the function that solves a field from a start at times, by torchdiffeq."""
        from torchdiffeq import odeint

        options: dict[str, Any] = {"step_size": 1.0} if self.fixed_step else {}
        if self.method == "explicit_adams":
            # The default is order 12, whose region of stability is too small to be useful.
            options["max_order"] = 4
        if self.method not in SCIPY:
            options["norm"] = norm
        settings: dict[str, Any] = {
            "rtol": self.rtol if rtol is None else rtol,
            "atol": self.atol if atol is None else atol,
            "method": self.method,
            "options": options,
        }

        def solve(field: Any, y: Any, times: Tensor) -> Any:
            try:
                return odeint(field, y, times, **settings)
            except AssertionError as failure:
                raise FloatingPointError(
                    f"{self.method} failed ({failure}): the solution reaches NaN or infinity, or "
                    "is stiff. Loosen the tolerances, shorten the run, or use a splitting."
                ) from failure

        return solve

    def __repr__(self) -> str:
        tolerances = f"rtol={self.rtol:g}, atol={self.atol:g}"
        settings = tolerances if self.dt is None else f"dt={self.dt:g}"
        return f"ODESolver({self.method!r}, {settings})"


def _fields(found: Any) -> Fields:
    """Return the fields of a state of torchdiffeq, a tensor for one field."""
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _largest(count: int, found: Any) -> Tensor:
    """Return the largest root mean square over the fields, without that of a time average."""
    fields = _fields(found)
    # The choice of steps is not differentiated.
    return reduce(torch.maximum, (x.detach().square().mean().sqrt() for x in fields[:count]))
