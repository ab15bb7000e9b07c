"""Clipping of the cotangents of a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive, as_whole
from adjsim.core.norms import unit_of
from adjsim.core.state import AnyState


@dataclass(frozen=True)
class Clip:
    """The largest norm of the cotangents of a system, to which a backward sweep scales them.

    With lambda_k the cotangents of all fields of a system's state after k steps, J_k the Jacobian
    of step k, and L the outputs that are saved after k steps, the sweep computes::

        lambda_k = c_k J_{k+1}^T lambda_{k+1} + dL/dz_k
        c_k      = min(1, norm / |J_{k+1}^T lambda_{k+1}|)     if 0 < k and every divides k, else 1

    The norm is joint over the fields, in their units, so the gradient depends on the units. For
    :class:`~adjsim.Pathwise`, which states the bias.

    Args:
        norm: largest norm; infinity: nothing is clipped.
        every: number of steps between clips, counted from the start of the run.

    Raises:
        ValueError: a norm that is not positive, a number of steps below 1.
    """

    norm: float
    every: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_positive("norm", self.norm))
        object.__setattr__(self, "every", as_whole("every", self.every, least=1))

    def at(self, step: int) -> bool:
        """Return whether the cotangents after a number of steps are clipped."""
        return step > 0 and step % self.every == 0

    def scaled(self, fields: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
        """Scale the fields of each system, which have ``batch`` leading axes of systems."""
        rows = [x.reshape(*x.shape[:batch], -1) for x in fields.values()]
        joined = torch.cat([x.abs() for x in rows], -1)
        # The norm itself may overflow, and that of the entries over the largest does not.
        unit = unit_of(joined, -1)
        size = torch.linalg.vector_norm(joined / unit, dim=-1)
        share = (self.norm / unit.squeeze(-1) / size).clamp(max=1.0)
        return {
            name: x * share.reshape(*share.shape, *[1] * (x.ndim - batch)).to(x)
            for name, x in fields.items()
        }

    def inserted(self, state: AnyState, step: int, batch: int) -> AnyState:
        """Return the state after a number of steps, behind which autograd clips cotangents."""
        if not self.at(step):
            return state
        fields = {
            n: x for n, x in state._asdict().items() if x.is_floating_point() or x.is_complex()
        }
        found = _Clipped.apply(self, batch, tuple(fields), *fields.values())
        return state._replace(**dict(zip(fields, found, strict=True)))


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(clip: Clip, batch: int, names: tuple[str, ...], *fields: Tensor) -> Any:
        return tuple(x.view_as(x) for x in fields)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.clip, ctx.batch, ctx.names = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        given = dict(zip(ctx.names, cotangents, strict=True))
        return (None, None, None, *ctx.clip.scaled(given, ctx.batch).values())
