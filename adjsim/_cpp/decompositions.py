"""Operations of torch that a trace replaces by printed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions

# Torch's own decompositions of these consist of operations that are printed.
COMPOSITE = (
    "addmv", "dot", "elu", "elu_backward", "frac", "gelu", "gelu_backward", "hardtanh",
    "hardtanh_backward", "huber_loss", "huber_loss_backward", "leaky_relu", "leaky_relu_backward",
    "linalg_cross", "linalg_vector_norm", "log_sigmoid_backward", "log_sigmoid_forward",
    "logaddexp", "mish", "mish_backward", "mse_loss", "mse_loss_backward", "mv",
    "native_layer_norm", "native_layer_norm_backward", "repeat", "silu", "silu_backward", "sinc",
    "softplus", "softplus_backward", "tanh_backward", "threshold", "threshold_backward",
)  # fmt: skip


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operations that are not printed themselves."""
    return get_decompositions([getattr(torch.ops.aten, name) for name in COMPOSITE])
