"""Forces from energies, and their vector-Jacobian products.

A potential is any ``nn.Module`` that maps position ``(*batch, atoms, dim)`` to energy
``(*batch,)``. Its force is ``-dU/dq``, by automatic differentiation. Two families have a force in
closed form: :class:`SeparablePotential`, a sum over coordinates, and
:class:`~adjsim.potentials.pair.PairPotential`, a sum over pairs. A module that derives from
:class:`ForceField` is a force that need not come from an energy, and may depend on time.

The adjoint also needs the vector-Jacobian product of a force F(q; theta). :func:`force_vjp` returns
the force and a function from v to (v^T dF/dq, v^T dF/dtheta), so that both share intermediate
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from adjsim._grid import Grid, straight_through
from adjsim._inputs import outside_inference_mode
from adjsim._layout import materialise
from adjsim._module import refuse_written, version_of
from adjsim._params import leaves, point_of_differentiation, refuse_unknown, unknown_leaf
from adjsim._state import in_transform
from adjsim._typing import Energies, Positions


@dataclass(frozen=True)
class DeferredVJP:
    """A deferred gradient of ``sum of weight . function(x; theta)`` with respect to theta.

    Deferred gradients of the same function may be stacked along a new leading axis and computed
    together. This spares small systems the overhead of one autograd call per step.

    Args:
        module: the module with the parameters theta.
        function: of x, elementwise.
        weight: the cotangent of its value.
        x: the point of evaluation.
    """

    module: nn.Module
    function: Callable[[Tensor], Tensor]
    weight: Tensor
    x: Tensor

    def gradient(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Compute the gradients; None for parameters that the function does not depend on.

        Raises:
            ValueError: the function depends on a tensor that requires grad and is not one of the
                parameters.
        """
        with torch.enable_grad():
            total = (self.weight * self.function(self.x)).sum()
        refuse_unknown(total, self.module, parameters, f"the force of {type(self.module).__name__}")
        if not parameters or not total.requires_grad:
            return [None] * len(parameters)
        return list(torch.autograd.grad(total, parameters, allow_unused=True))


@dataclass(frozen=True)
class VJPSum:
    """A sum of gradients with respect to the parameters, each deferred or a list."""

    terms: tuple[ParameterVJP, ...]

    def gradient(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Compute the sums; None for parameters that no term depends on."""
        total: list[Tensor | None] = [None] * len(parameters)
        for term in self.terms:
            found = term if isinstance(term, list) else term.gradient(parameters)
            total = [
                x if y is None else y if x is None else x + y
                for x, y in zip(total, found, strict=True)
            ]
        return total


ParameterVJP: TypeAlias = DeferredVJP | VJPSum | list[Tensor | None]
Pullback = Callable[[Tensor], tuple[Tensor, ParameterVJP]]


class Potential(nn.Module):
    """An energy ``U(q; theta)``. Subclasses write ``forward``, and may write closed forms."""

    def forward(self, position: Positions) -> Energies:
        raise TypeError(
            f"{type(self).__name__} has no energy: write forward(position) -> (*batch,)."
        )

    def __add__(self, other: nn.Module) -> SumPotential:
        return SumPotential(self, other)

    def __radd__(self, other: nn.Module) -> SumPotential:
        return SumPotential(other, self)

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        """Compute ``-dU/dq``, differentiable when grad mode is on.

        With a grid (``(*batch, 1, 1, 1)``, one spacing for each system), a force that is a sum of
        contributions rounds each of them to the grid before the sum. Then the sum is exact, and
        does not depend on the order.
        """
        return _derived(self, position, grid)

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain.

        The result is ``(*batch, dim, dim)``. Strain deforms the positions, and the box if the
        potential has one.
        """
        raise TypeError(
            f"{type(self).__name__} has no virial(position), which the pressure and the stress "
            "need. Pair potentials and sums of them have one."
        )

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
    ) -> tuple[Tensor, Pullback]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta).

        The second product is a :class:`DeferredVJP`, a list of gradients or a :class:`VJPSum`. On a
        grid the force has the bits of :meth:`force`.
        """
        return _autograd_vjp(lambda q: force(self, q, grid=grid), self, position, parameters)


class SumPotential(Potential):
    """A sum of potentials, ``U = sum_k U_k``, written ``a + b``.

    Each part keeps its own closed forms. The parameters of part k have names that begin with
    ``parts.k``.

    Args:
        parts: modules that map position to energy. A sum among them is replaced by its parts.

    Raises:
        TypeError: a part without an energy, such as a :class:`ForceField`.
        ValueError: no parts, or a part whose energy is not ``(*batch,)``.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        if not parts:
            raise ValueError("a sum of potentials needs at least one part.")
        flat: list[nn.Module] = []
        for part in parts:
            if not isinstance(part, nn.Module) or isinstance(part, ForceField):
                raise TypeError(
                    f"a part of a sum of potentials is a module with an energy; got a "
                    f"{type(part).__name__}."
                )
            # A subclass, or a sum with hooks, is more than its parts.
            plain = type(part) is SumPotential and not (
                part._forward_hooks or part._forward_pre_hooks
            )
            flat += cast(SumPotential, part).parts if plain else [part]
        self.parts = nn.ModuleList(flat)

    def forward(self, position: Positions) -> Energies:
        energies = [part(position) for part in self.parts]
        for part, energy in zip(self.parts, energies, strict=True):
            if energy.shape != position.shape[:-2]:
                raise ValueError(
                    f"{type(part).__name__}, a part of a sum, maps position "
                    f"{tuple(position.shape)} to energy {tuple(energy.shape)}; it must be "
                    f"{tuple(position.shape[:-2])}, one number for each system."
                )
        return _total(energies)

    def virial(self, position: Positions) -> Tensor:
        for part in self.parts:
            if not isinstance(part, Potential):
                raise TypeError(f"{type(part).__name__}, a part of a sum, has no virial(position).")
        return _total([cast(Potential, part).virial(position) for part in self.parts])

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        return _total([force(part, position, grid=grid) for part in self.parts])

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
    ) -> tuple[Tensor, Pullback]:
        found = [force_vjp(part, position, parameters, grid=grid) for part in self.parts]

        def pullback(v: Tensor) -> tuple[Tensor, VJPSum]:
            products = [inner(v) for _, inner in found]
            return _total([along for along, _ in products]), VJPSum(
                tuple(rest for _, rest in products)
            )

        return _total([value for value, _ in found]), pullback


def _total(values: Sequence[Tensor]) -> Tensor:
    """Sum values from first to last."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


class ForceField(nn.Module):
    """A force without an energy, ``F(t, q)``.

    Examples are a control and a non-conservative drive. It has no invariant.
    """

    def forward(self, t: Any, position: Positions) -> Positions:
        raise TypeError(f"{type(self).__name__} has no force: write forward(t, position).")


class SeparablePotential(Potential):
    """A potential ``U = sum over atoms and dimensions of u(q)``.

    ``element`` is u, ``slope`` is u' and ``curvature`` is u'', elementwise.
    """

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

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            value = -self.slope(position)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            with torch.no_grad():
                return -self.curvature(position) * v, DeferredVJP(self, self.slope, -v, position)

        return value, pullback


def force(
    potential: nn.Module, position: Positions, t: Any = 0.0, grid: Grid | None = None
) -> Positions:
    """Compute the force ``-dU/dq`` of a potential at a position.

    Args:
        potential: an energy module, or a :class:`ForceField`.
        position: ``(*batch, atoms, dim)``.
        t: the time, which only a :class:`ForceField` reads.
        grid: see :meth:`Potential.force`.

    Returns:
        ``(*batch, atoms, dim)``, differentiable in the position and the parameters when grad mode
        is on.

    Raises:
        ValueError: the potential writes into the position that it is given.
    """
    position = materialise(position)
    version = version_of(position)
    if isinstance(potential, ForceField):
        value = potential(t, position)
    elif isinstance(potential, Potential):
        value = potential.force(position) if grid is None else potential.force(position, grid)
    else:
        value = _derived(potential, position, grid)
    refuse_written(potential, position, version)
    return value


def force_vjp(
    potential: nn.Module,
    position: Positions,
    parameters: Sequence[Tensor],
    t: Any = 0.0,
    grid: Grid | None = None,
) -> tuple[Tensor, Pullback]:
    """Compute the force, detached, and its vector-Jacobian product.

    The product is with respect to the position and ``parameters``. The position must not require
    grad; the product may be taken once.
    """
    position = materialise(position)
    version = version_of(position)
    if isinstance(potential, ForceField):
        value, pullback = _autograd_vjp(lambda q: potential(t, q), potential, position, parameters)
    elif not isinstance(potential, Potential):
        value, pullback = energy_vjp(potential, position, parameters, grid)
    elif grid is None:
        value, pullback = potential.force_vjp(position, parameters)
    else:
        value, pullback = potential.force_vjp(position, parameters, grid)
    refuse_written(potential, position, version)
    return value, lambda v: pullback(materialise(v))


def energy_vjp(
    potential: nn.Module, position: Positions, parameters: Sequence[Tensor], grid: Grid | None
) -> tuple[Tensor, Pullback]:
    """Compute the force and its product by automatic differentiation of the energy alone.

    The energy is evaluated once, and with a grid once more; see :meth:`Potential.force`.
    """
    if torch.compiler.is_compiling() or in_transform():
        return _autograd_vjp(
            lambda q: _derived(potential, q, grid), potential, position, parameters
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
    if grid is not None:
        # A derivative with a graph comes from other kernels, and may differ in the last bit.
        with torch.no_grad():
            value = -derivative(potential, position)
    return value, _pullback(smooth, q, parameters)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute ``d(sum of function)/dx``, with a graph when grad mode is on.

    The cost does not depend on how x was computed: the function is applied to a view of x, and
    autograd stops at the node of this view. If it differentiated with respect to x itself where x
    is a leaf, it would visit every operation of the graph.
    """
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
    return slope if keeps_graph else slope.detach()


def _derived(potential: nn.Module, position: Tensor, grid: Grid | None) -> Tensor:
    smooth = -derivative(potential, position)
    if grid is None or not smooth.requires_grad:
        return smooth
    # A derivative with a graph comes from other kernels, and may differ in the last bit.
    with torch.no_grad():
        same = -derivative(potential, position)
    return straight_through(smooth, same)


def _autograd_vjp(
    function: Callable[[Tensor], Tensor],
    module: nn.Module,
    position: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Pullback]:
    with torch.enable_grad():
        q = position.detach().requires_grad_()
        value = function(q)
    refuse_unknown(value, module, [q, *parameters], f"the force of {type(module).__name__}")
    return value.detach(), _pullback(value, q, parameters)


def _pullback(value: Tensor, q: Tensor, parameters: Sequence[Tensor]) -> Pullback:
    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        if not value.requires_grad:
            return torch.zeros_like(q), [None] * len(parameters)
        along, *rest = torch.autograd.grad(value, (q, *parameters), v, allow_unused=True)
        return torch.zeros_like(q) if along is None else along, list[Tensor | None](rest)

    return pullback
