"""Evaluation of a module at parameter values that are passed, not set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from adjsim.core.reading import Reading

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def substituted(module: M, values: Mapping[str, Tensor]) -> tuple[M, Callable[[Any], Any]]:
    """Copy a module with other values of parameters, by any of their names.

    The second result makes a function read these values where it names the module itself.
    """
    reading = Reading(module)
    tensors = [values.get(name, x) for name, x in zip(reading.names, reading.tensors, strict=True)]
    copy = reading.bound(tensors)
    return copy, partial(reading.on, copy, tensors)


def with_values(module: M, values: Mapping[str, Tensor], function: Callable[[M], T]) -> T:
    """Evaluate a function of a copy of a module whose parameters have other values, by name."""
    copy, bound = substituted(module, values)
    return bound(function)(copy)
