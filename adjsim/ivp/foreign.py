"""Functions that compute with NumPy: they are given arrays, and have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


def computes_with_numpy(
    function: Callable[..., Any], t: Tensor, y: Tensor, args: tuple[Any, ...]
) -> bool:
    """Whether a function returns arrays for tensors, or refuses tensors and takes arrays."""
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


def refusal(what: str) -> TypeError:
    return TypeError(
        f"{what} computes with NumPy, and no gradient flows through NumPy. Write it with torch; "
        "or, where no gradient is "
        "wanted, detach() what requires grad or call solve_ivp() under torch.no_grad()."
    )


@contextmanager
def refused(what: str) -> Generator[None, None, None]:
    """Say which function has given NumPy a tensor that requires grad, which torch refuses."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "numpy()" not in str(error):
            raise
        raise refusal(what) from error
