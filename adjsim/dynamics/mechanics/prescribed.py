"""Vertices whose position is a given function of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import describe_type, wrong_shape
from adjsim.core.layout import number_on
from adjsim.core.parameters import leaves, point_of_differentiation
from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.core.typing import Array
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, Shear
from adjsim.dynamics.sources import FunctionOfTime
from adjsim.dynamics.terms import Holder, Stream
from adjsim.potentials.signals.controls import Placement

# A start agrees with a path up to this number of units in the last place of the largest coordinate.
AGREEMENT = 1e6


class Prescribed(Placement):
    """Vertices whose position follows a path, see :class:`~adjsim.Mechanics`."""

    def __init__(self, index: Array, path: Callable[[Any], Tensor]) -> None:
        super().__init__(index, "the index of prescribed")
        if not callable(path):
            raise TypeError(
                f"prescribed: the path must be a function of time; got {describe_type(path)}."
            )
        self.path = path

    def mask(self, atoms: int) -> Tensor:
        """Return which of a number of vertices are prescribed, ``(atoms, 1)``."""
        at, index = torch.arange(atoms, device=self.vertices.index.device), self.vertices.index
        return (at[:, None] == index).sum(-1, keepdim=True) > 0

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        """Place ``(vertices, dim)`` at the vertices, with zero at all others, ``(atoms, dim)``."""
        atoms, dim = like.shape[-2:]
        return self.spread(value.to(like).expand(len(self.vertices.index), dim), atoms)

    def check(self, t: float, position: Tensor) -> None:
        """Refuse positions that do not agree with the path at a time."""
        target, index = self.path(t).detach().to(position), self.vertices.index
        shape = (len(index), position.shape[-1])
        if target.shape != shape:
            raise wrong_shape(
                "the path of prescribed vertices", f"{shape}, a position for each of them", target
            )
        away = (position[..., index, :] - target).abs().amax(-1).flatten()
        allowed = AGREEMENT * torch.finfo(position.dtype).eps * max(1.0, float(target.abs().amax()))
        worst = int(away.argmax())
        if not float(away[worst]) <= allowed:
            raise ValueError(
                f"prescribed vertex {int(index[worst % len(index)])} is {float(away[worst]):.3g} "
                f"away from its path at t = {t:g}: start it on the path."
            )

    def check_momentum(self, momentum: Tensor) -> None:
        """Refuse momenta that do not have the vertices, or are not zero there."""
        atoms = momentum.shape[-2]
        if self.reach > atoms:
            raise ValueError(
                f"prescribed names vertex {self.reach - 1} and the state has {atoms} vertices, "
                "numbered from 0."
            )
        if bool((momentum[..., self.vertices.index, :] != 0).any()):
            raise ValueError(
                "prescribed vertices have an infinite mass and follow their path: start them with "
                "a momentum of zero."
            )


class PrescribedStream(Stream[PhaseState]):
    """Streaming, A, whose flow adds ``path(t + h) - path(t)`` to prescribed vertices."""

    def __init__(self, masses: Masses, prescribed: Prescribed) -> None:
        super().__init__(masses)
        self.prescribed = prescribed

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        time = number_on(t, torch.float64, state.position.device)
        moved = self.prescribed.placed(_rate(self.prescribed.path, time), state.position)
        return {"position": super().drift(t, state)["position"] + moved}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        return (*super().moves(h, state), self.shear(0.0, h))

    def constrained(self, holder: Holder) -> Refusal:
        return Refusal("its vertices follow a path, which distances to them do not")

    def shear(self, start: float, end: float) -> Shear:
        """Return the move along the path between two times, from the time of the stage."""
        path, placed = self.prescribed.path, self.prescribed.placed

        def step(t: Tensor, like: Tensor) -> Tensor:
            return placed(path(t + end) - path(t + start), like)

        return Shear("position", FunctionOfTime(step))


def _rate(path: Callable[[Any], Tensor], time: Tensor) -> Tensor:
    """Compute dpath/dt, with a graph when grad mode is on."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        t = point_of_differentiation(time)
        value = path(t)
        if not value.requires_grad:
            return torch.zeros_like(value)
        # The derivative of a product with a weight is linear in the weight.
        weight = point_of_differentiation(torch.zeros_like(value))
        (total,) = torch.autograd.grad(value, t, weight, create_graph=True, allow_unused=True)
        if total is None:
            return torch.zeros_like(value)
        (rate,) = torch.autograd.grad(total, weight, create_graph=create, materialize_grads=True)
    return rate if next(leaves(rate), None) is not None else rate.detach()
