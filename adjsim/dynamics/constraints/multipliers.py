"""Multipliers of constraints of distances, cluster by cluster, and their derivatives.

A group is a batch of m clusters with c constraints each. With d_k = q_i - q_j of constraint k, the
gradient of |d_k|^2 / 2 is the row G_k: d_k at atom i, -d_k at atom j. So for two configurations
with differences d and e::

    G(e) M^-1 G(d)^T = S * (e . d)        S_kl = sum_a B_ka B_la / m_a,   B_ki = 1,  B_kj = -1

is c x c, by elements of S, which depends on masses alone. Differences are ``(*batch, dim, m, c)``,
multipliers ``(*batch, m, c)``, S is ``(m, c, c)``, and lengths are ``(m, c)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.derived import has_values
from adjsim.core.layout import is_tracing

# Newton's method doubles the digits: three or four iterations are enough for usual steps.
ITERATIONS = 8
# Compiled loops eliminate matrices up to this size element by element.
SMALL = 4


def solve(matrix: Tensor, values: Tensor) -> Tensor:
    """Solve the small systems of all clusters; singular ones give infinity or NaN."""
    size = matrix.shape[-1]
    if size > SMALL or (size > 1 and not is_tracing()):
        return torch.linalg.solve_ex(matrix, values.unsqueeze(-1))[0].squeeze(-1)
    # Compiled loops print these operations, and would call a solver of torch. Near S * (d . d),
    # which is positive definite, elimination needs no pivots.
    rows = list(torch.cat([matrix, values.unsqueeze(-1)], -1).unbind(-2))
    for k in range(size):
        rows[k] = rows[k] / rows[k][..., k : k + 1]
        for j in range(size):
            if j != k:
                rows[j] = rows[j] - rows[j][..., k : k + 1] * rows[k]
    return torch.stack([row[..., -1] for row in rows], -1)


def products(e: Tensor, d: Tensor) -> Tensor:
    """Compute e_k . d_l, ``(*batch, m, c, c)``."""
    return (e.unsqueeze(-1) * d.unsqueeze(-2)).sum(-4)


def along(S: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Compute ``sum_l S_kl x_l d_l``, of the shape of d."""
    return (S * (x.unsqueeze(-3) * d).unsqueeze(-2)).sum(-1)


def tangent_multipliers(d: Tensor, v: Tensor, S: Tensor) -> Tensor:
    """Solve ``d_k . (v_k - sum_l S_kl y_l d_l) = 0`` for y, with differences v of velocities."""
    return solve(S * products(d, d), (d * v).sum(-3))


class LengthMultipliers(torch.autograd.Function):
    """The multipliers x with which differences u have the right lengths: ``|e_k| = L_k``.

    The differences become ``e_k = u_k + sum_l S_kl x_l d_l``. Newton's method solves
    ``s_k = (|e_k|^2 - L_k^2)/2 = 0`` from x = 0, with the matrix ``J_kl = S_kl e_k . d_l``. By the
    implicit function theorem ``J dx = -(ds at fixed x)``, so with the cotangent lambda of x::

        J^T z = lambda         lambda_u_k  = -z_k e_k
                               lambda_d_l  = -x_l sum_k S_kl z_k e_k
                               lambda_S_kl = -z_k x_l e_k . d_l
                               lambda_L_k  =  z_k L_k
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
        x, squares, readable = torch.zeros_like(u[..., 0, :, :]), length**2, has_values()
        solved = torch.zeros_like(x, dtype=torch.bool)
        # The iteration after the one that finds half of the digits finds the others.
        enough = torch.finfo(u.dtype).eps ** 0.5
        for _ in range(ITERATIONS):
            e = u + along(S, x, d)
            excess = (e * e).sum(-3) - squares
            change = solve(S * products(e, d), excess / 2)
            if readable:
                # A cluster that is solved rests, so that it does not depend on the others. Where
                # values cannot be read, all take the same number of iterations.
                change = torch.where(solved.all(-1, keepdim=True), 0.0, change)
            x, solved = x - change, excess.abs() <= enough * squares
            if readable and bool(solved.all()):
                return x
        if readable:
            raise FloatingPointError(_unsolved(u, length, solved))
        return torch.where(solved, x, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        u, d, S, length, x = ctx.saved_tensors
        e = u + along(S, x, d)
        inner = products(e, d)
        z = solve((S * inner).mT, cotangents[0])
        pulled = z.unsqueeze(-3) * e
        of_metric = -z.unsqueeze(-1) * x.unsqueeze(-2) * inner
        return (
            -pulled,
            -x.unsqueeze(-3) * along(S.mT, torch.ones_like(x), pulled),
            of_metric.sum_to_size(S.shape),
            (z * length).sum_to_size(length.shape),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        u, d, S, length, x = ctx.saved_tensors
        e, (du, dd, dS, dlength) = u + along(S, x, d), tangents
        change = du + along(S, x, dd) + along(dS, x, d)
        return -solve(S * products(e, d), (e * change).sum(-3) - length * dlength)


def _unsolved(u: Tensor, length: Tensor, solved: Tensor) -> str:
    """Describe the first constraint without a solution."""
    place = tuple((~solved).nonzero()[0].tolist())
    found, wanted = u.norm(dim=-3)[place], length.expand(solved.shape)[place]
    return (
        f"constraints: no multipliers were found that hold two atoms at the distance {wanted:g}; "
        f"without them the distance would be {found:g}. Use a smaller dt, start from a "
        "configuration with smaller forces, or check that the lengths of a cluster do not "
        "contradict each other."
    )
