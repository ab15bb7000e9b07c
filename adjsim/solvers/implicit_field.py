"""Implicit steps of any vector field, by Newton's method and the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adjsim._state import AnyState, State
from adjsim.dynamics.couplings import Map
from adjsim.dynamics.sources import MoveContext, Time
from adjsim.dynamics.vector_field import FieldDynamics
from adjsim.solvers.base import Program, Stage
from adjsim.solvers.newton import UnsolvedStepError

# Largest number of Newton iterations, and of halvings of one of them.
ITERATIONS, HALVINGS = 60, 12


@dataclass(frozen=True)
class ImplicitField:
    """The implicit step of a field f::

        x = y + a f(t, x)        y' = x + (1/theta - 1) (x - y)        a = theta h

    at the time t = t_n + theta h. Its inverse has the same x. With J = df/dx and the cotangent
    lambda of y', the implicit function theorem gives::

        (1 - a J)^T w = lambda/theta      lambda_y = w - (1/theta - 1) lambda
        lambda_p = a (df/dp)^T w

    The Jacobian of each system is dense: an iteration costs n products of f, and memory for n^2
    numbers a system. The systems of a batch must not depend on each other.

    Attributes:
        dynamics: the dynamics, whose drift is f.
        kind: the type of its states.
        widths: the number of entries of each field.
        h: the step.
        theta: the place of x inside of the step.
        tol: the allowed error of x, relative to the size of the state.
    """

    dynamics: FieldDynamics
    kind: type[Any]
    widths: tuple[int, ...]
    h: float
    theta: float
    tol: float

    def forward(self, t: Tensor, *fields: Tensor) -> tuple[tuple[Tensor, ...], int]:
        """Compute the fields after the step, and the number of evaluations of f."""
        y = torch.cat(fields, -1)
        x, evaluations = self._solve(t, y, self.theta * self.h)
        return self._split(x + (1 / self.theta - 1) * (x - y)), evaluations

    def after(self, coefficients: Any, t: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        """Compute the fields after the step."""
        return self.forward(t, *fields)[0]

    def before(self, coefficients: Any, t: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        """Compute the fields before the step."""
        after = torch.cat(fields, -1)
        b = (1 - self.theta) * self.h
        x = after if b == 0 else self._solve(t, after, -b)[0]
        return self._split(after - self.h * self._rate(t, x))

    def _solve(self, t: Tensor, y: Tensor, a: float) -> tuple[Tensor, int]:
        """Solve ``x = y + a f(t, x)``, with the derivative of the solution."""
        start = y.detach()
        x, evaluations = self._newton(t, start, a)
        if not torch.is_grad_enabled() or not bool(torch.isfinite(x).all()):
            return x, evaluations
        matrix = self._matrix(t, x, a)
        self._refuse_coupled(t, x, a, matrix)
        inverse = torch.linalg.inv(matrix)
        # Equal to x, with the derivative of the theorem: x and J are constants here.
        correction = y + a * self._rate(t, x) - x
        moved = _OnceDifferentiable.apply(correction)
        return x + (inverse @ moved.unsqueeze(-1)).squeeze(-1), evaluations + y.shape[-1] + 1

    @torch.no_grad()
    def _newton(self, t: Tensor, y: Tensor, a: float) -> tuple[Tensor, int]:
        x, evaluations = y, 1
        residual = a * self._rate(t, x)
        scale = y.abs().amax(-1)
        if not bool(torch.isfinite(residual).all()):
            return y + residual, evaluations  # The run refuses the state, and names the step.
        for _ in range(ITERATIONS):
            matrix = self._matrix(t, x, a)
            change, failed = torch.linalg.solve_ex(matrix, residual.unsqueeze(-1))
            change = change.squeeze(-1)
            evaluations += y.shape[-1]
            if bool(failed.any()) or not bool(torch.isfinite(change).all()):
                break
            size = residual.norm(dim=-1)
            share, tried, new = torch.ones_like(size), x, residual
            for _ in range(HALVINGS):
                tried = x + share.unsqueeze(-1) * change
                new = y + a * self._rate(t, tried) - tried
                evaluations += 1
                # Near the solution rounding decides, and every step is taken.
                worse = ~(new.norm(dim=-1) <= size) & (
                    change.abs().amax(-1) > 1e3 * self._allowed(scale, x)
                )
                if not bool(worse.any()):
                    break
                share = torch.where(worse, share / 2, share)
            x, residual = tried, new
            if bool((change.abs().amax(-1) <= self._allowed(scale, x)).all()):
                # An inverse step (a < 0) is compared with the forward run by its adjoint.
                if a > 0 and _is_beyond_a_fold(matrix):
                    raise UnsolvedStepError(
                        f"the implicit step at t = {float(t):g} does not continue those of smaller "
                        "dt: the field grows too fast for the time of the step (1 - theta h J has "
                        "a negative eigenvalue), or its solution blows up. Use a smaller dt (it is "
                        f"{self.h:g}), or end the run before this time."
                    )
                return x, evaluations
        left = (residual.abs().amax(-1) / self._allowed(scale, x)).flatten()
        worst = int(torch.where(torch.isfinite(left), left, torch.inf).argmax())
        system = f" of system {worst}" if len(left) > 1 else ""
        raise UnsolvedStepError(
            f"the implicit step{system} at t = {float(t):g} did not converge: its equation has no "
            f"solution near the state, or Newton's method misses it. Use a smaller dt (it is "
            f"{self.h:g})."
        )

    def _allowed(self, scale: Tensor, x: Tensor) -> Tensor:
        eps = 4 * torch.finfo(x.dtype).eps
        largest = torch.maximum(scale, x.abs().amax(-1))
        return max(self.tol, eps) * largest + torch.finfo(x.dtype).tiny

    def _rate(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.cat(tuple(self.dynamics.drift(t, self.kind._make(self._split(y)))), -1)

    def _matrix(self, t: Tensor, x: Tensor, a: float) -> Tensor:
        """Compute ``1 - a J`` for each system, row by row."""
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            rate = self._rate(t, y)
            columns = rate.unbind(-1)
        if not rate.requires_grad:
            return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(*x.shape, -1)
        rows = [_product(column, y, torch.ones_like(column)) for column in columns]
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - a * torch.stack(rows, -2)

    def _refuse_coupled(self, t: Tensor, x: Tensor, a: float, matrix: Tensor) -> None:
        """Refuse a field whose systems depend on each other, for which J has no blocks.

        The product with a random vector would differ.
        """
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            rate = self._rate(t, y)
        if not rate.requires_grad:
            return
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        whole = vector - a * _product(rate, y, vector)
        blocks = (vector.unsqueeze(-2) @ matrix).squeeze(-2)
        allowed = torch.finfo(x.dtype).eps ** 0.5 * (1 + matrix.abs().amax())
        if float((whole - blocks).abs().amax()) > float(allowed):
            raise ValueError(
                "implicit steps solve each system of the batch alone, and in this field systems "
                "depend on each other: put what is coupled on the last axis of y."
            )

    def _split(self, y: Tensor) -> tuple[Tensor, ...]:
        return y.split(self.widths, -1)


class _OnceDifferentiable(torch.autograd.Function):
    """The identity, which refuses to be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of an implicit step comes from a linear system and has no graph of "
                "its own, so it cannot be differentiated again (create_graph=True, double "
                "backward). Use explicit steps for that."
            )
        return cotangents[0]


def _is_beyond_a_fold(matrix: Tensor) -> bool:
    """Return whether a matrix ``1 - a J`` has a negative eigenvalue.

    All eigenvalues are 1 at a = 0. Along the branch of solutions that begins there, a real
    eigenvalue changes its sign only where the matrix is singular: the branch folds back there, or
    passes through infinity.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    # The left ends of Gershgorin's discs. Where all are positive, eigenvalues are not needed.
    lowest = diagonal + diagonal.abs() - matrix.abs().sum(-1)
    if bool((lowest > 0).all()):
        return False
    values = torch.linalg.eigvals(matrix)
    is_real = values.imag.abs() <= torch.finfo(matrix.dtype).eps ** 0.5 * values.abs()
    return bool((is_real & (values.real < 0)).any())


def _product(value: Tensor, y: Tensor, vector: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(
        value, y, vector, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return found


@dataclass(frozen=True)
class ImplicitFieldMove(Map):
    """A whole implicit step as one map, which counts its evaluations."""

    steps: ImplicitField = field(kw_only=True)

    def flow(self, state: State, context: MoveContext) -> State:
        """Return the state after the step."""
        t = Time().value(state, context).to(state[0])
        values, evaluations = self.steps.forward(t, *self._fields(state))
        context.forces.count(evaluations)
        return self._replace(state, values)


def field_program(
    dynamics: FieldDynamics, state: AnyState, h: float, theta: float, tol: float, order: int
) -> Program:
    """Write the implicit step of a vector field as a program."""
    widths = tuple(x.shape[-1] for x in state)
    steps = ImplicitField(dynamics, type(state), widths, h, theta, tol)
    move = ImplicitFieldMove(
        state._fields,
        steps.after,
        steps.before,
        (Time(),),
        reads_parameters=True,
        no_loop="it iterates until it converges",
        steps=steps,
    )
    return Program((Stage("Y", (move,), theta),), h, order)
