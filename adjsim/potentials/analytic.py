"""Sums over coordinates, and potentials with closed forms for tests, teaching and development."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import declared
from adjsim.core.rounding import Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.closed_form import ClosedForm
from adjsim.potentials.evaluated import DeclaredModule
from adjsim.potentials.products import DeferredVJP, Elementwise, Pullback


class SeparablePotential(DeclaredModule, Elementwise, ClosedForm, inherits_forces=True):
    """A potential ``U = sum over atoms and dimensions of u(q)``.

    ``element`` is u, ``slope`` is u' and ``curvature`` is u'', elementwise.
    """

    def forward(self, position: Positions) -> Energies:
        return self.element(position).sum((-1, -2))

    def linearised(self, position: Tensor, rounding: Rounding) -> tuple[Tensor, Pullback]:
        def product(v: Tensor) -> tuple[Tensor, DeferredVJP]:
            return -self.curvature(position) * v, DeferredVJP(self, self.slope, -v, position)

        return -self.slope(position), product


class Harmonic(SeparablePotential):
    """A harmonic well, ``U = sum k/2 (q - center)^2`` over atoms and dimensions.

    Args:
        {parameters}
    """

    shapes_of_declared = "a scalar or anything that broadcasts against ``(atoms, dim)``"

    k: Tensor = declared("stiffness, energy / length^2", 1.0)
    center: Tensor = declared("rest position, length", 0.0)

    def element(self, x: Tensor) -> Tensor:
        return 0.5 * self.k.to(x) * (x - self.center.to(x)) ** 2

    def slope(self, x: Tensor) -> Tensor:
        return self.k.to(x) * (x - self.center.to(x))

    def curvature(self, x: Tensor) -> Tensor:
        return self.k.to(x).expand_as(x)


class AsymmetricDoubleWell(SeparablePotential):
    """A tilted double well, ``U = sum barrier (q^2 - 1)^2 + asymmetry q``.

    The sum is over atoms and dimensions. Lengths are in units of the distance of the wells from the
    origin.

    Args:
        {parameters}
    """

    barrier: Tensor = declared(
        "height of the barrier between the wells at -1 and 1 without asymmetry, energy", 1.0
    )
    asymmetry: Tensor = declared("tilt, energy / length, positive favours the left well", 0.0)

    def element(self, x: Tensor) -> Tensor:
        return self.barrier.to(x) * (x * x - 1) ** 2 + self.asymmetry.to(x) * x

    def slope(self, x: Tensor) -> Tensor:
        return 4 * self.barrier.to(x) * (x * x - 1) * x + self.asymmetry.to(x)

    def curvature(self, x: Tensor) -> Tensor:
        return 4 * self.barrier.to(x) * (3 * x * x - 1)


class DoubleWell(SeparablePotential):
    """A double well, ``U = sum barrier (q^2 - 1)^2``.

    Its wells at -1 and 1 are equal. The sum is over atoms and dimensions.

    Args:
        {parameters}
    """

    barrier: Tensor = declared("height of the barrier at the origin, energy", 1.0)

    def element(self, x: Tensor) -> Tensor:
        return self.barrier.to(x) * (x * x - 1) ** 2

    def slope(self, x: Tensor) -> Tensor:
        return (x * x - 1) * x * (4 * self.barrier.to(x))

    def curvature(self, x: Tensor) -> Tensor:
        return (3 * x * x - 1) * (4 * self.barrier.to(x))


class MullerBrown(Potential):
    """The surface of Muller and Brown in two dimensions, a sum of four Gaussians::

        U = sum over atoms and k of A_k exp(a_k X^2 + b_k X Y + c_k Y^2)
        X = x - x_k, Y = y - y_k

    See Muller and Brown, Theor. Chim. Acta 53, 75 (1979). It has three minima joined by a curved
    valley, and is the standard test of barrier crossing. Energies run from -147 to far above 100,
    so temperatures of 10 to 20 are usual. Its constants are not trained.
    """

    amplitude: Tensor
    shape: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        quadratic = [[-1.0, 0.0, -10.0], [-1.0, 0.0, -10.0], [-6.5, 11.0, -6.5], [0.7, 0.6, 0.7]]
        for name, value in (
            ("amplitude", [-200.0, -100.0, -170.0, 15.0]),
            ("shape", quadratic),
            ("center", [[1.0, 0.0], [0.0, 0.5], [-0.5, 1.5], [-1.0, 1.0]]),
        ):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def forward(self, position: Positions) -> Energies:
        if position.shape[-1] != 2:
            raise ValueError(
                f"MullerBrown needs two dimensions; position has dim {position.shape[-1]}."
            )
        amplitude, shape, center = (
            x.to(position) for x in (self.amplitude, self.shape, self.center)
        )
        dx, dy = (position.unsqueeze(-2) - center).unbind(-1)
        exponent = shape[:, 0] * dx * dx + shape[:, 1] * dx * dy + shape[:, 2] * dy * dy
        return (amplitude * exponent.exp()).sum((-1, -2))
