"""Multipliers of constraints of distances, cluster by cluster, and their derivatives.

A group is a batch of m clusters with c constraints each. With d_k = q_i - q_j of constraint k, the
gradient of |d_k|^2 / 2 is the row G_k: d_k at atom i, -d_k at atom j. So for two configurations
with differences d and e::

    G(e) M^-1 G(d)^T = S * (e . d)        S_kl = sum_a B_ka B_la / m_a,   B_ki = 1,  B_kj = -1

is c x c, by elements of S, which is symmetric and depends on masses alone. Differences are
``(*batch, dim, m, c)``, multipliers ``(*batch, m, c)``, lengths ``(m, c)``, and S is
``(m, c, width)``, of which a row has the columns of its window (:mod:`systems`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing
from adjsim.dynamics.constraints.systems import (
    along,
    lengths_operator,
    newton,
    products,
    quadratic_root,
    solve,
    triangles_operator,
    window,
)
from adjsim.dynamics.constraints.triangles import triangle_multipliers


class Solution(torch.autograd.Function):
    """The solution x of ``sum_l S_kl (e_k . d_l) x_l = v_k``, of which S is symmetric.

    With the cotangent lambda of x, and z from the transposed system, in which e and d are
    exchanged::

        lambda_v_k  = z_k                            lambda_e_k = -z_k sum_l S_kl x_l d_l
        lambda_S_kl = -z_k x_l e_k . d_l             lambda_d_l = -x_l sum_k S_kl z_k e_k
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(e: Tensor, d: Tensor, S: Tensor, v: Tensor) -> Tensor:
        return solve(e, d, S, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        e, d, S, _ = inputs
        ctx.save_for_backward(e, d, S, output)
        ctx.save_for_forward(e, d, S, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        e, d, S, x = ctx.saved_tensors
        z = Solution.apply(d, e, S, cotangents[0])
        return (
            -z.unsqueeze(-3) * along(S, x, d),
            -x.unsqueeze(-3) * along(S, z, e),
            _of_metric(z, x, e, d, S),
            z,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        e, d, S, x = ctx.saved_tensors
        de, dd, dS, dv = tangents
        change = (de * along(S, x, d)).sum(-3) + (e * (along(S, x, dd) + along(dS, x, d))).sum(-3)
        return Solution.apply(e, d, S, dv - change)


def tangent_multipliers(d: Tensor, v: Tensor, S: Tensor) -> Tensor:
    """Solve ``d_k . (v_k - sum_l S_kl y_l d_l) = 0`` for y, with differences v of velocities."""
    return Solution.apply(d, d, S, (d * v).sum(-3))


class LengthMultipliers(torch.autograd.Function):
    """The multipliers x with which differences u have the right lengths: ``|e_k| = L_k``.

    The differences become ``e_k = u_k + sum_l S_kl x_l d_l``. Newton's method solves
    ``s_k = (|e_k|^2 - L_k^2)/2 = 0`` from x = 0, with the matrix ``J_kl = S_kl e_k . d_l``. One
    constraint by itself has a closed form, :func:`~.systems.quadratic_root`. By the implicit
    function theorem ``J dx = -(ds at fixed x)``, so with the cotangent lambda of x::

        J^T z = lambda         lambda_u_k  = -z_k e_k
                               lambda_d_l  = -x_l sum_k S_kl z_k e_k
                               lambda_S_kl = -z_k x_l e_k . d_l
                               lambda_L_k  =  z_k L_k
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
        if S.shape[-2] == 1:
            return quadratic_root(u, d, S, length)
        in_loop = is_tracing() and u.device.type == "cpu"
        return (lengths_operator if in_loop else newton)(u, d, S, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        u, d, S, length, x = ctx.saved_tensors
        e = u + along(S, x, d)
        z = Solution.apply(d, e, S, cotangents[0])
        return (
            -z.unsqueeze(-3) * e,
            -x.unsqueeze(-3) * along(S, z, e),
            _of_metric(z, x, e, d, S),
            (z * length).sum_to_size(length.shape),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        u, d, S, length, x = ctx.saved_tensors
        e, (du, dd, dS, dlength) = u + along(S, x, d), tangents
        change = du + along(S, x, dd) + along(dS, x, d)
        return -Solution.apply(e, d, S, (e * change).sum(-3) - length * dlength)


class TriangleMultipliers(LengthMultipliers):
    """The same of triangles whose differences go around: a closed form and one iteration."""

    @staticmethod
    def forward(u: Tensor, d: Tensor, S: Tensor, length: Tensor) -> Tensor:
        if is_tracing() and u.device.type == "cpu":
            return triangles_operator(u, d, S, length)
        return newton(u, d, S, length, triangle_multipliers(u, d, S, length))


def _of_metric(z: Tensor, x: Tensor, e: Tensor, d: Tensor, S: Tensor) -> Tensor:
    """Compute the cotangent of S, summed over the batch."""
    width = S.shape[-1]
    found = -z.unsqueeze(-1) * window(x, width) * products(e, d, width)
    return found.sum_to_size(S.shape)
