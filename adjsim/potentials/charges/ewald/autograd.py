"""Sums in closed form as functions of autograd, which keeps no intermediate results of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adjsim.core.rows import differentiates_backward, pulled_together
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.transforms import in_forward_mode
from adjsim.potentials.strained import at_rest

# The force, and the force along the strain, W, of the shape of the strain.
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

        In a box that does not move W and the cotangent of strain have no entries.
        """

    @abstractmethod
    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain."""


# Makes a part in the box of the potential (None), or in those of systems.
Maker: TypeAlias = Callable[[Strain | None], ChargeSum]


def forces_of(
    make: Maker, position: Tensor, charge: Tensor, strain: Strain | None = None
) -> Forces:
    """Compute the force and W of a part, differentiable."""
    value, rows = strain or (None, None)
    point = position, charge, value
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in point)
    if not wanted or in_transform() or in_forward_mode():
        return make(strain).linearised(position, charge)[0]
    return _Forces.apply(make, rows, *point)


class _Forces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        make: Maker,
        rows: Tensor | None,
        position: Tensor,
        charge: Tensor,
        value: Tensor | None,
    ) -> Forces:
        ctx.make, ctx.rows = make, rows
        ctx.save_for_backward(position, charge, value)
        return make(_strain(value, rows)).linearised(position, charge)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        make: Maker = ctx.make
        position, charge, value = ctx.saved_tensors
        strain = _strain(value, ctx.rows)
        if differentiates_backward():
            # The inputs may depend on each other, which torch.autograd.grad would follow.
            def again(q: Tensor, z: Tensor, *e: Tensor) -> Forces:
                here = None if strain is None else strain._replace(value=e[0])
                return make(here).linearised(q, z)[0]

            point = (position, charge) if value is None else (position, charge, value)
            found = torch.func.vjp(again, *point)[1](cotangents)
            return (None, None, *found, None)[:5]
        product = make(strain).linearised(position, charge)[1]

        def pull(v: Tensor, c: Tensor) -> tuple[Tensor | None, ...]:
            along, moved, weight = product(v, None if strain is None else c)
            by_strain = None if strain is None else at_rest(moved, position, along, strain)
            return along, weight, by_strain

        # The library of meshes takes rows of cotangents one by one.
        return None, None, *pulled_together(pull, cotangents)


def _strain(value: Tensor | None, rows: Tensor | None) -> Strain | None:
    return None if value is None else Strain(value, rows)
