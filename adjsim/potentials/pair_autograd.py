"""The pair operator as functions of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjsim._grid import Grid
from adjsim._pairs.kernel import ENERGY, FORCE, PRODUCT, SLOPES
from adjsim._state import in_transform
from adjsim.potentials import all_pairs

if TYPE_CHECKING:
    from adjsim.potentials.pair_operator import PairOperator


class PairForce(torch.autograd.Function):
    """The force, whose derivative is the product of the operator.

    A derivative that is to be differentiated itself is computed by torch operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: PairOperator,
        grid: Grid | None,
        position: Tensor,
        box: Tensor | None,
        species: Tensor | None,
        exclusions: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.operator = operator
        # With box, species and exclusions, so that a change in place is an error.
        ctx.save_for_backward(position, box, species, exclusions, *operands)
        return operator.evaluate(FORCE, position, grid=grid)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (v,), (position, _, _, _, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if torch.is_grad_enabled() or _is_batched(v):
            along, *rest = _product(
                lambda q, *values: all_pairs.force(operator.by_torch(values), q, None),
                (position, *operands),
                v,
            )
            return None, None, along, None, None, None, *rest
        _, along, *found = operator.evaluate(PRODUCT, position, vector=v)
        grads: list[Tensor | None] = [None] * len(operands)
        for k, grad in zip(operator.wanted, found, strict=True):
            grads[k] = grad
        return None, None, along, None, None, None, *grads


class PairEnergy(torch.autograd.Function):
    """The energy, whose derivative with respect to positions is minus the force."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: PairOperator,
        position: Tensor,
        box: Tensor | None,
        species: Tensor | None,
        exclusions: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(position, box, species, exclusions, *operands)
        return operator.evaluate(ENERGY, position)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (position, _, _, _, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if torch.is_grad_enabled() or _is_batched(weight):
            along, *rest = _product(
                lambda q, *values: all_pairs.energy(operator.by_torch(values), q),
                (position, *operands),
                weight,
            )
            return None, along, None, None, None, *rest
        along, grads = None, list[Tensor | None]([None] * len(operands))
        if ctx.needs_input_grad[1]:
            along = -operator.evaluate(FORCE, position)[0] * weight[..., None, None]
        if operator.wanted:
            found = operator.evaluate(SLOPES, position, weight=weight)
            for k, grad in zip(operator.wanted, found, strict=True):
                grads[k] = grad
        return None, along, None, None, None, *grads


def _is_batched(x: Tensor) -> bool:
    """Return whether a cotangent has a batch that torch hides, as in ``is_grads_batched``."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return in_transform() or functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def _product(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor
) -> tuple[Tensor, ...]:
    """Compute a vector-Jacobian product that can be differentiated.

    Inputs may depend on each other (a position on the parameters of earlier steps), which
    ``torch.autograd.grad`` would follow.
    """
    pullback = torch.func.vjp(function, *inputs)[1]
    return pullback(cotangent)
