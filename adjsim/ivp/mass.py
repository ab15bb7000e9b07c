r"""Mass matrices: differential-algebraic equations of index one.

The equation is :math:`M(t, \theta)\, \dot y = f(t, y, \theta)`, where M may be singular. Let
:math:`R = 1 - M M^+` be the projector to the complement of the range of M. The rows :math:`R f = 0`
are algebraic equations, and the equation has index one where

.. math:: S = M + R J, \qquad J = \partial f/\partial y

is regular. Then the rate is the solution of :math:`S \dot y = (1 - R) f - R\, \partial_t f`, and a
start is made consistent by Newton's method on

.. math:: G(y) = M (y - y_0) + R f(t_0, y) = 0,

which keeps the differential part :math:`M y_0` and has the Jacobian S. By the implicit function
theorem :math:`dy = S^{-1} (M dy_0 - dR\,f - R\, \partial_\theta f\, d\theta - dM (y - y_0))`.

A matrix that depends on time is replaced by the constant one of the start, :math:`M_0 = M(t_0)`.
If its null space does not change, :math:`M(t) = E(t) M_0` with :math:`E = 1 + (M(t) - M_0) M_0^+`,
so :math:`M_0 \dot y = E(t)^{-1} f`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjsim.core.parameters import leaves
from adjsim.core.rows import pulled_rows
from adjsim.ivp.column_steps import Rate, first_of
from adjsim.ivp.connection import is_tracked
from adjsim.ivp.rhs import RightHandSide
from adjsim.ivp.rodas4 import derivatives

# Singular values below this fraction of the largest one count as zero.
RANK = 1e-10
# Smallest ratio of the singular values of S in an equation of index one.
REGULAR = 1e-12
NEWTON_STEPS = 25
# Tolerances of a state by which a reset may leave it off the algebraic equations. The interpolant
# before it is off them by up to six.
OFF = 30
# Change of the null space, relative to M, that counts as rounding.
FIXED = 1e-8


class Mass:
    """The mass matrices ``(n, n, columns)`` of columns that begin at times ``(batch,)``."""

    def __init__(self, rhs: RightHandSide, begin: Tensor, field: Rate) -> None:
        self.rhs, self._begin, self._field = rhs, begin, field
        self.varies, n = not isinstance(rhs.mass, Tensor), len(rhs.like)
        matrix = self.at(begin)
        if matrix.shape[:2] != (n, n) or matrix.ndim != 3:
            raise ValueError(
                f"mass_matrix must have shape ({n}, {n}); got {tuple(matrix.shape[:2])}. A "
                f"function of times ({len(begin)},) of columns returns ({n}, {n}, {len(begin)})."
            )
        if self.varies and matrix.shape[2] == 1 < len(begin):
            # A product of times and entries may have the shape of a matrix.
            later = begin + torch.linspace(1e-3, 2e-3, len(begin), device=begin.device)
            if not torch.equal(self.at(later), matrix):
                raise ValueError(
                    f"mass_matrix depends on t of shape ({len(begin)},), the times of the columns: "
                    f"it must return matrices of shape ({n}, {n}, {len(begin)})."
                )
        if not matrix.detach().isfinite().all():
            raise ValueError("mass_matrix must be finite at the start.")
        known = {id(x) for x in rhs.parameter_leaves}
        #: Leaf tensors that the matrix reads, other than those of the run.
        self.reads = [x for x in leaves(matrix) if id(x) not in known]

    def at(self, t: Tensor) -> Tensor:
        """Return the matrices ``(n, n, columns)`` at times ``(batch,)``, in double precision."""
        found = self.rhs.matrix(t.to(self.rhs.like.dtype))
        return (found if found.ndim == 3 else found[..., None]).double()

    def constant(self) -> Tensor:
        """Return the constant matrices, those of the start."""
        return self.at(self._begin)

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the right-hand side ``(n, batch)`` of the equation with the constant matrices."""
        rates = self._field(t, y)
        if not self.varies:
            return rates
        first, now = (x.movedim(2, 0) for x in (self.constant(), self.at(t)))
        inverse = torch.linalg.pinv(first, rtol=RANK)
        change = now - first
        lost = change - change @ inverse @ first
        sizes, known = (x.detach().abs().amax((1, 2)) for x in (lost, first))
        wrong = sizes > FIXED * known
        if wrong.any():
            column = first_of(wrong)
            raise ValueError(
                "the null space of mass_matrix changes in time, between the start and t = "
                f"{float(t.detach()[column]):.9g} (column {column}). Multiply the equation so that "
                "its algebraic rows stay, or take new unknowns."
            )
        unit = torch.eye(len(y), dtype=y.dtype, device=y.device)
        solved = torch.linalg.solve(unit + change @ inverse, rates.T.unsqueeze(-1))
        return solved.squeeze(-1).T

    def rate(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the rates of the states ``(n, batch)``, without a graph."""
        with torch.no_grad():
            rates, jacobian, by_time = derivatives(self.field, t, y)
            matrix, outside = self.matrices()
            system = matrix + outside @ jacobian.movedim(2, 0)
            right = rates.T.unsqueeze(-1) - outside @ (rates + by_time).T.unsqueeze(-1)
            return torch.linalg.solve(system, right).squeeze(-1).T

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return M and R, ``(columns, n, n)``."""
        matrix = self.constant().movedim(2, 0)
        unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        return matrix, unit - matrix @ torch.linalg.pinv(matrix, rtol=RANK)

    def _residual(self, t: Tensor, y: Tensor, start: Tensor) -> Tensor:
        matrix, outside = self.matrices()
        found = matrix @ (y - start).T.unsqueeze(-1) + outside @ self.field(t, y).T.unsqueeze(-1)
        return found.squeeze(-1).T

    def consistent(
        self, start: Tensor, begin: Tensor, tolerance: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return states ``(n, batch)`` near a start that satisfy the algebraic equations.

        Their error is far below the ``tolerance`` of states. They are connected to the start, the
        parameters and the times ``begin``.
        """
        t, given, done = self._begin, start.detach().double(), False
        y = given
        for number in range(NEWTON_STEPS):
            system = self._system(t, y, refuse=number == 0)
            with torch.no_grad():
                right = self._residual(t, y, given).T.unsqueeze(-1)
                step = torch.linalg.solve_ex(system, right)[0].squeeze(-1).T
                y = y - step
                rounding = 8 * self.rhs.eps * y.abs().amax(0)
                done = bool((step.abs() <= 1e-4 * tolerance(y) + rounding).all())
            if done or not y.isfinite().all():
                break
        if not done:
            raise ValueError(
                "no consistent start was found: Newton's method on the algebraic equations does "
                f"not converge from y0 = {given[:, 0].tolist()}. Give a y0 that satisfies them."
            )
        pull = self._pull(t, y, given)
        return self.rhs.connected(y.to(start.dtype), start, pull, more=[*self.reads, begin])

    def completed(self, t: Tensor, states: Tensor) -> Tensor:
        """Give states ``(n, times)`` with the derivatives of M y those of all unknowns."""
        if not any(map(is_tracked, (states, *self.rhs.parameters))):
            return states
        given = states.detach().double()
        pull = self._pull(t, given, given)
        return self.rhs.connected(
            states.detach(), states, lambda rows: pull(rows)[:-1], more=self.reads
        )

    def _pull(self, t: Tensor, y: Tensor, start: Tensor) -> Callable[[Tensor], list[Tensor]]:
        """Return the products with the derivatives of consistent states, which are at y.

        They are those with respect to the start, the parameters and the times.
        """
        system = self._system(t, y)

        def pull(rows: Tensor) -> list[Tensor]:
            # Rows (k, n, batch) are the columns of the right-hand sides (batch, n, k).
            weights = torch.linalg.solve(system.mT, rows.double().permute(2, 1, 0))
            with torch.enable_grad():
                first, at = start.clone().requires_grad_(), t.clone().requires_grad_()
                residual = self._residual(at, y, first)
            inputs = [first, *self.rhs.parameter_leaves, *self.reads, at]
            return pulled_rows([residual], inputs, [-weights.permute(2, 1, 0)])

        return pull

    def refuse_inconsistent(
        self, t: Tensor, y: Tensor, marked: Tensor, tolerance: Callable[[Tensor], Tensor]
    ) -> None:
        """Refuse states of ``marked`` columns that a reset leaves off the algebraic equations.

        Newton's step to them changes the algebraic unknowns alone. It may not exceed :data:`OFF`
        times the ``tolerance`` of states.
        """
        with torch.no_grad():
            right = self._residual(t, y, y).T.unsqueeze(-1)
            step = torch.linalg.solve_ex(self._system(t, y, refuse=False), right)[0].squeeze(-1).T
            allowed = OFF * tolerance(y) + 16 * self.rhs.eps * y.abs()
        wrong = marked & ~(step.abs() <= allowed).all(0)
        if wrong.any():
            column = first_of(wrong)
            raise ValueError(
                f"the reset at t = {float(t[column]):.9g} leaves column {column} off its algebraic "
                f"equations by {float(step[:, column].abs().max()):.3g}: return a state that "
                "satisfies them."
            )

    def _system(self, t: Tensor, y: Tensor, refuse: bool = True) -> Tensor:
        """Return the matrices S, ``(batch, n, n)``, of an equation of index one."""
        with torch.no_grad():
            matrix, outside = self.matrices()
            found = matrix + outside @ derivatives(self.field, t, y)[1].movedim(2, 0)
            sizes = torch.linalg.svdvals(found)
        wrong = ~(sizes[:, -1] > REGULAR * sizes[:, 0])
        if refuse and wrong.any():
            column = first_of(wrong)
            raise ValueError(
                "the equation with this mass_matrix is not of index one at t = "
                f"{float(t[column]):.9g}: its algebraic equations do not determine the algebraic "
                f"unknowns (column {column}). Differentiate constraints with respect to time until "
                "they do."
            )
        return found
