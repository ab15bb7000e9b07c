"""Norms of numbers whose squares overflow or vanish, as derivatives along chaotic paths do."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the Euclidean norm over all axes, or over one."""
    x = x.abs()
    if not x.numel():
        return torch.linalg.vector_norm(x, dim=dim)
    largest = x.amax() if dim is None else x.amax(dim, keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    size = torch.linalg.vector_norm(x / unit, dim=dim)
    return size * (unit if dim is None else unit.squeeze(dim))
