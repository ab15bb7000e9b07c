"""Sums in closed form as functions of autograd, which keeps no intermediate results of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from adjsim.core.state import in_transform

Product = Callable[[Tensor], tuple[Tensor, Tensor]]


class ChargeSum(ABC):
    """A part of the energy of charges ``(atoms,)``, with its derivatives in closed form."""

    @abstractmethod
    def energy(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the energy, ``(*batch,)``."""

    @abstractmethod
    def linearised(self, position: Tensor, charge: Tensor) -> tuple[Tensor, Product]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dcharge)."""

    @abstractmethod
    def virial(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain."""

    def force(self, position: Tensor, charge: Tensor) -> Tensor:
        """Compute the force, ``(*batch, atoms, 3)``."""
        return self.linearised(position, charge)[0]


def force_of(part: ChargeSum, position: Tensor, charge: Tensor) -> Tensor:
    """Compute the force of a part, differentiable."""
    wanted = torch.is_grad_enabled() and (position.requires_grad or charge.requires_grad)
    if not wanted or in_transform() or forward_ad._current_level >= 0:
        return part.force(position, charge)
    return _Force.apply(part, position, charge)


class _Force(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: ChargeSum, position: Tensor, charge: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(position, charge)
        return part.force(position, charge)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, Tensor, Tensor]:
        (v,), (position, charge) = cotangents, ctx.saved_tensors
        part: ChargeSum = ctx.part
        if torch.is_grad_enabled():
            # The inputs may depend on each other, which torch.autograd.grad would follow.
            return None, *torch.func.vjp(part.force, position, charge)[1](v)
        return None, *part.linearised(position, charge)[1](v)
