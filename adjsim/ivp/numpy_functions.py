"""User functions that compute with NumPy: they get arrays and have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


def computes_with_numpy(
    function: Callable[..., Any], t: Tensor, y: Tensor, args: tuple[Any, ...]
) -> bool:
    """Test whether a function returns arrays for tensors, or accepts arrays only."""
    try:
        return _is_array(function(t, y, *args))
    except Exception as error:
        try:
            function(float(t), y.cpu().numpy(), *args)
        except Exception:
            raise error from None
        return True


def _is_array(out: Any) -> bool:
    if isinstance(out, list | tuple):
        return any(map(_is_array, out)) and not any(isinstance(x, Tensor) for x in out)
    return isinstance(out, np.ndarray | np.generic)


def numpy_error(function: str) -> TypeError:
    """Make the error for a function that computes with NumPy where a gradient is wanted."""
    return TypeError(
        f"{function} computes with NumPy, and no gradient flows through NumPy. Write it with "
        "torch. If no gradient is wanted, detach() the tensors that require grad, or call "
        "solve_ivp() under torch.no_grad()."
    )


@contextmanager
def naming_function(function: str) -> Generator[None, None, None]:
    """Name the function in torch's error about converting a tensor that requires grad."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "numpy()" not in str(error):
            raise
        raise numpy_error(function) from error
