"""Runs at other values of the parameters, which are passed and not set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from adjsim._trajectory import Final, TimeAverage, Trajectory, check_times
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.base import Observable, Simulation

T = TypeVar("T")


class _Holder(nn.Module):
    """Calls a function while its dynamics has other tensors."""

    def __init__(self, dynamics: Dynamics) -> None:
        super().__init__()
        self.dynamics = dynamics

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def with_values(dynamics: Dynamics, values: dict[str, Tensor], function: Callable[[], T]) -> T:
    """What a function gives where parameters of the dynamics have other values, by name; one tensor under several names is
    replaced under all of them."""
    return torch.func.functional_call(_Holder(dynamics), {f"dynamics.{name}": x for name, x in values.items()}, (function,))


def captured(simulation: Simulation, observable: Observable) -> str | None:
    """The parameter that an observable reads as a tensor of its own, if there is one, so that another value that the dynamics
    is given does not reach it."""
    parameters = simulation.dynamics.trainable()
    start = simulation.starts(1, torch.Generator().manual_seed(0))

    def seen() -> Tensor:
        if isinstance(observable, TimeAverage | Final):
            return observable.function(start)
        frames = type(start)(*(torch.stack([x] * len(simulation.ts)) for x in start))
        return observable(Trajectory(check_times(simulation.ts), frames, None, start, {}))

    with torch.enable_grad():
        value = with_values(simulation.dynamics, {name: p.detach() for name, p in parameters.items()}, seen)
        if not value.requires_grad:
            return None
        slopes = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    return next((name for name, slope in zip(parameters, slopes, strict=True) if slope is not None), None)
