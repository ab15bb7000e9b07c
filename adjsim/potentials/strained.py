"""Energies, forces and virials in boxes that states carry, as at constant pressure.

The box of a system is that of the potential with its rows multiplied by exp(strain). The strain is
``(*batch, 1, 1)``, or ``(*batch, 1, dim)`` with a number for each row. The force along the strain,
W, is minus the derivative of the energy as box and positions are stretched together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from adjsim.core.box import stretched
from adjsim.core.derived import derived_of
from adjsim.core.layout import materialise
from adjsim.core.parameters import refuse_unknown
from adjsim.core.reading import Reading
from adjsim.core.rounding import UNROUNDED, Rounding, straight_through
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.evaluated import Evaluated
from adjsim.potentials.products import ParameterVJP, Tensors, VJPSum

Forced: TypeAlias = tuple[Tensor, Tensor]
# Takes the cotangents of force and W, and returns those of position and strain, and of parameters.
StrainedPullback: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, ParameterVJP]]

# The values of a potential that follow from a box, and are known for a stretched one.
_FOLLOWING = ("image_box", "smallest_listed")


class PositionForces(Protocol):
    """The force of a module and its product at a position."""

    potential: nn.Module

    def force(self, t: Any, position: Tensor) -> Tensor: ...
    def force_vjp(
        self, t: Any, position: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ParameterVJP]]]: ...


class Strainable(Evaluated):
    """Base class of energies that can be evaluated in a box that a state carries.

    The methods differentiate the energy automatically. Subclasses may write them in closed form.
    """

    def strained_energy(self, position: Positions, strain: Tensor) -> Energies:
        """Compute the energy at a strain, differentiable."""
        return _energy(self, position, strain)

    def strained_force(
        self,
        position: Positions,
        strain: Tensor,
        rounding: Rounding = UNROUNDED,
        virial_rounding: Rounding = UNROUNDED,
    ) -> Forced:
        """Compute the force and W, of the shape of the strain, differentiable.

        The roundings are those of what pairs contribute to each, see
        :meth:`~adjsim.potentials.Potential.force`.
        """
        return _force(self, position, strain, rounding)

    def strained_vjp(
        self,
        position: Positions,
        strain: Tensor,
        parameters: Tensors,
        rounding: Rounding = UNROUNDED,
        virial_rounding: Rounding = UNROUNDED,
    ) -> tuple[Forced, StrainedPullback]:
        """Compute force and W, and a function of their cotangents v and c.

        The function returns the products with the derivatives by position, strain and parameters,
        each with the others fixed.
        """
        return _vjp(self, position, strain, parameters, rounding)


def strained_energy(module: nn.Module, position: Positions, strain: Tensor) -> Energies:
    """Compute the energy of any module, as :meth:`Strainable.strained_energy`."""
    if isinstance(module, Strainable):
        return module.strained_energy(position, strain)
    return _energy(module, position, strain)


def strained_force(
    module: nn.Module, position: Positions, strain: Tensor, *roundings: Rounding
) -> Forced:
    """Compute force and W of any module, as :meth:`Strainable.strained_force`."""
    if isinstance(module, Strainable):
        return module.strained_force(position, strain, *roundings)
    return _force(module, position, strain, *roundings[:1])


def strained_vjp(
    module: nn.Module,
    position: Positions,
    strain: Tensor,
    parameters: Tensors,
    *roundings: Rounding,
) -> tuple[Forced, StrainedPullback]:
    """Compute the product of any module, as :meth:`Strainable.strained_vjp`."""
    if isinstance(module, Strainable):
        return module.strained_vjp(position, strain, parameters, *roundings)
    return _vjp(module, position, strain, parameters, *roundings[:1])


class ForcesAt:
    """Forces of a module at a point, a position or a position and a strain, and their products.

    They are a tuple: the force, and with a strain also W. Products take and return tuples.
    """

    def __init__(
        self,
        forces: PositionForces,
        rounding: Rounding = UNROUNDED,
        virial_rounding: Rounding = UNROUNDED,
    ) -> None:
        self.potential, self._forces = forces.potential, forces
        self._roundings = rounding, virial_rounding

    def values(self, t: Any, point: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the forces at a point and a time."""
        if len(point) == 1:
            return (self._forces.force(t, point[0]),)
        position, strain = map(materialise, point)
        return strained_force(self.potential, position, strain, *self._roundings)

    def vjp(
        self, t: Any, point: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Callable[..., tuple[tuple[Tensor, ...], ParameterVJP]]]:
        """Compute the forces, and a function of a cotangent for each of them."""
        if len(point) == 1:
            value, pullback = self._forces.force_vjp(t, point[0], parameters)

            def product(v: Tensor) -> tuple[tuple[Tensor, ...], ParameterVJP]:
                along, rest = pullback(v)
                return (along,), rest

            return (value,), product
        position, strain = map(materialise, point)
        values, strained = strained_vjp(
            self.potential, position, strain, parameters, *self._roundings
        )

        def both(v: Tensor, c: Tensor) -> tuple[tuple[Tensor, ...], ParameterVJP]:
            along, moved, rest = strained(materialise(v), materialise(c))
            return (along, moved), rest

        return values, both


def summed_energy(whole: Evaluated, position: Positions, strain: Tensor) -> Energies:
    """Sum the energies of the parts of a sum."""
    return reduce(add, [strained_energy(part, position, strain) for part in whole.terms()])


def summed_force(
    whole: Evaluated, position: Positions, strain: Tensor, *roundings: Rounding
) -> Forced:
    """Sum the forces of the parts of a sum, and their W."""
    return _sum([strained_force(part, position, strain, *roundings) for part in whole.terms()])


def summed_vjp(
    whole: Evaluated, position: Positions, strain: Tensor, parameters: Tensors, *roundings: Rounding
) -> tuple[Forced, StrainedPullback]:
    """Sum the forces of the parts of a sum, their W, and their products."""
    parts = [strained_vjp(part, position, strain, parameters, *roundings) for part in whole.terms()]

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
        found = [inner(v, c) for _, inner in parts]
        along, strained = _sum([x[:2] for x in found])
        return along, strained, VJPSum(tuple(rest for *_, rest in found))

    return _sum([values for values, _ in parts]), pullback


def _sum(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = zip(*found, strict=True)
    return reduce(add, first), reduce(add, second)


def has_box(module: nn.Module) -> bool:
    """Return whether a part of a module has a box."""
    return any(part._buffers.get("box") is not None for part in module.modules())


def refuse_unstrained(module: nn.Module) -> None:
    """Refuse a part that computes other values from its box when it is read."""
    for part in module.modules():
        for rule in derived_of(type(part)):
            if "box" in rule.sources and rule.name not in _FOLLOWING and has_box(part):
                raise TypeError(
                    f"{type(part).__name__} computes {rule.name} from its box once a run, so it "
                    "cannot follow a box that moves: it is not supported at constant pressure."
                )


def _energy(module: nn.Module, position: Tensor, strain: Tensor) -> Tensor:
    if not has_box(module):
        found: Tensor = module(position)
        return found
    refuse_unstrained(module)
    reading, batch = Reading(module), position.shape[:-2]

    def one(q: Tensor, e: Tensor) -> Tensor:
        tensors = [
            stretched(x, e).reshape(x.shape) if name.endswith("box") else x
            for name, x in zip(reading.names, reading.tensors, strict=True)
        ]
        energy: Tensor = reading.bound(tensors)(q)
        return energy

    if not batch:
        return one(position, strain)
    # The energies of a module are those of systems with one box.
    flat = position.reshape(-1, *position.shape[-2:])
    strains = strain.expand(*batch, *strain.shape[-2:]).reshape(-1, *strain.shape[-2:])
    return torch.vmap(one)(flat, strains).reshape(batch)


def _force(
    module: nn.Module, position: Tensor, strain: Tensor, rounding: Rounding = UNROUNDED
) -> Forced:
    create = torch.is_grad_enabled()
    smooth = _differentiated(module, position, strain, create)
    if not rounding.rounds or not create:
        return smooth
    # A derivative with a graph comes from other kernels, and may differ in the last bit.
    same = _differentiated(module, position, strain, False)
    return straight_through(smooth[0], same[0]), straight_through(smooth[1], same[1])


def _differentiated(
    module: nn.Module,
    position: Tensor,
    strain: Tensor,
    create: bool,
    stretch: Tensor | None = None,
) -> Forced:
    """Compute minus the derivatives by position, and by a stretch of positions and box."""
    with torch.enable_grad():
        q = position.view_as(position) if create else position.detach()
        q = q if q.requires_grad else q.detach().requires_grad_()
        stretch = _no_stretch(strain) if stretch is None else stretch
        base = strain if create else strain.detach()
        total = _energy(module, q * torch.exp(stretch), base + stretch).sum()
        if not total.requires_grad:
            return torch.zeros_like(position), torch.zeros_like(strain)
        found = torch.autograd.grad(
            total, (q, stretch), create_graph=create, materialize_grads=True
        )
    return -found[0], -found[1]


def _no_stretch(strain: Tensor) -> Tensor:
    return torch.zeros_like(strain.detach()).requires_grad_()


def _vjp(
    module: nn.Module,
    position: Tensor,
    strain: Tensor,
    parameters: Tensors,
    rounding: Rounding = UNROUNDED,
) -> tuple[Forced, StrainedPullback]:
    with torch.enable_grad():
        q, e = position.detach().requires_grad_(), strain.detach().requires_grad_()
        stretch = _no_stretch(strain)
        smooth = _differentiated(module, q, e, True, stretch)
    what = f"the force of {type(module).__name__}"
    for value in smooth:
        refuse_unknown(value, module, [q, e, stretch, *parameters], what)
    values = tuple(x.detach() for x in smooth)
    if rounding.rounds:
        with torch.no_grad():
            values = _differentiated(module, position, strain, False)

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        pairs = [(x, y) for x, y in zip(smooth, (v, c), strict=True) if x.requires_grad]
        found: Sequence[Any] = (None,) * (2 + len(parameters))
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, (q, e, *parameters), given, allow_unused=True)
        zero = torch.zeros_like
        along, strained = (zero(x) if g is None else g for x, g in zip((q, e), found, strict=False))
        return along, strained, list(found[2:])

    return (values[0], values[1]), pullback
