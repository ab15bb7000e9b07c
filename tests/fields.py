"""Vector fields to test on: small, smooth, dependent on time, with every parameter trainable."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import SDE
from tests.problems import parameter


class Pair(NamedTuple):
    """Two fields of different width."""

    first: Tensor
    second: Tensor


class Net(nn.Module):
    """A small network of time and state, with a decay that keeps it bounded."""

    def __init__(self, n: int = 3, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(n + 1, width, dtype=torch.float64)
        self.outer = nn.Linear(width, n, dtype=torch.float64)
        self.decay = parameter(0.3)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        time = t.expand(*y.shape[:-1], 1)
        hidden = torch.tanh(self.inner(torch.cat([y, time], -1)))
        return self.outer(hidden) - self.decay * y


class PairNet(nn.Module):
    """The same network on a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, t: Tensor, y: Pair) -> Pair:
        whole = self.net(t, torch.cat(tuple(y), -1))
        return Pair(whole[..., :1], whole[..., 1:])


class Diffusion(nn.Module):
    """A diffusion of each kind of noise: an entry depends on its own entry of y alone."""

    def __init__(self, noise: str, n: int = 3, columns: int = 2) -> None:
        super().__init__()
        self.noise = noise
        generator = torch.Generator().manual_seed(2)
        shape = (n, columns) if noise in ("additive", "general") else (n,)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        self.size = nn.Parameter(0.2 + 0.4 * drawn)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        size = self.size * (1 + 0.2 * torch.sin(t))
        if self.noise == "additive":
            return size.expand(*y.shape[:-1], *size.shape)
        if self.noise == "general":
            return size * torch.cos(y).unsqueeze(-1)
        return size * torch.cos(y)


class PairDiffusion(nn.Module):
    """The same diffusion on a named tuple."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.whole = Diffusion(noise)

    def forward(self, t: Tensor, y: Pair) -> Pair:
        found, axis = self.whole(t, torch.cat(tuple(y), -1)), y.first.ndim - 1
        return Pair(*found.split([1, 2], axis))


def start(batch: tuple[int, ...] = (4,), n: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*batch, n, generator=generator, dtype=torch.float64)


def pair(y: Tensor) -> Pair:
    return Pair(y[..., :1], y[..., 1:])


def equation(noise: str | None, named: bool = False) -> Any:
    """The ODE, or the SDE of a noise, on a tensor or on a named tuple."""
    drift = PairNet() if named else Net()
    if noise is None:
        return ODE(drift)
    return SDE(drift, PairDiffusion(noise) if named else Diffusion(noise), noise=noise)
