"""What an Ewald sum has beside its part in real space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from adjsim.core.box import refuse_trained_box
from adjsim.core.layout import materialise
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.charges.ewald.autograd import Forces, Product, forces_of
from adjsim.potentials.products import DeferredVJP, ParameterVJP, Pullback
from adjsim.potentials.strained import Forced, StrainedPullback, at_rest


class Complement(Potential):
    """The sum in reciprocal space, that over excluded pairs, and the energies of single charges."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        # No submodule: its tensors are those of the whole.
        self._whole = (whole,)

    @property
    def whole(self) -> Any:
        """The Ewald sum."""
        return self._whole[0]

    def forward(self, position: Positions) -> Energies:
        return self.whole.beyond(position)

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        refuse_trained_box(self.whole)
        charge = self.whole.checked_charges(position)
        found = [forces_of(make, position, charge)[0] for make in self.whole.charge_sums(position)]
        return materialise(reduce(add, [_rounded(x, rounding) for x in found]))

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        found, products = self._linearised(position, None)
        value = reduce(add, [_rounded(x, rounding) for x, _ in found])

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            with torch.no_grad():
                along, _, weights = zip(*(product(v, None) for product in products), strict=True)
                return materialise(reduce(add, along)), self._deferred(weights, position)

        return materialise(value), pullback

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        return self.whole.beyond(position, strain)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        charge = self.whole.checked_charges(position)
        makers = self.whole.charge_sums(position)
        return _added([forces_of(make, position, charge, strain) for make in makers], roundings)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Sequence[Tensor],
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        found, products = self._linearised(position, strain)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            with torch.no_grad():
                along, moved, weights = zip(*(product(v, c) for product in products), strict=True)
                by_strain = [
                    at_rest(x, position, more, strain) for x, more in zip(moved, along, strict=True)
                ]
                deferred = self._deferred(weights, position)
                return materialise(reduce(add, along)), reduce(add, by_strain), deferred

        return _added(found, roundings), pullback

    def _linearised(
        self, position: Tensor, strain: Strain | None
    ) -> tuple[list[Forces], list[Product]]:
        """Return force and W of each sum of charges, and its product."""
        with torch.no_grad():
            charge = self.whole.checked_charges(position)
            makers = self.whole.charge_sums(position)
            found = [make(strain).linearised(position, charge) for make in makers]
        return [values for values, _ in found], [product for _, product in found]

    def _deferred(self, weights: Sequence[Tensor], position: Tensor) -> DeferredVJP:
        # A method of the whole, which is one function in all steps of a run.
        charges = self.whole.checked_charges
        return DeferredVJP(self.whole, charges, reduce(add, weights), position)


def _added(found: Sequence[Forces], roundings: Roundings) -> Forced:
    """Sum forces and W, each rounded."""
    forces = [_rounded(force, roundings.force) for force, _ in found]
    rows = [_rounded(along, roundings.virial) for _, along in found]
    return materialise(reduce(add, forces)), reduce(add, rows)


def _rounded(force: Tensor, rounding: Rounding) -> Tensor:
    return rounding.round(force.unsqueeze(-2)).squeeze(-2)
