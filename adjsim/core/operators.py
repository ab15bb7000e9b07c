"""Operators of torch's dispatcher that this library defines."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adjsim.core.transforms import has_tangent, in_forward_mode

F = TypeVar("F", bound=Callable[..., Any])


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Define a function of tensors as the operator ``adjsim::name``.

    A trace records the operator as one operation. The operator has no derivative: a gradient
    through it raises an error, backward and forward.
    ``torch.library.custom_op`` also checks that results do not share memory with arguments; it
    imports Dynamo when the operator is first called, which takes a second.

    Args:
        schema: the types of arguments and results, in torch's notation; None: from annotations.
    """

    def define(function: Callable[..., Any]) -> Any:
        qualified = f"adjsim::{name}"
        types = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, types, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", _without_tangents(function))
        defined = getattr(torch.ops.adjsim, name).default
        if defined._schema.returns:
            torch.library.register_autograd(qualified, _refuse)
        return defined

    return define


def _without_tangents(function: F) -> F:
    @wraps(function)
    def evaluate(*given: Any, **named: Any) -> Any:
        if in_forward_mode():
            tensors = (x for x in tree_leaves((given, named)) if isinstance(x, Tensor))
            if any(map(has_tangent, tensors)):
                _refuse(None)
        return function(*given, **named)

    return evaluate  # pyright: ignore[reportReturnType]


def _refuse(ctx: Any, *cotangents: Any) -> Any:
    raise NotImplementedError(
        "a gradient came to an operator of adjsim, which has no derivative: leave compile=True "
        "out, and please report it."
    )


def shapes_of(target: Any) -> Callable[[F], F]:
    """Declare a function that computes results of an operator without values."""

    def declare(function: F) -> F:
        torch.library.register_fake(target, function)
        return function

    return declare


def vmap_of(target: Any) -> Callable[[F], F]:
    """Declare a function that evaluates an operator under ``torch.vmap``."""

    def declare(function: F) -> F:
        torch.library.register_vmap(target, function)
        return function

    return declare
