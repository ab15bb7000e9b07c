"""The simulations of a fit, each with the observable whose mean is fitted."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from adjsim.core.durable.manifest import describe_function
from adjsim.core.parameters import refuse_untrainable
from adjsim.estimators.base import Estimator
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.replicas import Observable, Simulation
from adjsim.estimators.sharing import describe_computation

Problem: TypeAlias = tuple[Simulation[Any], Observable[Any]]


def problems_of(simulation: Any, observable: Any) -> list[Problem]:
    """Pair simulations with their observables, of which there may be one each."""
    if isinstance(simulation, Simulation):
        return [(simulation, observable)]
    if len(simulation) == 0 or len(simulation) != len(observable):
        raise ValueError(
            f"each simulation needs an observable; got {len(simulation)} and {len(observable)}."
        )
    return list(zip(simulation, observable, strict=True))


def shared_parameters(problems: list[Problem]) -> dict[str, Tensor]:
    """Return the parameters that are fitted, which all simulations share."""
    for simulation, _ in problems:
        refuse_untrainable(simulation.dynamics)
    first, *others = (simulation.dynamics.trainable() for simulation, _ in problems)
    for other in others:
        if other.keys() != first.keys() or any(other[name] is not first[name] for name in first):
            raise ValueError(
                "the simulations of a fit share their parameters, and these have different ones: "
                f"{', '.join(first)} and {', '.join(other)}. Make all dynamics with one potential, "
                "and give the other numbers as floats."
            )
    return first


def described(problems: list[Problem], estimator: Estimator) -> dict[str, str]:
    """Describe what the estimates of the problems depend on, but for chunks and seeds."""
    about: dict[str, str] = {}
    for k, (simulation, observable) in enumerate(problems):
        found = describe_computation(estimator, simulation, observable)
        found["the starts"] = describe_function(simulation.initial, "the starts")
        about |= {f"{name}{f' ({k + 1})' * (k > 0)}": text for name, text in found.items()}
    return about


def joined(parts: list[GradientEstimate]) -> GradientEstimate:
    """Join the estimates of several simulations, with the diagnostics of the least known one."""
    if len(parts) == 1:
        return parts[0]
    drifts: list[Any] = [part.diagnostics.get("drift") for part in parts]
    drift = None if any(x is None for x in drifts) else torch.cat(drifts)
    worst = min(parts, key=lambda part: part.diagnostics["ess"])
    return GradientEstimate(
        torch.cat([part.value for part in parts]),
        torch.cat([part.value_stderr for part in parts]),
        {name: torch.cat([part.grad[name] for part in parts]) for name in worst.grad},
        {name: torch.cat([part.grad_stderr[name] for part in parts]) for name in worst.grad},
        worst.estimand,
        worst.diagnostics | {"drift": drift},
    )
