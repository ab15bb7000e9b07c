"""The connection of values that torch has not computed to the inputs that they depend on.

A solution is computed by SciPy. Its derivatives come from ``pull``, which takes cotangents of the
values to those of the inputs, and ``push``, which takes tangents of the inputs to those of the
values. Both take several rows at once, on a leading axis, so a Jacobian costs one backward pass:
``torch.autograd.grad(..., is_grads_batched=True)``, ``torch.func.jacrev`` and ``vmap`` hand all
rows to one call of ``pull``, and ``torch.func.jacfwd`` to one of ``push``.

Inside of a transform of ``torch.func`` a tensor is a wrapper around its values. SciPy, and the
passes of autograd of ``pull`` and ``push``, compute with the values, outside of the transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.rows import are_hidden, hide_rows, level_of_rows, shown_rows
from adjsim.core.second_derivative import refuse_second_derivative
from adjsim.core.state import in_transform
from adjsim.core.transforms import (
    FunctionOfRows,
    RefuseWrapped,
    has_tangent,
    is_wrapped,
    outside_transforms,
    unwrapped,
)

# Rows of cotangents of the value to rows of cotangents of each input, and of tangents back.
Pull = Callable[[Tensor], Sequence[Tensor]]
Push = Callable[..., Tensor]
WHY = "the derivative of a solution comes from an equation of its own"
NO_BATCH = (
    "torch.vmap over the inputs of solve_ivp is not possible, since SciPy solves one problem at a "
    "time: give the problems as columns, y0 of shape (n, batch). torch.vmap over cotangents is."
)
AGAIN = partial(RuntimeError, f"{WHY}, so it cannot be differentiated again (nested transforms).")


def plain(x: Tensor) -> Tensor:
    """Return the values of a tensor that transforms of torch.func may have wrapped, detached."""
    with outside_transforms():
        return unwrapped(x, partial(ValueError, NO_BATCH), AGAIN).detach()


def is_transformed(x: Tensor) -> bool:
    """Return whether a tensor has a tangent, or is differentiated by torch.func."""
    return (in_transform() and is_wrapped(x)) or has_tangent(x)


def refuse_wrapped() -> RefuseWrapped:
    """Make the mode in which fun may read no tensor that torch.func differentiates."""
    return RefuseWrapped(partial(undeclared, "a tensor that torch.func differentiates, which"))


def undeclared(name: str) -> ValueError:
    """Make the error for a tensor that fun reads and whose derivative would be lost."""
    return ValueError(
        f"fun reads {name} was not declared, so the adjoint would lose its gradient. Pass it in "
        "args, declare it by params=[...], make it a parameter of a module, or detach() it."
    )


def is_solution(node: Any) -> bool:
    """Return whether a node of a graph is that of a solution."""
    return getattr(node, "_forward_cls", None) is _Connected


def is_tracked(x: Tensor) -> bool:
    """Return whether a derivative with respect to a tensor is recorded now."""
    return (torch.is_grad_enabled() and x.requires_grad) or is_transformed(x)


def connected(value: Tensor, inputs: Sequence[Tensor], pull: Pull, push: Push | None) -> Tensor:
    """Give a value its derivatives with respect to the inputs; push None: backward alone."""
    return _Connected.apply(pull, push, value, *inputs)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(pull: Pull, push: Push | None, value: Tensor, *inputs: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pull, ctx.push, _, *given = inputs
        # The values of the inputs are those of the run, whatever becomes of them. Where they have
        # tangents they are kept, so that a second derivative is an error.
        keeps = any(map(is_transformed, given))
        kept = given if keeps else [x.detach().new_empty(0) for x in given]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.shapes = [x.shape for x in given]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (cotangent,), likes = grad_outputs, ctx.saved_tensors
        if not in_transform():
            refuse_second_derivative(WHY)
        if are_hidden(cotangent):
            # The older kind of vmap of is_grads_batched asks no function for its rule.
            level = level_of_rows()
            found = [hide_rows(x, level) for x in ctx.pull(shown_rows(cotangent))]
        else:
            rows = FunctionOfRows.apply(ctx.pull, AGAIN, 1, cotangent[None], *likes)
            found = [x[0] for x in rows]
        return None, None, None, *(x.to(like) for x, like in zip(found, likes, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        if ctx.push is None:
            raise NotImplementedError(
                "derivatives forward in time (jvp, jacfwd) are those of real states, solved with "
                'adjoint="interpolate": use jacrev or backward().'
            )
        likes, shapes = ctx.saved_tensors, ctx.shapes
        along = [
            like.new_zeros((1, *shape)) if x is None else x[None]
            for x, like, shape in zip(tangents[3:], likes, shapes, strict=True)
        ]
        given = len(along), *along, *likes
        (found,) = FunctionOfRows.apply(lambda *rows: [ctx.push(*rows)], AGAIN, *given)
        return found[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ValueError(NO_BATCH)
