"""Operations of torch that a trace replaces by printed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.convolutions import CONVOLUTIONS
from adjsim.compiler.factors import FACTOR_DECOMPOSITIONS

# Torch's own decompositions of these consist of operations that are printed.
COMPOSITE = (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
    "_weight_norm_interface", "addmv", "diag_embed", "dot", "elu", "elu_backward", "frac", "gelu",
    "gelu_backward", "hardtanh", "hardtanh_backward", "huber_loss", "huber_loss_backward",
    "leaky_relu", "leaky_relu_backward", "linalg_cross", "linalg_vector_norm",
    "log_sigmoid_backward", "log_sigmoid_forward", "logaddexp", "mish", "mish_backward",
    "mse_loss", "mse_loss_backward", "mv", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "repeat", "silu", "silu_backward", "sinc",
    "softplus", "softplus_backward", "tanh_backward", "threshold", "threshold_backward", "tril",
    "triu",
)  # fmt: skip
# Longest axis of which the maximum is printed as a formula.
LONGEST = 64
# Multiplications of the largest batch of matrix products that is printed as sums.
FEW_TERMS = 4096
Axes = Sequence[int] | None
Dtype = torch.dtype | None


@cache
def decompositions(exact: bool) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operations that are not printed themselves.

    In exact loops torch evaluates operations of its libraries, whose last bits are not printed.
    """
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return {
        **get_decompositions([getattr(aten, name) for name in COMPOSITE]),
        **({} if exact else {**FACTOR_DECOMPOSITIONS, **CONVOLUTIONS}),
        **({} if exact else {aten.topk.default: _topk, aten.prod.default: _prod}),
        **({} if exact else {aten.prod.dim_int: _prod}),
        aten.sum.default: _sum,
        aten.sum.dim_IntList: _sum,
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.amax.default: partial(_extreme, torch.maximum, aten.max.dim),
        aten.amin.default: partial(_extreme, torch.minimum, aten.min.dim),
        aten.argmax.default: partial(_place, aten.max.dim),
        aten.argmin.default: partial(_place, aten.min.dim),
        aten.bmm.default: _bmm,
        aten.constant_pad_nd.default: _pad,
        aten.cumprod.default: partial(_scan, aten.cumprod.default),
        aten.cumsum.default: partial(_scan, aten.cumsum.default),
        aten.diagonal_backward.default: _diagonal_backward,
        aten.diagonal_copy.default: lambda x, *axes: x.diagonal(*axes).clone(),
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.embedding.default: lambda weight, index, *_: weight[_unwrapped(index, len(weight))],
        aten.eye.default: lambda n, **options: _eye(n, n, **options),
        aten.eye.m: _eye,
        aten.isnan.default: lambda x: x != x,
        aten.slice_backward.default: _slice_backward,
        aten.std.correction: _std,
        aten.gather.default: _gather,
        aten.index_add.default: _index_add,
        aten.index_fill.int_Scalar: _fill,
        aten.index_fill.int_Tensor: _fill,
        aten.index_select.default: _index_select,
        aten.logsumexp.default: _logsumexp,
        aten.max.default: lambda x: aten.amax.default(x),
        aten.min.default: lambda x: aten.amin.default(x),
        aten.reflection_pad1d.default: partial(_edged, _reflected),
        aten.reflection_pad1d_backward.default: partial(_edged_backward, _reflected),
        aten.replication_pad1d.default: partial(_edged, _repeated),
        aten.replication_pad1d_backward.default: partial(_edged_backward, _repeated),
        aten.roll.default: _roll,
        aten.scatter.src: _scatter,
        aten.scatter.value: lambda x, dim, index, number: _scatter(
            x, dim, index, x.new_full((), number).expand(index.shape)
        ),
        aten.scatter_add.default: partial(_scatter, accumulate=True),
        aten.trace.default: lambda x: x.diagonal().sum(),
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        aten.any.default: lambda x: (x != 0).sum() > 0,
        aten.any.dim: lambda x, *axes: (x != 0).sum(*axes) > 0,
        aten.all.dim: lambda x, *axes: (x == 0).sum(*axes) == 0,
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


def _extreme(
    pair: Callable[..., Tensor],
    along: Callable[..., Any],
    x: Tensor,
    dim: Sequence[int] = (),
    keepdim: bool = False,
) -> Tensor:
    """Return the largest or smallest numbers along axes."""
    if x.ndim == 0 or not x.numel() or x.dtype == torch.bool:
        return NotImplemented
    if len(dim) == 1 and x.shape[dim[0]] <= LONGEST:
        found = reduce(pair, x.unbind(dim[0]))
        return found.unsqueeze(dim[0]) if keepdim else found
    axes = sorted({axis % x.ndim for axis in dim or range(x.ndim)}, reverse=True)
    for axis in axes:
        x = along(x, axis, keepdim)[0]
    return x


def _place(
    along: Callable[..., Any], x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    if x.ndim == 0 or x.dtype == torch.bool:
        return NotImplemented
    if dim is None:
        found = along(x.reshape(-1), 0)[1]
        return found.view((1,) * x.ndim) if keepdim else found
    return along(x, dim, keepdim)[1]


def _scan(along: Callable[..., Tensor], x: Tensor, dim: int, *, dtype: Dtype = None) -> Tensor:
    """Convert numbers before a scan, as torch does."""
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if x.ndim == 0 or wanted == x.dtype:
        return NotImplemented
    return along(x.to(wanted), dim)


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    if x.ndim == 0 or x.device.type != "cpu":
        return NotImplemented
    values, places = torch.ops.aten.sort.default(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


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


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor, accumulate: bool = False) -> Tensor:
    if not x.ndim or not index.ndim:
        return NotImplemented
    part = src[tuple(slice(n) for n in index.shape)]
    return x.index_put(_grid(x, dim, index), part, accumulate=accumulate)


def _embedding_backward(
    grad: Tensor, index: Tensor, length: int, padding: int, by_count: bool
) -> Tensor:
    if by_count:
        return NotImplemented
    zeros = grad.new_zeros(length, grad.shape[-1])
    part = torch.where((index == padding).unsqueeze(-1), 0, grad)
    return _put(zeros, 0, _unwrapped(index, length), part, True)


def _diagonal_backward(grad: Tensor, sizes: Sequence[int], offset: int, a: int, b: int) -> Tensor:
    count = len(sizes)
    order = [axis for axis in range(count) if axis not in (a % count, b % count)]
    order += [a % count, b % count]
    places = torch.arange(grad.shape[-1], device=grad.device)
    indices = [*[None] * (count - 2), places + max(0, -offset), places + max(0, offset)]
    zeros = grad.new_zeros([sizes[axis] for axis in order])
    found = torch.ops.aten.index_put.default(zeros, indices, grad)
    return found.permute([order.index(axis) for axis in range(count)]).contiguous()


def _reflected(places: Tensor, length: int) -> Tensor:
    return (length - 1) - ((length - 1) - places.abs()).abs()


def _repeated(places: Tensor, length: int) -> Tensor:
    return places.clamp(0, length - 1)


def _edged(read: Callable[[Tensor, int], Tensor], x: Tensor, pad: Sequence[int]) -> Tensor:
    """Pad the last axis by numbers of its own."""
    length = x.shape[-1]
    places = torch.arange(-pad[0], length + pad[1], device=x.device)
    return x.index_select(-1, read(places, length))


def _edged_backward(
    read: Callable[[Tensor, int], Tensor], grad: Tensor, x: Tensor, pad: Sequence[int]
) -> Tensor:
    places = read(torch.arange(-pad[0], x.shape[-1] + pad[1], device=x.device), x.shape[-1])
    return _put(grad.new_zeros(x.shape), -1 % x.ndim, places, grad, True)


def _prod(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    if not x.ndim or not x.numel() or x.device.type != "cpu":
        return NotImplemented
    if dim is None:
        return x.reshape(-1).cumprod(0, dtype=dtype)[-1]
    found = x.cumprod(dim, dtype=dtype).narrow(dim, x.shape[dim] - 1, 1)
    return found.clone() if keepdim else found.squeeze(dim).clone()


def _weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    of_g = (grad * v).sum(axes, keepdim=True) / norms
    return g / norms * (grad - v * (of_g / norms)), of_g


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    if not x.ndim:
        return NotImplemented
    index = index.reshape(-1)
    numbers = source if alpha == 1 else alpha * source
    return _put(x, dim, _unwrapped(index, x.shape[dim]), numbers, True)


def _fill(x: Tensor, dim: int, index: Tensor, number: Tensor | float) -> Tensor:
    if not x.ndim:
        return NotImplemented
    shape = list(x.shape)
    shape[dim] = index.numel()
    value = number.to(x.dtype) if isinstance(number, Tensor) else x.new_full((), number)
    return _put(x, dim, index.reshape(-1), value.expand(shape), False)


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
