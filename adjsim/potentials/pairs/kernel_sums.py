"""Energies and forces by the pair operator, with their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.parameters import refuse_unknown
from adjsim.core.rounding import UNROUNDED, Rounding, Roundings
from adjsim.core.rows import differentiates_backward, pulled_together
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs import dense
from adjsim.potentials.pairs.kernels.kernel import ATOM, ENERGY, FORCE, NUMBER, PRODUCT, SLOPES
from adjsim.potentials.pairs.operator import PairOperator
from adjsim.potentials.products import DeferredVJP, Pullback, Tensors, VJPSum


def energy(operator: PairOperator, position: Positions) -> Energies:
    """Compute the energy, differentiable."""
    differentiable = operator.differentiable(position)
    modes = (ENERGY, SLOPES) if differentiable else (ENERGY,)
    if operator.printed or not operator.has(*modes):
        return dense.energy(operator.by_torch(operator.operands), position)
    if differentiable:
        return PairEnergy.apply(operator, position, *operator.settings, *operator.operands)
    return operator.evaluate(ENERGY, position)[0]


def force(operator: PairOperator, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
    """Compute the force, differentiable."""
    differentiable = operator.differentiable(position)
    modes = (FORCE, PRODUCT) if differentiable else (FORCE,)
    if operator.printed or not operator.has(*modes, rounds=rounding.rounds):
        return dense.force(operator.by_torch(operator.operands), position, rounding)
    if differentiable:
        return PairForce.apply(operator, rounding, position, *operator.settings, *operator.operands)
    return operator.evaluate(FORCE, position, roundings=Roundings(rounding))[0]


def force_vjp(
    operator: PairOperator, position: Positions, parameters: Tensors, rounding: Rounding
) -> tuple[Tensor, Pullback]:
    """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta)."""
    if operator.printed or not operator.has(FORCE, PRODUCT, rounds=rounding.rounds):
        by_torch = operator.by_torch(operator.operands)
        value, product = dense.force_vjp(by_torch, position, (), rounding)

        def pullback_by_rows(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
            along, found = product(v)
            assert isinstance(found, DeferredVJP)
            return along, propagate(operator, gradients_by_rows(operator, found), parameters)

        return value, pullback_by_rows
    value = operator.evaluate(FORCE, position, roundings=Roundings(rounding))[0]

    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        _, along, *found = operator.evaluate(
            PRODUCT, position, vector=v, roundings=Roundings(rounding)
        )
        return along, propagate(operator, found, parameters)

    return value, pullback


def gradients_by_rows(operator: PairOperator, deferred: DeferredVJP) -> list[Tensor]:
    """Compute the cotangents of operands, with numbers expanded over the rows of pairs.

    The compiler then fuses the sum over each row with the loop over pairs of the compiled step,
    while a sum over all pairs would need another loop. The terms of a pair are the same in both
    orders. So the gradient of a number of an atom is twice the sum over the pairs where this atom
    is the first, of which a compiled loop takes each pair once (halves.py).
    """
    rows = (*deferred.x.shape[:-1], 1)
    leaves = [
        (x.detach().expand(rows) if kind == NUMBER else x.detach()).requires_grad_()
        for x, kind in zip(operator.operands, operator.form.spec.kinds, strict=True)
    ]
    with torch.enable_grad():
        slope = operator.by_torch(leaves, fixed=True).truncated_slope(deferred.x)
        total = (deferred.weight * slope).sum()
    wanted = [leaves[k] for k in operator.wanted]
    if not wanted:
        return []
    grads = torch.autograd.grad(total, wanted, materialize_grads=True)
    likes = [operator.operands[k] for k in operator.wanted]
    kinds = [operator.form.spec.kinds[k] for k in operator.wanted]
    grads = [2 * x if kind == ATOM else x for kind, x in zip(kinds, grads, strict=True)]
    return [
        grad.sum().reshape(like.shape) if like.numel() == 1 else grad
        for like, grad in zip(likes, grads, strict=True)
    ]


def propagate(
    operator: PairOperator, found: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Propagate the cotangents of operands to parameters."""
    grads: list[Tensor | None] = [None] * len(parameters)
    rest: list[tuple[Tensor, Tensor]] = []
    for k, grad in zip(operator.wanted, found, strict=True):
        operand = operator.operands[k]
        same = next((i for i, p in enumerate(parameters) if p is operand), None)
        if same is not None:
            known = grads[same]
            grads[same] = grad if known is None else known + grad
        else:
            what = f"the force of {type(operator.pair).__name__}"
            refuse_unknown(operand, operator.pair, parameters, what)
            rest.append((operand, grad))
    if not rest or not parameters:
        return grads
    outputs, cotangents = zip(*rest, strict=True)
    more = torch.autograd.grad(
        outputs, parameters, cotangents, allow_unused=True, retain_graph=True
    )
    return VJPSum((grads, list(more))).gradient(parameters)


class PairForce(torch.autograd.Function):
    """The force, whose derivative is the product of the operator."""

    @staticmethod
    def forward(
        ctx: Any, operator: PairOperator, rounding: Rounding, position: Tensor, *tensors: Any
    ) -> Tensor:
        ctx.operator = operator
        # With box, species and exclusions, so that a change in place is an error.
        ctx.save_for_backward(position, *tensors)
        return operator.evaluate(FORCE, position, roundings=Roundings(rounding))[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (v,), (position, _, _, _, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if differentiates_backward():
            # Inputs may depend on each other (a position on the parameters of earlier steps), which
            # torch.autograd.grad would follow.
            along, *grads = torch.func.vjp(
                lambda q, *values: dense.force(operator.by_torch(values), q), position, *operands
            )[1](v)
        else:

            def pull(v: Tensor) -> list[Tensor | None]:
                _, along, *found = operator.evaluate(PRODUCT, position, vector=v)
                return [along, *gradients_of_all(operator, found)]

            along, *grads = pulled_together(pull, [v], one_by_one=True)
        return None, None, along, None, None, None, *grads


class PairEnergy(torch.autograd.Function):
    """The energy, whose derivative with respect to positions is minus the force."""

    @staticmethod
    def forward(ctx: Any, operator: PairOperator, position: Tensor, *tensors: Any) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(position, *tensors)
        return operator.evaluate(ENERGY, position)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (position, _, _, _, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if differentiates_backward():
            along, *grads = torch.func.vjp(
                lambda q, *values: dense.energy(operator.by_torch(values), q), position, *operands
            )[1](weight)
        else:
            along, grads = None, [None] * len(operands)
            if ctx.needs_input_grad[1]:
                along = -operator.evaluate(FORCE, position)[0] * weight[..., None, None]
            if operator.wanted:
                grads = slopes(operator, position, weight)
        return None, along, None, None, None, *grads


def slopes(operator: PairOperator, position: Tensor, weight: Tensor) -> list[Tensor | None]:
    """Return the cotangents of all operands for that of the energies, which may have rows."""

    def pull(weight: Tensor) -> list[Tensor | None]:
        found = operator.evaluate(SLOPES, position, weight=weight)
        return gradients_of_all(operator, found)

    return pulled_together(pull, [weight], one_by_one=True)


def gradients_of_all(operator: PairOperator, found: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the cotangents of all operands, None for those that none is wanted of."""
    known = dict(zip(operator.wanted, found, strict=True))
    return [known.get(k) for k in range(len(operator.operands))]
