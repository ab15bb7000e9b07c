"""Operations of torch that a trace replaces by printed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

# Torch's own decompositions of these consist of operations that are printed.
COMPOSITE = (
    "addmv", "dot", "elu", "elu_backward", "frac", "gelu", "gelu_backward", "hardtanh",
    "hardtanh_backward", "huber_loss", "huber_loss_backward", "leaky_relu", "leaky_relu_backward",
    "linalg_cross", "linalg_vector_norm", "log_sigmoid_backward", "log_sigmoid_forward",
    "logaddexp", "mish", "mish_backward", "mse_loss", "mse_loss_backward", "mv",
    "native_layer_norm", "native_layer_norm_backward", "repeat", "silu", "silu_backward", "sinc",
    "softplus", "softplus_backward", "tanh_backward", "threshold", "threshold_backward",
)  # fmt: skip
# Longest axis of which the maximum is printed.
LONGEST = 64
Axes = Sequence[int] | None
Dtype = torch.dtype | None


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operations that are not printed themselves."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return {
        **get_decompositions([getattr(aten, name) for name in COMPOSITE]),
        aten.sum.default: _sum,
        aten.sum.dim_IntList: _sum,
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.amax.default: _amax,
        aten.any.default: lambda x: (x != 0).sum() > 0,
        aten.all.default: lambda x: (x == 0).sum() == 0,
    }


def _sum(x: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    """Sum one axis after the other, the last first.

    So the order of the terms does not depend on the memory order, and a sum over all pairs can
    share a loop with sums of rows.
    """
    axes = sorted({axis % x.ndim for axis in dim or range(x.ndim)}) if x.ndim else []
    long = [axis for axis in axes if x.shape[axis] > 1]
    if len(long) < 2:
        return NotImplemented
    return x.sum(long[-1], keepdim=True, dtype=dtype).sum(axes, keepdim=keepdim)


def _mean(x: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    if not (dtype or x.dtype).is_floating_point or not x.numel():
        return NotImplemented
    total = x.sum(list(dim or range(x.ndim)), keepdim=keepdim, dtype=dtype)
    return total / (x.numel() // total.numel())


def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    if x.ndim == 0 or len(dim) != 1 or not 0 < x.shape[dim[0]] <= LONGEST:
        return NotImplemented
    found = reduce(torch.maximum, x.unbind(dim[0]))
    return found.unsqueeze(dim[0]) if keepdim else found
