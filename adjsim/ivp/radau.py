r"""Radau IIA of order five with a mass matrix, and the right-hand side of its adjoint.

The equation is :math:`M \dot y = f(t, y)` with a constant M of an equation of index one
(:mod:`adjsim.ivp.mass`). The method collocates at the points :math:`c_i`, of which the last is 1:

.. math:: M \sum_j (A^{-1})_{ij} Z_j = h f(t + c_i h, y + Z_i), \qquad y_1 = y + Z_3 .

With :math:`A^{-1} = T \Lambda T^{-1}` and :math:`W = T^{-1} Z`, where :math:`\Lambda` has a real
eigenvalue :math:`\gamma` and a complex pair, a step of the simplified Newton iteration solves one
real and one complex system of n equations (E. Hairer and G. Wanner, "Solving Ordinary Differential
Equations II", sections IV.8 and VI.1),

.. math:: \Big(\frac{\Lambda}{h} M - J\Big) \Delta W = T^{-1} F(Z) - \frac{\Lambda}{h} M W,

and the error of the step is estimated, with the matrix of the real system, by

.. math:: \Big(\frac{\gamma}{h} M - J\Big)^{-1} \Big( f(t, y) + \frac1h M \sum_i e_i Z_i \Big) .

With M = 1 these are the formulas of SciPy's Radau, whose step control and interpolant are used.
This error is not that of the interpolant in algebraic unknowns, which may oscillate between the
points. So the interpolant has to satisfy the algebraic equations between them, to the tolerance.

**The adjoint.** Let :math:`R = 1 - M M^+` and :math:`S = M + R J`. A change of the solution has
:math:`M \delta y = u` with :math:`R u = 0`, and :math:`S \delta y = u - R f_\theta \delta\theta`.
So :math:`x = M^+ u`, the part of :math:`\delta y` that M sees, obeys the ordinary equation

.. math:: \dot x = P (J x + f_\theta\, \delta\theta), \qquad P = M^+ (1 - J S^{-1} R),

and the adjoint of an equation whose rate has the derivatives of :math:`P f`, with a constant P, is
integrated as any other. Where the solution is read, :math:`\delta y = S^{-1} (M x - R
f_\theta\, \delta\theta)` adds the change of the algebraic unknowns. A change of M is one of f, by
:math:`- \delta M\, \dot y`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import Radau
from scipy.integrate._ivp.common import norm, select_initial_step
from scipy.integrate._ivp.radau import (
    MAX_FACTOR,
    MIN_FACTOR,
    MU_COMPLEX,
    MU_REAL,
    NEWTON_MAXITER,
    TI,
    TI_COMPLEX,
    TI_REAL,
    C,
    E,
    P,
    T,
    predict_factor,
)
from torch import Tensor

from adjsim.core.rows import pulled_rows
from adjsim.ivp.columns import check_columns
from adjsim.ivp.events import Event
from adjsim.ivp.mass import RANK, Mass
from adjsim.ivp.rhs import (
    Array,
    Graph,
    RightHandSide,
    computes_with_numpy,
    numpy_error,
    to_numpy,
)
from adjsim.ivp.rodas4 import derivatives

# A shorter step would overflow in the matrices of the systems.
SMALLEST = 1e-200
# Points of a step at which the error of interpolation from its four points is largest.
BETWEEN = (0.4, 0.85)
# Number of smallest steps to which a jump of algebraic unknowns at a fixed time is located.
JUMP = 64


class MassRadau(Radau):
    """SciPy's Radau for an equation with a mass matrix ``(n, n)``; ``rate`` returns dy/dt."""

    def __init__(
        self,
        fun: Callable[[float, Array], Array],
        t0: float,
        y0: Array,
        t_bound: float,
        *,
        mass: Array,
        rate: Callable[[float, Array], Array],
        first_step: float | None = None,
        max_step: float = np.inf,
        rtol: Any = 1e-3,
        atol: Any = 1e-6,
        **options: Any,
    ) -> None:
        if first_step is None and t0 != t_bound:
            sign, known = np.sign(t_bound - t0), rate(t0, y0)
            first_step = select_initial_step(
                rate, t0, y0, t_bound, max_step, known, sign, 3, rtol, atol
            )
        super().__init__(
            fun, t0, y0, t_bound, first_step=first_step, max_step=max_step, rtol=rtol, atol=atol,
            **options,
        )  # fmt: skip
        # SciPy's name f is that of the rate, which the right-hand side is not.
        self.mass, self.f = mass, None
        self.right: Any = fun(t0, y0)
        self.outside = np.eye(len(mass)) - mass @ np.linalg.pinv(mass, rcond=RANK)
        self.outside[abs(self.outside) < RANK] = 0.0
        self.factors: tuple[float, Any, Any] | None = None

    def _step_impl(self) -> Any:
        t, y = self.t, self.y
        smallest = max(10 * abs(np.nextafter(t, self.direction * np.inf) - t), SMALLEST)
        size = min(max(self.h_abs, smallest), self.max_step)
        before = (self.h_abs_old, self.error_norm_old) if size == self.h_abs else (None, None)
        rejected = False
        while True:
            if not size >= smallest:
                return False, self.TOO_SMALL_STEP
            after = t + size * self.direction
            after = self.t_bound if self.direction * (after - self.t_bound) > 0 else after
            h, size = after - t, abs(after - t)
            found = self._solve(t, y, h)
            if found is None and not self.current_jac:
                self._evaluate_jacobian(t, y, self.right)
                found = self._solve(t, y, h)
            if found is None:
                size *= 0.5
                continue
            stages, iterations, contraction = found
            scale = self.atol + np.maximum(abs(y), abs(y + stages[-1])) * self.rtol
            assert self.factors is not None
            change = self.mass @ (stages.T @ E) / h
            error = self.solve_lu(self.factors[1], self.right + change)
            if rejected and norm(error / scale) > 1:
                error = self.solve_lu(self.factors[1], self.fun(t, y + error) + change)
            relative = norm(error / scale)
            if size > JUMP * smallest:
                relative = max(relative, self._off(t, y, h, stages, scale))
            safety = 0.9 * (2 * NEWTON_MAXITER + 1) / (2 * NEWTON_MAXITER + iterations)
            factor = safety * predict_factor(size, before[0], relative, before[1])
            if relative <= 1:
                break
            size, rejected = size * (max(MIN_FACTOR, factor) if factor > 0 else MIN_FACTOR), True
        slow = self.jac is not None and iterations > 2 and contraction > 1e-3
        factor = min(MAX_FACTOR, factor)
        # The factors of a matrix serve several steps of one size.
        factor = 1.0 if not slow and factor < 1.2 else factor
        self.h_abs_old, self.error_norm_old, self.h_abs = self.h_abs, relative, size * factor
        self.t_old, self.y_old, self.t, self.y, self.Z = t, y, after, y + stages[-1], stages
        self.right = self.fun(self.t, self.y)
        if slow:
            self._evaluate_jacobian(self.t, self.y, self.right)
        else:
            self.current_jac = self.jac is None
        self.sol = self._compute_dense_output()
        return True, None

    def _off(self, t: float, y: Array, h: float, stages: Array, scale: Array) -> float:
        """Return by how much the interpolant misses the algebraic equations, in tolerances."""
        if not self.outside.any():
            return 0.0
        assert self.factors is not None
        inside = [y + stages.T @ (P @ x ** np.arange(1, 4)) for x in BETWEEN]
        pairs = zip(BETWEEN, inside, strict=True)
        rights = [self.outside @ self.fun(t + x * h, state) for x, state in pairs]
        return max(norm(self.solve_lu(self.factors[1], right) / scale) for right in rights)

    def _evaluate_jacobian(self, t: float, y: Array, right: Array) -> None:
        self.J, self.current_jac, self.factors = self.jac(t, y, right), True, None

    def _solve(self, t: float, y: Array, h: float) -> tuple[Array, int, float] | None:
        """Return the stages ``(3, n)``, the number of iterations and their contraction.

        None: the iteration does not converge.
        """
        if self.factors is None or self.factors[0] != h:
            systems = (mu / h * self.mass - self.J for mu in (MU_REAL, MU_COMPLEX))
            self.factors = (h, *map(self.lu, systems))
        _, real, pair = self.factors
        scale = self.atol + abs(y) * self.rtol
        stages = np.zeros((3, len(y))) if self.sol is None else self.sol(t + h * C).T - y
        w, last, contraction = TI @ stages, None, None
        for k in range(NEWTON_MAXITER):
            rates = np.stack([self.fun(t + c * h, y + z) for c, z in zip(C, stages, strict=True)])
            if not np.isfinite(rates).all():
                return None
            first = self.solve_lu(real, TI_REAL @ rates - MU_REAL / h * (self.mass @ w[0]))
            both = self.mass @ (w[1] + 1j * w[2])
            second = self.solve_lu(pair, TI_COMPLEX @ rates - MU_COMPLEX / h * both)
            change = np.stack([first, second.real, second.imag])
            size = norm(change / scale)
            if last is not None:
                contraction = size / last
                left = contraction ** (NEWTON_MAXITER - k) / (1 - contraction) * size
                if contraction >= 1 or left > self.newton_tol:
                    return None
            w = w + change
            stages = T @ w
            if size == 0 or (
                contraction is not None and contraction / (1 - contraction) * size < self.newton_tol
            ):
                return stages, k + 1, contraction or 0.0
            last = size
        return None


class MassRightHandSide(RightHandSide):
    """The right-hand side of M dy/dt = fun(t, y, \\*args) for one state ``(n,)``."""

    def begin(
        self, start: Tensor, time: Tensor, kind: str, events: Sequence[Event], options: Any
    ) -> Tensor:
        """Evaluate the mass matrix at the start, and return the consistent start."""
        if kind == "backsolve":
            raise ValueError('with mass_matrix adjoint must be "interpolate" or "checkpoint".')
        if any(event.reset is not None for event in events):
            raise ValueError(
                'with mass_matrix and method="Radau" events have no reset: take method="Rodas4".'
            )
        check_columns(start[:, None])
        # The adjoint's rate has products with Jacobians, which vmap does not evaluate.
        self.takes_vmap = False
        at = time.detach()[None]
        reads = Mass(self, at, self._columns).reads
        self.parameters = [*self.parameters, *reads]
        self.parameter_leaves = [*self.parameter_leaves, *reads]
        self.system = Mass(self, at, self._columns)
        # Differences of algebraic equations lose small unknowns, and leave a singular matrix.
        given = options.get("jac")
        options["jac"] = self.jacobian if given is None else given
        if (
            self.system.varies
            and getattr(options["jac"], "__func__", None) is not type(self).jacobian
        ):
            raise ValueError(
                'with a mass_matrix that is a function jac must be "autodiff" or None, since the '
                "Jacobian is that of an equation with a constant matrix."
            )
        if "jac_sparsity" in options:
            raise ValueError("mass_matrix takes no jac_sparsity: its systems are dense.")
        matrix, outside = (x[0].detach() for x in self.system.matrices())
        self._matrix, self._outside = matrix, outside
        self._inverse = torch.linalg.pinv(matrix, rtol=RANK)
        rtol, atol = (torch.as_tensor(options[name]).reshape(-1, 1) for name in ("rtol", "atol"))
        found = self.system.consistent(
            start[:, None], time[None], lambda y: atol.to(y) + rtol.to(y) * y.abs()
        )
        return found[:, 0]

    def check(self, t: float | Array, y: Array, gradient: bool) -> None:
        with torch.no_grad():
            if computes_with_numpy(self.evaluate, self.time(t), self.tensor(y), ()):
                raise numpy_error("fun, whose Jacobian a mass_matrix needs,")
        super().check(t, y, gradient)

    def _columns(self, t: Tensor, y: Tensor) -> Tensor:
        dtype = self.like.dtype
        pairs = zip(t.to(dtype), y.T.to(dtype), strict=True)
        return torch.stack([self(time, state) for time, state in pairs], -1).double()

    def matrix(self, t: Tensor) -> Tensor:
        if isinstance(self.mass, Tensor):
            return super().matrix(t)
        return torch.stack([super(MassRightHandSide, self).matrix(time) for time in t], -1)

    def _at(self, t: float | Array, y: Array) -> tuple[Tensor, Tensor]:
        """Return a time and a state as those of one column."""
        return self.time(t)[None].double(), self.tensor(y)[:, None].double()

    def numpy(self, t: float | Array, y: Array) -> Array:
        with torch.no_grad():
            return to_numpy(self.system.field(*self._at(t, y))[:, 0])

    def rate(self, t: float | Array, y: Array) -> Array:
        return to_numpy(self.system.rate(*self._at(t, y))[:, 0])

    def smooth_rate(self, t: float | Array, y: Array) -> Array:
        return to_numpy(self._inverse) @ self.numpy(t, y)

    def jacobian(self, t: float, y: Array) -> Array:
        with torch.no_grad():
            return to_numpy(derivatives(self.system.field, *self._at(t, y))[1][..., 0])

    def solver_options(self) -> dict[str, Any]:
        return {"mass": to_numpy(self._matrix), "rate": self.rate}

    def completed(self, times: Array, states: Tensor) -> Tensor:
        return self.system.completed(torch.as_tensor(times).to(states.device), states)

    def evaluate_checked(self, t: float | Array, y: Array) -> Array:
        self._with_graph(t, y)
        return self.smooth_rate(t, y)

    def _with_graph(self, t: float | Array, y: Array) -> Graph:
        matrix, outside = self._matrix, self._outside
        with torch.enable_grad():
            x, at = self.tensor(y).requires_grad_(), self.time(t).requires_grad_()
            out = self.system.field(at[None].double(), x[:, None].double())[:, 0]
            moved = self.system.constant()[..., 0] - matrix
        self.inputs.refuse_undeclared(out, x, at, *self.parameter_leaves)
        unit = torch.eye(len(y)).to(out)
        jacobian, by_time = (row.double() for row in pulled_rows([out], [x, at], [unit]))
        solved = torch.linalg.inv(matrix + outside @ jacobian)
        known = out.detach()
        rate = solved @ (known - outside @ (known + by_time))
        with torch.enable_grad():
            into = self._inverse @ (unit - jacobian @ solved @ outside)
            return x, (into @ (out - moved @ rate)).to(x.dtype)
