"""Convolutions along one axis as matrix products, for loops that are not exact.

With the numbers of x that a kernel of K numbers reads, ``columns[n, o, i, k] =
x[n, i, s o + d k - p]`` for stride s, dilation d and padding p, a convolution is
``y[n, c, o] = sum_ik w[c, i, k] columns[n, o, i, k]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sizes = Sequence[int]
# Multiplications of the largest convolution that is printed. Torch's libraries are faster beyond.
LARGEST = 2**15


class _Steps(NamedTuple):
    stride: int
    padding: int
    dilation: int


def _places(outputs: int, kernel: int, steps: _Steps, like: Tensor) -> Tensor:
    """Return the places in a padded row that each output reads."""
    first = steps.stride * torch.arange(outputs, device=like.device)
    return first.unsqueeze(-1) + steps.dilation * torch.arange(kernel, device=like.device)


def _columns(x: Tensor, outputs: int, kernel: int, steps: _Steps) -> Tensor:
    """Return what each output reads, ``(n outputs, inputs kernel)``."""
    padded = torch.constant_pad_nd(x, [steps.padding, steps.padding])
    stride, dilation = steps.stride, steps.dilation
    last = stride * (outputs - 1) + 1
    parts = [padded[..., dilation * k :][..., :last:stride] for k in range(kernel)]
    return torch.stack(parts, -1).transpose(1, 2).reshape(len(x) * outputs, -1)


def _product(x: Tensor, weight: Tensor, outputs: int, steps: _Steps) -> Tensor:
    columns = _columns(x, outputs, weight.shape[-1], steps)
    found = columns @ weight.reshape(len(weight), -1).T
    return found.view(len(x), outputs, len(weight)).transpose(1, 2).contiguous()


def _transposed(grad: Tensor, weight: Tensor, length: int, steps: _Steps) -> Tensor:
    """Return the product of the transpose, ``(n, inputs, length)``: each output is added back."""
    batch, _, outputs = grad.shape
    _, inputs, kernel = weight.shape
    columns = grad.transpose(1, 2).reshape(batch * outputs, -1) @ weight.flatten(1)
    columns = columns.view(batch, outputs, inputs, kernel).transpose(1, 2)
    padded = grad.new_zeros(batch, inputs, length + 2 * steps.padding)
    places = [None, None, _places(outputs, kernel, steps, grad)]
    found = torch.ops.aten.index_put.default(padded, places, columns, True)
    return found[..., steps.padding : steps.padding + length].contiguous()


def _is_printed(x: Tensor, weight: Tensor, groups: int) -> bool:
    # The number of multiplications with stride one and without padding.
    small = len(x) * x.shape[-1] * weight.numel() <= LARGEST
    known = x.dtype in (torch.float64, torch.float32) and x.device.type == "cpu"
    return x.ndim == 3 and groups == 1 and small and known and x.numel() > 0


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes,
    transposed: bool, output_padding: Sizes, groups: int,
) -> Tensor:  # fmt: skip
    if not _is_printed(x, weight, groups):
        return NotImplemented
    steps = _Steps(stride[0], padding[0], dilation[0])
    reach = steps.dilation * (weight.shape[-1] - 1) + 1 - 2 * steps.padding
    if transposed:
        length = steps.stride * (x.shape[-1] - 1) + reach + output_padding[0]
        found = _transposed(x, weight, length, steps)
    else:
        found = _product(x, weight, (x.shape[-1] - reach) // steps.stride + 1, steps)
    return found if bias is None else found + bias.unsqueeze(-1)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sizes | None, stride: Sizes,
    padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if not _is_printed(x, weight, groups):
        return NotImplemented
    steps = _Steps(stride[0], padding[0], dilation[0])
    # A transposed convolution has the places of x and of its result exchanged.
    read, made = (grad, x) if transposed else (x, grad)
    of_x = of_weight = None
    if mask[0]:
        of_x = (_product if transposed else _transposed)(grad, weight, x.shape[-1], steps)
    if mask[1]:
        columns = _columns(read, made.shape[-1], weight.shape[-1], steps)
        rows = made.transpose(0, 1).reshape(made.shape[1], -1)
        of_weight = (rows @ columns).view(weight.shape)
    return of_x, of_weight, grad.sum((0, 2)) if mask[2] else None


CONVOLUTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
