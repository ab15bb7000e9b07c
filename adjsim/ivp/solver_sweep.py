"""The adjoint by an explicit solver of SciPy, or by Radau where the state is large."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.integrate import OdeSolution, OdeSolver, Radau
from torch import Tensor

from adjsim.ivp.forward_states import StoredInterpolants, adjoint_error
from adjsim.ivp.quadrature import AdaptiveLobatto
from adjsim.ivp.rhs import SMALLEST_RTOL, Array
from adjsim.ivp.sweep import AdjointSettings, Sweep, as_real, as_state_type, forward_steps_between


class SolverSweep(Sweep):
    """Integration by an explicit solver of SciPy or by Radau, whose step size outlasts jumps.

    The integral is computed afterwards over the forward steps (:mod:`adjsim.ivp.quadrature`), so
    that it does not enter the error norm of the adjoint.
    """

    def __init__(self, settings: AdjointSettings, adjoint: Array, method: type[OdeSolver]) -> None:
        super().__init__(settings, adjoint)
        self.method = method
        rows = len(adjoint)
        self.integral = self.points = AdaptiveLobatto(
            self.rhs.parameter_leaves, rows, settings.rtol, self._largest
        )

    def integrate(self, begin: float, end: float, path: OdeSolution, remaining: float) -> None:
        solver, like = self._solver(begin, end, path), self.adjoint
        storage = StoredInterpolants(self.method)
        storage(solver)
        while solver.status == "running":
            proposed = float(getattr(solver, "h_abs", 0.0))
            message = solver.step()
            if solver.status == "failed":
                raise adjoint_error(solver.t, message)
            # If the end cut the last step short, the next one need not be as short.
            cut = solver.status == "finished" and solver.step_size < 0.999 * proposed
            following = float(getattr(solver, "h_abs", 0.0))
            self.step = max(proposed, following) if cut else following
            storage(solver)
        self.adjoint = as_state_type(np.asarray(solver.y).reshape(len(like), -1), like)
        if not self.rhs.parameters:
            return
        found = storage.solution()

        def adjoint(times: Array) -> Array:
            return as_state_type(found(times).reshape(len(like), -1, len(times)), like)

        def integrand(times: Array, weights: Array, differences: Array) -> list[list[Tensor]]:
            z = adjoint(times)
            graphs = self.rhs.graphs(times, path(times))
            return self.rhs.parameter_vjp(graphs, -weights * z, -differences * z)

        # The forward steps resolve how fast the states change.
        self.points.integrate(
            [begin, *forward_steps_between(begin, end, path), end],
            integrand,
            lambda length, t: self._rounding(length, t, adjoint(np.array([t]))[..., 0], path),
            lambda times, weights: self._uncertainty(times, path, weights * adjoint(times)),
        )

    def _solver(self, begin: float, end: float, path: OdeSolution) -> Any:
        like, shape = self.adjoint, as_real(self.adjoint).shape
        options = self.settings.solver_options(np.repeat(self._absolute(), shape[1]))
        # SciPy's error norm is the mean over all rows, of which one may have the whole error.
        share = len(like) ** -0.5
        options["rtol"] = max(share * options["rtol"], SMALLEST_RTOL)
        options["atol"] = share * options["atol"]
        if self.step:
            options["first_step"] = min(self.step, abs(end - begin))
        if issubclass(self.method, Radau):

            def jacobian(t: float, z: Array) -> Any:
                graphs = self.rhs.graphs(np.array([t]), path(np.array([t])))
                return _each_row(-self.rhs.transposed_jacobians(graphs)[0], len(like))

            options["jac"] = jacobian

        def rate(t: float, z: Array) -> Array:
            rows = as_state_type(z.reshape(shape), like)
            return -as_real(self.rhs.state_vjp(t, path(t), rows)).ravel()

        return self.method(rate, begin, as_real(like).ravel(), end, **options)


def _each_row(matrix: Array, rows: int) -> Any:
    """Return the Jacobian of rows that have one matrix each: sparse, if there are several."""
    return matrix if rows == 1 else sparse.csc_matrix(sparse.kron(sparse.eye(rows), matrix))
