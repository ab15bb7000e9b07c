"""The continuous adjoint."""

from __future__ import annotations

from adjsim.adjoints.base import Adjoint, Result
from adjsim.solvers.base import ContinuousSolver, Problem


class BacksolveAdjoint(Adjoint):
    """Solve the adjoint equation backward in time (optimise, then discretise), through torchdiffeq.

    With ``dy/dt = f(t, y; theta)`` and ``a = dL/dy``, going back from the last save time::

        da/dt = -a^T df/dy        dL/dtheta = int a^T df/dtheta dt

    together with y itself, which is set to the stored solution again at every save time. Memory does not grow with the
    number of steps. The gradient is that of the exact flow, not of the steps taken: it approaches the solver's own as
    tolerances tighten. Between save times the state is integrated backward, which loses it where the flow contracts or is
    chaotic (after T of about 10 to 15 decay or Lyapunov times): save more often there, or use a splitting with
    :class:`ReversibleAdjoint`.

    Args:
        rtol, atol: tolerances of the backward solve; None: the solver's own.
    """

    accepts = (ContinuousSolver,)

    def __init__(self, *, rtol: float | None = None, atol: float | None = None) -> None:
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value}.")
        self.rtol, self.atol = rtol, atol

    def run(self, problem: Problem) -> Result:
        assert isinstance(problem.solver, ContinuousSolver)
        return problem.solver.solve(problem, {"rtol": self.rtol, "atol": self.atol})
