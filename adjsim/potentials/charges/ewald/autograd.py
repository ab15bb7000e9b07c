"""Sums in closed form as functions of autograd, which keeps no intermediate results of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from adjsim.core.state import in_transform
from adjsim.potentials.strained import at_rest

# The force, and the force along the strain, W, ``(*batch, 1, axes)``, or by coordinate.
Forces: TypeAlias = tuple[Tensor, Tensor]
# Takes the cotangents v of the force and c of W, None in a box that does not move. Returns those of
# the position, of the strain as box and positions are stretched together, and of charges.
Product: TypeAlias = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


class ChargeSum(ABC):
    """A part of the energy of charges ``(atoms,)``, with its derivatives in closed form."""

    @abstractmethod
    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the energy, ``(*batch,)``."""

    @abstractmethod
    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Forces, Product]:
        """Compute force and W, and a function of their cotangents.

        In a box that does not move W and the cotangent of strain may be without entries.
        """

    @abstractmethod
    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain."""


# Makes a part in the box of the potential, or in those of systems of these strains.
Maker: TypeAlias = Callable[..., ChargeSum]


def forces_of(make: Maker, position: Tensor, charge: Tensor, *strain: Tensor) -> Forces:
    """Compute the force and W of a part, differentiable."""
    point = position, charge, *strain
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in point)
    if not wanted or in_transform() or forward_ad._current_level >= 0:
        return make(*strain).linearised(position, charge)[0]
    return _Forces.apply(make, *point)


class _Forces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Maker, position: Tensor, charge: Tensor, *strain: Tensor) -> Forces:
        ctx.make = make
        ctx.save_for_backward(position, charge, *strain)
        return make(*strain).linearised(position, charge)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        make: Maker = ctx.make
        position, charge, *strain = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The inputs may depend on each other, which torch.autograd.grad would follow.
            def again(q: Tensor, z: Tensor, *e: Tensor) -> Forces:
                return make(*e).linearised(q, z)[0]

            return None, *torch.func.vjp(again, position, charge, *strain)[1](cotangents)
        v, c = cotangents
        product = make(*strain).linearised(position, charge)[1]
        along, moved, weight = product(v, c if strain else None)
        return None, along, weight, *(at_rest(moved, position, along, e) for e in strain)
