"""Parametrisations by which an optimiser's numbers stay admissible.

An optimiser changes an unconstrained number; the parameter that a potential reads is a smooth
function of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number


class Positive(nn.Module):
    """Positive numbers, ``x = exp(y)``, as a parametrisation of torch::

        from torch.nn.utils.parametrize import register_parametrization

        register_parametrization(body, "youngs_modulus", Positive())

    The parameter keeps its value, and ``body.parameters()`` then has y in its place. Equal steps of
    y are equal ratios of x, so that numbers such as moduli may be wrong by powers of ten at first.
    """

    def forward(self, y: Tensor) -> Tensor:
        return torch.exp(y)

    def right_inverse(self, x: Tensor) -> Tensor:
        """Compute y; a number that is not positive is a ValueError."""
        if not bool((x > 0).all()):
            raise ValueError(f"Positive() needs positive numbers; got {float(x.min()):g}.")
        return torch.log(x)


class Between(nn.Module):
    """Numbers between two bounds, ``x = low + (high - low) / (1 + exp(-y))``.

    Register it as :class:`Positive` is. The bounds are excluded. Close to a bound x hardly depends
    on y, so a start should be away from both.

    Args:
        low, high: the bounds, finite. For one bound use :class:`Positive`.

    Raises:
        ValueError: bounds that are not finite, or not in order.
    """

    def __init__(self, low: float | int, high: float | int) -> None:
        super().__init__()
        self.low, self.high = as_number("low", low), as_number("high", high)
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(
                f"the bounds of Between must be finite; got {self.low:g} and {self.high:g}. For "
                "positive numbers use Positive()."
            )
        if not self.low < self.high:
            raise ValueError(f"low must be below high; got {self.low:g} and {self.high:g}.")

    def forward(self, y: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(y)

    def right_inverse(self, x: Tensor) -> Tensor:
        """Compute y; a number that is not between the bounds is a ValueError."""
        wrong = x[~((x > self.low) & (x < self.high))]
        if wrong.numel():
            raise ValueError(
                f"Between({self.low:g}, {self.high:g}) excludes {float(wrong[0]):g}: start with a "
                "number between the bounds."
            )
        return torch.logit((x - self.low) / (self.high - self.low))
