"""Energies, forces and virials in boxes that states carry, as at constant pressure.

The box of a system is that of the potential with its rows multiplied by exp(e), see
:class:`~adjsim.core.strain.Strain`. The force along the strain, W, is minus the derivative of the
energy by e as box and positions are stretched together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from adjsim.core.derived import derived_of, first_sources
from adjsim.core.parameters import leaves, point_of_differentiation, refuse_unknown
from adjsim.core.reading import Reading
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings, straight_through
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.evaluated import Evaluated
from adjsim.potentials.products import ParameterVJP, Tensors, VJPSum, derived_force, energy_vjp

Forced: TypeAlias = tuple[Tensor, Tensor]
# Takes the cotangents of force and W, and returns those of position and strain, and of parameters.
StrainedPullback: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, ParameterVJP]]

# The boxes of a potential: as they are given, and by whose rows nearest images are found.
_BOXES = "box", "image_box"


class Summed(Protocol):
    """A sum of energies, and the modules whose forces add up to its own."""

    @property
    def parts(self) -> Iterable[nn.Module]: ...

    def summands(self, position: Tensor) -> Iterable[nn.Module]: ...


class Strainable(Evaluated):
    """Base class of energies that can be evaluated in a box that a state carries.

    The methods differentiate the energy automatically. Subclasses may write them in closed form.

    Attributes:
        reads_values: whether an evaluation reads the values of positions, as one that builds a
            neighbour list does, so that ``torch.vmap`` cannot take it.
    """

    reads_values: ClassVar[bool] = False

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        """Compute the energy at a strain, differentiable."""
        return energy_at(self, position, strain)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        """Compute the force and W, of the shape of the strain, differentiable.

        The roundings are those of what pairs contribute to each, see
        :meth:`~adjsim.potentials.Potential.force`.
        """
        return ByAutograd(self, strained_energy).force(position, strain, roundings.force)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Tensors,
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        """Compute force and W, and a function of their cotangents v and c.

        The function returns the products with the derivatives by position, strain and parameters,
        each with the others fixed.
        """
        return ByAutograd(self, strained_energy).vjp(position, strain, parameters, roundings.force)


def strained_energy(module: nn.Module, position: Positions, strain: Strain) -> Energies:
    """Compute the energy of any module, as :meth:`Strainable.strained_energy`."""
    if isinstance(module, Strainable):
        return module.strained_energy(position, strain)
    return energy_at(module, position, strain)


def strained_force(
    module: nn.Module, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
) -> Forced:
    """Compute force and W of any module, as :meth:`Strainable.strained_force`."""
    if isinstance(module, Strainable):
        return module.strained_force(position, strain, roundings)
    return ByAutograd(module).force(position, strain, roundings.force)


def strained_vjp(
    module: nn.Module,
    position: Positions,
    strain: Strain,
    parameters: Tensors,
    roundings: Roundings = UNROUNDED_BOTH,
) -> tuple[Forced, StrainedPullback]:
    """Compute the product of any module, as :meth:`Strainable.strained_vjp`."""
    if isinstance(module, Strainable):
        return module.strained_vjp(position, strain, parameters, roundings)
    return ByAutograd(module).vjp(position, strain, parameters, roundings.force)


def summed_energy(whole: Summed, position: Positions, strain: Strain) -> Energies:
    """Sum the energies of the parts of a sum."""
    return reduce(add, [strained_energy(part, position, strain) for part in whole.parts])


def summed_force(
    whole: Summed, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
) -> Forced:
    """Sum the forces of the summands of a sum, and their W."""
    summands = whole.summands(position)
    return added([strained_force(part, position, strain, roundings) for part in summands])


def summed_vjp(
    whole: Summed,
    position: Positions,
    strain: Strain,
    parameters: Tensors,
    roundings: Roundings = UNROUNDED_BOTH,
) -> tuple[Forced, StrainedPullback]:
    """Sum the forces of the summands of a sum, their W, and their products."""
    summands = whole.summands(position)
    return added_vjp(
        [strained_vjp(part, position, strain, parameters, roundings) for part in summands]
    )


def added_vjp(parts: Sequence[tuple[Forced, StrainedPullback]]) -> tuple[Forced, StrainedPullback]:
    """Sum forces, their W, and their products."""

    def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
        found = [inner(v, c) for _, inner in parts]
        along, strained = added([x[:2] for x in found])
        return along, strained, VJPSum(tuple(rest for *_, rest in found))

    return added([values for values, _ in parts]), pullback


def added(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sum forces, and their W."""
    first, second = zip(*found, strict=True)
    return reduce(add, first), reduce(add, second)


def boxes_of(module: nn.Module) -> list[Tensor]:
    """Return the boxes of the parts of a module."""
    found = (part._buffers.get("box") for part in module.modules())
    return [box for box in found if box is not None]


def at_rest(moved: Tensor, position: Tensor, along: Tensor, strain: Strain) -> Tensor:
    """Compute the cotangent of a strain with the positions fixed.

    It is given as box and positions are stretched together, with the cotangent of positions.
    """
    return moved - strain.along(position, along)


def has_box(module: nn.Module) -> bool:
    """Return whether a part of a module has a box."""
    return bool(boxes_of(module))


def reference_box(module: nn.Module) -> Tensor:
    """Return the box of a module that has one, which a strain stretches."""
    return boxes_of(module)[0]


def follow_box(part: nn.Module) -> None:
    """Compute the tensors that follow from the box of a copy again.

    Numbers such as those of waves and of mesh points stay those of the box of the potential.
    """
    for rule in derived_of(type(part)):
        known = part._buffers.get(rule.name)
        if (
            known is not None
            and rule.name not in _BOXES
            and "box" in first_sources(type(part), rule.name)
        ):
            part._buffers[rule.name] = rule.function(part).to(known.device)


def energy_at(module: nn.Module, position: Tensor, strain: Strain) -> Tensor:
    """Compute an energy of a module in the boxes of systems, differentiable."""
    if not has_box(module):
        return nn.Module.__call__(module, position)
    copy_at, batch = stretched_copies(module), position.shape[:-2]

    def one(q: Tensor, e: Tensor) -> Tensor:
        return nn.Module.__call__(copy_at(strain._replace(value=e)), q)

    if not batch:
        return one(position, strain.value)
    # A module has one box, so systems are evaluated one by one, or as if they were.
    flat = position.reshape(-1, *position.shape[-2:])
    value = strain.value
    strains = value.expand(*batch, *value.shape[-2:]).reshape(-1, *value.shape[-2:])
    if any(getattr(part, "reads_values", False) for part in module.modules()):
        return torch.stack(list(map(one, flat, strains))).reshape(batch)
    return torch.vmap(one)(flat, strains).reshape(batch)


def stretched_copies(module: nn.Module) -> Callable[[Strain], Any]:
    """Return a function that copies a module into the box of one system."""
    reading = Reading(module)
    # A box may have another name first, in a part that shares it.
    kept = (part._buffers.get(name) for part in module.modules() for name in _BOXES)
    own = {id(x) for x in kept if x is not None}
    boxes = {
        id(x)
        for name, x in zip(reading.names, reading.tensors, strict=True)
        if name.rpartition(".")[2] in _BOXES or id(x) in own
    }

    def copy_at(strain: Strain) -> Any:
        tensors = [
            strain.stretched(x).to(x).reshape(x.shape) if id(x) in boxes else x
            for x in reading.tensors
        ]
        copy = reading.bound(tensors)
        for part in copy.modules():
            follow_box(part)
        return copy

    return copy_at


class ByAutograd:
    """Forces in boxes of systems, differentiated automatically from an energy of a module.

    A force is one pass forward and one back, which gives W too, and a product goes back once more.
    """

    def __init__(
        self, module: nn.Module, energy: Callable[[nn.Module, Tensor, Strain], Tensor] = energy_at
    ) -> None:
        self.module, self.energy = module, energy

    def force(self, position: Tensor, strain: Strain, rounding: Rounding = UNROUNDED) -> Forced:
        """Compute force and W, differentiable when grad mode is on."""
        if not has_box(self.module):
            value = self._force_without_box(position, rounding)
            return value, strain.along(position, value)
        create = torch.is_grad_enabled()
        smooth = self._differentiated(position, strain, create)
        if not rounding.rounds or not create:
            return smooth
        # A derivative with a graph comes from other kernels, and may differ in the last bit.
        same = self._differentiated(position, strain, False)
        return straight_through(smooth[0], same[0]), straight_through(smooth[1], same[1])

    def vjp(
        self, position: Tensor, strain: Strain, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Forced, StrainedPullback]:
        """Compute force and W, and their product with cotangents."""
        if not has_box(self.module):
            return self._vjp_without_box(position, strain, parameters, rounding)
        with torch.enable_grad():
            q, e = position.detach().requires_grad_(), strain.value.detach().requires_grad_()
            smooth = self._differentiated(q, strain._replace(value=e), True)
        what = f"the force of {type(self.module).__name__}"
        for value in smooth:
            refuse_unknown(value, self.module, [q, e, *parameters], what)
        values = smooth[0].detach(), smooth[1].detach()
        if rounding.rounds:
            with torch.no_grad():
                values = self._differentiated(position, strain, False)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
            pairs = [(x, y) for x, y in zip(smooth, (v, c), strict=True) if x.requires_grad]
            found: Sequence[Any] = (None,) * (2 + len(parameters))
            if pairs:
                outputs, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(outputs, (q, e, *parameters), given, allow_unused=True)
            along, strained = (
                torch.zeros_like(x) if g is None else g for x, g in zip((q, e), found, strict=False)
            )
            return along, strained, list(found[2:])

        return values, pullback

    def _force_without_box(self, position: Tensor, rounding: Rounding) -> Tensor:
        if not isinstance(self.module, Strainable):
            return derived_force(self.module, position, rounding)
        potential: Any = self.module
        return potential.force(position, *((rounding,) if rounding.rounds else ()))

    def _vjp_without_box(
        self, position: Tensor, strain: Strain, parameters: Tensors, rounding: Rounding
    ) -> tuple[Forced, StrainedPullback]:
        """Compute force, W and products of an energy that depends on positions alone.

        With W_a = sum_i q_ia F_ia by coordinate along rows, the cotangent of q is
        ``J (v + c q) + c F``, J that of F.
        """
        if isinstance(self.module, Strainable):
            potential: Any = self.module
            given = (rounding,) if rounding.rounds else ()
            value, product = potential.force_vjp(position, parameters, *given)
        else:
            value, product = energy_vjp(self.module, position, parameters, rounding)
        along = strain.along(position, value)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            found, rest = product(v + strain.dilated(position, c))
            return found + strain.pulled_back(value, c), torch.zeros_like(c), rest

        return (value, along), pullback

    def _differentiated(self, position: Tensor, strain: Strain, create: bool) -> Forced:
        """Compute minus the derivatives by position, and by a stretch of positions and box."""

        def total_energy(q: Tensor, u: Tensor, e: Tensor) -> Tensor:
            there = strain._replace(value=e + u)
            return self.energy(self.module, strain.dilated(q, torch.exp(u)), there).sum()

        at = strain.value
        if in_transform() or torch.compiler.is_compiling():
            by_both = torch.func.grad(total_energy, (0, 1))
            force, along = by_both(position, torch.zeros_like(at), at)
            return -force, -along
        with torch.enable_grad():
            q = position.view_as(position) if create else position.detach()
            q = q if q.requires_grad else point_of_differentiation(q)
            stretch = point_of_differentiation(torch.zeros_like(at))
            total = total_energy(q, stretch, at if create else at.detach())
            if not total.requires_grad:
                return torch.zeros_like(position), torch.zeros_like(at)
            found = torch.autograd.grad(total, (q, stretch), create_graph=create, allow_unused=True)
        force, along = (
            torch.zeros_like(x) if g is None else -g
            for x, g in zip((position, at), found, strict=True)
        )
        trained = position.requires_grad or at.requires_grad
        if trained or any(next(leaves(x), None) is not None for x in (force, along)):
            return force, along
        # Nothing but the leaves made here requires grad.
        return force.detach(), along.detach()
