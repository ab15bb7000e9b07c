"""Tangent vectors along a run, and their products with the Jacobians of its steps.

A tangent vector of a state is flattened to N numbers: the fields in order, each flattened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.state import AnyState, State
from adjsim.dynamics.buffer import Spill


def flatten(fields: Iterable[Tensor], axes: int) -> Tensor:
    """Join fields along one last axis of N numbers, after so many leading axes."""
    return torch.cat([x.reshape(*x.shape[:axes], -1) for x in fields], -1)


def start_basis(state: AnyState, axes: int, count: int) -> Tensor:
    """Return random orthonormal columns ``(*batch, N, count)``, the same for every system."""
    first, generator = state[0], torch.Generator().manual_seed(0)
    size = sum(x.shape[axes:].numel() for x in state)
    drawn = torch.randn(size, count, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].to(first).expand(*first.shape[:axes], -1, -1)


class TangentDriver:
    """Runs steps one by one, each with its product with orthonormal tangent vectors::

        DPhi Q = Q' R        growth += log |diag R|        triangle <- R triangle

    The product with the Jacobian DPhi of a step is the derivative of its transposed product
    ``u -> DPhi^T u``, which is linear, with respect to u (double backward). So a step must be
    twice differentiable by autograd. Each vector has a replica of its own: ``count`` copies of the
    batch step at once. The basis Q is ``(*batch, N, count)``. Growth and triangle are those since
    :meth:`reset`.
    """

    def __init__(
        self, stepper: Stepper, inputs: Inputs, potential: nn.Module | None, basis: Tensor
    ) -> None:
        self.stepper, self.inputs, self.potential = stepper, inputs, potential
        self.basis = basis
        self.reset()

    def reset(self) -> None:
        """Begin new sums of growth."""
        count = self.basis.shape[-1]
        self.growth = self.basis.new_zeros((*self.basis.shape[:-2], count))
        self.triangle = torch.eye(count).to(self.basis).expand(*self.growth.shape, -1)

    def stops(self, wanted: set[int]) -> Sequence[int]:
        return range(1, self.stepper.clock.last + 1)

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        for number in range(start, stop):
            state, pushed = self.push(number, state, self.basis)
            self.basis, r = torch.linalg.qr(pushed)
            self.growth = self.growth + r.diagonal(dim1=-2, dim2=-1).abs().log()
            self.triangle = r @ self.triangle
        return state, stop

    def push(self, number: int, state: State, columns: Tensor) -> tuple[State, Tensor]:
        """Take step number ``number``, and return the state after it and DPhi times columns."""
        axes, count = columns.ndim - 2, columns.shape[-1]
        parts = columns.movedim(-1, 0).split([x.shape[axes:].numel() for x in state], -1)
        tangents = [part.reshape(count, *x.shape) for part, x in zip(parts, state, strict=True)]
        with torch.enable_grad():
            before = self._copies(state, count)
            before = type(state)._make(x.requires_grad_() for x in before)
            after = self._step(number, before, count)
            u = [torch.zeros_like(x, requires_grad=True) for x in after]
            transposed = torch.autograd.grad(
                tuple(after), tuple(before), u, create_graph=True, materialize_grads=True
            )
        found = torch.autograd.grad(transposed, u, tangents, materialize_grads=True)
        made = type(state)._make(x.detach()[0] for x in after)
        return made, flatten(found, axes + 1).movedim(0, -1)

    def check_copies(self, state: AnyState, count: int) -> None:
        """Refuse dynamics whose first step of copies of the state is not the copy of its step."""
        plain, copies = self._step(0, state, None), self._step(0, self._copies(state, count), count)
        for name, x, y in zip(state._fields, plain, copies, strict=True):
            small = 1e-4 * float(x.abs().amax())
            if y.shape != (count, *x.shape) or not torch.allclose(
                y, x.expand_as(y), rtol=0.0, atol=small, equal_nan=True
            ):
                raise ValueError(
                    f"the dynamics steps {name} of shape {tuple(x.shape)} differently if a batch "
                    f"axis of {count} tangent vectors is put before it: write it for (*batch, "
                    "...), with indices such as y[..., 0] instead of y[:, 0]."
                )

    @staticmethod
    def _copies(state: State, count: int) -> State:
        return type(state)._make(x.detach().expand(count, *x.shape).clone() for x in state)

    def _step(self, number: int, state: State, count: int | None) -> State:
        plan = self.stepper.plan
        context = self.stepper.context(number, self.inputs, plan.forces(self.potential))
        if context.noise is not None and count is not None:
            noise = tuple(x.expand(count, *x.shape) for x in context.noise)
            context = context._replace(noise=noise)
        return plan.step(state, context)


class TangentRecorder:
    """An observer that reads growth, triangles and basis of a driver at given steps."""

    def __init__(self, driver: TangentDriver, steps: Sequence[int], vectors: bool) -> None:
        self.driver, self.vectors = driver, vectors
        self.first, self.steps = steps[0], frozenset(steps)
        self.growth, self.triangles, self.bases = list[Tensor](), list[Tensor](), list[Tensor]()
        self.states: list[Any] = []

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return self.steps

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if step not in self.steps:
            return
        if step > self.first:
            self.growth.append(self.driver.growth)
        if self.vectors:
            if step > self.first:
                self._refuse_lost(step)
                self.triangles.append(self.driver.triangle)
            self.bases.append(self.driver.basis)
            self.states.append(state)
        self.driver.reset()

    def _refuse_lost(self, step: int) -> None:
        """Refuse an interval in which vectors grow or shrink out of the range of numbers."""
        most = float(self.driver.growth.abs().amax())
        # Norms are squared.
        limit = math.log(torch.finfo(self.driver.growth.dtype).max) / 2.2
        if not most < limit:
            raise ValueError(
                f"a tangent vector grows or shrinks by exp({most:.3g}) in the interval of save "
                f"times that ends at t = {self.driver.stepper.clock.time(step):g}, and covariant "
                f"vectors need less than exp({limit:.3g}): put save times closer together, or "
                "lower count, if a step destroys a direction."
            )


def covariant_vectors(bases: Sequence[Tensor], triangles: Sequence[Tensor]) -> list[Tensor]:
    """Compute covariant Lyapunov vectors by Ginelli's recursion (2007)::

        C_{k-1} = R_k^-1 C_k |columns to unit length|        V_k = Q_k C_k

    The first i columns of Q span the i fastest forward directions. Upper triangular C, iterated
    backward, turn them to vectors with DPhi V_{k-1} parallel to V_k. ``bases`` are Q at n + 1
    times, and ``triangles`` the R of the intervals between them.
    """
    mixing = torch.eye(bases[-1].shape[-1]).to(bases[-1]).expand_as(triangles[-1])
    vectors = [bases[-1]]
    for Q, R in zip(reversed(bases[:-1]), reversed(triangles), strict=True):
        mixing = torch.linalg.solve_triangular(R, mixing, upper=True)
        mixing = mixing / mixing.norm(dim=-2, keepdim=True)
        vectors.append(Q @ mixing)
    return vectors[::-1]
