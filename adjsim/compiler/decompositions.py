"""Operations of torch that a trace replaces by printed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

# Torch's own decompositions of these consist of operations that are printed.
COMPOSITE = (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
    "addmv", "dot", "elu", "elu_backward", "frac", "gelu", "gelu_backward", "hardtanh",
    "hardtanh_backward", "huber_loss", "huber_loss_backward", "leaky_relu", "leaky_relu_backward",
    "linalg_cross", "linalg_vector_norm", "log_sigmoid_backward", "log_sigmoid_forward",
    "logaddexp", "mish", "mish_backward", "mse_loss", "mse_loss_backward", "mv",
    "native_layer_norm", "native_layer_norm_backward", "repeat", "silu", "silu_backward", "sinc",
    "softplus", "softplus_backward", "tanh_backward", "threshold", "threshold_backward",
)  # fmt: skip
# Longest axis of which the maximum is printed.
LONGEST = 64
# Multiplications of the largest batch of matrix products that is printed as sums.
FEW_TERMS = 4096
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
        aten.bmm.default: _bmm,
        aten.constant_pad_nd.default: _pad,
        aten.embedding.default: lambda weight, index, *_: weight[_unwrapped(index, len(weight))],
        aten.eye.default: lambda n, **options: _eye(n, n, **options),
        aten.eye.m: _eye,
        aten.isnan.default: lambda x: x != x,
        aten.slice_backward.default: _slice_backward,
        aten.std.correction: _std,
        aten.gather.default: _gather,
        aten.index_add.default: _index_add,
        aten.index_select.default: _index_select,
        aten.logsumexp.default: _logsumexp,
        aten.roll.default: _roll,
        aten.scatter_add.default: _scatter_add,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
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


def _bmm(x: Tensor, y: Tensor) -> Tensor:
    if x.numel() * y.shape[-1] > FEW_TERMS or not x.dtype.is_floating_point:
        return NotImplemented
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    for k in range(len(pad) // 2):
        axis, (before, after) = x.ndim - 1 - k, pad[2 * k : 2 * k + 2]
        shape = list(x.shape)
        ends = []
        for length in (before, after):
            shape[axis] = max(0, length)
            ends.append(x.new_full(shape, value))
        begin, stop = max(0, -before), x.shape[axis] - max(0, -after)
        x = torch.cat([ends[0], x.narrow(axis, begin, stop - begin), ends[1]], axis)
    return x.clone() if not pad else x


def _gather(x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    return x[_grid(x, dim, index)] if x.ndim and index.ndim else NotImplemented


def _unwrapped(index: Tensor, length: int) -> Tensor:
    """Put negative places out of range, since these operations do not count them from the end."""
    return torch.where(index < 0, length, index)


def _grid(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, ...]:
    """Return index tensors of all axes, of which that of one axis is given."""
    axes = []
    for axis, length in enumerate(index.shape):
        shape = [1] * index.ndim
        shape[axis] = length
        axes.append(torch.arange(length, device=index.device).view(shape))
    axes[dim % index.ndim] = _unwrapped(index, x.shape[dim])
    return tuple(axes)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    if not x.ndim or not index.ndim:
        return NotImplemented
    part = src[tuple(slice(n) for n in index.shape)]
    return x.index_put(_grid(x, dim, index), part, accumulate=True)


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    if not x.ndim:
        return NotImplemented
    index = index.reshape(-1)
    numbers = source if alpha == 1 else alpha * source
    return _put(x, dim, _unwrapped(index, x.shape[dim]), numbers, True)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return NotImplemented if index.ndim or not x.ndim else x.index_select(dim, index.reshape(1))


def _put(x: Tensor, dim: int, index: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """Write, or add, numbers at places along an axis."""
    indices = [*[None] * (dim % x.ndim), index]
    return torch.ops.aten.index_put.default(x, indices, values, accumulate)


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    axes = tuple(dim)
    if not x.ndim or x.is_complex():
        return NotImplemented
    largest = x.amax(axes, keepdim=True)
    # Infinite numbers are their own logarithms of sums.
    largest = torch.where(largest.abs() == torch.inf, 0.0, largest)
    total = (x - largest).exp().sum(axes, keepdim=True).log() + largest
    return total if keepdim else total.squeeze(axes)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        length = x.shape[dim]
        if length:
            first = length - shift % length
            parts = [x.narrow(dim, first, length - first), x.narrow(dim, 0, first)]
            x = torch.cat(parts, dim)
    return x


def _var_mean(
    x: Tensor, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if x.is_complex():
        return NotImplemented
    axes = tuple(dim if dim else range(x.ndim))
    mean = x.mean(axes, keepdim=True)
    total = ((x - mean) ** 2).sum(axes, keepdim=keepdim)
    terms = x.numel() // max(1, mean.numel())
    divisor = max(0, terms - (1 if correction is None else correction))
    return total / divisor, mean if keepdim else mean.squeeze(axes)


def _var(x: Tensor, dim: Axes = None, **options: Any) -> Tensor:
    return NotImplemented if x.is_complex() else _var_mean(x, dim, **options)[0]


def _std(x: Tensor, dim: Axes = None, **options: Any) -> Tensor:
    return NotImplemented if x.is_complex() else _var_mean(x, dim, **options)[0].sqrt()


def _eye(n: int, m: int, *, dtype: Dtype = None, device: Any = None, **_: Any) -> Tensor:
    rows, columns = torch.arange(n, device=device), torch.arange(m, device=device)
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


def _slice_backward(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    if step == 1:
        return NotImplemented
    places = torch.arange(sizes[dim], device=grad.device)[start:end:step]
    return _put(grad.new_zeros(tuple(sizes)), dim, places, grad, False)
