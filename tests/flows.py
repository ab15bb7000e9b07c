"""Vector fields that tests of Runge-Kutta steps share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Lorenz(nn.Module):
    """The equations of Lorenz (1963) with sigma = 10, rho = 28, beta = 8/3."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([10.0, 28.0, 8 / 3], dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        (a, b, c), (x, v, z) = self.numbers.unbind(), y.unbind(-1)
        return torch.stack([a * (v - x), x * (b - z) - v, x * v - c * z], -1)


class Linear(nn.Module):
    """dy/dt = a y."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.a * y


class DrivenPendulum(nn.Module):
    """A damped pendulum, driven by a force that depends on the time."""

    def __init__(self) -> None:
        super().__init__()
        self.damping = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
        self.drive = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        angle, velocity = y.unbind(-1)
        force = -torch.sin(angle) + self.drive * torch.cos(2 * t) - self.damping * velocity
        return torch.stack([velocity, force], -1)
