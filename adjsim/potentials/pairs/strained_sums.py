"""Energies, forces and virials by the pair operator in boxes of systems, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.rounding import UNROUNDED_BOTH, Roundings
from adjsim.core.rows import differentiates_backward, pulled_together
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs import dense
from adjsim.potentials.pairs.kernel_sums import (
    gradients_by_rows,
    gradients_of_all,
    propagate,
    slopes,
)
from adjsim.potentials.pairs.kernels.kernel import ENERGY, FORCE, PRODUCT, SLOPES
from adjsim.potentials.pairs.operator import PairOperator
from adjsim.potentials.products import Tensors
from adjsim.potentials.strained import at_rest

# The product of a force F and the force along a strain, W, with their cotangents v and c: the
# cotangent of the position, that of the strain of box and positions together, and those of
# parameters.
StrainedProduct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Any]]


def energy(operator: PairOperator, position: Positions) -> Energies:
    """Compute the energy, differentiable in parameters, position and strain."""
    strain = operator.present_strain
    moves = torch.is_grad_enabled() and (position.requires_grad or strain.value.requires_grad)
    differentiable = operator.differentiable(position)
    modes = (ENERGY, SLOPES) if differentiable else (ENERGY,)
    if moves or not operator.has(*modes):
        return dense.strained_energy(operator.by_torch(operator.operands), position, strain)
    if differentiable:
        return _Energy.apply(operator, position, *operator.operands)
    return operator.evaluate(ENERGY, position)[0]


def force(
    operator: PairOperator, position: Positions, roundings: Roundings = UNROUNDED_BOTH
) -> tuple[Tensor, Tensor]:
    """Compute F and W, differentiable."""
    strain = operator.present_strain
    moves = torch.is_grad_enabled() and strain.value.requires_grad
    differentiable = operator.differentiable(position) or moves
    modes = (FORCE, PRODUCT) if differentiable else (FORCE,)
    if not operator.has(*modes, rounds=roundings.force.rounds):
        by_torch = operator.by_torch(operator.operands)
        return dense.strained_force(by_torch, position, strain, roundings)
    if differentiable:
        return _Force.apply(operator, roundings, position, strain.value, *operator.operands)
    return _forces(operator, position, roundings)


def force_vjp(
    operator: PairOperator,
    position: Positions,
    parameters: Tensors,
    roundings: Roundings,
) -> tuple[tuple[Tensor, Tensor], StrainedProduct]:
    """Compute F and W, and their product with cotangents."""
    if not operator.has(FORCE, PRODUCT, rounds=roundings.force.rounds):
        by_torch = operator.by_torch(operator.operands)
        strain = operator.present_strain
        values, product = dense.strained_vjp(by_torch, position, strain, roundings)

        def pullback_by_rows(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Any]:
            along, moved, deferred = product(v, c)
            grads = propagate(operator, gradients_by_rows(operator, deferred), parameters)
            return along, moved, grads

        return values, pullback_by_rows

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Any]:
        along, moved, found = _product(operator, position, v, c, roundings)
        return along, moved, propagate(operator, found, parameters)

    return _forces(operator, position, roundings), pullback


def _forces(
    operator: PairOperator, position: Tensor, roundings: Roundings
) -> tuple[Tensor, Tensor]:
    value, virial = operator.evaluate(FORCE, position, roundings=roundings)
    return value, operator.present_strain.contracted(virial.sum(-2, keepdim=True))


def _product(
    operator: PairOperator,
    position: Tensor,
    v: Tensor,
    c: Tensor,
    roundings: Roundings = UNROUNDED_BOTH,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    strain = operator.present_strain
    _, _, along, moved, *found = operator.evaluate(
        PRODUCT,
        position,
        vector=v,
        stretch=strain.matrix(c, position.shape[-1]),
        roundings=roundings,
    )
    return along, strain.contracted(moved.sum(-2, keepdim=True)), found


def with_strain(
    position: Tensor,
    strain: Strain,
    values: tuple[Tensor, Tensor],
    v: Tensor,
    c: Tensor,
    product: StrainedProduct,
) -> tuple[Tensor, Tensor, Any]:
    """Compute the cotangents of position and strain, each with the other one fixed.

    A pair at d_ij, with Hessian K_ij of its energy, adds to force F and to W::

        dF_i = -K_ij (dq_i - dq_j + de d_ij)       W_a = sum d_a F_a       de: by coordinate

    where de stretches box and positions together, and coordinates are those along rows. Then for
    the cotangents v of F and c of W, with P the product of the pairs and S its strain part::

        lambda_q = P + c F          lambda_e = S + c W - sum_i q_i lambda_q,i

    The last term takes the positions back to where they were.
    """
    force, virial = values
    along, moved, rest = product(v, c)
    along = along + strain.pulled_back(force, c)
    return along, at_rest(moved + c * virial, position, along, strain), rest


class _Force(torch.autograd.Function):
    """F and W, whose derivatives are products of the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: PairOperator,
        roundings: Roundings,
        position: Tensor,
        strain: Tensor,
        *operands: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.operator = operator
        values = _forces(operator, position, roundings)
        ctx.save_for_backward(position, strain, *values, *operands)
        return values

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        v, c = cotangents
        position, value, force, along_strain, *operands = ctx.saved_tensors
        operator: PairOperator = ctx.operator
        strain = operator.present_strain._replace(value=value)
        if differentiates_backward():

            def by_torch(q: Tensor, e: Tensor, *found: Tensor) -> tuple[Tensor, Tensor]:
                pair = operator.by_torch(found)
                return dense.strained_force(pair, q, strain._replace(value=e))

            along, moved, *grads = torch.func.vjp(by_torch, position, value, *operands)[1]((v, c))
        else:
            values = force, along_strain
            product = partial(_product, operator, position)

            def pull(v: Tensor, c: Tensor) -> list[Tensor | None]:
                along, moved, found = with_strain(position, strain, values, v, c, product)
                return [along, moved, *gradients_of_all(operator, found)]

            along, moved, *grads = pulled_together(pull, [v, c], one_by_one=True)
        return None, None, along, moved, *grads


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
        if differentiates_backward():
            grads = torch.func.vjp(
                lambda *values: dense.strained_energy(
                    operator.by_torch(values), position, operator.present_strain
                ),
                *operands,
            )[1](weight)
        else:
            grads = slopes(operator, position, weight)
        return None, None, *grads
