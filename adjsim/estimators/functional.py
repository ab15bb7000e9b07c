"""Evaluation of a module at parameter values that are passed, not set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from adjsim._module import ModuleTensors
from adjsim._state import State
from adjsim._trajectory import Final, TimeAverage, Trajectory, check_times
from adjsim.estimators.base import Observable, Simulation

T = TypeVar("T")


def with_values(module: nn.Module, values: Mapping[str, Tensor], function: Callable[[], T]) -> T:
    """Evaluate a function while parameters of a module have other values, by name.

    A tensor with several names is replaced under all of them.
    """
    tensors = ModuleTensors(module)
    with tensors.substituted(
        [values.get(name, x) for name, x in zip(tensors.names, tensors.tensors, strict=True)]
    ):
        return function()


def refuse_captured_force(estimator: str, simulation: Simulation[State]) -> None:
    """Refuse dynamics whose force reads a parameter other than from its module.

    A value that is passed to the module would not reach such a force.
    """
    dynamics = simulation.dynamics
    start = simulation.starts(1, torch.Generator().manual_seed(0))
    values = {name: p.detach() for name, p in dynamics.trainable().items()}
    with torch.enable_grad():
        rates = with_values(
            dynamics, values, lambda: dynamics.drift(check_times(simulation.ts)[0], start)
        )
    if any(rate.requires_grad for rate in rates):
        raise ValueError(
            f"{estimator}: the force reads a parameter from a list or as a captured variable "
            "instead of from its module, so no other value can be passed to it. Read it as an "
            "attribute of the module, or in an nn.ParameterList, or use Pathwise."
        )


def captured_parameter(simulation: Simulation[State], observable: Observable[State]) -> str | None:
    """Find a parameter that an observable reads other than from its module."""
    parameters = simulation.dynamics.trainable()
    start = simulation.starts(1, torch.Generator().manual_seed(0))

    def seen() -> Tensor:
        if isinstance(observable, TimeAverage | Final):
            return observable.function(start)
        frames = type(start)._make(torch.stack([x] * len(simulation.ts)) for x in start)
        return observable(Trajectory(check_times(simulation.ts), frames, None, start, {}))

    with torch.enable_grad():
        value = with_values(
            simulation.dynamics, {name: p.detach() for name, p in parameters.items()}, seen
        )
        if not value.requires_grad:
            return None
        slopes = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    return next(
        (name for name, slope in zip(parameters, slopes, strict=True) if slope is not None), None
    )
