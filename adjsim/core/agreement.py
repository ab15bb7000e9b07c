"""Whether two evaluations of one computation agree to rounding, which integers do not have."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.autocast import autocast_state


def difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference of two tensors."""
    if not _is_rounded(x) or torch.equal(x, y):
        return 0.0
    found = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    return float(found.nan_to_num(nan=torch.inf).max())


def rounding(*tensors: Tensor) -> float:
    """Return the difference that rounding may make in a sum of these."""
    return epsilon(tensors[0]) ** 0.75 * sum(map(size, tensors))


def perturbed(x: Tensor, part: float) -> Tensor:
    """Change each number by this part of itself, or by some rounding errors if more."""
    if not _is_rounded(x):
        return x.detach().clone()
    # In the dtype of x, which has its rounding errors.
    signs = 1 - 2 * (torch.arange(x.numel(), device=x.device) % 2).to(x.dtype)
    return x.detach() * (1 + max(part, 4 * epsilon(x)) * signs.reshape(x.shape))


def epsilon(x: Tensor) -> float:
    """Return the relative rounding error of the coarsest dtype in which a number is computed."""
    if not _is_rounded(x):
        return 0.0
    return max(torch.finfo(kind).eps for kind in (x.dtype, *autocast_state()) if kind is not None)


def size(x: Tensor) -> float:
    """Return the largest size of a number."""
    if not _is_rounded(x) or not x.numel():
        return 0.0
    return float(x.detach().abs().nan_to_num(posinf=0.0).max())


def _is_rounded(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
