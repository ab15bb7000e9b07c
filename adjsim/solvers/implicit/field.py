"""Implicit steps of any vector field, by Newton's method and the implicit function theorem.

A compiled loop cannot contain another whose length depends on numbers. So there a step takes as
many iterations of the loop as it needs (:func:`iterate`). Each evaluates the field and its Jacobian
at one point: at the next iterate of the step, or, where the last change was small, at the end of
the step, from which the next step begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.compiler import has_negative_eigenvalue, has_negative_eigenvalue_if, solve
from adjsim.core.layout import is_tracing, outside_tracing
from adjsim.core.rows import outside_vmap, shown_rows
from adjsim.core.second_derivative import once_differentiable
from adjsim.core.state import AnyState, State
from adjsim.core.transforms import in_forward_mode
from adjsim.dynamics.cotangents import Cotangents, add_each
from adjsim.dynamics.fields.ode import FieldDynamics
from adjsim.dynamics.moves import Move
from adjsim.dynamics.sources import MoveContext, Time
from adjsim.solvers.base import TimeInStep
from adjsim.solvers.implicit.newton import UnsolvedStepError

# Largest number of Newton iterations, and of shares of one of them that are tried, each half of the
# one before.
ITERATIONS, HALVINGS = 60, 12
# Iterations after which a compiled loop leaves a step to a run without compilation.
LOOP_ITERATIONS = 60
COUPLED = (
    "implicit steps solve each system of the batch alone, and in this field systems depend on each "
    "other: put what is coupled on the last axis of y."
)


class Linear(NamedTuple):
    """The field at a leaf x, ``(*batch, n)``: f(t, x) with its graph, and ``1 - a J`` by system."""

    point: Tensor
    rate: Tensor
    matrix: Tensor

    def coupled(self, a: float) -> Tensor:
        """Return whether systems of the batch depend on each other.

        The product of J with a random vector then differs from that of the systems' blocks.
        """
        if not self.rate.requires_grad:
            return torch.zeros((), dtype=torch.bool, device=self.rate.device)
        with outside_tracing(), outside_vmap():
            generator = torch.Generator().manual_seed(0)
            vector = torch.randn(self.point.shape, generator=generator, dtype=torch.float64)
            vector = vector.to(self.point.dtype).to(self.point.device)
        whole = vector - a * product(self.rate, self.point, vector)
        blocks = (vector.unsqueeze(-1) * self.matrix).sum(-2)
        allowed = torch.finfo(whole.dtype).eps ** 0.5 * (1 + self.matrix.abs().sum(-2))
        return (~((whole - blocks).abs() <= allowed)).any()


@dataclass(frozen=True)
class ImplicitField(Move):
    """The implicit step of a field f::

        x = y + a f(t, x)        y' = x + (1/theta - 1) (x - y)        a = theta h

    at the time t = t_n + theta h. Its inverse has the same x. With J = df/dx and the cotangent
    lambda of y', the implicit function theorem gives::

        (1 - a J)^T w = lambda/theta      lambda_y = w - (1/theta - 1) lambda
        lambda_p = a (df/dp)^T w

    The Jacobian of each system is dense: an iteration costs n products of f, and memory for n^2
    numbers a system. The systems of a batch must not depend on each other. ``kind`` is the type of
    the states, whose fields have the ``widths``, and ``tol`` is relative to the size of the state.
    """

    dynamics: FieldDynamics
    kind: type[Any]
    widths: tuple[int, ...]
    h: float
    theta: float
    tol: float

    @property
    def writes(self) -> tuple[str, ...]:
        return self.kind._fields

    @property
    def a(self) -> float:
        """The time from the state before the step to x."""
        return self.theta * self.h

    def joined(self, state: AnyState) -> Tensor:
        """Return the fields of a state, joined along their last axis."""
        return torch.cat(tuple(state), -1)

    def state(self, y: Tensor) -> Any:
        """Return the state of joined fields."""
        return self.kind._make(y.split(self.widths, -1))

    def end(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute y', the end of the step."""
        return x + (1 / self.theta - 1) * (x - y)

    def solve(self, t: Tensor, y: Tensor) -> tuple[Tensor, int]:
        """Solve ``x = y + a f(t, x)`` with its derivative, and count the evaluations of f."""
        x, evaluations = self._newton(t, y.detach(), self.a)
        # Parameters may have tangents, which the iterations do not differentiate.
        x = x.detach()
        wanted = torch.is_grad_enabled() or in_forward_mode()
        if not wanted or not bool(torch.isfinite(x).all()):
            return x, evaluations
        linear = self.linear(t, x, self.a)
        if bool(linear.coupled(self.a)):
            raise ValueError(COUPLED)
        inverse = torch.linalg.inv(linear.matrix.detach())
        # Equal to x, with the derivative of the theorem: x and J are constants here.
        correction = y + self.a * self.rate(t, x) - x
        why = "the gradient of an implicit step comes from a linear system"
        moved = once_differentiable(correction, why, "Use explicit steps.")
        return x + (inverse @ moved.unsqueeze(-1)).squeeze(-1), evaluations + y.shape[-1] + 1

    @torch.no_grad()
    def _newton(self, t: Tensor, y: Tensor, a: float) -> tuple[Tensor, int]:
        x, evaluations = y, 1
        residual = a * self.rate(t, x)
        scale = largest(y)
        if not bool(torch.isfinite(residual).all()):
            return y + residual, evaluations  # The run refuses the state, and names the step.
        for _ in range(ITERATIONS):
            matrix = self.linear(t, x, a).matrix
            change, singular = solve(matrix, residual)
            evaluations += y.shape[-1]
            if bool(singular) or not bool(torch.isfinite(change).all()):
                break
            size, rounded = residual.norm(dim=-1), self.rounded(y, x, matrix, residual)
            share, tried, new = torch.ones_like(size), x, residual
            for _ in range(HALVINGS):
                tried = x + share.unsqueeze(-1) * change
                new = y + a * self.rate(t, tried) - tried
                evaluations += 1
                worse = ~(new.norm(dim=-1) <= size) & ~self.near(scale, x, change, rounded)
                if not bool(worse.any()):
                    break
                share = torch.where(worse, share / 2, share)
            x, residual = tried, new
            if bool(self.ends(scale, x, change, rounded).all()):
                # An inverse step (a < 0) is compared with the forward run by its adjoint. In a
                # forward step all eigenvalues of the matrix are 1 at a = 0. Along the branch of
                # solutions that begins there, a real one changes its sign only where the matrix is
                # singular: the branch folds back there, or passes through infinity.
                if a > 0 and bool(has_negative_eigenvalue(matrix)):
                    raise UnsolvedStepError(
                        f"the implicit step at t = {self.dynamics.shown_time(t):g} does not "
                        "continue those of smaller dt: the field grows too fast for the time of "
                        "the step (1 - theta h J has a negative eigenvalue), or its solution "
                        f"blows up. Use a smaller dt (it is {self.h:g}), or end the run before "
                        "this time."
                    )
                return x, evaluations
        left = (largest(residual) / self.allowed(scale, x)).flatten()
        worst = int(torch.where(torch.isfinite(left), left, torch.inf).argmax())
        system = f" of system {worst}" if len(left) > 1 else ""
        raise UnsolvedStepError(
            f"the implicit step{system} at t = {self.dynamics.shown_time(t):g} did not converge: "
            "its equation has no solution near the state, or Newton's method misses it. Use a "
            f"smaller dt (it is {self.h:g})."
        )

    def ends(self, scale: Tensor, x: Tensor, change: Tensor, rounded: Tensor) -> Tensor:
        """Return for each system whether a change of x is as small as is allowed, or rounding."""
        return (largest(change) <= self.allowed(scale, x)) | rounded

    def near(self, scale: Tensor, x: Tensor, change: Tensor, rounded: Tensor) -> Tensor:
        """Return for each system whether a change is taken whole: rounding may decide about it."""
        allowed = self.allowed(scale, x)
        small = torch.minimum(1e3 * allowed, torch.finfo(x.dtype).eps ** 0.5 * scale)
        return (largest(change) <= torch.maximum(allowed, small)) | rounded

    def rounded(self, y: Tensor, x: Tensor, matrix: Tensor, residual: Tensor) -> Tensor:
        """Return for each system whether its residual is rounding.

        A small relative change of the matrix and of y would then make it zero (Oettli and Prager,
        Numer. Math. 6, 405 (1964)). If J is stiff, the rounding of x alone gives such residuals.
        """
        terms = y.abs() + (matrix.abs() * x.abs().unsqueeze(-2)).sum(-1)
        return (residual.abs() - 8 * torch.finfo(x.dtype).eps * terms).amax(-1) <= 0

    def allowed(self, scale: Tensor, x: Tensor) -> Tensor:
        """Return the largest change of each system by which x counts as converged."""
        eps = 4 * torch.finfo(x.dtype).eps
        return max(self.tol, eps) * torch.maximum(scale, largest(x)) + torch.finfo(x.dtype).tiny

    def rate(self, t: Tensor, y: Tensor) -> Tensor:
        """Evaluate f at joined fields."""
        return self.joined(self.dynamics.drift(t, self.state(y)))

    def linear(self, t: Tensor, x: Tensor, a: float) -> Linear:
        """Evaluate f and ``1 - a J`` for each system, row by row."""
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            rate = self.rate(t, point)
        with outside_tracing():
            unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        if not rate.requires_grad:
            return Linear(point, rate, unit.expand(*x.shape, -1))
        return Linear(point, rate, unit - a * jacobian(rate, point))

    def flow(self, state: State, context: MoveContext) -> State:
        t, y = self._time(state, context), self.joined(state)
        x, evaluations = self.solve(t, y)
        context.forces.count(evaluations)
        return self.state(self.end(y, x))

    def check(self, before: State, after: State, context: MoveContext) -> None:
        """Refuse a step in which systems depend on each other, whose gradient would be wrong."""
        t = self._time(after, context)
        x = self._between(before, after)
        # The run refuses a state that is not finite, and names the step.
        if bool(torch.isfinite(x).all()) and bool(self.linear(t, x, self.a).coupled(self.a)):
            raise ValueError(COUPLED)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        """Propagate back; from the state before, by one linear system and without a step."""
        t, end = self._time(after, context), self.joined(after)
        if before is None:
            b = (1 - self.theta) * self.h
            x, evaluations = (end, 0) if b == 0 else self._newton(t, end, -b)
            context.forces.count(evaluations)
        else:
            x = self._between(before, after)
        linear = self.linear(t, x, self.a)
        context.forces.count(x.shape[-1] + 2)
        start = self.state(end - self.h * linear.rate.detach()) if before is None else before
        outer = torch.cat([cotangents[name] for name in self.writes], -1)
        w, singular = solve(linear.matrix.mT, outer / self.theta)
        # In a compiled loop w is NaN for a singular matrix, and the forward run has refused systems
        # that depend on each other.
        if not is_tracing():
            if bool(shown_rows(singular).any()):
                raise UnsolvedStepError(
                    f"the implicit step at t = {self.dynamics.shown_time(t):g} has no derivative: "
                    "1 - theta h J is singular. Use a smaller dt."
                )
            if bool(linear.coupled(self.a)):
                raise ValueError(COUPLED)
        along = self.state(w - (1 / self.theta - 1) * outer)
        for name, cotangent in zip(self.writes, along, strict=True):
            cotangents[name] = cotangent
        if linear.rate.requires_grad:
            forces = context.forces
            forces.refuse_unknown(linear.rate, [linear.point], "the vector field")
            parameters = list(forces.parameters.values())
            if parameters:
                found = torch.autograd.grad(linear.rate, parameters, self.a * w, allow_unused=True)
                add_each(cotangents.add_parameter, forces.parameters, found)
        return start

    def _between(self, before: AnyState, after: AnyState) -> Tensor:
        """Return x of the step from one state to another."""
        y = self.joined(before)
        return y + self.theta * (self.joined(after) - y)

    def _time(self, state: AnyState, context: MoveContext) -> Tensor:
        return Time().value(state, context).to(state[0])


def jacobian(rate: Tensor, point: Tensor) -> Tensor:
    """Compute the Jacobian of each system, ``(*batch, n, n)``, of a rate that has a graph."""
    with torch.enable_grad():
        columns = rate.unbind(-1)
    rows = [product(column, point, torch.ones_like(column)) for column in columns]
    return torch.stack(rows, -2)


def product(value: Tensor, y: Tensor, vector: Tensor) -> Tensor:
    """Compute the vector-Jacobian product of a value, and keep its graph."""
    (found,) = torch.autograd.grad(
        value, y, vector, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return found


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value along the last axis."""
    return x.abs().amax(-1)


class Newton(NamedTuple):
    """The iterate of Newton's method in a step, and the change from there, ``(*batch, n)``.

    The residual at x has the norm ``size``, and may be ``rounded``; ``share`` of the change is
    tried next, each ``(*batch,)``. The step has had ``number`` iterations, halvings included, and
    ``ended`` says that the change is its last.
    """

    x: Tensor
    change: Tensor
    rounded: Tensor
    share: Tensor
    size: Tensor
    number: Tensor
    ended: Tensor


class Iterated(NamedTuple):
    """The state before the step that goes on, or begins, and its iteration.

    ``done`` says that the next step begins, and ``failed`` that the step is left to a run without
    compilation: Newton's method does not converge, the solution does not continue those of smaller
    steps, or systems depend on each other.
    """

    state: AnyState
    newton: Newton
    done: Tensor
    failed: Tensor


def first_iteration(steps: ImplicitField, state: AnyState) -> Newton:
    """Return the beginning of a step."""
    y = steps.joined(state)
    share = torch.ones_like(y[..., 0])
    number = torch.zeros((), dtype=torch.int64, device=y.device)
    size = torch.full_like(share, torch.inf)
    return Newton(y, torch.zeros_like(y), share > 1, share, size, number, number > 0)


def iterate(
    steps: ImplicitField, now: TimeInStep, later: TimeInStep, state: AnyState, newton: Newton
) -> Iterated:
    """Run one iteration of the step after a state, with the times in this and the next step."""
    x, change, rounded, share, size, number, done = newton
    y = steps.joined(state)
    trial = x + share.unsqueeze(-1) * change
    end = steps.end(y, trial)
    y, point = torch.where(done, end, y), torch.where(done, end, trial)
    t = torch.where(done, later(steps.theta), now(steps.theta)).to(y.dtype)
    linear = steps.linear(t, point, steps.a)
    residual = y + steps.a * linear.rate.detach() - point
    found, singular = solve(linear.matrix, residual)
    length = residual.square().sum(-1).sqrt()
    near = steps.near(largest(y), x, change, rounded)
    worse = ~(length <= size) & ~near & (share > 0.5 ** (HALVINGS - 1)) & ~done
    rejected = worse.unsqueeze(-1)
    x, change = torch.where(rejected, x, point), torch.where(rejected, change, found)
    rounded = torch.where(worse, rounded, steps.rounded(y, point, linear.matrix, residual))
    share, size = torch.where(worse, share / 2, 1.0), torch.where(worse, size, length)
    number = torch.where(done, 1, number + 1)
    # A change that is rejected is neither small nor from a residual that is rounding.
    trial = x + share.unsqueeze(-1) * change
    ended = steps.ends(largest(y), trial, change, rounded).all()
    failed = (
        singular
        | ~(largest(change) < torch.inf).all()
        | (number > LOOP_ITERATIONS)
        # Of the matrix of the last change, as in a step that is not compiled.
        | has_negative_eigenvalue_if(linear.matrix, ended)
    )
    if y.ndim > 1:
        failed = failed | (ended & linear.coupled(steps.a))
    new = Newton(x, change, rounded, share, size, number, ended)
    return Iterated(steps.state(y), new, done, failed)
