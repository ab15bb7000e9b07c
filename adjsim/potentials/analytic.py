"""Potentials with closed forms, for tests, teaching and method development."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.parameters import register
from adjsim.core.typing import Energies, Number, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.separable import SeparablePotential


class Harmonic(SeparablePotential):
    """A harmonic well, ``U = sum k/2 (q - center)^2`` over atoms and dimensions.

    Args:
        k: stiffness, energy / length^2; a scalar or anything that broadcasts against
            ``(atoms, dim)``.
        center: rest position, length; likewise.
    """

    k: Tensor
    center: Tensor

    def __init__(self, k: Number = 1.0, center: Number = 0.0) -> None:
        super().__init__()
        register(self, "k", k)
        register(self, "center", center)

    def element(self, x: Tensor) -> Tensor:
        return 0.5 * self.k.to(x) * (x - self.center.to(x)) ** 2

    def slope(self, x: Tensor) -> Tensor:
        return self.k.to(x) * (x - self.center.to(x))

    def curvature(self, x: Tensor) -> Tensor:
        return self.k.to(x).expand_as(x)


class AsymmetricDoubleWell(SeparablePotential):
    """A tilted double well, ``U = sum barrier (q^2 - 1)^2 + asymmetry q``.

    The sum is over atoms and dimensions.

    Args:
        barrier: height of the barrier between the wells at -1 and 1 if the asymmetry is zero,
            energy. Lengths are in units of the distance of the wells from the origin.
        asymmetry: tilt, energy / length; positive favours the left well.
    """

    barrier: Tensor
    asymmetry: Tensor

    def __init__(self, barrier: Number = 1.0, asymmetry: Number = 0.0) -> None:
        super().__init__()
        register(self, "barrier", barrier)
        register(self, "asymmetry", asymmetry)

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
        barrier: height of the barrier at the origin, energy.
    """

    barrier: Tensor

    def __init__(self, barrier: Number = 1.0) -> None:
        super().__init__()
        register(self, "barrier", barrier)

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
    so temperatures of 10 to 20 are usual. Its constants are part of its definition and are not
    trained.
    """

    amplitude: Tensor
    shape: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "amplitude", torch.tensor([-200.0, -100.0, -170.0, 15.0], dtype=torch.float64)
        )
        quadratic = [[-1.0, 0.0, -10.0], [-1.0, 0.0, -10.0], [-6.5, 11.0, -6.5], [0.7, 0.6, 0.7]]
        self.register_buffer("shape", torch.tensor(quadratic, dtype=torch.float64))
        centers = [[1.0, 0.0], [0.0, 0.5], [-0.5, 1.5], [-1.0, 1.0]]
        self.register_buffer("center", torch.tensor(centers, dtype=torch.float64))

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
