"""Products of cotangents with Jacobians, of one cotangent or of several rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pulled(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    keep_graph: bool = True,
) -> list[Tensor]:
    """Return the cotangents of the inputs, zero where no output depends on one."""
    pairs = [x for x in zip(outputs, cotangents, strict=True) if x[0].requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=keep_graph, materialize_grads=True
    )
    return list(found)


def pulled_rows(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: Sequence[Tensor]
) -> list[Tensor]:
    """Return the cotangents ``(k, ...)`` of the inputs for rows ``(k, ...)`` of the outputs.

    Operations that vmap does not know take the rows one by one.
    """
    count = len(rows[0])

    def pull(*row: Tensor) -> list[Tensor]:
        return pulled(outputs, inputs, row)

    if count > 1:
        try:
            return list(torch.vmap(pull)(*rows))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation without a rule for vmap. The loop below raises any other error again.
            pass
    found = [pull(*(x[k] for x in rows)) for k in range(count)]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]
