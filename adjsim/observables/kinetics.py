"""How the atoms move."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Frames = Float[Tensor, "time *batch atoms dim"]


def mean_squared_displacement(position: Frames) -> Float[Tensor, "time *batch"]:
    """``|q(t) - q(0)|^2`` averaged over atoms, length^2, from positions that were not wrapped into a box."""
    return ((position - position[0]) ** 2).sum(-1).mean(-1)


def velocity_autocorrelation(velocity: Frames, lags: int) -> Float[Tensor, "lags *batch"]:
    """``<v(t) . v(0)> / dim`` averaged over atoms and time origins, for lags of 0 to ``lags - 1`` frames.

    It begins at kT/m at equilibrium.
    """
    frames = velocity.shape[0]
    if not 1 <= lags <= frames:
        raise ValueError(f"lags must be between 1 and the number of frames, {frames}; got {lags}.")
    products = [(velocity[: frames - k] * velocity[k:]).mean((0, -1, -2)) for k in range(lags)]
    return torch.stack(products)
