"""Conversion of numbers, arrays, lists and tensors, with errors before any work is done.

A setting (a step, a cutoff, a time) becomes a Python float or int. A physical number or a field
becomes a tensor. Tensors keep their dtype, device and graph. NumPy's float32 and float64 keep their
dtype and are copied. Other numbers and lists become float64, and quantities of OpenMM float64 in
eV, angstrom and amu. A string, None or a bool in place of a number is a TypeError.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.openmm_units import converted, is_quantity


def as_number(name: str, value: Any) -> float:
    """Convert a setting of a run to a float."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{name} requires grad, and no gradient with respect to it is provided; pass a "
                f"number, such as {name}.item()."
            )
        value = value.detach().cpu().numpy()
    elif is_quantity(value):
        value = converted(name, value)
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise ValueError(f"{name} must be one number; got shape {value.shape}.")
        value = value.reshape(())[()]
    if not isinstance(value, numbers.Real) or isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a number; got {describe_type(value)}.")
    return float(value)


def as_positive(name: str, value: Any) -> float:
    """Convert a setting to a positive float, which may be infinite."""
    number = as_number(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be positive; got {number:g}.")
    return number


def as_whole(name: str, value: Any, least: float = -math.inf) -> int:
    """Convert a count to an int."""
    number = as_number(name, value)
    if not number.is_integer():
        raise ValueError(f"{name} must be an integer; got {number:g}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number:g}.")
    return int(number)


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False; got {describe_type(value)}.")
    return bool(value)


def as_tensor(name: str, value: Any) -> Tensor:
    """Convert a number, an array, a list or a tensor to a floating-point tensor."""
    if isinstance(value, Tensor):
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name} must be real numbers; got a tensor of {value.dtype}.")
        if not value.is_floating_point():
            return value.double()
        copied = value.is_inference() and not torch.is_inference_mode_enabled()
        return value.clone() if copied else value
    value = _plain(name, value)
    if not isinstance(value, numbers.Real | Sequence) and not hasattr(value, "__array__"):
        raise TypeError(
            f"{name} must be a number, an array, a list or a tensor; got {describe_type(value)}."
        )
    try:
        array = np.asarray(value)
    except ValueError as ragged:
        raise ValueError(
            f"{name} must be rows of equal length; got {describe_type(value)}."
        ) from ragged
    if array.dtype.kind == "O" and isinstance(value, numbers.Real):
        array = np.asarray(float(value))
    # A list may hold a bool among numbers, which NumPy converts to 0 or 1.
    if array.dtype.kind not in "iuf" or (not hasattr(value, "__array__") and _holds_bool(value)):
        raise TypeError(f"{name} must be real numbers; got {describe_type(value)}.")
    kept = array.dtype.kind == "f" and array.itemsize <= 8
    return torch.tensor(np.array(array, array.dtype.newbyteorder("=") if kept else np.float64))


def as_indices(name: str, value: Any) -> Tensor:
    """Convert integers to an int64 tensor."""
    found = as_tensor(name, value).detach()
    if not bool((found == found.round()).all()):
        raise ValueError(f"{name} must be integers; got {found.tolist()}.")
    return found.long()


def wrong_shape(name: str, wanted: str, value: Tensor, advice: str = "") -> ValueError:
    """Make the error of a tensor of another shape than is wanted."""
    shape = tuple(value.shape)
    return ValueError(f"{name} must be {wanted}; got shape {shape}.{advice and ' '}{advice}")


def _plain(name: str, value: Any) -> Any:
    """Replace quantities, and the tensors inside lists, by their numbers."""
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if is_quantity(value):
        return converted(name, value)
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad:
        raise ValueError(
            f"{name} is a list that holds a tensor that requires grad, and the list would lose its "
            "gradient: make one nn.Parameter of all entries, or torch.stack them."
        )
    return value.tolist()


def _holds_bool(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool | np.bool_)


def describe_type(value: Any) -> str:
    """Describe a wrong argument for an error message, by type and, if short, by value."""
    text, kind = repr(value), type(value).__name__
    short = value is not None and not isinstance(value, type) and len(text) <= 40
    return f"{kind} {text}" if short else kind


def refuse_uncalled(name: str, value: Any) -> None:
    """Raise if ``value`` is a class or function in place of an object."""
    refuse_uncalled_class(name, value)
    if inspect.isfunction(value):
        raise TypeError(
            f"{name} must be an object, not the function {value.__name__} that makes one: write "
            f"{_call(value)}."
        )


def refuse_uncalled_class(name: str, value: Any) -> None:
    """Raise if ``value`` is a class in place of an object."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} must be an object, not the class {value.__name__}: write {_call(value)}."
        )


def _call(function: Any) -> str:
    """Write a call of a class or function with its required arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return f"{function.__name__}(...)"
    names = [
        f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return f"{function.__name__}({', '.join(names)})"


@contextmanager
def outside_inference_mode() -> Generator[None, None, None]:
    """Replace ``torch.inference_mode``, which forbids derivatives, by ``torch.no_grad``."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def leave_to_python(function: Any) -> None:
    """Keep torch.compile from a function and from what it calls.

    It is what ``torch.compiler.disable`` does, without a second of imports.
    """
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "adjsim compiles its own loops: simulate(compile=True)"
