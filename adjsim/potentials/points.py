"""Forces at a point: a position, or a position and the strain of its box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from adjsim.core.layout import materialise
from adjsim.core.rounding import UNROUNDED_BOTH, Roundings
from adjsim.core.strain import Strain
from adjsim.potentials.products import ParameterVJP
from adjsim.potentials.strained import reference_box, strained_force, strained_vjp


class PositionForces(Protocol):
    """The force of a module and its product at a position."""

    potential: nn.Module

    def force(self, t: Any, position: Tensor) -> Tensor: ...
    def force_vjp(
        self, t: Any, position: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ParameterVJP]]]: ...


class ForcesAt:
    """Forces of a module at a point, a position or a position and a strain, and their products.

    They are a tuple: the force, and with a strain also W. Products take and return tuples.
    """

    def __init__(self, forces: PositionForces, roundings: Roundings = UNROUNDED_BOTH) -> None:
        self.potential, self._forces, self._roundings = forces.potential, forces, roundings

    def values(self, t: Any, point: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the forces at a point and a time."""
        if len(point) == 1:
            return (self._forces.force(t, point[0]),)
        position, strain = self._at(point)
        return strained_force(self.potential, position, strain, self._roundings)

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
        position, strain = self._at(point)
        values, strained = strained_vjp(
            self.potential, position, strain, parameters, self._roundings
        )

        def both(v: Tensor, c: Tensor) -> tuple[tuple[Tensor, ...], ParameterVJP]:
            along, moved, rest = strained(materialise(v), materialise(c))
            return (along, moved), rest

        return values, both

    def _at(self, point: Sequence[Tensor]) -> tuple[Tensor, Strain]:
        position, value = map(materialise, point)
        return position, Strain.of(reference_box(self.potential), value)
