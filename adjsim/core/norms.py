"""Norms of numbers whose squares overflow or vanish, as derivatives along chaotic paths do."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the Euclidean norm over all axes, or over one."""
    x = x.abs()
    if not x.numel():
        return torch.linalg.vector_norm(x, dim=dim)
    unit = unit_of(x, dim)
    size = torch.linalg.vector_norm(x / unit, dim=dim)
    return size * (unit if dim is None else unit.squeeze(dim))


def unit_of(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest absolute entry, over one axis that is kept; 1 where it is no unit."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
