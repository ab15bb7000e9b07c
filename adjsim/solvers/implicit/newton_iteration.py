"""One iteration of Newton's method, of which compiled loops of implicit steps consist.

A loop cannot contain another whose length depends on numbers, so a step takes as many iterations of
the compiled loop as it needs. Each evaluates the field and its Jacobian at one point: at the next
iterate of the step, or, where the last change was small, at the end of the step, from which the
next step begins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.compiler.systems import has_negative_eigenvalue_if, solve
from adjsim.core.state import AnyState
from adjsim.solvers.base import TimeInStep
from adjsim.solvers.implicit.field import HALVINGS, ITERATIONS, ImplicitField, largest


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
        | (number > ITERATIONS)
        # Of the matrix of the last change, as in a step that is not compiled.
        | has_negative_eigenvalue_if(linear.matrix, ended)
    )
    if y.ndim > 1:
        failed = failed | (ended & linear.coupled(steps.a))
    new = Newton(x, change, rounded, share, size, number, ended)
    return Iterated(steps.state(y), new, done, failed)
