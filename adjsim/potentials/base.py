"""Forces from energies, and their transposed Jacobians.

A potential is any ``nn.Module`` that maps position ``(*batch, atoms, dim)`` to energy ``(*batch,)``. Its force is
``-dU/dq``, by automatic differentiation. Two families know theirs in closed form: :class:`SeparablePotential`, a sum
over coordinates, and :class:`~adjsim.potentials.pair.PairPotential`, a sum over pairs. A module that derives from
:class:`ForceField` is a force that need not come from an energy, and may depend on time.

The adjoint needs one more thing of a force F(q; theta): its vector-Jacobian product. :func:`force_vjp` gives the force and a
function that takes v to (v^T dF/dq, v^T dF/dtheta), so that the two share their work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adjsim._grid import Grid, straight
from adjsim._inputs import outside_inference_mode
from adjsim._params import leaves, point_of_differentiation
from adjsim._state import in_transform, stored
from adjsim._typing import Energies, Positions


@dataclass(frozen=True)
class Contraction:
    """``sum of weight . function(x; theta)`` over all entries, whose gradient with respect to theta is wanted.

    Those of one function may be stacked along a new leading axis and differentiated together, which spares small systems the
    overhead of doing so in every step.
    """

    function: Callable[[Tensor], Tensor]
    weight: Tensor
    x: Tensor

    def gradient(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """None for a parameter that the function does not depend on."""
        if not parameters:
            return []
        with torch.enable_grad():
            total = (self.weight * self.function(self.x)).sum()
        if not total.requires_grad:
            return [None] * len(parameters)
        return list(torch.autograd.grad(total, parameters, allow_unused=True))


Pullback = Callable[[Tensor], tuple[Tensor, Contraction | list[Tensor | None]]]


class Potential(nn.Module):
    """An energy function ``U(q; theta)``; subclasses write ``forward``, and may write the closed forms below it."""

    def forward(self, position: Positions) -> Energies:
        raise TypeError(f"{type(self).__name__} has no energy: write forward(position) -> (*batch,).")

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        """``-dU/dq``, differentiable when grad mode is on.

        Where it is a sum of contributions and a grid is given (``(*batch, 1, 1, 1)``, one spacing for each system), they are
        rounded to it before they are summed: the sum is then exact, and does not depend on the order.
        """
        return _derived(self, position, grid)

    def force_vjp(self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None) -> tuple[Tensor, Pullback]:
        """The force, and v -> (v^T dF/dq, v^T dF/dtheta), the latter as a contraction or as gradients.

        On a grid, the force has the bits that :meth:`force` gives it.
        """
        return _autograd_vjp(lambda q: force(self, q, grid=grid), position, parameters)


class ForceField(nn.Module):
    """A force given directly, ``F(t, q)``: a control, a non-conservative drive. It has no energy and no invariant."""

    def forward(self, t: Any, position: Positions) -> Positions:
        raise TypeError(f"{type(self).__name__} has no force: write forward(t, position).")


class SeparablePotential(Potential):
    """``U = sum over atoms and dimensions of u(q)``, with ``slope = u'`` and ``curvature = u''`` elementwise."""

    def element(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no element(x).")

    def slope(self, x: Tensor) -> Tensor:
        return derivative(self.element, x)

    def curvature(self, x: Tensor) -> Tensor:
        return derivative(self.slope, x)

    def forward(self, position: Positions) -> Energies:
        return self.element(position).sum((-1, -2))

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        return -self.slope(position)

    def force_vjp(self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            value = -self.slope(position)

        def pullback(v: Tensor) -> tuple[Tensor, Contraction]:
            with torch.no_grad():
                return -self.curvature(position) * v, Contraction(self.slope, -v, position)

        return value, pullback


def force(potential: nn.Module, position: Positions, t: Any = 0.0, grid: Grid | None = None) -> Positions:
    """The force ``-dU/dq`` of a potential at a position.

    Args:
        potential: an energy module, or a :class:`ForceField`.
        position: ``(*batch, atoms, dim)``.
        t: the time, which only a :class:`ForceField` looks at.
        grid: see :meth:`Potential.force`.

    Returns:
        ``(*batch, atoms, dim)``, differentiable in the position and the parameters when grad mode is on.
    """
    position = stored(position)
    if isinstance(potential, ForceField):
        return potential(t, position)
    if isinstance(potential, Potential):
        return potential.force(position) if grid is None else potential.force(position, grid)
    return _derived(potential, position, grid)


def force_vjp(
    potential: nn.Module, position: Positions, parameters: Sequence[Tensor], t: Any = 0.0, grid: Grid | None = None
) -> tuple[Tensor, Pullback]:
    """The force, detached, and its vector-Jacobian product with respect to position and ``parameters``.

    The position must not require grad; the product may be asked for once.
    """
    position = stored(position)
    if not isinstance(potential, Potential):
        value, pullback = _autograd_vjp(lambda q: force(potential, q, t, grid), position, parameters)
    elif grid is None:
        value, pullback = potential.force_vjp(position, parameters)
    else:
        value, pullback = potential.force_vjp(position, parameters, grid)
    return value, lambda v: pullback(stored(v))


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``d(sum of function)/dx``, differentiable when grad mode is on, and without a graph when it is off."""
    if torch.compiler.is_compiling() or in_transform():
        return torch.func.grad(lambda y: function(y).sum())(x)
    if torch.is_inference_mode_enabled():
        # Nothing requires grad there, which would look like a function without a derivative.
        with outside_inference_mode():
            return derivative(function, x.clone())
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        zero = point_of_differentiation(x)
        total = function(x + zero).sum()
        if not total.requires_grad:
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(total, zero, create_graph=create, allow_unused=True)
    if slope is None:
        return torch.zeros_like(x)
    # Where nothing but our own leaf asks for a gradient, the result must not claim one.
    asked = x.requires_grad or next(leaves(slope), None) is not None
    return slope if asked else slope.detach()


def _derived(potential: nn.Module, position: Tensor, grid: Grid | None) -> Tensor:
    push = -derivative(potential, position)
    if grid is None or not push.requires_grad:
        return push
    # A derivative that keeps a graph comes from other kernels, and may differ in its last bit.
    with torch.no_grad():
        same = -derivative(potential, position)
    return straight(push, same)


def _autograd_vjp(
    function: Callable[[Tensor], Tensor], position: Tensor, parameters: Sequence[Tensor]
) -> tuple[Tensor, Pullback]:
    with torch.enable_grad():
        q = position.detach().requires_grad_()
        value = function(q)

    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        if not value.requires_grad:
            return torch.zeros_like(position), [None] * len(parameters)
        along, *rest = torch.autograd.grad(value, (q, *parameters), v, allow_unused=True)
        return torch.zeros_like(position) if along is None else along, list[Tensor | None](rest)

    return value.detach(), pullback
