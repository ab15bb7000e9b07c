"""The base class of potentials with a force and its product in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.products import ParameterVJP, Pullback, Tensors


class ClosedForm(Potential):
    """A potential that computes its force and the product of the force in closed form."""

    def linearised(self, position: Tensor, rounding: Rounding, /) -> tuple[Tensor, Pullback]:
        """Compute the force with a graph, and its product, which is called without one."""
        raise TypeError(f"{type(self).__name__} has no linearised(position, rounding).")

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return self.linearised(position, rounding)[0]

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            value, product = self.linearised(position, rounding)

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            with torch.no_grad():
                return product(v)

        return value, pullback
