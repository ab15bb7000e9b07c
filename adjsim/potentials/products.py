"""Vector-Jacobian products of forces: deferred, summed, and by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.parameters import leaves, point_of_differentiation, refuse_unknown, unknown_leaf
from adjsim.core.rounding import UNROUNDED, Rounding, straight_through
from adjsim.core.state import in_transform
from adjsim.core.transforms import without_graph
from adjsim.core.typing import Positions

Tensors: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True)
class DeferredVJP:
    """A deferred gradient of ``sum of weight . function(x; theta)`` by the theta of a module.

    Deferred gradients of the same function may be stacked along a new leading axis and computed
    together. This spares small systems the overhead of one autograd call per step.
    """

    module: nn.Module
    function: Callable[[Tensor], Tensor]
    weight: Tensor
    x: Tensor

    def gradient(self, parameters: Tensors) -> list[Tensor | None]:
        """Compute the gradients, None without dependence; refuse a dependence on other tensors."""
        with torch.enable_grad():
            value = self.function(self.x)
        refuse_unknown(value, self.module, parameters, f"the force of {type(self.module).__name__}")
        if not parameters or not value.requires_grad:
            return [None] * len(parameters)
        weight = self.weight.sum_to_size(value.shape)
        return list(torch.autograd.grad(value, parameters, weight, allow_unused=True))


@dataclass(frozen=True)
class VJPSum:
    """A sum of gradients with respect to the parameters, each deferred or a list."""

    terms: tuple[ParameterVJP, ...]

    def gradient(self, parameters: Tensors) -> list[Tensor | None]:
        """Compute the sums; None for parameters that no term depends on."""
        total: list[Tensor | None] = [None] * len(parameters)
        for term in self.terms:
            found = term if isinstance(term, list) else term.gradient(parameters)
            pairs = zip(total, found, strict=True)
            total = [x if y is None else y if x is None else x + y for x, y in pairs]
        return total


ParameterVJP: TypeAlias = DeferredVJP | VJPSum | list[Tensor | None]
Pullback = Callable[[Tensor], tuple[Tensor, ParameterVJP]]


def energy_vjp(
    potential: nn.Module, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
) -> tuple[Tensor, Pullback]:
    """Compute the force and its product by automatic differentiation of the energy alone."""
    if torch.compiler.is_compiling() or in_transform():
        return autograd_vjp(
            lambda q: derived_force(potential, q, rounding), potential, position, parameters
        )
    with torch.enable_grad():
        q = position.detach().requires_grad_()
        total = potential(q).sum()
        smooth = torch.zeros_like(q)
        if total.requires_grad:
            smooth = -torch.autograd.grad(total, q, create_graph=True, materialize_grads=True)[0]
    # The graph of the energy has all leaves of that of the force, and is smaller.
    if unknown_leaf(total, [q, *parameters]) is not None:
        what = f"the force of {type(potential).__name__}"
        refuse_unknown(smooth, potential, [q, *parameters], what)
    value = smooth.detach()
    if rounding.rounds:
        with torch.no_grad():
            value = derived_force(potential, position, rounding)
    return value, _pullback(smooth, q, parameters)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute ``d(sum of function)/dx``, with a graph when grad mode is on.

    A scalar x stands for one number in each entry of the result, such as the cutoff of all pairs.
    The function is applied to a view of x, at whose node autograd stops. So the cost does not
    depend on how x was computed.
    """
    if x.ndim == 0:
        with torch.no_grad():
            x = x.expand(function(x).shape)
    if torch.compiler.is_compiling() or in_transform():
        return torch.func.grad(lambda y: function(y).sum())(x)
    if torch.is_inference_mode_enabled():
        # Nothing requires grad in inference mode, which would look like a zero derivative.
        with outside_inference_mode():
            return derivative(function, x.clone())
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        here = x.view_as(x) if x.requires_grad else point_of_differentiation(x)
        total = function(here).sum()
        if not total.requires_grad:
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(total, here, create_graph=create, allow_unused=True)
    if slope is None:
        return torch.zeros_like(x)
    # If nothing but the leaf made here requires grad, the result must not require grad.
    keeps_graph = x.requires_grad or next(leaves(slope), None) is not None
    return slope if keeps_graph else without_graph(slope)


class Elementwise:
    """A function u(x), whose derivatives follow from it where they are not written."""

    def element(self, x: Tensor, /) -> Tensor:
        """Compute u(x), elementwise."""
        raise TypeError(f"{type(self).__name__} has no element(x).")

    def slope(self, x: Tensor, /) -> Tensor:
        """Compute du/dx, elementwise."""
        return derivative(self.element, x)

    def curvature(self, x: Tensor, /) -> Tensor:
        """Compute d2u/dx2, elementwise."""
        return derivative(self.slope, x)


def with_fewer_axes(rounding: Rounding, count: int) -> Rounding:
    """Return a rounding of contributions with so many axes fewer than those of pairs."""
    if not rounding.rounds or not rounding.spacing.ndim:
        return rounding
    return Rounding(rounding.spacing.squeeze(tuple(range(-count, 0))))


def derived_force(potential: nn.Module, position: Tensor, rounding: Rounding = UNROUNDED) -> Tensor:
    """Compute the force by automatic differentiation of the energy."""
    smooth = -derivative(potential, position)
    if not rounding.rounds or not smooth.requires_grad:
        return smooth
    # A derivative with a graph comes from other kernels, and may differ in the last bit.
    with torch.no_grad():
        same = -derivative(potential, position)
    return straight_through(smooth, same)


def autograd_vjp(
    function: Callable[[Tensor], Tensor], module: nn.Module, position: Tensor, parameters: Tensors
) -> tuple[Tensor, Pullback]:
    """Compute a force and its product by automatic differentiation of the force."""
    with torch.enable_grad():
        q = position.detach().requires_grad_()
        value = function(q)
    refuse_unknown(value, module, [q, *parameters], f"the force of {type(module).__name__}")
    return value.detach(), _pullback(value, q, parameters)


def _pullback(value: Tensor, q: Tensor, parameters: Tensors) -> Pullback:
    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        if not value.requires_grad:
            return torch.zeros_like(q), [None] * len(parameters)
        along, *rest = torch.autograd.grad(value, (q, *parameters), v, allow_unused=True)
        return torch.zeros_like(q) if along is None else along, list[Tensor | None](rest)

    return pullback
