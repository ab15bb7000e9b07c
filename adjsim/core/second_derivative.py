"""The refusal of second derivatives, where a gradient has no graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_second_derivative(gradient: str, remedy: str = "") -> None:
    """Refuse a backward pass with create_graph; ``gradient`` says why there is no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{gradient} and has no graph of its own, so it cannot be differentiated again "
            f"(create_graph=True, double backward, torch.func).{remedy and ' '}{remedy}"
        )


def once_differentiable(x: Tensor, gradient: str, remedy: str = "") -> Tensor:
    """Return the tensor, with a gradient that refuses to be differentiated again."""
    return _OnceDifferentiable.apply(x, gradient, remedy)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *refusal: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.refusal = inputs[1:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*ctx.refusal)
        return cotangents[0], None, None
