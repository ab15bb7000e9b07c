"""Descriptions of a computation, by which a store knows that it is called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from adjsim._cache_key import UninspectableError
from adjsim._fingerprint import module_fingerprint, object_fingerprint, tensor_fingerprint
from adjsim._inputs import describe_type
from adjsim._store import Store, StoreError


@dataclass(frozen=True)
class Saving:
    """Where and how often a run saves itself.

    Attributes:
        store: the store.
        every: seconds between two saves.
        manifest: the description of the run.
    """

    store: Store
    every: float
    manifest: dict[str, str]


def versions() -> dict[str, str]:
    """Describe the versions whose change may change numbers."""
    return {"adjsim": version("adjsim"), "torch": torch.__version__}


def describe_module(module: nn.Module, function: Callable[..., Any] | None) -> dict[str, str]:
    """Describe a dynamics, the function that is observed, and the values of all tensors.

    Raises:
        StoreError: a part of them cannot be inspected.
    """
    try:
        formulas = module_fingerprint(module, function)
    except UninspectableError as reason:
        raise StoreError(f"store=: {reason}") from None
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "the formulas of the dynamics and of the observable": formulas,
        **{name: tensor_fingerprint(x) for name, x in tensors.items()},
        "the parameters that require grad": ", ".join(
            name for name, x in tensors.items() if x.requires_grad
        ),
    }


def describe_function(function: Callable[..., Any], where: str) -> str:
    """Describe a function as far as it can be inspected."""
    try:
        return object_fingerprint(function, where)
    except UninspectableError:
        return "a function that cannot be inspected"


def describe_object(x: Any, where: str) -> str:
    """Describe an object such as a solver.

    Raises:
        StoreError: it cannot be inspected.
    """
    try:
        return f"{x!r} [{object_fingerprint(x, where)}]"
    except UninspectableError as reason:
        raise StoreError(f"store=: {where} is {describe_type(x)}: {reason}") from None
