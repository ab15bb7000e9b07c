"""What an observable reads, found from its values.

Automatic differentiation does not see a field that is read behind ``detach()`` or through a
comparison, so fields are moved, by sizes over several decades, and the values compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjsim._state import State
from adjsim.dynamics.base import Dynamics

# In units of the field's root mean square, or of one where it is zero.
SIZES = (1e-3, 1.0, 10.0, 1e3)


def depends_on(function: Callable[[Any], Tensor], state: State, name: str) -> bool:
    """Whether a function of the state reads a field, at a state with replicas along its leading
    axis.
    """
    x = getattr(state, name).detach()
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) * (float(x.square().mean().sqrt()) or 1.0)
    with torch.no_grad():
        before = function(state)
        return any(not bitwise_equal(function(state._replace(**{name: x + size * shift})), before) for size in SIZES)


def depends_on_bath(dynamics: Dynamics, function: Callable[[Any], Tensor], state: State) -> bool:
    """Whether an observable reads variables of the bath at these states.

    Raises:
        ValueError: it reads a field that has no stationary density, such as the position of a
            Nose-Hoover chain.
    """
    others = [name for name in state._fields if name not in ("position", "momentum") and depends_on(function, state, name)]
    for name in others:
        if not depends_on(dynamics.reduced_energy, state, name):
            raise ValueError(
                f"the observable reads {name}, which has no stationary density under "
                f"{type(dynamics).__name__}, so that its mean has no equilibrium value. Use "
                "Pathwise or FiniteDifference for its mean along a path."
            )
    return any(name in dynamics.bath_fields for name in others)


def reduced_energy(dynamics: Dynamics, state: State, bath: bool) -> Tensor:
    """The reduced energy, with the terms of the bath or without.

    An observable that does not read the bath is independent of it: these terms would add nothing to
    a covariance on average, and only to its variance. They are Gaussian about zero, where neither
    their value nor their derivative is left.
    """
    if not bath:
        state = state._replace(**{name: torch.zeros_like(getattr(state, name)) for name in dynamics.bath_fields})
    return dynamics.reduced_energy(state)


def evenly_spaced(first: int, last: int, count: int) -> set[int]:
    """So many whole numbers from first to last, as even as possible, the last among them."""
    return {last - (last - first) * i // count for i in range(count)}


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two values have the same bits, NaN included."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
