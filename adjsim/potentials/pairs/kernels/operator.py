"""The pair operator of torch, which evaluates a kernel.

A traced step contains the operators ``adjsim::pairs``, which name their kernel. Anywhere else the
kernel is called directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing
from adjsim.potentials.pairs.kernels.kernel import ENERGY, FORCE, KERNELS, PRODUCT, Kernel


@torch.library.custom_op("adjsim::pairs", mutates_args=())
def pairs(
    position: Tensor,
    vector: Tensor | None,
    weight: Tensor | None,
    operands: Sequence[Tensor],
    box: Tensor | None,
    species: Tensor | None,
    exclusions: Tensor | None,
    spacing: Tensor | None,
    kernel: str,
) -> list[Tensor]:
    """Evaluate a kernel. The outputs are those of :class:`~.kernel.Kernel`."""
    return KERNELS[kernel](
        position, operands, box, species, exclusions,
        vector=vector, spacing=spacing, weight=weight,
    )  # fmt: skip


@pairs.register_fake
def _(position: Tensor, vector: Any, weight: Any, operands: Sequence[Tensor], *rest: Any) -> Any:
    layout = KERNELS[rest[-1]].spec
    results: list[Tensor] = []
    if layout.mode in (FORCE, PRODUCT):
        results.append(torch.empty_like(position))
    if layout.mode == PRODUCT:
        results.append(torch.empty_like(position))
    if layout.mode == ENERGY:
        results.append(position.new_empty(position.shape[:-2]))
    return [*results, *(torch.empty_like(operands[k]) for k in layout.gradients)]


def evaluate(
    kernel: Kernel,
    position: Tensor,
    operands: Sequence[Tensor],
    box: Tensor | None,
    species: Tensor | None,
    exclusions: Tensor | None,
    *,
    vector: Tensor | None = None,
    spacing: Tensor | None = None,
    weight: Tensor | None = None,
) -> list[Tensor]:
    """Evaluate a kernel, or record its evaluation in a trace."""
    if not is_tracing():
        return kernel(
            position, operands, box, species, exclusions,
            vector=vector, spacing=spacing, weight=weight,
        )  # fmt: skip
    given = [None if x is None else x.detach() for x in (position, vector, weight)]
    return torch.ops.adjsim.pairs(
        *given, [x.detach() for x in operands], box, species, exclusions, spacing, kernel.name
    )
