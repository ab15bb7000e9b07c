"""Writes to tensors, and the check that a potential leaves its argument as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def version_of(x: Tensor) -> int:
    """Return how often torch has counted a write to a tensor."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def refuse_written(potential: nn.Module, position: Tensor, version: int) -> None:
    """Refuse a potential that has written into its argument since it had this version."""
    if version_of(position) != version:
        raise ValueError(
            f"{type(potential).__name__} writes into the position that it is given, which would "
            "change the state of the run (an assignment to a slice, or an operation such as "
            "add_). Work on position.clone(), or avoid operations in place."
        )
