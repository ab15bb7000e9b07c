"""Descriptions of a computation, by which a store knows that it is called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.agreement import difference, rounding
from adjsim.core.arguments import describe_type
from adjsim.core.autocast import autocast_state
from adjsim.core.cache_key import UninspectableError
from adjsim.core.durable.identity import module_fingerprint, object_fingerprint, tensor_fingerprint
from adjsim.core.durable.store import Store, StoreError

# Evaluates a computation at a start whose numbers are changed by this part of themselves, and
# returns its rates by descriptions of them.
Measure = Callable[[float], dict[str, Tensor]]
# The part of the start by which its numbers are changed, to see what rounding may change in rates.
CHANGE, MARGIN = 1e-6, 4.0


@dataclass(frozen=True)
class Saving:
    """The store of a run, the seconds between two saves, and how the store knows the run."""

    store: Store
    every: float
    manifest: dict[str, str]
    measure: Measure


def versions() -> dict[str, str]:
    """Describe the versions whose change may change numbers."""
    return {"adjsim": version("adjsim"), "torch": torch.__version__}


def describe_module(module: nn.Module, function: Callable[..., Any] | None) -> dict[str, str]:
    """Describe a dynamics, the function that is observed, and the values of all tensors."""
    try:
        formulas = module_fingerprint(module, function)
    except UninspectableError as reason:
        raise StoreError(f"store=: {reason}") from None
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "the autocast on CPU and GPU": f"{autocast_state()}",
        "the formulas of the dynamics and of the observable": formulas,
        **{name: tensor_fingerprint(x) for name, x in tensors.items()},
        "the parameters that require grad": ", ".join(
            name for name, x in tensors.items() if x.requires_grad
        ),
    }


def check_numbers(store: Store, measure: Measure) -> None:
    """Compare a computation at its start, up to rounding, with that of the store, or store it."""
    found = measure(0.0)
    if not store.has("start"):
        store.write("start", found)
        return
    known = store.read("start")
    for name, x in found.items():
        y = known[name].to(x.device)
        by = difference(x, y)
        if by > rounding(x, y) and by > MARGIN * difference(measure(CHANGE)[name], x):
            raise StoreError(
                f"store '{store.folder}' is of another computation: {name} at the start differs by "
                f"{by:.1e}, although no value that can be seen has changed. The potential, the "
                "dynamics or the observable reads another one (a patched function, a computed "
                "name, an object that cannot be inspected). Give another folder."
            )


def describe_function(function: Callable[..., Any], where: str) -> str:
    """Describe a function as far as it can be inspected."""
    try:
        return object_fingerprint(function, where)
    except UninspectableError:
        return "a function that cannot be inspected"


def describe_object(x: Any, where: str) -> str:
    """Describe an object such as a solver."""
    try:
        return f"{x!r} [{object_fingerprint(x, where)}]"
    except UninspectableError as reason:
        raise StoreError(f"store=: {where} is {describe_type(x)}: {reason}") from None
