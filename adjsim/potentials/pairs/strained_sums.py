"""Energies, forces and virials by the pair operator in boxes of systems, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import stretched
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs import dense
from adjsim.potentials.pairs.kernel_sums import (
    gradients_by_rows,
    gradients_of_all,
    is_batched,
    propagate,
)
from adjsim.potentials.pairs.kernels.kernel import ENERGY, FORCE, PRODUCT, SLOPES
from adjsim.potentials.pairs.operator import PairOperator
from adjsim.potentials.products import Tensors
from adjsim.potentials.strained import at_rest

# The product of a force and the diagonal of a virial with their cotangents v and c: the cotangent
# of the position, that of the strain of box and positions together, and those of parameters.
StrainedProduct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Any]]


def energy(operator: PairOperator, position: Positions) -> Energies:
    """Compute the energy, differentiable in parameters, position and box."""
    box = operator.box
    moves = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (position, box)
    )
    differentiable = operator.differentiable(position)
    modes = (ENERGY, SLOPES) if differentiable else (ENERGY,)
    if moves or not operator.has(*modes):
        return dense.energy(operator.by_torch(operator.operands), position, box)
    if differentiable:
        return _Energy.apply(operator, position, *operator.operands)
    return operator.evaluate(ENERGY, position)[0]


def force(
    operator: PairOperator,
    position: Positions,
    strain: Tensor,
    rounding: Rounding = UNROUNDED,
    virial_rounding: Rounding = UNROUNDED,
) -> tuple[Tensor, Tensor]:
    """Compute the force and the diagonal of the virial ``(*batch, 1, dim)``, differentiable."""
    assert operator.box is not None
    moves = torch.is_grad_enabled() and strain.requires_grad
    differentiable = operator.differentiable(position) or moves
    modes = (FORCE, PRODUCT) if differentiable else (FORCE,)
    if not operator.has(*modes, rounds=rounding.rounds):
        by_torch = operator.by_torch(operator.operands)
        return dense.strained_force(by_torch, position, operator.box, rounding, virial_rounding)
    if differentiable:
        return _Force.apply(
            operator, rounding, virial_rounding, position, strain, *operator.operands
        )
    found = operator.evaluate(FORCE, position, rounding=rounding, virial_rounding=virial_rounding)
    return found[0], found[1].sum(-2, keepdim=True)


def force_vjp(
    operator: PairOperator,
    position: Positions,
    parameters: Tensors,
    rounding: Rounding,
    virial_rounding: Rounding,
) -> tuple[tuple[Tensor, Tensor], StrainedProduct]:
    """Compute the force and the diagonal of the virial, and their product with cotangents."""
    assert operator.box is not None
    if not operator.has(FORCE, PRODUCT, rounds=rounding.rounds):
        values, product = dense.strained_vjp(
            operator.by_torch(operator.operands), position, operator.box, rounding, virial_rounding
        )

        def pullback_by_rows(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Any]:
            along, strain, deferred = product(v, c)
            grads = propagate(operator, gradients_by_rows(operator, deferred), parameters)
            return along, strain, grads

        return values, pullback_by_rows
    rounded: Any = {"rounding": rounding, "virial_rounding": virial_rounding}
    value, virial = operator.evaluate(FORCE, position, **rounded)

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Any]:
        along, strain, found = _product(operator, position, v, c, **rounded)
        return along, strain, propagate(operator, found, parameters)

    return (value, virial.sum(-2, keepdim=True)), pullback


def _product(
    operator: PairOperator, position: Tensor, v: Tensor, c: Tensor, **rounded: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    _, _, along, strain, *found = operator.evaluate(
        PRODUCT, position, vector=v, stretch=c, **rounded
    )
    return along, strain.sum(-2, keepdim=True), found


def with_strain(
    position: Tensor,
    values: tuple[Tensor, Tensor],
    v: Tensor,
    c: Tensor,
    product: StrainedProduct,
) -> tuple[Tensor, Tensor, Any]:
    """Compute the cotangents of position and strain, each with the other one fixed.

    A pair at d_ij, with Hessian K_ij of its energy, adds to force F and virial W::

        dF_i = -K_ij (dq_i - dq_j + de d_ij)       W_a = sum d_a F_a       de: by coordinate

    where de stretches box and positions together. Then for the cotangents v of F and c of W, with
    P the product of the pairs and S its strain part::

        lambda_q = P + c F          lambda_e = S + c W - sum_i q_i lambda_q,i

    The last term takes the positions back to where they were.
    """
    force, virial = values
    along, strain, rest = product(v, c)
    along, strain = along + c * force, strain + c * virial
    return along, at_rest(strain, position, along, strain), rest


class _Force(torch.autograd.Function):
    """Force and diagonal of the virial, whose derivatives are products of the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: PairOperator,
        rounding: Rounding,
        virial_rounding: Rounding,
        position: Tensor,
        strain: Tensor,
        *operands: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.operator = operator
        value, virial = operator.evaluate(
            FORCE, position, rounding=rounding, virial_rounding=virial_rounding
        )
        virial = virial.sum(-2, keepdim=True)
        ctx.save_for_backward(position, strain, value, virial, *operands)
        return value, virial

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        v, c = cotangents
        position, strain, value, virial, *operands = ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if torch.is_grad_enabled() or is_batched(v):
            cell = operator.pair.image_box
            assert cell is not None

            def by_torch(q: Tensor, e: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
                return dense.strained_force(operator.by_torch(values), q, stretched(cell, e))

            along, moved, *grads = torch.func.vjp(by_torch, position, strain, *operands)[1]((v, c))
        else:
            along, moved, found = with_strain(
                position,
                (value, virial),
                v,
                c,
                lambda v, c: _product(operator, position, v, c),
            )
            grads = gradients_of_all(operator, found)
        return None, None, None, along, moved.sum_to_size(strain.shape), *grads


class _Energy(torch.autograd.Function):
    """The energy, as a function of the operands."""

    @staticmethod
    def forward(ctx: Any, operator: PairOperator, position: Tensor, *operands: Tensor) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(position, *operands)
        return operator.evaluate(ENERGY, position)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (position, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled() or is_batched(weight):
            grads = torch.func.vjp(
                lambda *values: dense.energy(operator.by_torch(values), position, operator.box),
                *operands,
            )[1](weight)
        else:
            grads = gradients_of_all(operator, operator.evaluate(SLOPES, position, weight=weight))
        return None, None, *grads
