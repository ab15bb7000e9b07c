"""The continuous adjoint, by torchdiffeq or torchsde."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjsim.adjoints.base import Adjoint, Result
from adjsim.core.arguments import as_positive
from adjsim.core.rows import has_rows
from adjsim.core.run_report import RunReport
from adjsim.core.second_derivative import once_differentiable
from adjsim.core.state import State
from adjsim.solvers.continuous.base import ContinuousSolver
from adjsim.solvers.run import Run


class BacksolveAdjoint(Adjoint):
    """The continuous adjoint: its equation is solved backward in time, by torchdiffeq or torchsde.

    With ``dy/dt = f(t, y; theta)`` and ``a = dL/dy``, from the last save time backward::

        da/dt = -a^T df/dy        dL/dtheta = int a^T df/dtheta dt

    together with y itself, which is reset to the stored solution at every save time (optimise, then
    discretise). Memory does not grow with the number of steps. The gradient is that of the exact
    flow, not of the discrete steps: it approaches the solver's own gradient as tolerances tighten.
    Between save times the state is integrated backward. Where the flow contracts or is chaotic, the
    recovered state is lost after about 10 to 15 decay or Lyapunov times. Save more often there, or
    use a splitting with :class:`ReversibleAdjoint`.

    For an SDE the noise of the forward run is generated again. Under friction the error of the
    gradient grows as exp(friction t) between save times. For a double well at dt = 1/64 it was 4 %
    at friction t = 5 and 990 % at 10, with friction 1 (``docs/choosing_a_solver.rst``). A run
    with more than friction t = 5 between save times is refused.

    Args:
        rtol, atol: tolerances of the backward solve of an ODE; None: the solver's own.
    """

    accepts = (ContinuousSolver,)

    def __init__(self, *, rtol: float | None = None, atol: float | None = None) -> None:
        self.rtol = None if rtol is None else as_positive("rtol", rtol)
        self.atol = None if atol is None else as_positive("atol", atol)

    def check(self, run: Run[State]) -> None:
        run.solver.check(run, self._options())

    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        joined, values = run.joined()
        options = {**self._options(), "params": values}
        states, record, final = run.solver.solve(joined, report, options)
        joined.refuse_written()
        make = type(final)._make

        def once(x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(_refuse_rows)
            why = "this gradient was swept backward in constant memory"
            return once_differentiable(x, why, "Use DirectAdjoint() without compile=True.")

        return (
            None if states is None else make(map(once, states)),
            None if record is None else once(record),
            make(map(once, final)),
            None,
        )

    def _options(self) -> dict[str, Any]:
        return {"rtol": self.rtol, "atol": self.atol}


def _refuse_rows(cotangent: Tensor) -> None:
    """Refuse several rows of cotangents at once, for which the solvers have one step size."""
    if has_rows(cotangent):
        raise RuntimeError(
            "BacksolveAdjoint takes one cotangent at a time (not is_grads_batched=True, nor "
            "torch.func.vmap): loop over the rows, or use CheckpointAdjoint() with RungeKutta."
        )
