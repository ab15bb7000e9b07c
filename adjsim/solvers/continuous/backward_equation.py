"""The continuous adjoint of an ODE: one flat equation, which torchdiffeq solves backward.

The equation and its steps are those of ``torchdiffeq.odeint_adjoint``. There the state is a tuple,
which is joined and divided at every evaluation, and each parameter of the user is an input of its
own. For a small network this takes as long as the network. Here one row is solved for, and the
products are taken with respect to leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adjsim.solvers.continuous.base import Fields, VectorField

# Solves a field from a start, and returns the states at the times.
Solve: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


class BackwardEquation:
    """The equation of a state y, of its cotangent a, and of those of the time and the parameters.

    With s = -t, so that time increases::

        db/ds = a^T df/dt      dy/ds = -f      da/ds = a^T df/dy      dg/ds = a^T df/dtheta

    They are one row (b, y, a, g). Nobody reads b, but it takes part in the choice of steps, as in
    torchdiffeq. A state of several fields is a row too; one field keeps its shape. The row has the
    widest real dtype of all, and complex parameters are pairs of numbers there; the field is
    evaluated at states of their own dtype.
    """

    def __init__(self, field: VectorField[Any], start: Fields) -> None:
        if any(x.is_complex() for x in start):
            # One row would make the state complex too.
            raise TypeError(
                "BacksolveAdjoint takes time averages of real functions: average "
                "torch.view_as_real(value), or use DirectAdjoint()."
            )
        self.field = field.at_leaves()
        self.parameters = self.field.trainable
        self.shapes = [x.shape for x in start]
        self.widths = [x.numel() for x in start]
        self.single, self.dtype = len(start) == 1, start[0].dtype
        sizes, count = [_real(x).numel() for x in self.parameters], len(self.field.run.state)
        self._parts = [1, sum(self.widths), sum(self.widths), sum(sizes)]
        self._normed = [1, *self.widths, *self.widths, *sizes]
        # A time average, the field after those of the state, takes no part in the choice of steps.
        averages = {place + count + 1 for place in (0, len(start))} if count < len(start) else set()
        self._chosen = [k for k in range(len(self._normed)) if k not in averages]
        shares = [max(1, self._normed[k]) ** -0.5 for k in self._chosen]
        self._shares = torch.tensor(shares, device=start[0].device)

    def joined(self, fields: Fields) -> Tensor:
        """Return one field as it is, and several as a row."""
        return fields[0] if self.single else torch.cat([x.reshape(-1) for x in fields])

    def fields(self, y: Tensor) -> Fields:
        """Divide a state into its fields; time may lead."""
        if self.single:
            return (y,)
        parts = zip(y.split(self.widths, -1), self.shapes, strict=True)
        return tuple(x.reshape((*y.shape[:-1], *shape)) for x, shape in parts)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the rates of a state."""
        return self.field(t, y) if self.single else self.joined(self.field(t, self.fields(y)))

    def __call__(self, s: Tensor, row: Tensor) -> Tensor:
        """Return the rates of a row."""
        _, y, cotangent, _ = row.split(self._parts)
        shape = self.shapes[0] if self.single else y.shape
        time, y = (-s).requires_grad_(), y.view(shape).detach().to(self.dtype).requires_grad_()
        cotangent = cotangent.view(shape).to(self.dtype)
        with torch.enable_grad():
            rates = self.forward(time, y)
        slope, *products = _products(rates, (time, y, *self.parameters), cotangent)
        return torch.cat([_real(x).reshape(-1) for x in (slope, -rates.detach(), *products)])

    def norm(self, row: Tensor) -> Tensor:
        """Return the largest root mean square of the fields, the cotangents and each parameter."""
        parts = row.split(self._normed)
        norms = torch.stack(torch._foreach_norm([parts[k] for k in self._chosen]))
        return (norms * self._shares.to(norms)).amax()

    def gradient(
        self, solve: Solve, times: Tensor, frames: Tensor, cotangents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the cotangent of the start and the gradient of the parameters, as rows."""
        zero = frames.new_zeros(1)
        parts = [zero, frames[-1], cotangents[-1], *map(torch.zeros_like, self.parameters)]
        row = torch.cat([_real(x).reshape(-1) for x in parts])
        for i in range(len(times) - 1, 0, -1):
            row = solve(self, row, -times[i - 1 : i + 1].flip(0))[1]
            _, y, cotangent, _ = row.split(self._parts)
            # The state is that of the forward solution at each save time.
            y.copy_(frames[i - 1].reshape(-1))
            cotangent += cotangents[i - 1].reshape(-1)
        _, _, cotangent, gradient = row.split(self._parts)
        return cotangent, gradient


def _real(x: Tensor) -> Tensor:
    """Return a real tensor as it is, and a complex one as pairs of numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _as_parameter(row: Tensor, x: Tensor) -> Tensor:
    """Return the part of a row that is the gradient of a parameter in its shape."""
    if not x.is_complex():
        return row.view(x.shape)
    # A part of a row may begin between the two numbers of a pair.
    return torch.view_as_complex(row.view(*x.shape, 2).clone())


def _products(rates: Tensor, inputs: Fields, cotangent: Tensor) -> Fields:
    """Return the products of a cotangent with the derivatives of rates, zero where none exist."""
    if not rates.requires_grad:
        return tuple(map(torch.zeros_like, inputs))
    found = torch.autograd.grad(rates, inputs, cotangent, allow_unused=True)
    pairs = zip(inputs, found, strict=True)
    return tuple(torch.zeros_like(x) if product is None else product for x, product in pairs)


class Backsolve(torch.autograd.Function):
    """The states at the times, whose gradient is the solution of a backward equation.

    It has a solver for each of both directions. The gradient is that of the parameters, joined or
    not, whose values the equation has as leaves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        equation: BackwardEquation,
        solvers: tuple[Solve, Solve],
        times: Tensor,
        y: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        frames = solvers[0](equation.forward, y, times)
        equation.field.run.refuse_written()
        ctx.equation, ctx.solve, ctx.times, ctx.shape = equation, solvers[1], times, y.shape
        ctx.save_for_backward(frames, *parameters)
        return frames

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        frames, *parameters = ctx.saved_tensors
        start, gradient = ctx.equation.gradient(ctx.solve, ctx.times, frames, cotangents[0])
        ctx.equation.field.run.refuse_written()
        parts = gradient.split([_real(x).numel() for x in parameters])
        products = (_as_parameter(g, x) for g, x in zip(parts, parameters, strict=True))
        return None, None, None, start.view(ctx.shape), *products
