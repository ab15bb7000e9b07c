"""Evaluation of a module at parameter values that are passed, not set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from adjsim.core.reading import Reading
from adjsim.core.state import State
from adjsim.core.trajectory import Final, TimeAverage, check_times
from adjsim.estimators.base import Observable, Simulation

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def with_values(module: M, values: Mapping[str, Tensor], function: Callable[[M], T]) -> T:
    """Evaluate a function of a copy of a module whose parameters have other values, by name.

    A tensor with several names has the value under all of them. Where the function names the module
    itself, it reads these values too.
    """
    reading = Reading(module)
    tensors = [values.get(name, x) for name, x in zip(reading.names, reading.tensors, strict=True)]
    copy = reading.bound(tensors)
    return reading.on(copy, tensors, function)(copy)


def moved(
    simulation: Simulation[State], observable: Observable[State], values: Mapping[str, Tensor]
) -> tuple[Simulation[State], Observable[State]]:
    """Return a simulation and an observable at other values of parameters, by name."""
    reading = Reading(simulation.dynamics)
    tensors = [values.get(name, x) for name, x in zip(reading.names, reading.tensors, strict=True)]
    copy = reading.bound(tensors)
    if isinstance(observable, Final):
        observable = Final(reading.on(copy, tensors, observable.function))
    elif not isinstance(observable, TimeAverage):
        observable = reading.on(copy, tensors, observable)
    # A run gives the values to the function of a time average.
    return replace(simulation, dynamics=copy), observable


def refuse_captured_force(estimator: str, simulation: Simulation[State]) -> None:
    """Refuse dynamics whose force reads a parameter other than from its module.

    A value that is passed to the module would not reach such a force.
    """
    dynamics = simulation.dynamics
    start = simulation.starts(1, torch.Generator().manual_seed(0))
    reading = Reading(dynamics)
    with torch.enable_grad():
        copy = reading.bound([x.detach() for x in reading.tensors])
        rates = copy.drift(check_times(simulation.ts)[0], start)
    if any(rate.requires_grad for rate in rates):
        raise ValueError(
            f"{estimator}: the force reads a parameter from a list or as a captured variable "
            "instead of from its module, so no other value can be passed to it. Read it as an "
            "attribute of the module, or in an nn.ParameterList, or use Pathwise."
        )
