"""The refusal of second derivatives, where a gradient has no graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_second_derivative(gradient: str, remedy: str = "") -> None:
    """Refuse a backward pass with create_graph; ``gradient`` says why there is no graph."""
    if torch.is_grad_enabled():
        raise _refusal(gradient, remedy)


def once_differentiable(x: Tensor, gradient: str, remedy: str = "") -> Tensor:
    """Return the tensor, with a gradient that refuses to be differentiated again.

    A tensor with a tangent has been differentiated once: it refuses a backward pass, and so does
    its tangent.
    """
    value, tangent = forward_ad.unpack_dual(x)
    if tangent is None:
        return _OnceDifferentiable.apply(x, gradient, remedy)
    parts = (_Differentiated.apply(part, gradient, remedy) for part in (value, tangent))
    return forward_ad.make_dual(*parts)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *refusal: str) -> Tensor:
        ctx.refusal = refusal
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*ctx.refusal)
        return cotangents[0], None, None


class _Differentiated(_OnceDifferentiable):
    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        raise _refusal(*ctx.refusal)


def _refusal(gradient: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{gradient} and has no graph of its own, so it cannot be differentiated again "
        "(create_graph=True, double backward, a backward pass of dual tensors, torch.func)."
        f"{remedy and ' '}{remedy}"
    )
