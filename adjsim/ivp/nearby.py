"""States, arguments and times near those of a start, at which functions show what they read."""

import torch
from torch import Tensor

# Relative change of states and arguments that shows what depends on them.
NUDGE = 1e-3


def nudged(x: Tensor) -> Tensor:
    """Return a tensor near another one, each entry with a change of its own."""
    size = max(NUDGE, 16 * torch.finfo(x.dtype).eps ** 0.5)
    each = torch.arange(x.numel(), dtype=torch.float64, device=x.device).reshape(x.shape)
    return x + size * (1 + x.abs()) * (1 + 0.5 * torch.cos(each**2)).to(x)


def near_start(begin: Tensor, end: Tensor) -> Tensor:
    """Return times inside of time spans, where rates that begin at zero no longer vanish."""
    return begin + NUDGE * (end - begin)
